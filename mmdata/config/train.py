"""Settings of the section train: the loss and its miner, the optimizer, the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import BelowOne, Count, Integer, Location, MayChange, Positive, Settings

Cosine = Annotated[float, Field(ge=-2.0, le=2.0)]
"""A difference of cosine similarities."""


LossName = Literal["clip", "siglip", "multi_positive", "triplet", "hard_negative"]
Schedule = Literal["cosine", "constant", "cooldown"]
PositivesBy = Literal["labels", "image_hash", "caption_hash"]
"""The entry of a batch in which rows that are positives of each other are equal."""


class MinerConfig(Settings):
    """Which in-batch negatives enter the loss. The negatives that these settings leave out never reach the miner."""

    RENAMED: ClassVar[Mapping[str, str]] = {"train.miner.skip_hottest": "train.miner.drop_hardest"}

    false_negative_margin: Cosine | None = None
    """Leave out negatives above the positive's cosine, or less than this below it; null: leave none out."""
    drop_hardest: Annotated[float, Field(strict=True, gt=0.0)] | None = None
    """Then leave out this number of the most similar negatives, or this share of them if it is below 1."""
    after_steps: Count = 0
    """Updates with all negatives first: an untrained model's hardest negatives are noise, and it collapses on them."""


class AllConfig(MinerConfig):
    """all: every negative that the settings above leave."""

    name: Literal["all"]


class TopKConfig(MinerConfig):
    """top_k: the hardest negatives of each row, in both directions."""

    name: Literal["top_k"]
    k: Positive = 64
    """Negatives kept for each row; all of them where they are fewer."""


class RatioConfig(MinerConfig):
    """ratio: the hardest share of each row's negatives."""

    name: Literal["ratio"]
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1


class SemiHardConfig(MinerConfig):
    """semi_hard: those below the positive by no more than a margin (FaceNet)."""

    name: Literal["semi_hard"]
    margin: Annotated[float, Field(gt=0.0, le=2.0)] = 0.2


class DistanceWeightedConfig(MinerConfig):
    """distance_weighted: drawn evenly over distances (Wu et al. 2017)."""

    name: Literal["distance_weighted"]
    dimension: Annotated[int, Field(strict=True, ge=3)]
    """Dimension of the features (`model.embed_dim`), or less if the features fill less of their space."""
    k: Positive = 64
    """Negatives drawn for each row."""
    cutoff: Annotated[float, Field(gt=0.0, lt=2.0)] = 0.5
    """Distances below count as this one."""
    farthest: Annotated[float, Field(gt=0.0, le=2.0)] = 1.4
    """Negatives at this distance or beyond are never drawn."""


class GumbelTopKConfig(MinerConfig):
    """gumbel_top_k: drawn without replacement, the likelier the more similar."""

    name: Literal["gumbel_top_k"]
    k: Positive = 64
    """Negatives drawn for each row."""
    temperature: Annotated[float, Field(gt=0.0)] = 0.05
    """In cosine: near 0 draws the hardest k; a large temperature draws any k with equal probability."""
    gradient: Literal["none", "straight_through", "relaxed"] = "none"
    """Gradient of the choice itself; relaxed weighs all negatives, with weights that sum to k."""
    softness: Annotated[float, Field(gt=0.0)] = 0.5
    """Temperature of the relaxation."""


class SameGroupConfig(MinerConfig):
    """same_group: the hardest of the row's own group, for batches of groups (`data.groups`)."""

    name: Literal["same_group"]
    size: Annotated[int, Field(strict=True, ge=2)]
    """Rows of a group: `data.groups.size`, or 1 + `data.groups.candidates`."""
    k: Positive = 64
    """Negatives kept for each row; all of the group where they are fewer."""


class UserConfig(MinerConfig):
    """user: a function of your own, or a class called with `arguments` (docs/train.md)."""

    RENAMED: ClassVar[Mapping[str, str]] = {**MinerConfig.RENAMED, "train.miner.of": "train.miner.target"}

    name: Literal["user"]
    target: str
    """The class or function: "module:Class" or "module:function", in a file that Python can import."""
    arguments: dict[str, Any] = Field(default_factory=dict)


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
    """A moving average of the model, which says what may be a false negative. It costs a forward a step."""

    decay: BelowOne = 0.999
    """Decay of the average at each update."""
    margin: Cosine = 0.0
    """Leave out negatives whose cosine, by the teacher, is above the positive's or less than this below it."""
    after_steps: Count = 0
    """Updates before the teacher masks negatives; the average is taken from the first update on."""


class QueueConfig(Settings):
    """The queue: features of earlier batches as further negatives, of both directions."""

    rows: Positive = 65536
    """Of global batches, the last ones; 8 bytes a row and feature on each device, and in checkpoints."""
    after_steps: Count = 1000
    """Updates before the first batch is kept: the features of a young model are soon out of date."""


