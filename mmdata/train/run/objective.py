"""The loss and miner of a training step, as the section train names them."""

from __future__ import annotations

import sys
from functools import partial
from inspect import isfunction, signature
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.config.train import DistillConfig, LossName, MinerConfig, NamedMinerConfig, UserConfig
from mmdata.errors import ConfigError, where_to_look
from mmdata.train import losses, miners
from mmdata.train.batches import field_features
from mmdata.train.keys import check_keys
from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.pairs import ExtraNegatives, first_features
from mmdata.train.losses.telemetry import mining_telemetry
from mmdata.train.memory.queue import FeatureQueue, keys_of
from mmdata.train.miners import AnyMiner, BlockMiner, Chain, Miner, Side, for_block
from mmdata.train.models.dual_encoder import MAX_LOGIT_SCALE, DualEncoderOutput

NO_IMAGE = -(2**63)
"""Image hash of a text without an image; a real hash equals it with a probability of 1 in 2^64."""
BY_NAME = {
    "all": miners.All,
    "top_k": miners.TopK,
    "semi_hard": miners.SemiHard,
    "gumbel_top_k": miners.GumbelTopK,
    "same_group": miners.SameGroup,
}
"""Miner classes by the setting `name`; the other settings of a miner are its arguments."""


class ContrastiveLoss:
    """A loss with its miner: `loss = ContrastiveLoss("clip")(output, batch)`.

    Args:
        loss: the name of a loss, as in `train.loss`, or all settings of the section train.
        miner: chooses negatives; None keeps all. The settings' own miners are made by `make_loss`.
        region_miner: of the loss of `regions`, likewise.
        queue: features of earlier batches, further negatives of both directions for "clip". The training loop fills it.
            Needs `mask_false_negatives` and the hashes.
        teacher: what the frozen model of `distill` makes of the batch; None where the batch has its features.
        settings: with a name: further settings of the section train, such as `positives` and `loss_precision`.
            `mask_false_negatives` is True if it is not given, and asks for no hashes.

    Attributes:
        region_loss: scalar of the last call, detached and not weighted; None without `regions`.

    Raises:
        ValueError: an unknown loss or setting; a queue with a loss that takes none.
    """

    def __init__(
        self,
        loss: LossName | TrainConfig = "clip",
        *,
        miner: AnyMiner | None = None,
        region_miner: AnyMiner | None = None,
        queue: FeatureQueue | None = None,
        teacher: DualEncoderOutput | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(loss, TrainConfig):
            given = {"loss": loss, "mask_false_negatives": True} | settings
            loss = parse(TrainConfig, given, origin="ContrastiveLoss")
        self.config, self.miner, self.queue, self.teacher = loss, miner, queue, teacher
        self.region_miner, self.region_loss = region_miner, None
        name = loss.loss
        if queue is not None and name != "clip":
            raise ValueError(
                f"queue: its rows are further negatives for loss 'clip' alone, got '{name}': leave train.queue out"
            )
        if queue is not None and not loss.mask_false_negatives:
            raise ValueError(
                "queue: needs train.mask_false_negatives=true: without it a row's own image and caption, seen "
                "an epoch ago, would be its hardest negatives"
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
        scale, bias = output.logit_scale, output.logit_bias
        self.check_fits(has_bias=bias is not None, has_negative_captions=output.negative_text_features is not None)
        if scale is None and (self.config.loss != "triplet" or self.config.distill is not None):
            needs = f"loss '{self.config.loss}'" if self.config.distill is None else "train.distill"
            raise ValueError(
                f"{needs} needs a scale, and the model's output has none: return DualEncoderOutput("
                "image_features, text_features, logit_scale), a multiplier of cosines such as learned.exp()"
            )
        parts = [self._of(_first(output, length), batch) for length in self.config.matryoshka or ()]
        loss = self._of(output, batch)  # the last, for region_loss
        if parts:
            loss = torch.stack([loss, *parts]).mean()
        # A scalar that the loss does not use gets the gradient 0 in place of none: DDP waits for every parameter.
        for value in (scale, bias):
            loss = loss if value is None else loss + 0.0 * value
        return loss

    def _of(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        """The loss of these features, regions and distillation included."""
        loss, config, scale = self._contrast(output, batch), self.config.distill, output.logit_scale
        if self.config.regions is not None:
            of_regions = self._contrast_regions(output, batch)
            self.region_loss, loss = of_regions.detach(), loss + self.config.regions.weight * of_regions
        if config is None or scale is None:
            return loss
        given: dict[str, Any] = {"teacher": self._taught(config, batch), "valid": batch["valid"]}
        return loss + config.weight * losses.distill_loss(output.image_features, output.text_features, scale, **given)

    def _contrast(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        images, captions = output.image_features, output.negative_text_features
        given: dict[str, Any] = {"valid": batch["valid"], "same": self._same(batch), "miner": self.miner}
        if self.config.loss == "multi_positive":
            given["labels"] = self._labels(batch)
        if self.queue is not None:
            given["same"] = keys_of(batch)
        if self.config.loss == "clip" and (self.queue is not None or captions is not None):
            extra = self._extra(captions, batch, width=images.shape[1], with_keys=len(given["same"]) > 0)
            given["extra_images"], given["extra_texts"] = extra
        return self._named_loss(images, output.text_features, output, given)

    def _contrast_regions(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        """The loss with regions as images and phrases as texts: B * M rows, of which those without phrase count not."""
        regions, phrases, valid = output.region_features, output.phrase_features, batch.get("boxes_valid")
        if regions is None or phrases is None or valid is None or "box_text_hash" not in batch:
            lacks = "batch has no boxes with phrases" if valid is None else "model's output has no region_features"
            raise ValueError(
                f"train.regions: the {lacks}: set data.targets.boxes and data.targets.box_texts, and call "
                "DualEncoder.compare_regions(), or give region_features and phrase_features of a model of your own"
            )
        phrase = batch["box_text_hash"].flatten()
        given = {"valid": valid.flatten() & (phrase != 0), "same": [phrase], "miner": self.region_miner}
        given |= {"labels": phrase} if self.config.loss == "multi_positive" else {}
        return self._named_loss(regions.flatten(0, 1), phrases.flatten(0, 1), output, given)

    def _named_loss(self, images: Tensor, texts: Tensor, output: DualEncoderOutput, given: dict[str, Any]) -> Tensor:
        """The loss that the settings name, with the output's scale and bias."""
        name, scale, bias, precision = self.config.loss, *output[2:4], self.config.loss_precision
        if name == "triplet":
            return losses.triplet_loss(images, texts, **given)
        assert scale is not None, "checked before"
        if name == "multi_positive":
            return losses.multi_positive_loss(images, texts, scale, **given)
        if precision == "auto" and self.config.precision == "bf16" and images.device.type == "cuda":
            precision = "bf16"
        if name == "siglip":
            assert bias is not None, "check_fits"
            return losses.siglip_loss(images, texts, scale, bias, precision=precision, **given)
        return losses.clip_loss(images, texts, scale, precision=precision, **given)

    def _taught(self, config: DistillConfig, batch: Batch) -> tuple[Tensor, Tensor, Tensor | float]:
        """The teacher's features of this rank's rows, and its scale."""
        if config.fields is not None:
            return *field_features(batch, config.fields, "train.distill.fields"), config.logit_scale or MAX_LOGIT_SCALE
        if self.teacher is None or (scale := config.logit_scale or self.teacher.logit_scale) is None:
            raise ValueError(
                "train.distill.teacher: the loss was given no output of a teacher, or one without logit_scale: pass "
                "ContrastiveLoss(teacher=DualEncoderOutput(image_features, text_features, logit_scale))"
            )
        return self.teacher.image_features, self.teacher.text_features, scale

    def check_fits(self, *, has_bias: bool, has_negative_captions: bool) -> None:
        """Check the loss against a model and its batches.

        Raises:
            ValueError: the loss needs a bias, or takes no negative captions.
        """
        name = self.config.loss
        if name == "siglip" and not has_bias:
            raise ValueError("loss 'siglip' needs a bias: set model.logit_bias_init (-10 in the paper)")
        if name != "clip" and has_negative_captions:
            raise ValueError(
                f"loss '{name}' takes no negative captions: set train.loss to clip, or leave data.negative_captions out"
            )

    def _extra(
        self, captions: Tensor | None, batch: Batch, *, width: int, with_keys: bool
    ) -> tuple[ExtraNegatives | None, ExtraNegatives | None]:
        """The queue's images; the negative captions and the queue's texts. Every rank holds the whole queue."""
        kept = None if self.queue is None else self.queue.negatives()
        images, texts = (None, None) if kept is None else (each.first(width) for each in kept)
        if captions is None:
            return images, texts
        same: list[Tensor] = []
        if with_keys and "negative_caption_hash" in batch:  # no negative of images whose own caption is the same
            # In the order of the rows' keys, image_hash and caption_hash. No negative caption has an image.
            same = [torch.full_like(batch["negative_caption_hash"], NO_IMAGE), batch["negative_caption_hash"]]
        written = ExtraNegatives(captions, same, batch.get("negative_valid")).gather()
        return images, written if texts is None else written.joined(texts)

    def telemetry(self, output: DualEncoderOutput, batch: Batch) -> dict[str, float]:
        """What the miner makes of this batch; see `mining_telemetry`."""
        labels = [self._labels(batch)] if self.config.loss == "multi_positive" else []
        images, texts, same = output.image_features, output.text_features, [*self._same(batch), *labels]
        everyones = GlobalBatch.gather(images, texts, batch["valid"], same=same)
        scale = 1.0 if output.logit_scale is None else output.logit_scale  # a triplet loss has none
        return mining_telemetry(everyones, everyones.scalar("logit_scale", scale), self.miner)

    def _same(self, batch: Batch) -> list[Tensor]:
        hashes = (batch.get("image_hash"), batch.get("caption_hash"))
        return [key for key in hashes if self.config.mask_false_negatives and key is not None]

    def _labels(self, batch: Batch) -> Tensor:
        """int64 (B,), equal for positives of each other."""
        name = self.config.positives
        labels = batch.get(name)
        if labels is None:
            raise ValueError(
                f"loss 'multi_positive': the batch has no '{name}'; convert the corpus "
                "with labels, or name another one in train.positives"
            )
        check_keys(name, labels)  # before they are mixed with row numbers
        # A row without a label (-1) gets a label of its own. Row numbers are at least -1, so such a label is below 0.
        return labels.where(labels >= 0, -2 - batch["rows"]) if name == "labels" else labels


def _first(output: DualEncoderOutput, width: int) -> DualEncoderOutput:
    """The output with the first `width` numbers of all features."""
    images, texts = (first_features(each, width) for each in (output.image_features, output.text_features))
    more = (None if each is None else first_features(each, width) for each in output[4:])
    return DualEncoderOutput(images, texts, output.logit_scale, output.logit_bias, *more)


def make_loss(
    step: int,
    config: TrainConfig,
    teacher_mask: AnyMiner | None = None,
    queue: FeatureQueue | None = None,
    teacher: DualEncoderOutput | None = None,
) -> ContrastiveLoss:
    """The loss and miner that a configuration names, for the update after `step` updates.

    Args:
        step: updates made.
        config: how to train.
        teacher_mask: leaves out the teacher's false negatives before the miner chooses.
        queue: features of earlier batches.
        teacher: what the frozen model of `train.distill` makes of the batch.

    Raises:
        ValueError: settings that do not fit together.
        ConfigError: a miner that cannot be made.
    """
    given = {"train.miner": config.miner, "train.regions.miner": config.regions and config.regions.miner}
    mines = step >= config.mining_after_steps
    miner, region_miner = (configured(each, key) if each and mines else None for key, each in given.items())
    if teacher_mask is not None:
        miner = teacher_mask if miner is None else Chain((teacher_mask, miner))
    return ContrastiveLoss(config, miner=miner, region_miner=region_miner, queue=queue, teacher=teacher)


def check_loss(
    config: TrainConfig, *, has_bias: bool, has_negative_captions: bool = False, embed_dim: int | None = None
) -> None:
    """Raise before a run begins what an update would raise, hundreds of steps later with `mining_after_steps`.

    Args:
        config: of the run.
        has_bias: the model has a logit_bias, or may have one.
        has_negative_captions: the batches have negative captions.
        embed_dim: numbers of a feature; None: not known yet.

    Raises:
        ConfigError: see `ContrastiveLoss`; or a miner that cannot be made.
    """
    queue = None if config.queue is None else FeatureQueue(config.queue)
    try:
        loss = make_loss(sys.maxsize, config, queue=queue)
        loss.check_fits(has_bias=has_bias, has_negative_captions=has_negative_captions)
        if embed_dim is not None and (longer := [length for length in config.matryoshka or () if length >= embed_dim]):
            raise ValueError(
                f"matryoshka {longer}: the model's features have {embed_dim} numbers, and are trained themselves; give "
                "smaller lengths only"
            )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"train.{error}") from error


def configured(config: NamedMinerConfig, key: str = "train.miner") -> AnyMiner:
    """The miner alone, or in a chain after the miners that leave out false negatives.

    Args:
        config: of the miner.
        key: the setting that names it, for messages.

    Raises:
        ConfigError: a user's class that does not exist or does not take its arguments, or a value out of range.
    """
    try:
        parts: list[AnyMiner] = []
        if config.false_negative_margin is not None:
            parts.append(miners.FalseNegativeMargin(config.false_negative_margin))
        if config.drop_hardest is not None:
            parts.append(miners.DropHardest(config.drop_hardest))
        if isinstance(config, UserConfig):
            parts.append(_of_user(config, key))
        else:
            parts.append(BY_NAME[config.name](**config.model_dump(exclude={"name", *MinerConfig.model_fields})))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    return parts[0] if len(parts) == 1 else miners.Chain(tuple(parts))


def _of_user(config: UserConfig, key: str) -> AnyMiner:
    target, given = config.target, config.arguments
    try:
        kind: Any = resolve_name(target)
    except ImportError as error:
        where = where_to_look(error, target.partition(":")[0])
        raise ConfigError(f"{key}.target '{target}': cannot be imported: {error}{where}") from error
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{key}.target '{target}': expected 'module:function' or 'module:Class' ({error})") from error
    try:
        miner = kind if isfunction(kind) else kind(**given)
        if not isinstance(miner, BlockMiner):
            signature(miner).bind("scores", "positives", "negatives", **(given if miner is kind else {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}.arguments {given} of '{target}': {error}; a miner is called with (scores, positives, "
            "negatives), and a function with the arguments too"
        ) from error
    return _UserMiner(target, key, partial(kind, **given) if miner is kind else miner)


class _UserMiner:
    """A user's miner, which messages call by its target. A ValueError in it ends the run with a traceback."""

    def __init__(self, target: str, key: str, miner: AnyMiner) -> None:
        self.__qualname__ = target
        self._key, self._miner = key, miner

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for these anchors; see `BlockMiner`."""

        def mine(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            try:
                return for_block(self._miner, side, rows)(scores, positives, negatives)
            except ValueError as error:  # a command would show it in one line, without its place
                raise RuntimeError(f"{self._key}.target '{self.__qualname__}': {error}") from error

        return mine
