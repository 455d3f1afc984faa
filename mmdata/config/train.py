"""Settings of the section train: the loss and its miner, the optimizer, the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import (
    NOT_BOOLEAN,
    BelowOne,
    Count,
    Integer,
    Location,
    MayChange,
    OwnFunction,
    Positive,
    Settings,
)

Cosine = Annotated[float, Field(ge=-2.0, le=2.0), NOT_BOOLEAN]
"""A difference of cosine similarities."""


LossName = Literal["clip", "siglip", "multi_positive", "triplet"]
LossPrecision = Literal["auto", "bf16", "tf32", "fp32"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
Schedule = Literal["cosine", "constant", "cooldown"]
OptimizerName = Literal["adamw", "adafactor", "sgd", "muon"]
PositivesBy = Literal["labels", "image_hash", "caption_hash"]
"""The entry of a batch in which rows that are positives of each other are equal."""

MASK_REMEDY = "train.mask_false_negatives=true makes them no negatives"
"""What commands advise where captions or images repeat."""


class MinerConfig(Settings):
    """Which negatives of the batch enter the loss. The negatives that these settings leave out never reach the
    miner."""

    false_negative_margin: Cosine | None = None
    """Leaves out negatives that are more similar than the positive minus this margin, in cosine: they may be false
    negatives. null: leaves none out."""
    drop_hardest: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] | None = None
    """Leaves out the most similar negatives of each row, after the margin: this number of them, or this share if it is
    below 1. null: leaves none out."""


class AllConfig(MinerConfig):
    """all: every negative that the other settings of the miner leave."""

    name: Literal["all"]


class TopKConfig(MinerConfig):
    """top_k: the hardest negatives of each row, in both directions."""

    name: Literal["top_k"]
    k: Positive = 64
    """Number of negatives that each row keeps; all of them where they are fewer."""


class SemiHardConfig(MinerConfig):
    """semi_hard: negatives that are less similar than the positive, by at most a margin (FaceNet)."""

    name: Literal["semi_hard"]
    margin: Annotated[float, Field(gt=0.0, le=2.0), NOT_BOOLEAN] = 0.2
    """Keeps negatives that are less similar than the positive, by at most this much, in cosine."""


class GumbelTopKConfig(MinerConfig):
    """gumbel_top_k: negatives drawn without replacement; more similar ones are drawn more often."""

    name: Literal["gumbel_top_k"]
    k: Positive = 64
    """Number of negatives drawn for each row."""
    temperature: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 0.05
    """Temperature of the draw, in cosine: near 0 the hardest k are drawn, at a large temperature any k with equal
    probability."""
    gradient: Literal["none", "straight_through", "relaxed"] = "none"
    """Whether the choice itself has a gradient. none: no. straight_through: the choice of k, with the gradient of
    relaxed weights. relaxed: all negatives, with weights that sum to k."""


class SameGroupConfig(MinerConfig):
    """same_group: the hardest negatives of the row's own group, for batches of groups (`data.groups`)."""

    name: Literal["same_group"]
    size: Annotated[int, Field(strict=True, ge=2)]
    """Number of rows of a group: `data.groups.size`, or 1 + `data.groups.candidates`."""
    k: Positive = 64
    """Number of negatives of its group that each row keeps; all of them where they are fewer."""


class UserConfig(MinerConfig):
    """user: a function of your own, or a class called with `arguments`, such as those of `mmdata.train.miners`."""

    name: Literal["user"]
    target: str
    """The function or class: "module:function" or "module:Class", in a file that Python can import."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, or of each call of the function."""


NamedMinerConfig = Annotated[
    AllConfig | TopKConfig | SemiHardConfig | GumbelTopKConfig | SameGroupConfig | UserConfig,
    Field(discriminator="name"),
]


class AverageConfig(Settings):
    """A moving average of the weights (EMA). Evaluations and exports take it, and `load_run` and `model.init_from`."""

    decay: BelowOne = 0.999
    """Decay of the moving average at each update: 0.999 averages about the last 1,000 updates."""


