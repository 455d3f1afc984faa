"""Number formats: what auto chooses, that a resumed run keeps it, and what torch's settings are meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.train import precision
from mmdata.train.evaluation import retrieval
from mmdata.train.precision import choose_precision, numerics
from mmdata.train.run import trainer
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def now() -> tuple[str, bool, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


def set_defaults() -> None:
    """Torch's defaults of float32."""
    backends: Any = torch.backends
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    set_defaults()  # whatever ran in this process before
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
        with numerics("fp32", GPU):
            assert now() == ("highest", False, True)
        assert now()[0] == inside
    before = now()
    with numerics(kind, CPU):
        assert now() == before


@pytest.mark.parametrize("block", [numerics("tf32", GPU), numerics("fp32", GPU)])
def test_settings_return_after_an_error(block: AbstractContextManager[None]):
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError


@pytest.fixture
def backends() -> Iterator[Any]:
    """`torch.backends`, whose switches of float32 are torch's defaults again after the test."""
    backends: Any = torch.backends
    yield backends
    set_defaults()


def new_switches() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


@pytest.mark.parametrize("said", ["tf32", "ieee"])
@pytest.mark.parametrize("switch", ["all", "products", "convolutions"])
def test_blocks_work_and_settings_return_where_torchs_new_switch_was_used(switch: str, said: str, backends: Any):
    # "all" is what TrainingArguments(tf32=…) sets. Where switches disagree, torch refuses to read the old ones.
    where = {"all": backends, "products": backends.cuda.matmul, "convolutions": backends.cudnn.conv}[switch]
    where.fp32_precision = said
    before = new_switches()
    assert said in before
    with numerics("bf16", GPU):
        assert (now(), new_switches()) == (("high", True, True), ("tf32", "tf32"))  # a compiler may read either
        with numerics("fp32", GPU):
            assert (now()[0], new_switches()[0]) == ("highest", "ieee")
    assert new_switches() == before
    with numerics("fp32", GPU):
        assert (now(), new_switches()) == (("highest", False, True), ("ieee", "ieee"))
    assert new_switches() == before


def test_the_switch_for_all_operations_works_after_a_block_as_before(backends: Any):
    for said in ("tf32", "ieee"):
        backends.fp32_precision = said
        with numerics("tf32", GPU), numerics("fp32", GPU):
            pass
        assert backends.cuda.matmul.fp32_precision == said


def test_a_trainer_says_in_its_settings_what_auto_is(tmp_path: Path):
    made = Trainer(small.small_model(), small.SmallBatches(), small.train_config(epochs=1), output=tmp_path)
    assert made.config.precision == made.settings["train"]["precision"] == "fp32"


def test_training_and_its_evaluation_run_in_the_number_format_and_ranking_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # As on a GPU: there these blocks change torch's settings.
    monkeypatch.setattr(trainer, "numerics", lambda kind, device: numerics(kind, GPU))
    monkeypatch.setattr(retrieval, "numerics", lambda kind, device: numerics(kind, GPU))
    seen: dict[str, set[str]] = {"towers": set(), "ranks": set()}
    compare = retrieval._compare

    def spied(*arguments: Any, share: bool) -> Any:
        seen["ranks"].add(now()[0])
        return compare(*arguments, share=share)

    monkeypatch.setattr(retrieval, "_compare", spied)
    model = small.small_model()
    model.register_forward_pre_hook(lambda *_: seen["towers"].add(now()[0]))
    config = small.train_config(epochs=1, precision="tf32")
    assert Trainer(model, small.SmallBatches(), config, output=tmp_path, evaluate=small.evaluate).run() == 0
    assert seen == {"towers": {"high"}, "ranks": {"highest"}}
