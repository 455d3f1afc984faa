"""Keys that are no integers, and masks that are not bool: refused wherever they enter.

Beside float32 labels, int64 hashes were rounded to float32: all rows became equal, and the loss 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmdata.batch import Batch
from mmdata.train import losses
from mmdata.train.losses.pairs import ExtraNegatives
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.run.objective import ContrastiveLoss
from tests.train.compare import LOSSES, assert_equal, features, scalar, telemetry_of, value_and_gradients

HASHES = torch.arange(6) + 2**40  # all the same number in float32
FLOATS = [torch.float16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "distill"])  # it compares with all rows
def test_losses_refuse_keys_that_are_no_integers(name: str, dtype: torch.dtype):
    inputs = (*features(6), scalar(9.0), scalar(-4.0))
    word = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"same has dtype {word}, expected integers: as {word}, different hashes"):
        LOSSES[name](*inputs, labels=torch.arange(6), same=[HASHES, torch.arange(6).to(dtype)])
    if name.startswith("multi_positive"):
        with pytest.raises(ValueError, match=f"labels has dtype {word}, expected integers"):
            LOSSES[name](*inputs, labels=torch.arange(6).to(dtype), same=[HASHES])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.uint64, torch.bool])
def test_keys_of_all_integer_types_are_compared_exactly(dtype: torch.dtype):
    inputs = (*features(6), scalar(9.0), scalar(-4.0))
    labels = torch.tensor([0, 1, 0, 1, 1, 0])

    def loss(labels: torch.Tensor) -> torch.Tensor:
        return losses.multi_positive_loss(*inputs[:3], labels=labels, same=[HASHES])

    ours = value_and_gradients(loss(labels.to(dtype)), *inputs)
    assert_equal(ours, value_and_gradients(loss(labels), *inputs), 0.0)
    assert ours[0] > 0


def batch_of(**changes: torch.Tensor) -> Batch:
    known: dict[str, Any] = {"image_hash": HASHES, "caption_hash": HASHES + 9, "labels": torch.arange(6) % 3}
    known |= {"valid": torch.ones(6, dtype=torch.bool), "rows": torch.arange(6), "keys": [""] * 6}
    return {**known, **changes}  # type: ignore[typeddict-item]


def output() -> DualEncoderOutput:
    return DualEncoderOutput(*features(6), torch.tensor(9.0), None)


ENTRIES: dict[str, Callable[[], object]] = {
    "labels of the objective": lambda: ContrastiveLoss("multi_positive", positives="labels")(
        output(), batch_of(labels=torch.arange(6.0))
    ),
    "image_hash of the objective": lambda: ContrastiveLoss()(output(), batch_of(image_hash=HASHES.float())),
    "extra negatives": lambda: ExtraNegatives(torch.rand(2, 3), [torch.zeros(2)]),
    "queue": lambda: FeatureQueue(8).keep(output(), batch_of(caption_hash=HASHES.double()), 0),
    "telemetry": lambda: telemetry_of(*features(6), torch.tensor(9.0), same=[HASHES.float()]),
}


@pytest.mark.parametrize("enter", ENTRIES)
def test_keys_that_are_no_integers_are_refused_wherever_they_enter(enter: str):
    with pytest.raises(
        ValueError, match=r"has dtype float\d\d, expected integers: as float\d\d, different hashes become"
    ):
        ENTRIES[enter]()


@pytest.mark.parametrize("valid", [torch.ones(6), torch.ones(6, dtype=torch.long)])
def test_a_mask_that_is_not_bool_is_refused(valid: torch.Tensor):
    with pytest.raises(ValueError, match=r"valid has dtype (float32|int64), expected bool: True where a row counts"):
        losses.clip_loss(*features(6), torch.tensor(9.0), valid=valid)
    with pytest.raises(ValueError, match=r"valid of the extra negatives has dtype (float32|int64), expected bool"):
        ExtraNegatives(torch.rand(6, 3), valid=valid)