class FeatureFields(Settings):
    """Entries of a batch (`data.fields`) with the features that another model has for each row: floats (B, D), or
    (B, A, D) for A crops or captions of a row, of which the mean counts. They need not be normalised."""

    image: str
    """Entry with the features of the images."""
    text: str
    """Entry with the features of the texts; as many numbers as those of the images."""


class TeacherConfig(AverageConfig):
    """A moving average of the model, which finds probable false negatives and feeds the queue. It costs one more
    forward pass in each step. With `fields`, features of another model find them at no such cost (GIST)."""

    fields: FeatureFields | None = None
    """Features of a frozen guide in place of a moving average. null: a moving average of the model."""
    margin: Cosine | None = 0.0
    """Leaves out negatives that the teacher finds more similar than the positive minus this margin, in cosine. null:
    leaves none out, for a teacher that only feeds the queue."""


class ParameterGroupConfig(Settings):
    """Parameters that learn at another rate, or not at all. No parameter may be in two groups."""

    match: str
    """Names of parameters, with * and [0-9] as in file names: image_*, text_tower.*, "*.layers.[0-8].*". Names begin
    with image_tower and text_tower, with image_projection and text_projection where the model has them, and go on as in
    the state dict; two are logit_scale and logit_bias."""
    lr_scale: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 1.0
    """Factor of the learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0), NOT_BOOLEAN] | None = None
    """Weight decay of the group's matrices. null: `train.weight_decay`."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0), NOT_BOOLEAN] | None = None
    """Factor of the learning rate for each layer further below the top (BEiT), such as 0.75. In a tower of n blocks the
    last has the factor once, the first n times, embeddings n + 1 times; what is above the blocks has the full rate.
    null: one rate."""
    freeze: bool = False
    """Keeps the parameters as they are: no gradient, no optimizer state, no weight decay. Dropout stays, unlike with
    `model.freeze`."""

    @model_validator(mode="after")
    def _check(self) -> ParameterGroupConfig:
        if self.freeze == (self.lr_scale != 1.0 or self.weight_decay is not None or self.layer_decay is not None):
            raise ValueError(
                f"match '{self.match}': give freeze alone, or one or more of lr_scale, weight_decay and layer_decay; "
                "parameters that are in no group learn as the section train says"
            )
        return self


class DistillConfig(Settings):
    """Adds the cross entropy of the model's logits against the softmax of a teacher's, in both directions (open_clip's
    DistillClipLoss). Give `teacher` or `fields`."""

    teacher: Location | None = None
    """A run or checkpoint, or a CLIP or SigLIP model of transformers, with the tokenizer and the pixels of this run. It
    is frozen, and embeds each batch. A resumed run may find it elsewhere."""
    fields: FeatureFields | None = None
    """Features of a teacher that the batches hold, such as DataCompDR's; no model is loaded."""
    logit_scale: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] | None = None
    """Multiplier of the teacher's cosines, 1 / temperature. null: the teacher's own, or 100 for `fields`."""
    weight: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 1.0
    """What the distillation loss is multiplied by before it is added to the loss."""

    @model_validator(mode="after")
    def _one_teacher(self) -> DistillConfig:
        if (self.teacher is None) == (self.fields is None):
            raise ValueError("give either teacher (a folder) or fields (features that the batches hold)")
        return self


class RegionsConfig(Settings):
    """Adds the loss `loss` of regions against their phrases, over all boxes of the batch, in both directions. A region
    is pooled from the patches of its image (RoIAlign). Boxes with equal phrases are not counted as negatives."""

    weight: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 1.0
    """What the loss of the regions is multiplied by before it is added to the loss."""
    miner: NamedMinerConfig | None = None
    """Chooses which regions and phrases of the batch are negatives, after `mining_after_steps`. null: all of them."""


