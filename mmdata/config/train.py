"""Settings of the section train: the loss and its miner, the optimizer, the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import BelowOne, Count, Integer, Location, MayChange, Positive, Settings

Cosine = Annotated[float, Field(ge=-2.0, le=2.0)]
"""A difference of cosine similarities."""


LossName = Literal["clip", "siglip", "multi_positive", "triplet", "hard_negative", "sogclr"]
Schedule = Literal["cosine", "constant", "cooldown"]
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
    drop_hardest: Annotated[float, Field(strict=True, gt=0.0)] | None = None
    """Leaves out the most similar negatives of each row, after the margin: this number of them, or this share if it is
    below 1. null: leaves none out."""
    after_steps: Count = 0
    """Number of updates with all negatives, before the miner begins: the hardest negatives of an untrained model are
    noise, on which it collapses."""


class AllConfig(MinerConfig):
    """all: every negative that the other settings of the miner leave."""

    name: Literal["all"]


class TopKConfig(MinerConfig):
    """top_k: the hardest negatives of each row, in both directions."""

    name: Literal["top_k"]
    k: Positive = 64
    """Number of negatives that each row keeps; all of them where they are fewer."""


class RatioConfig(MinerConfig):
    """ratio: the hardest share of each row's negatives."""

    name: Literal["ratio"]
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of its negatives that each row keeps."""


class SemiHardConfig(MinerConfig):
    """semi_hard: negatives that are less similar than the positive, by at most a margin (FaceNet)."""

    name: Literal["semi_hard"]
    margin: Annotated[float, Field(gt=0.0, le=2.0)] = 0.2
    """Keeps negatives that are less similar than the positive, by at most this much, in cosine."""


class DistanceWeightedConfig(MinerConfig):
    """distance_weighted: negatives drawn evenly over all distances (Wu et al. 2017)."""

    name: Literal["distance_weighted"]
    dimension: Annotated[int, Field(strict=True, ge=3)]
    """Length of the features (`model.embed_dim`), or a smaller number if the features use fewer of their dimensions."""
    k: Positive = 64
    """Number of negatives drawn for each row."""
    cutoff: Annotated[float, Field(gt=0.0, lt=2.0)] = 0.5
    """Distances below this one count as this one, so that the few nearest negatives are not drawn far too often."""
    farthest: Annotated[float, Field(gt=0.0, le=2.0)] = 1.4
    """Negatives at this distance or farther are never drawn; distances of normalised features are 0 to 2."""


class GumbelTopKConfig(MinerConfig):
    """gumbel_top_k: negatives drawn without replacement; more similar ones are drawn more often."""

    name: Literal["gumbel_top_k"]
    k: Positive = 64
    """Number of negatives drawn for each row."""
    temperature: Annotated[float, Field(gt=0.0)] = 0.05
    """Temperature of the draw, in cosine: near 0 the hardest k are drawn, at a large temperature any k with equal
    probability."""
    gradient: Literal["none", "straight_through", "relaxed"] = "none"
    """Whether the choice itself has a gradient. none: no. straight_through: the choice of k, with the gradient of
    relaxed weights. relaxed: all negatives, with weights that sum to k."""
    softness: Annotated[float, Field(gt=0.0)] = 0.5
    """Temperature of the relaxed weights, for the gradients straight_through and relaxed."""


class SameGroupConfig(MinerConfig):
    """same_group: the hardest negatives of the row's own group, for batches of groups (`data.groups`)."""

    name: Literal["same_group"]
    size: Annotated[int, Field(strict=True, ge=2)]
    """Number of rows of a group: `data.groups.size`, or 1 + `data.groups.candidates`."""
    k: Positive = 64
    """Number of negatives of its group that each row keeps; all of them where they are fewer."""


class UserConfig(MinerConfig):
    """user: a function of your own, or a class called with `arguments` (docs/losses.md)."""

    name: Literal["user"]
    target: str
    """The function or class: "module:function" or "module:Class", in a file that Python can import."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that the class is called with; none for a function."""


NamedMinerConfig = Annotated[
    AllConfig
    | TopKConfig
    | RatioConfig
    | SemiHardConfig
    | DistanceWeightedConfig
    | GumbelTopKConfig
    | SameGroupConfig
    | UserConfig,
    Field(discriminator="name"),
]


class TeacherConfig(Settings):
    """A moving average of the model, which says what may be a false negative, and may feed the queue. It costs one more
    forward pass in each step."""

    decay: BelowOne = 0.999
    """Decay of the moving average at each update: 0.999 averages about the last 1,000 updates."""
    margin: Cosine | None = 0.0
    """Leaves out negatives that the teacher finds more similar than the positive minus this margin, in cosine. null:
    leaves none out, for a teacher that only feeds the queue."""
    after_steps: Count = 0
    """Number of updates before the teacher leaves out negatives; the average is taken from the first update on."""


