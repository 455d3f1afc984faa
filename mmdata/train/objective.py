"""A loss with its settings, as the training step takes it. `ContrastiveLoss` alone says which settings fit together."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.config.train import LossName, PositivesBy
from mmdata.errors import ConfigError
from mmdata.train import losses
from mmdata.train.keys import check_keys
from mmdata.train.losses.extra_negatives import ExtraNegatives
from mmdata.train.losses.telemetry import mining_telemetry
from mmdata.train.memory.queue import FeatureQueue, keys_of
from mmdata.train.miners import All, AnyMiner, Chain
from mmdata.train.miners.configured import configured
from mmdata.train.models.dual_encoder import DualEncoder, DualEncoderOutput

NO_IMAGE = -(2**63)
"""Image hash of a text without an image; a real hash equals it with a probability of 1 in 2^64."""


@dataclass(frozen=True)
class ContrastiveLoss:
    """A loss with its miner: `loss = ContrastiveLoss("clip")(output, batch)`.

    Args:
        kind: "clip" (InfoNCE; takes the negative captions of the batch), "siglip" (sigmoid), "multi_positive"
            (InfoNCE with several positives), "triplet" (hinge) or "hard_negative" (InfoNCE that weighs negatives by
            their hardness).
        miner: chooses negatives; None keeps all.
        mask_same: rows with equal image_hash or caption_hash are not negatives of each other, if the batch has hashes.
        positives: for "multi_positive": the entry of the batch in which positives are equal. A row without a label has
            its own partner only.
        margin: for "triplet", in cosine.
        beta: for "hard_negative", how much the hardness counts.
        prior: for "hard_negative", the probability τ⁺ that a negative is a false one.
        queue: features of earlier batches, further negatives of both directions for "clip". The training loop fills it.
            Needs `mask_same` and the hashes.

    Raises:
        ValueError: an unknown kind; a queue or a miner with a loss that takes none.
    """

    kind: LossName = "clip"
    miner: AnyMiner | None = None
    mask_same: bool = True
    positives: PositivesBy = "caption_hash"
    margin: float = 0.2
    beta: float = 1.0
    prior: float = 0.0
    queue: FeatureQueue | None = None

    def __post_init__(self) -> None:
        known = get_args(LossName)
        if self.kind not in known:
            raise ValueError(f"loss '{self.kind}': known are {', '.join(known)}")
        if self.queue is not None and self.kind != "clip":
            raise ValueError(
                f"queue: its rows are further negatives for loss 'clip' alone, got '{self.kind}': leave train.queue out"
            )
        if self.queue is not None and not self.mask_same:
            raise ValueError(
                "queue: needs train.mask_false_negatives=true: without it a row's own image and caption, seen "
                "an epoch ago, would be its hardest negatives"
            )
        if self.kind == "hard_negative" and self.miner is not None:
            raise ValueError(
                f"loss '{self.kind}' weighs all negatives and takes no miner: leave train.miner and train.teacher out"
            )

    def __call__(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        """Scalar loss of `output`, the model's features of `batch`.

        Raises:
            ValueError: the model or the batch lacks what the loss needs, or has negative captions that it cannot take.
            TypeError: `output` is something else, such as a plain tuple of tensors.
        """
        if not hasattr(output, "logit_bias"):
            raise TypeError(
                f"output is a {type(output).__name__}, expected a DualEncoderOutput: give DualEncoderOutput("
                "image_features, text_features, logit_scale), or call a function of mmdata.train.losses with tensors"
            )
        self.check_fits(
            has_bias=output.logit_bias is not None, has_negative_captions=output.negative_text_features is not None
        )
        loss = self._loss(output, batch)
        # A scalar that the loss does not use gets the gradient 0 in place of none: DDP waits for every parameter.
        for value in (output.logit_scale, output.logit_bias):
            loss = loss if value is None else loss + 0.0 * value
        return loss

    def check_fits(self, *, has_bias: bool, has_negative_captions: bool) -> None:
        """Check the loss against a model and its batches.

        Args:
            has_bias: the model has a logit_bias.
            has_negative_captions: the batches have negative captions.

        Raises:
            ValueError: the loss needs a bias, or takes no negative captions.
        """
        if self.kind == "siglip" and not has_bias:
            raise ValueError("loss 'siglip' needs a bias: set model.logit_bias_init (-10 in the paper)")
        if self.kind != "clip" and has_negative_captions:
            raise ValueError(
                f"loss '{self.kind}' takes no negative captions: set train.loss to clip, or leave "
                "data.negative_captions out"
            )

    def _loss(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        images, texts, same, valid = *output[:2], self._same(batch), batch["valid"]
        if self.kind == "triplet":
            return losses.triplet_loss(images, texts, margin=self.margin, miner=self.miner, valid=valid, same=same)
        features = images, texts, self._scale(output)
        if self.kind == "siglip":
            assert output.logit_bias is not None, "check_fits"
            return losses.siglip_loss(*features, output.logit_bias, miner=self.miner, valid=valid, same=same)
        if self.kind == "multi_positive":
            labels = self._labels(batch)
            return losses.multi_positive_loss(*features, labels=labels, miner=self.miner, valid=valid, same=same)
        if self.kind == "hard_negative":
            return losses.hard_negative_loss(*features, beta=self.beta, prior=self.prior, valid=valid, same=same)
        extra_texts = self._extra_texts(output, batch, len(same))
        extra_images, extra_texts = self._with_queue(extra_texts and extra_texts.gather())
        return losses.clip_loss(
            *features,
            miner=self.miner,
            valid=valid,
            same=same if self.queue is None else keys_of(batch),
            extra_texts=extra_texts,
            extra_images=extra_images,
        )

    def _extra_texts(self, output: DualEncoderOutput, batch: Batch, num_keys: int) -> ExtraNegatives | None:
        """The negative captions as negatives of all images but those whose own caption is the same text."""
        if output.negative_text_features is None:
            return None
        same: list[Tensor] = []
        if num_keys and "negative_caption_hash" in batch:
            # In the order of the rows' keys, image_hash and caption_hash. No negative caption has an image.
            same = [torch.full_like(batch["negative_caption_hash"], NO_IMAGE), batch["negative_caption_hash"]]
        return ExtraNegatives(output.negative_text_features, same, batch.get("negative_valid"))

    def _with_queue(self, extra_texts: ExtraNegatives | None) -> tuple[ExtraNegatives | None, ExtraNegatives | None]:
        """The queue's images, and its texts joined with `extra_texts`; every rank holds the whole queue."""
        kept = self.queue and self.queue.negatives()
        if kept is None:
            return None, extra_texts
        images, texts = kept
        return images, texts if extra_texts is None else extra_texts.joined(texts)

    def telemetry(self, output: DualEncoderOutput, batch: Batch) -> dict[str, float | list[float]]:
        """What the miner makes of this batch; see `mining_telemetry`."""
        return mining_telemetry(
            output.image_features,
            output.text_features,
            self._scale(output),
            miner=self.miner,
            valid=batch["valid"],
            same=[*self._same(batch), *([self._labels(batch)] if self.kind == "multi_positive" else [])],
        )

    def _scale(self, output: DualEncoderOutput) -> Tensor:
        if output.logit_scale is None:
            raise ValueError(
                f"loss '{self.kind}' needs a scale, and the model's output has none: return DualEncoderOutput("
                "image_features, text_features, logit_scale), a multiplier of cosines such as learned.exp()"
            )
        return output.logit_scale

    def _same(self, batch: Batch) -> list[Tensor]:
        hashes = (batch.get("image_hash"), batch.get("caption_hash"))
        return [key for key in hashes if self.mask_same and key is not None]

    def _labels(self, batch: Batch) -> Tensor:
        """int64 (B,), equal for positives of each other."""
        labels = batch.get(self.positives)
        if labels is None:
            raise ValueError(
                f"loss 'multi_positive': the batch has no '{self.positives}'; convert the corpus "
                "with labels, or name another one in train.positives"
            )
        check_keys(self.positives, labels)  # before they are mixed with row numbers
        # A row without a label (-1) gets a label of its own. Row numbers are at least -1, so such a label is below 0.
        return labels.where(labels >= 0, -2 - batch["rows"]) if self.positives == "labels" else labels


