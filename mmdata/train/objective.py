"""A loss with its settings, as the training step takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.config.train import LossName, PositivesBy
from mmdata.errors import ConfigError
from mmdata.train import losses
from mmdata.train.losses.extra_negatives import ExtraNegatives
from mmdata.train.losses.keys import check_keys
from mmdata.train.losses.telemetry import mining_telemetry
from mmdata.train.memory.queue import FeatureQueue, keys_of
from mmdata.train.miners import AnyMiner, Chain
from mmdata.train.miners.configured import configured
from mmdata.train.models.dual_encoder import DualEncoder, DualEncoderOutput

NO_IMAGE = -(2**63)
"""Stands for the image hash of a text without an image; that a real one equals it has a chance of 1 in 2^64."""


@dataclass(frozen=True)
class ContrastiveLoss:
    """A loss with its miner: `loss = ContrastiveLoss("clip")(output, batch)`.

    Args:
        kind: "clip" (InfoNCE; takes the negative captions of the batch), "siglip" (sigmoid), "multi_positive"
            (InfoNCE with several positives), "triplet" (hinge) or "hard_negative" (InfoNCE that weighs negatives by
            their hardness).
        miner: chooses negatives; None keeps all.
        mask_same: rows of equal image_hash or caption_hash are not negatives of each other, where the batch has them.
        positives: of "multi_positive": the entry of the batch in which positives are equal. A row without a label has
            its own partner only.
        margin: of "triplet", in cosine.
        beta: of "hard_negative", how much the hardness counts.
        positive_share: of "hard_negative", the probability that a negative is a false one.
        queue: features of earlier batches, further negatives of both directions for "clip"; who trains fills it. Needs
            `mask_same` and the hashes.
    """

    kind: LossName = "clip"
    miner: AnyMiner | None = None
    mask_same: bool = True
    positives: PositivesBy = "caption_hash"
    margin: float = 0.2
    beta: float = 1.0
    positive_share: float = 0.0
    queue: FeatureQueue | None = None

    def __post_init__(self) -> None:
        if self.queue is not None and (self.kind != "clip" or not self.mask_same):
            raise ValueError(
                f"cross-batch memory: needs loss 'clip' and mask_same, got '{self.kind}' and {self.mask_same}: without "
                "the mask a row's own image and caption, seen an epoch ago, would be its hardest negatives"
            )
        if self.kind == "hard_negative" and self.miner is not None:
            raise ValueError(
                "loss 'hard_negative' weighs all negatives and takes no miner: leave train.miner and train.teacher out"
            )

    def __call__(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        """Scalar loss of `output`, the model's features of `batch`.

        Raises:
            ValueError: the model or the batch lacks what the loss needs, or has negative captions that it cannot take.
        """
        if output.negative_text_features is not None and self.kind != "clip":
            raise ValueError(
                f"loss '{self.kind}' takes no negative captions: set train.loss to clip, or leave "
                "data.negative_captions out"
            )
        loss = self._loss(output, batch)
        # The gradient of a scalar that the loss does not look at is 0, not absent: DDP waits for every parameter.
        for value in (output.logit_scale, output.logit_bias):
            loss = loss if value is None else loss + 0.0 * value
        return loss

    def _loss(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        features, same, valid = output[:3], self._same(batch), batch["valid"]
        if self.kind == "siglip":
            if output.logit_bias is None:
                raise ValueError("loss 'siglip' needs a bias: set model.logit_bias_init (-10 in the paper)")
            return losses.siglip_loss(*features, output.logit_bias, miner=self.miner, valid=valid, same=same)
        if self.kind == "multi_positive":
            labels = self._labels(batch)
            return losses.multi_positive_loss(*features, labels=labels, miner=self.miner, valid=valid, same=same)
        if self.kind == "triplet":
            return losses.triplet_loss(*features[:2], margin=self.margin, miner=self.miner, valid=valid, same=same)
        if self.kind == "hard_negative":
            share = self.positive_share
            return losses.hard_negative_loss(*features, beta=self.beta, positive_share=share, valid=valid, same=same)
        extra_texts = self._extra_texts(output, batch, len(same))
        extra_images, extra_texts = self._remembered(extra_texts and extra_texts.gather())
        return losses.clip_loss(
            *features,
            miner=self.miner,
            valid=valid,
            same=same if self.queue is None else keys_of(batch),
            extra_texts=extra_texts,
            extra_images=extra_images,
        )

    def _extra_texts(self, output: DualEncoderOutput, batch: Batch, num_keys: int) -> ExtraNegatives | None:
        """The negative captions as negatives of the images: not of one that has the same caption as its own."""
        if output.negative_text_features is None:
            return None
        same: list[Tensor] = []
        if num_keys and "negative_caption_hash" in batch:
            # As the keys of the rows: image_hash, caption_hash. No negative caption has an image of its own.
            same = [torch.full_like(batch["negative_caption_hash"], NO_IMAGE), batch["negative_caption_hash"]]
        return ExtraNegatives(output.negative_text_features, same, batch.get("negative_valid"))

    def _remembered(self, extra_texts: ExtraNegatives | None) -> tuple[ExtraNegatives | None, ExtraNegatives | None]:
        """Extra images, and extra texts with those given, of the queue: all ranks hold all of it."""
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
            output.logit_scale,
            miner=self.miner,
            valid=batch["valid"],
            same=[*self._same(batch), *([self._labels(batch)] if self.kind == "multi_positive" else [])],
        )

    def _same(self, batch: Batch) -> list[Tensor]:
        hashes = (batch.get("image_hash"), batch.get("caption_hash"))
        return [key for key in hashes if self.mask_same and key is not None]

    def _labels(self, batch: Batch) -> Tensor:
        """What positives have in common, int64 (B,)."""
        labels = batch.get(self.positives)
        if labels is None:
            raise ValueError(
                f"loss 'multi_positive': the batch has no '{self.positives}'; set data.add_hashes for a hash, convert "
                "the corpus with labels, or name another one in train.positives"
            )
        check_keys(self.positives, labels)  # before they meet the row numbers
        # -1 is no label in common. Row numbers are -1 where there is no row, so these are all below 0.
        return labels.where(labels >= 0, -2 - batch["rows"]) if self.positives == "labels" else labels


def loss_at(
    step: int, config: TrainConfig, opinion: AnyMiner | None = None, queue: FeatureQueue | None = None
) -> ContrastiveLoss:
    """The loss and miner that a configuration names, for the update after `step` updates.

    Args:
        step: updates made.
        config: how to train.
        opinion: what a teacher leaves out before the miner chooses.
        queue: features of earlier batches.
    """
    miner = None
    if config.miner is not None and step >= config.miner.after_steps:
        miner = configured(config.miner)
    if opinion is not None:
        miner = opinion if miner is None else Chain((opinion, miner))
    return ContrastiveLoss(
        config.loss,
        miner=miner,
        mask_same=config.mask_false_negatives,
        positives=config.positives,
        margin=config.triplet_margin,
        beta=config.hard_negative_beta,
        positive_share=config.hard_negative_positive_share,
        queue=queue,
    )


def check_objective(config: TrainConfig, model: DualEncoder, *, negative_captions: bool) -> None:
    """Say before a run begins what its first update would.

    Args:
        config: of the run.
        model: that is trained.
        negative_captions: whether the batches have them.

    Raises:
        ConfigError: the loss needs what the model lacks, or takes no negative captions; or there is no such miner.
    """
    if config.loss == "siglip" and model.logit_bias is None:
        raise ConfigError("train.loss 'siglip' needs a bias: set model.logit_bias_init (-10 in the paper)")
    if negative_captions and config.loss != "clip":
        raise ConfigError(
            f"train.loss '{config.loss}' takes no negative captions: set it to clip, or leave "
            "data.negative_captions out"
        )
    if config.miner is not None:
        configured(config.miner)
