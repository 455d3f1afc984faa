"""Compiled towers: the numbers of eager ones, one graph a shape, plain names in checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import ModelConfig
from mmdata.train import DualEncoder, compiler, train_step
from mmdata.train.batches import split
from mmdata.train.evaluation.embedding import embed
from mmdata.train.ranks import parallel
from mmdata.train.run.objective import ContrastiveLoss
from mmdata.train.run.trainer import Trainer
from tests.rounding import RUN_IN_DOUBLE
from tests.train.test_loop import last_state, read_metrics, small

CPU = torch.device("cpu")
VOCABULARY = 30


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend that needs no compiler, torch's own limits, and no graphs but a test's own."""
    monkeypatch.setattr(parallel, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=10_000):
        yield
    torch._dynamo.reset()


def make_model(name: Any = "micro", **settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    config = ModelConfig(name=name, logit_bias_init=-10.0, **settings)
    return DualEncoder.from_config(config, vocab_size=VOCABULARY).double()


def compiled(model: DualEncoder) -> DualEncoder:
    """The same model, compiled; graphs are counted from here on."""
    parallel.compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    return model


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def make_batch(rows: int, side: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(side + length)
    return Batch(
        pixel_values=torch.randint(0, 256, (rows, 3, side, side), dtype=torch.uint8, generator=generator),
        input_ids=torch.randint(0, VOCABULARY, (rows, length), generator=generator),
        attention_mask=torch.ones(rows, length, dtype=torch.long),
        valid=torch.ones(rows, dtype=torch.bool),
        rows=torch.arange(rows),
        keys=[str(row) for row in range(rows)],
    )


def step(model: DualEncoder, batch: Batch, micro_batch_size: int | None = None) -> dict[str, Tensor]:
    """Loss and gradients of one step, dropout from the same seed each time."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = train_step(model, batch, ContrastiveLoss(), micro_batch_size=micro_batch_size).loss
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, **gradients}


@pytest.mark.parametrize(
    "settings",
    [{}, {"dropout": 0.3}, {"dropout": 0.3, "gradient_checkpointing": True}, {"dropout": 0.3, "freeze": ["image"]}],
)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.sweep(keep=1)
def test_compiling_changes_no_loss_and_no_gradient(settings: dict[str, Any], micro_batch_size: int | None):
    batch = make_batch(4, 16, 5)
    expected = step(make_model(**settings), batch, micro_batch_size)
    found = step(compiled(make_model(**settings)), batch, micro_batch_size)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["micro", "tiny"])  # one block in each tower, and two
@pytest.mark.sweep(keep=1)
def test_compiling_makes_one_graph_for_each_shape_of_a_tower(name: str):
    model = compiled(make_model(name))
    shapes = [(16, 5), (16, 9), (24, 5), (16, 5), (24, 9)]  # 2 of images, 2 of texts
    for side, length in shapes:
        step(model, make_batch(5, side, length))
    assert graphs() == 4
    for _ in range(2):
        step(model, make_batch(5, *shapes[0]), micro_batch_size=3)
    assert graphs() == 4 + 2 * 2, "3 rows and the last two: both passes of a micro-batch take the same graph"


def test_compiling_shapes_beyond_the_limit_run_as_they_do_without():
    plain, model = make_model(), compiled(make_model())
    torch._dynamo.config.recompile_limit = 2
    for length in (5, 6, 7, 8):
        batch = make_batch(4, 16, length)
        torch.testing.assert_close(step(model, batch), step(plain, batch), rtol=1e-10, atol=1e-12)
    assert 1 < graphs() < 5


def test_compiling_raises_the_limits_of_torch_never_lowers_them():
    compiled(make_model())
    assert torch._dynamo.config.recompile_limit == 512
    assert torch._dynamo.config.accumulated_recompile_limit == 10_000


def test_compiling_evaluation_takes_the_same_weights_without_a_graph():
    plain, model = make_model(), compiled(make_model())
    batch = make_batch(4, 16, 5)
    torch.testing.assert_close(embed(model.eval(), [batch]), embed(plain.eval(), [batch]))
    assert graphs() == 0
    assert parallel.is_compiled(model)
    assert not parallel.is_compiled(plain)


def test_compiling_a_run_writes_the_checkpoints_of_one_that_is_not(tmp_path: Path):
    for name, compile in (("plain", False), ("compiled", True)):
        config = small.train_config(compile=compile, micro_batch_size=3, epochs=1)
        model = small.small_model().double()
        assert Trainer(model, small.SmallBatches(), config, output=tmp_path / name).run() == 0
    plain, other = last_state(tmp_path / "plain"), last_state(tmp_path / "compiled")
    torch.testing.assert_close(other["model"], plain["model"], rtol=0, atol=RUN_IN_DOUBLE)
    losses = [line["loss"] for line in read_metrics(tmp_path / "plain")]
    found = [line["loss"] for line in read_metrics(tmp_path / "compiled")]
    assert found == pytest.approx(losses, rel=0, abs=RUN_IN_DOUBLE)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
@pytest.mark.sweep
def test_compiling_with_inductor_draws_the_same_dropout_in_both_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel, "BACKEND", "inductor")
    batch = next(iter(small.SmallBatches()))
    model = compiled(small.small_model(dropout=0.3).double())
    found = step(model, batch, micro_batch_size=4)
    model.zero_grad()
    torch.manual_seed(1)
    outputs = [model(part) for part in split(batch, 4)]  # each drawn once
    names = ("image_features", "text_features")
    features = {name: torch.cat([getattr(output, name) for output in outputs]) for name in names}
    ContrastiveLoss()(outputs[0]._replace(**features), batch).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, {"loss": found["loss"], **gradients}, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("setting", "kind", "error", "shapes", "compiled"),
    [
        ("auto", "cpu", "", 1, False),
        ("auto", "cuda", "", 8, True),
        ("auto", "cuda", "", None, True),  # batches of your own
        ("auto", "cuda", "no gcc", 8, False),
        (True, "cpu", "", 9, True),
        (False, "cuda", "", 1, False),
    ],
)
def test_compiling_is_the_default_on_a_gpu_that_can(
    setting: Any,
    kind: str,
    error: str,
    shapes: int | None,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    assert is_compiled_by_default(setting, kind, error, shapes, monkeypatch) == compiled
    said = "towers and loss run without torch.compile, with more time and memory: it builds no code for device 'cuda' "
    assert caplog.messages == ([f"{said}here ({error}); on a GPU it needs Triton and a C compiler"] if error else [])


def test_compiling_is_left_out_by_default_where_the_batches_have_many_shapes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert not is_compiled_by_default("auto", "cuda", "", 23, monkeypatch)
    assert caplog.messages == [
        "train.compile: the blocks are not compiled, since the batches have 23 shapes, and each takes about 10 s; "
        "set train.compile to true if the run is long"
    ]


def is_compiled_by_default(setting: Any, kind: str, error: str, shapes: int | None, monkeypatch: Any) -> bool:
    """Whether a model is compiled on a device where torch.compile has this error, for batches of so many shapes."""
    compiler.compiles.cache_clear()
    monkeypatch.setattr(compiler, "compiler_error", lambda device: error)
    monkeypatch.setattr(parallel, "compile_blocks", lambda model: model.compile(backend="eager"))
    config, blank = small.train_config(compile=setting), None if shapes is None else lambda: range(shapes)
    device = torch.device(kind)
    model = parallel.prepare(make_model(), config, device, autocast_dtype=None, blank_batches=blank)
    compiler.compiles.cache_clear()
    return parallel.is_compiled(model)


def test_compiling_a_trainer_counts_the_shapes_of_its_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(parallel, "prepare", lambda model, *given, **named: asked.append(named) or model)
    batches: Any = small.SmallBatches()
    batches.blank_batches = lambda: [("8 rows", lambda: next(iter(small.SmallBatches())))]
    Trainer(small.small_model(), batches, small.train_config(), output=tmp_path)
    assert [named["blank_batches"] for named in asked] == [batches.blank_batches]


def test_compiling_torch_still_has_the_names_that_tell_a_compiled_module():
    said = "torch has renamed it: parallel.is_compiled no longer sees compiled modules, whose dropout then differs"
    module = torch.nn.Linear(2, 2)
    assert hasattr(torch.compile(module, backend="eager"), "_orig_mod"), said
    module.compile(backend="eager")
    assert vars(module).get("_compiled_call_impl") is not None, said