def make_loss(
    step: int,
    config: TrainConfig,
    teacher_mask: AnyMiner | None = None,
    queue: FeatureQueue | None = None,
) -> ContrastiveLoss:
    """The loss and miner that a configuration names, for the update after `step` updates.

    Args:
        step: updates made.
        config: how to train.
        teacher_mask: leaves out the teacher's false negatives before the miner chooses.
        queue: features of earlier batches.

    Raises:
        ValueError: settings that do not fit together.
        ConfigError: a miner that cannot be made.
    """
    miner = None
    if config.miner is not None and step >= config.mining_after_steps:
        miner = configured(config.miner)
    if teacher_mask is not None:
        miner = teacher_mask if miner is None else Chain((teacher_mask, miner))
    return ContrastiveLoss(
        config.loss,
        miner=miner,
        mask_same=config.mask_false_negatives,
        positives=config.positives,
        beta=config.hard_negative_beta,
        queue=queue,
    )


def check_objective(config: TrainConfig, model: nn.Module, *, has_negative_captions: bool = False) -> None:
    """Raise before a run begins what an update would raise, hundreds of steps later with `mining_after_steps`.

    Args:
        config: of the run.
        model: to be trained; whether a model of your own has a bias shows in the first update.
        has_negative_captions: the batches have negative captions.

    Raises:
        ConfigError: see `ContrastiveLoss`; or a miner that cannot be made.
    """
    has_bias = not isinstance(model, DualEncoder) or model.logit_bias is not None
    check_loss(config, has_bias=has_bias, has_negative_captions=has_negative_captions)


def check_loss(config: TrainConfig, *, has_bias: bool, has_negative_captions: bool) -> None:
    """`check_objective` for a model that is not built yet, of which only `has_bias` is known.

    Raises:
        ConfigError: see `ContrastiveLoss`; or a miner that cannot be made.
    """
    masks = config.teacher is not None and config.teacher.margin is not None
    teacher_mask = All() if masks else None  # stands for any miner
    queue = None if config.queue is None else FeatureQueue(config.queue)
    try:
        loss = make_loss(sys.maxsize, config, teacher_mask, queue)
        loss.check_fits(has_bias=has_bias, has_negative_captions=has_negative_captions)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"train.{error}") from error
