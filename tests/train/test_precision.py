"""Number formats: what auto chooses, that a resumed run keeps it, and what torch's settings are meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from mmdata.train import precision
from mmdata.train.precision import choose_precision, full_float32, numerics
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def now() -> tuple[str, bool, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = now()
    yield
    assert now() == before


@pytest.mark.parametrize(("has_bf16", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_on_a_gpu_that_has_it_and_fp32_elsewhere(
    has_bf16: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(precision, "_has_bf16", lambda device: has_bf16)
    assert choose_precision("auto", GPU) == chosen
    assert choose_precision("auto", CPU) == "fp32"
    assert [choose_precision(kind, CPU) for kind in ("bf16", "fp16", "tf32")] == ["bf16", "fp16", "tf32"]


@pytest.mark.parametrize(("kind", "inside"), [("bf16", "high"), ("tf32", "high"), ("fp32", "highest")])
def test_products_of_float32_are_tf32_on_a_gpu_unless_fp32_is_asked_for(kind: precision.Precision, inside: str):
    with numerics(kind, GPU):
        assert now() == (inside, inside == "high", True)
        with full_float32(GPU):
            assert now() == ("highest", inside == "high", True)
        assert now()[0] == inside
    before = now()
    with numerics(kind, CPU), full_float32(CPU):
        assert now() == before


@pytest.mark.parametrize("block", [numerics("tf32", GPU), full_float32(GPU)])
def test_settings_return_after_an_error(block: AbstractContextManager[None]):
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError


def test_a_trainer_says_in_its_settings_what_auto_is(tmp_path: Path):
    trainer = Trainer(small.small_model(), small.SmallBatches(), small.train_config(epochs=1), output=tmp_path)
    assert trainer.config.precision == trainer.settings["train"]["precision"] == "fp32"