class FeatureCacheConfig(Settings):
    """The features that training computes, kept in the run's folder, for `mmdata neighbours --features`."""

    RENAMED: ClassVar[Mapping[str, str]] = {"train.feature_cache.of": "train.feature_cache.side"}

    every_steps: Positive = 1
    """Write one batch in this many."""
    side: Literal["pair", "image", "text"] = "pair"
    """Which features are written; pair: the normalised sum of both."""


class TrainConfig(Settings):
    """How the towers are trained."""

    RENAMED: ClassVar[Mapping[str, str]] = {"train.hard_negative_positive_share": "train.hard_negative_prior"}

    output: MayChange[Location | None] = None
    """Folder of the run; runs/NAME for configs/NAME.yaml unless given. A run found there is resumed."""
    epochs: Positive | None = None
    """Passes over the data; this or `steps` is required to train."""
    steps: Positive | None = None
    """Optimizer updates in all, in place of `epochs`."""
    overfit_batches: Positive | None = None
    """Train on the first so many batches of epoch 0 again and again: can the model learn them? null: on all."""
    lr: Annotated[float, Field(gt=0.0)] = 5e-4
    """Learning rate at the end of the warm-up; how it goes on from there: `schedule`."""
    schedule: Schedule = "cosine"
    """The learning rate after the warm-up. cosine: falls to 0 along a half cosine. constant: stays, so that a
    finished run can go on with more epochs. cooldown: stays, and falls to 0 along a line over the last
    `cooldown_steps`."""
    cooldown_steps: Positive | None = None
    """Updates at the end of a run with the schedule cooldown; 10 to 20 % of all are usual."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.2
    """AdamW's, on matrices only: not on biases, norms, logit_scale and logit_bias."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    warmup_steps: Count = 100
    """Updates over which the learning rate rises linearly from 0."""
    grad_clip_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Largest norm of the whole gradient; null leaves it as it is."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast type of the towers; fp16 brings a gradient scaler."""
    micro_batch_size: MayChange[Positive | None] = None
    """Rows per forward on a rank; the gradients are those of the whole batch. null: all rows at once."""
    parallel: MayChange[Literal["ddp", "fsdp"]] = "ddp"
    """fsdp: each rank keeps a share of weights, gradients and optimizer state (FSDP2); the numbers are those of ddp."""
    compile: MayChange[bool] = False
    """torch.compile for the towers: a graph for each shape of the batches."""
    loss: LossName = "clip"
    """clip: InfoNCE. siglip: sigmoid of all pairs. multi_positive: InfoNCE with several positives (UniCL). triplet:
    hinge (VSE++). hard_negative: InfoNCE whose negatives weigh the more the harder they are; takes no miner."""
    positives: PositivesBy = "caption_hash"
    """Of the loss multi_positive: rows equal in this are positives of each other; a hash sets `data.add_hashes`."""
    triplet_margin: Annotated[float, Field(ge=0.0, le=2.0)] = 0.2
    """Of the loss triplet: a negative's cosine is to be so much below the positive's."""
    hard_negative_beta: Annotated[float, Field(ge=0.0)] = 1.0
    """Of the loss hard_negative: weights go with exp(beta · logit); 0 weighs all the same."""
    hard_negative_prior: BelowOne = 0.0
    """For the loss hard_negative: the probability τ⁺ that a negative is a false one, which the loss corrects for."""
    miner: NamedMinerConfig | None = None
    teacher: TeacherConfig | None = None
    queue: QueueConfig | None = None
    feature_cache: FeatureCacheConfig | None = None
    mask_false_negatives: bool = False
    """Rows with the same image or caption are no negatives of each other; sets `data.add_hashes`."""
    log_every_steps: MayChange[Positive] = 10
    mining_telemetry_every_steps: MayChange[Count] = 0
    """Measure how hard the negatives are, and what the miner keeps (docs/train.md); 0: never."""
    checkpoint_every_steps: MayChange[Positive] = 1000
    """One is also written at the end and when a signal stops the run."""
    keep_checkpoints: MayChange[Positive] = 2
    """The newest ones; older ones are deleted."""
    stall_timeout_s: MayChange[Annotated[float, Field(gt=0.0)] | None] = 600.0
    """If a rank makes no progress for this long, all ranks exit with an error that names it and its step; null waits
    for ever."""
    evaluate_every_epochs: MayChange[Count] = 1
    """On `data.val`; 0: only at the end."""
    seed: Integer = 0
    """Of the weights and of dropout; rank r draws from its own stream."""
    device: MayChange[Literal["auto", "cpu", "cuda"]] = "auto"
    """auto: the GPU of the rank where there is one."""
    tensorboard: MayChange[bool] = False
    """Also write scalars for TensorBoard into the run's folder."""

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
        if self.parallel == "fsdp" and self.compile:
            raise ValueError(
                "parallel 'fsdp' runs towers that are not compiled: set compile to false, or parallel to ddp"
            )
        if self.parallel == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "parallel 'fsdp' has no gradient scaler: set precision to bf16 or fp32, or parallel to ddp"
            )
        return self
