"""Distillation: losses, features that batches hold, and a teacher in a run. The oracle is open_clip's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.loss import DistillClipLoss
from torch import Tensor

from mmdata.config.strict_yaml import parse
from mmdata.config.train import FeatureFields, TrainConfig
from mmdata.errors import ConfigError
from mmdata.train import ContrastiveLoss, DualEncoderOutput, losses
from mmdata.train.batches import field_features
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small
from tests.train.compare import assert_equal, features, scalar, value_and_gradients

FIELDS = {"image": "image_emb", "text": "text_emb"}


def batch_of(rows: int, **entries: Any) -> Any:
    return {"valid": torch.ones(rows, dtype=torch.bool), **entries}


def test_distill_loss_and_its_gradients_are_those_of_open_clip():
    inputs, teacher = (*features(7), scalar(20.0)), (*features(7, 4, seed=3), torch.tensor(50.0))
    contrast, distilled = DistillClipLoss()(*inputs, *teacher)
    wanted = value_and_gradients(contrast + 2.5 * distilled, *inputs)
    loss = ContrastiveLoss("clip", distill={"teacher": "folder", "weight": 2.5}, teacher=DualEncoderOutput(*teacher))
    assert_equal(value_and_gradients(loss(DualEncoderOutput(*inputs), batch_of(7)), *inputs), wanted)


def test_joined_features_are_normalised_and_rows_without_are_left_out_of_distillation():
    images, texts = (x.detach() for x in features(6, 4, seed=3))
    lengths = torch.arange(1.0, 7.0)[:, None]
    batch = batch_of(6, image_emb=lengths * images, text_emb=(lengths * texts)[:, None].expand(-1, 3, -1).clone())
    batch["image_emb"][1] = torch.nan  # a table without a value
    batch["text_emb"][4] = 0.0  # padding
    inputs = (*features(6), scalar(20.0))
    loss = ContrastiveLoss("clip", distill={"fields": FIELDS})(DualEncoderOutput(*inputs), batch)
    kept = torch.tensor([0, 2, 3, 5])
    some = (inputs[0][kept], inputs[1][kept], inputs[2], images[kept], texts[kept], torch.tensor(100.0))
    wanted = losses.clip_loss(*inputs) + DistillClipLoss()(*some)[1]
    assert_equal(value_and_gradients(loss, *inputs), value_and_gradients(wanted, *inputs))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {},
            r"train.distill.fields 'image_emb': the batch has nothing there; data.fields brings floats \(B, D\) to it",
        ),
        ({"image_emb": ["a"]}, r"'image_emb': the batch has list there"),
        ({"image_emb": torch.ones(3)}, r"'image_emb': the batch has torch.float32 \(3,\) there"),
        (
            {"image_emb": torch.ones(3, 4), "text_emb": torch.ones(3, 5)},
            r"train.distill.fields: 'image_emb' has 4 numbers a row and 'text_emb' 5: features of one model",
        ),
    ],
)
def test_fields_that_are_no_features_are_refused(entries: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        field_features(entries, FeatureFields(image="image_emb", text="text_emb"), "train.distill.fields")


def test_distillation_without_what_it_needs_is_refused():
    images, texts = features(3)
    with pytest.raises(ValueError, match=r"train.distill.teacher: the loss was given no output of a teacher, or one"):
        ContrastiveLoss(distill={"teacher": "f"})(DualEncoderOutput(images, texts, scalar(5.0)), batch_of(3))
    with pytest.raises(ValueError, match=r"train.distill needs a scale, and the model's output has none"):
        ContrastiveLoss("triplet", distill={"fields": FIELDS})(DualEncoderOutput(images, texts), batch_of(3))
    with pytest.raises(ValueError, match=r"valid has shape \(2,\), expected \(3,\): one entry a feature row"):
        losses.distill_loss(images, texts, 5.0, teacher=(images[:2], texts[:2], 5.0))
    with pytest.raises(ConfigError, match=r"give either teacher \(a folder\) or fields \(features that the batches"):
        parse(TrainConfig, {"distill": {"weight": 1.0}}, origin="c")


class WithFeatures(small.SmallBatches):
    """Batches that hold features of a teacher, of which each row has its own."""

    def __iter__(self):
        table = torch.randn(2, len(self.index), 8, generator=torch.Generator().manual_seed(5))
        for batch in super().__iter__():
            yield {**batch, "image_emb": table[0, batch["rows"]], "text_emb": table[1, batch["rows"]]}


def losses_of(output: Path, train: dict[str, Any], **given: Any) -> list[Tensor]:
    """The weights at the end of a run of four steps."""
    torch.set_num_threads(1)
    model = small.small_model(0.0)
    config = small.train_config(steps=4, **train)
    assert Trainer(model, WithFeatures(), config, output=output, **given).run() == 0
    return [weight.detach() for weight in model.parameters()]


def test_a_run_learns_from_a_frozen_teacher_and_micro_batches_change_nothing(tmp_path: Path):
    distill = {"distill": {"teacher": "given", "weight": 3.0}}
    teacher = small.small_model(0.3)
    before = [weight.clone() for weight in teacher.parameters()]
    whole = losses_of(tmp_path / "whole", distill, teacher=teacher)
    assert_equal(list(teacher.parameters()), before, tolerance=0)
    in_parts = losses_of(tmp_path / "parts", {**distill, "micro_batch_size": 3}, teacher=small.small_model())
    assert_equal(in_parts, whole, tolerance=1e-5)
    assert not torch.equal(whole[-1], losses_of(tmp_path / "without", {})[-1])


def test_a_run_without_the_model_of_its_teacher_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train.distill.teacher and Trainer\(teacher=model\) belong together"):
        losses_of(tmp_path, {"distill": {"teacher": "folder"}})