class TrainConfig(Settings):
    """How the towers are trained."""

    output: MayChange[Location | None] = None
    """Folder of the run: checkpoints, logs, scores. null: runs/NAME for a config NAME.yaml. A run that is in the folder
    is resumed."""
    epochs: Positive | None = None
    """Number of passes over the data. Training needs either this or `steps`."""
    steps: Positive | None = None
    """Number of optimizer updates of the whole run, in place of `epochs`."""
    lr: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 5e-4
    """Largest learning rate, reached at the end of the warm-up; `schedule` says what follows."""
    schedule: Schedule = "cosine"
    """The learning rate after the warm-up. cosine: falls to 0 along a half cosine. constant: stays, so that a finished
    run can continue with more epochs. cooldown: stays, then falls to 0 linearly over the last `cooldown_steps`."""
    cooldown_steps: Positive | None = None
    """Updates at the end of a run with the schedule cooldown; 10 to 20 % of all are usual."""
    optimizer: OptimizerName = "adamw"
    """The optimizer, of torch.optim. adafactor: keeps averages of rows and columns in place of matrices, to save
    memory; its rate is relative to the size of each weight. sgd: with momentum. muon: for the matrices of the towers'
    blocks, in steps as large as AdamW's (match_rms_adamw); AdamW for the rest."""
    weight_decay: Annotated[float, Field(ge=0.0), NOT_BOOLEAN] = 0.2
    """Weight decay. It acts on matrices only, not on biases, norms, logit_scale and logit_bias."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    """Decay of AdamW's averages of the gradient and of its square. The defaults are CLIP's for vision transformers. The
    first is also the momentum of sgd and muon; adafactor has its own."""
    groups: list[ParameterGroupConfig] = Field(default_factory=list)
    """Parameters that learn at another rate, or not at all; all others learn as `lr` and `weight_decay` say."""
    ema: AverageConfig | None = None
    """Keeps a moving average of the weights beside them, in checkpoints too. null: no average."""
    warmup_steps: Count = 100
    """Number of updates over which the learning rate rises linearly from 0."""
    grad_clip_norm: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] | None = 1.0
    """Largest norm of the gradient of all weights together; a larger gradient is scaled down to it. null: not
    clipped."""
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"
    """Number format of the computations. bf16 and fp16: the towers in torch.autocast, fp16 with a gradient scaler. tf32
    and fp32: the towers in float32. Products of float32 that are left, such as the loss's, are TF32 on a GPU (10 bits
    of mantissa), except with fp32. auto: bf16 on a GPU that has it, else fp32; a resumed run keeps the precision that
    it began with."""
    micro_batch_size: MayChange[Positive | None] = None
    """Rows that go through the towers at a time on each rank, to save memory; losses and gradients are those of the
    whole batch. null: all rows at once."""
    parallel: MayChange[Literal["ddp", "fsdp"]] = "ddp"
    """How several ranks train together. ddp: each rank holds the whole model. fsdp: each rank keeps a share of weights,
    gradients and optimizer state (FSDP2), which saves memory; the results are those of ddp."""
    compile: MayChange[Literal["auto"] | bool] = "auto"
    """Compiles the towers' blocks with torch.compile, once for each shape of the batches. auto: on a GPU where torch
    has what it needs, and for 8 shapes at most: each takes about 10 s."""
    rehearse: MayChange[Literal["auto"] | bool] = "auto"
    """Makes a trial step of each batch shape of the epoch before the first step, without an update. Code is then
    compiled at the start, and a shape for which there is too little memory is named at once. auto: on a GPU, or with
    `compile: true`."""
    loss: LossName = "clip"
    """The loss. clip: InfoNCE. siglip: sigmoid of all pairs. multi_positive: InfoNCE with several positives (UniCL).
    triplet: hinge (VSE++)."""
    loss_precision: LossPrecision = "auto"
    """Number format of the products in the losses clip and siglip without a miner or teacher. bf16: features and a
    tile's gradient are rounded to bfloat16; sums are float32. tf32, fp32: as in `precision`. auto: bf16 on a GPU with
    `precision` bf16, else as `precision` says."""
    positives: PositivesBy = "caption_hash"
    """For the loss multi_positive: rows with equal values of this are positives of each other."""
    matryoshka: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Lengths such as [64, 128]: the first 64 and the first 128 numbers of all features, normalised again, are trained
    to be features themselves. The loss is the mean of theirs and that of the whole features. null: none."""
    distill: DistillConfig | None = None
    """Also learns the similarities of a teacher model; null: does not."""
    regions: RegionsConfig | None = None
    """Also learns which phrase each box has; needs `data.targets` with boxes and box_texts. null: does not."""
    miner: NamedMinerConfig | None = None
    """Chooses which negatives of the batch enter the loss, such as the hardest; null: all of them do."""
    teacher: TeacherConfig | None = None
    """Leaves out negatives that a moving average of the model, or another model, finds too similar to be negatives; the
    moving average also feeds `queue`. null: no teacher."""
    queue: Positive | None = None
    """Number of rows of earlier batches whose features are further negatives, for the loss clip, such as 65536; needs
    `mask_false_negatives`. Each row takes 8 bytes a feature on each device and in checkpoints. The features are the
    model's, or with `teacher` those of the moving average, which change more slowly (MoCo). null: none."""
    mining_after_steps: Count = 0
    """Number of updates before `miner`s, `teacher` and `queue` change the loss. For new weights set some hundreds: the
    hardest negatives of an untrained model are noise, and its features are soon out of date."""
    feature_cache: Literal["pair", "image", "text"] | None = None
    """Keeps the features that training computes in the run's folder, for `mmdata neighbours --features`: those of the
    images, of the texts, or of the pair, which is the normalised sum of both. null: does not keep them."""
    mask_false_negatives: bool = False
    """Rows with the same image or the same caption are not used as negatives for each other."""
    log_every_steps: MayChange[Positive] = 10
    """Number of updates between two lines of the log and of metrics.jsonl."""
    checkpoint_every_steps: MayChange[Positive] = 1000
    """Number of updates between two checkpoints. One is also written at the end, and when a signal stops the run.
    Training continues while one is written, from a copy of weights and averages in the memory of rank 0's host; with
    `parallel: fsdp` and several ranks each rank copies and writes its share (docs/train.md)."""
    keep_checkpoints: MayChange[Positive] = 2
    """Number of newest checkpoints that are kept; older ones are deleted."""
    evaluate_every_epochs: MayChange[Count] = 1
    """Number of epochs between two evaluations on `data.val`; 0: only at the end."""
    seed: Integer = 0
    """Seed of the initial weights, of dropout and of miners that draw; `data.seed` is that of the batches."""
    trackers: MayChange[list[TrackerName | OwnFunction]] = Field(default_factory=list)
    """Where the log's numbers go besides metrics.jsonl. tensorboard: into the run's folder. wandb, trackio: to a run of
    the same id after each resume. "module:Class": to a class of your own (`mmdata.train.log.log.Tracker`)."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs ({self.epochs}) and steps ({self.steps}) exclude each other: give one, and set the other to "
                "null, as in train.epochs=null"
            )
        if self.teacher and self.teacher.fields and self.teacher.decay != AverageConfig().decay:
            raise ValueError(
                "teacher.decay is of a moving average, and teacher.fields of a frozen guide: give one of them"
            )
        if len(set(self.matryoshka or ())) < len(self.matryoshka or ()):
            raise ValueError(f"matryoshka {self.matryoshka}: give each length once")
        fills_queue = self.queue is not None and self.teacher is not None and self.teacher.fields is None
        if self.teacher is not None and self.teacher.margin is None and not fills_queue:
            raise ValueError(
                "teacher.margin null leaves no negative out: give a margin, or let the teacher feed a queue "
                "(train.queue)"
            )
        if (self.schedule == "cooldown") != (self.cooldown_steps is not None):
            raise ValueError(
                f"schedule 'cooldown' and cooldown_steps, over which the rate falls, belong together: got schedule "
                f"'{self.schedule}' and cooldown_steps {self.cooldown_steps}"
            )
        if self.parallel == "fsdp" and self.optimizer == "adafactor":
            raise ValueError(
                "parallel 'fsdp' and optimizer 'adafactor': torch's takes no sharded weights: set optimizer to adamw, "
                "sgd or muon, or parallel to ddp"
            )
        if self.parallel == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "parallel 'fsdp' has no gradient scaler: set precision to bf16 or fp32, or parallel to ddp"
            )
        return self