class QueueConfig(Settings):
    """The queue: features of earlier batches as further negatives, of both directions."""

    rows: Positive = 65536
    """Number of rows that the queue holds, those of the last global batches. Each takes 8 bytes a feature on each
    device and in checkpoints."""
    after_steps: Count = 1000
    """Number of updates before the queue begins: the features of a young model are soon out of date."""
    features: Literal["model", "teacher"] = "model"
    """Whose features the queue holds. teacher: those of the moving average `train.teacher`, which change more slowly
    (MoCo)."""


class FeatureCacheConfig(Settings):
    """The features that training computes, kept in the run's folder, for `mmdata neighbours --features`."""

    every_steps: Positive = 1
    """Writes the features of one batch in this many."""
    side: Literal["pair", "image", "text"] = "pair"
    """Which features are written: those of the images, of the texts, or of the pair, which is the normalised sum of
    both."""


class TrainConfig(Settings):
    """How the towers are trained."""

    output: MayChange[Location | None] = None
    """Folder of the run: checkpoints, logs, scores. null: runs/NAME for a config NAME.yaml. A run that is in the folder
    is resumed."""
    epochs: Positive | None = None
    """Number of passes over the data. Training needs either this or `steps`."""
    steps: Positive | None = None
    """Number of optimizer updates of the whole run, in place of `epochs`."""
    overfit_batches: Positive | None = None
    """Trains on this many batches of epoch 0 again and again, to see whether the model can learn them at all. null:
    trains on all batches."""
    lr: Annotated[float, Field(gt=0.0)] = 5e-4
    """Largest learning rate of AdamW, reached at the end of the warm-up; `schedule` says how it goes on."""
    schedule: Schedule = "cosine"
    """The learning rate after the warm-up. cosine: falls to 0 along a half cosine. constant: stays, so that a
    finished run can go on with more epochs. cooldown: stays, and falls to 0 along a line over the last
    `cooldown_steps`."""
    cooldown_steps: Positive | None = None
    """Updates at the end of a run with the schedule cooldown; 10 to 20 % of all are usual."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.2
    """Weight decay of AdamW. It acts on matrices only, not on biases, norms, logit_scale and logit_bias."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    """Decay of AdamW's averages of the gradient and of its square. The defaults are CLIP's for vision transformers."""
    warmup_steps: Count = 100
    """Number of updates over which the learning rate rises linearly from 0."""
    grad_clip_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Largest norm of the gradient of all weights together; a larger gradient is scaled down to it. null: not
    clipped."""
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"
    """Number format of the computations. bf16 and fp16: the towers in torch.autocast, fp16 with a gradient scaler. tf32
    and fp32: the towers in float32. Products of float32 that are left, such as the loss's, are TF32 on a GPU (10 bits
    of mantissa), except with fp32. auto: bf16 on a GPU that has it, else fp32; `mmdata train` goes on with what a run
    began with."""
    micro_batch_size: MayChange[Positive | None] = None
    """Rows that go through the towers at a time on each rank, to save memory; losses and gradients are those of the
    whole batch. null: all rows at once."""
    parallel: MayChange[Literal["ddp", "fsdp"]] = "ddp"
    """How several ranks train together. ddp: each rank holds the whole model. fsdp: each rank keeps a share of weights,
    gradients and optimizer state (FSDP2), which saves memory; the results are those of ddp."""
    compile: MayChange[bool] = False
    """Compiles the towers' blocks with torch.compile, once for each shape of the batches."""
    rehearse: MayChange[Literal["auto"] | bool] = "auto"
    """Makes a step of each shape of the epoch's batches before the first one, without an update. So code is compiled at
    the start, and a shape for which there is too little memory is named then. auto: on a GPU, or with `compile`."""
    loss: LossName = "clip"
    """The loss. clip: InfoNCE. siglip: sigmoid of all pairs. multi_positive: InfoNCE with several positives (UniCL).
    triplet: hinge (VSE++). hard_negative: InfoNCE in which harder negatives weigh more; takes no miner.
    sogclr: InfoNCE of the whole corpus, estimated (SogCLR, FastCLIP); keeps 8 bytes for each row, takes no miner."""
    positives: PositivesBy = "caption_hash"
    """For the loss multi_positive: rows with equal values of this are positives of each other. A hash sets
    `data.add_hashes`."""
    triplet_margin: Annotated[float, Field(ge=0.0, le=2.0)] = 0.2
    """For the loss triplet: how far below the positive's cosine a negative's cosine should lie."""
    hard_negative_beta: Annotated[float, Field(ge=0.0)] = 1.0
    """For the loss hard_negative: how much more harder negatives weigh, by exp(beta · logit); 0 weighs all the same."""
    hard_negative_prior: BelowOne = 0.0
    """For the loss hard_negative: the assumed probability that a negative is a false one (τ⁺), which the loss corrects
    for."""
    sogclr_gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """For the loss sogclr: weight of a batch in the averages of its rows, after `sogclr_gamma_decay_steps`."""
    sogclr_gamma_decay_steps: Count = 0
    """For the loss sogclr: updates in which gamma falls from 1 to `sogclr_gamma` along a half cosine. FastCLIP: half of
    the run, to 0.2."""
    sogclr_eps: Annotated[float, Field(gt=0.0)] | None = None
    """For the loss sogclr: added to a row's average. null: 1 / (rows that are trained on - 1), which makes the loss
    InfoNCE of the whole corpus. The papers': 1.0e-14."""
    sogclr_rho: float | None = None
    """For the loss sogclr: what the scale aims at, as in FastCLIP-v3's objective; larger makes the scale larger.
    null: the scale is learned as in InfoNCE."""
    miner: NamedMinerConfig | None = None
    """Chooses which negatives of the batch enter the loss, such as the hardest; null: all of them do."""
    teacher: TeacherConfig | None = None
    """Leaves out negatives that a moving average of the model finds too similar to be negatives; null: no teacher."""
    queue: QueueConfig | None = None
    """Features of earlier batches as further negatives, for the loss clip; needs `mask_false_negatives`. null: none."""
    feature_cache: FeatureCacheConfig | None = None
    """Keeps the features that training computes, for `mmdata neighbours --features`; null: does not keep them."""
    mask_false_negatives: bool = False
    """Rows with the same image or the same caption are not negatives of each other; sets `data.add_hashes`."""
    log_every_steps: MayChange[Positive] = 10
    """Number of updates between two lines of the log and of metrics.jsonl."""
    mining_telemetry_every_steps: MayChange[Count] = 0
    """Of so many updates one is measured: how hard its negatives are, and which of them the miner keeps
    (docs/losses.md). Each time it is another one of them, since batches at one place of an epoch are alike. 0: none."""
    checkpoint_every_steps: MayChange[Positive] = 1000
    """Number of updates between two checkpoints. One is also written at the end, and when a signal stops the run.
    Training goes on while one is written, from a copy of weights and averages in the memory of rank 0's host, or of
    each rank's its share (`checkpoint`)."""
    checkpoint: MayChange[Literal["whole", "sharded"]] = "whole"
    """The form of checkpoints. whole: one file, which rank 0 writes. sharded: a folder into which each rank writes its
    share (torch.distributed.checkpoint), for several ranks with `parallel: fsdp`. A run goes on from both, on any
    number of ranks (docs/scaling.md)."""
    keep_checkpoints: MayChange[Positive] = 2
    """Number of newest checkpoints that are kept; older ones are deleted."""
    stall_timeout_s: MayChange[Annotated[float, Field(gt=0.0)] | None] = 600.0
    """Seconds without progress of a rank after which all ranks exit, with an error that names the rank and its step.
    null: waits for ever."""
    evaluate_every_epochs: MayChange[Count] = 1
    """Number of epochs between two evaluations on `data.val`; 0: only at the end."""
    seed: Integer = 0
    """Seed of the initial weights, of dropout and of miners that draw; `data.seed` is that of the batches."""
    device: MayChange[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device to train on; auto: the rank's GPU if there is one, otherwise the CPU."""
    tensorboard: MayChange[bool] = False
    """Also writes the log's numbers for TensorBoard, into the run's folder."""

    @property
    def needs_hashes(self) -> bool:
        """Whether batches must have image_hash and caption_hash."""
        return self.mask_false_negatives or (self.loss == "multi_positive" and self.positives != "labels")

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs ({self.epochs}) and steps ({self.steps}) exclude each other: give one")
        return self

    @model_validator(mode="after")
    def _feeding_the_queue(self) -> TrainConfig:
        if self.queue is not None and self.queue.features == "teacher" and self.teacher is None:
            raise ValueError(
                "queue.features 'teacher' needs a moving average: set teacher to {margin: null}, or with a margin to "
                "leave out false negatives too"
            )
        feeds = self.queue is not None and self.queue.features == "teacher"
        if self.teacher is not None and self.teacher.margin is None and not feeds:
            raise ValueError(
                "teacher.margin null leaves no negative out: give a margin, or let the teacher feed the queue "
                "(queue.features)"
            )
        return self

    @model_validator(mode="after")
    def _cooling_down(self) -> TrainConfig:
        if self.schedule == "cooldown" and self.cooldown_steps is None:
            raise ValueError("schedule 'cooldown' needs cooldown_steps: the updates over which the rate falls")
        if self.schedule != "cooldown" and self.cooldown_steps is not None:
            raise ValueError(
                f"cooldown_steps belongs to schedule 'cooldown', and schedule is '{self.schedule}': set schedule to "
                "cooldown, or leave cooldown_steps out"
            )
        return self

    @model_validator(mode="after")
    def _sharded(self) -> TrainConfig:
        if self.checkpoint == "sharded" and self.parallel != "fsdp":
            raise ValueError(
                f"checkpoint 'sharded' is for parallel 'fsdp', and parallel is '{self.parallel}': set parallel to "
                "fsdp, or checkpoint to whole"
            )
        if self.parallel == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "parallel 'fsdp' has no gradient scaler: set precision to bf16 or fp32, or parallel to ddp"
            )
        return self
