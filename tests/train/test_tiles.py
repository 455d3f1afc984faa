"""Sums over similarities that are never stored whole, and what the losses on them keep in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from mmdata.train import compiler, losses, miners
from mmdata.train.losses import tiles
from mmdata.train.losses.exclusions import Exclusions
from mmdata.train.losses.rowwise import rowwise_sum
from mmdata.train.losses.tiles import log_sum_exps
from tests.rounding import rounding
from tests.train.compare import LOSSES, assert_equal, features, scalar, value_and_gradients

MIB = 1 << 20


def test_log_sum_exps_of_the_docstring():
    rows, columns = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [math.log(3), 0.0]])
    over_columns, over_rows, partners = log_sum_exps(rows, columns)
    torch.testing.assert_close(over_columns, torch.tensor([math.log(4)]))
    torch.testing.assert_close(over_rows, torch.tensor([0.0, math.log(3)]))
    assert partners == torch.tensor([0.0])


@pytest.mark.parametrize("elements", [1, 6, 20, 1000])
@pytest.mark.parametrize("first", [0, 3, 5, -2])  # also partners of some rows only
def test_log_sum_exps_are_those_of_the_whole_matrix(elements: int, first: int, monkeypatch: pytest.MonkeyPatch):
    rows, columns = features(4)[0], features(7, seed=1)[0]
    logits = rows @ columns.T
    at = torch.arange(4) + first
    inside = (at >= 0) & (at < 7)
    partners = logits[torch.arange(4), at.clamp(0, 6)].where(inside, 0.0)
    expected = (logits.logsumexp(1), logits.logsumexp(0), partners)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    found = log_sum_exps(rows, columns, Exclusions(first=first))
    assert_equal(found, expected)
    weights = [torch.linspace(-1, 2, len(x), dtype=x.dtype) for x in expected]
    ours, theirs = (sum((x * w).sum() for x, w in zip(side, weights, strict=True)) for side in (found, expected))
    assert_equal(value_and_gradients(ours, rows, columns), value_and_gradients(theirs, rows, columns))


class Products(TorchDispatchMode):
    """Counts the matrix products that make a tile: those of a gradient add to what there is (addmm)."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


def exclusions() -> tuple[Exclusions, Tensor]:
    """Of 4 rows and 7 columns, row i's partner being column i + 1: by validity and two keys; and the pairs, (4, 7)."""
    valid_rows, valid_columns = torch.tensor([1, 1, 0, 1]).bool(), torch.tensor([1, 1, 1, 0, 1, 1, 1]).bool()
    keys = [(torch.tensor([5, 2, 9, 4]), torch.tensor([5, 5, 2, 9, 4, 2, 7])), (torch.arange(4), torch.arange(7, 14))]
    pairs = ~(valid_rows[:, None] & valid_columns)
    pairs |= (keys[0][0][:, None] == keys[0][1]) & (torch.arange(1, 5)[:, None] != torch.arange(7))
    assert pairs.sum() == 12
    assert pairs[0, 0]
    return Exclusions(valid_rows, valid_columns, *map(tuple, zip(*keys, strict=True)), first=1), pairs


@pytest.mark.parametrize("elements", [1, 6, 20, 1000])
@pytest.mark.parametrize("device", ["cpu", "other", "compiled"])
@pytest.mark.sweep(keep=1)
def test_sums_with_scale_and_exclusions_are_those_of_the_whole_matrix(
    elements: int, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    if device != "cpu":  # a GPU masks out of place, within the functions of a tile
        monkeypatch.setattr(
            tiles, "_excluded", lambda exclusions, tile, *part, **_: exclusions.of_tile(*part, tile.device)
        )
    if device == "compiled":  # by a backend that needs no compiler
        monkeypatch.setattr(tiles, "BACKEND", "aot_eager")
        monkeypatch.setattr(tiles, "_for_device", lambda function, _: tiles._compiled(function))
        tiles._compiled.cache_clear()
    rows, columns, scale = features(4)[0], features(7, seed=1)[0], scalar(3.0)
    excluded, pairs = exclusions()

    def total(found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        weighted = ((x.where(x.isfinite(), 0.0) * torch.linspace(-1, 2, len(x), dtype=x.dtype)).sum() for x in found)
        return sum(weighted, torch.zeros(()))

    ours = total(log_sum_exps(rows, columns, excluded, scale=scale))
    logits = scale * rows @ columns.T
    masked = logits.masked_fill(pairs, -torch.inf)
    over_columns, over_rows = (masked.logsumexp(dim) for dim in (1, 0))
    theirs = total((over_columns, over_rows, logits.diagonal(1).where(torch.arange(4) != 2, 0.0)))
    inputs = (rows, columns, scale)
    assert_equal(value_and_gradients(ours, *inputs), value_and_gradients(theirs, *inputs))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways of a GPU on a CPU: masks out of place, functions of a tile compiled by a backend without a compiler."""
    monkeypatch.setattr(tiles, "_excluded", lambda exclusions, tile, *part, **_: exclusions.of_tile(*part, tile.device))
    monkeypatch.setattr(tiles, "BACKEND", "aot_eager")
    monkeypatch.setattr(tiles, "_for_device", lambda function, _: tiles._compiled(function))
    tiles._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("in_a_thread", [False, True])  # autograd calls backward for a GPU in a thread of its own
@pytest.mark.sweep
def test_many_kinds_of_losses_in_one_process_are_more_than_torchs_eight_graphs(in_a_thread: bool):
    def all_kinds() -> None:
        for rows, columns, number, with_valid in itertools.product((1, 8, 9), (13,), (0, 1, 2), (False, True)):
            one, other = features(rows)[0], features(columns, seed=1)[0]
            keys = [(torch.arange(rows) // 2, torch.arange(columns) // 2) for _ in range(number)]
            valid = (torch.arange(rows) != 1, torch.arange(columns) != 2) if with_valid else (None, None)
            excluded = Exclusions(*valid, tuple(key for key, _ in keys), tuple(key for _, key in keys))
            found = log_sum_exps(one, other, excluded)
            kept = torch.ones(rows, columns, dtype=torch.bool)
            if with_valid:
                kept &= (torch.arange(rows) != 1)[:, None] & (torch.arange(columns) != 2)
            if number:
                apart = torch.arange(rows)[:, None] // 2 != torch.arange(columns) // 2
                kept &= apart | (torch.arange(rows)[:, None] == torch.arange(columns))
            logits = (one @ other.T).masked_fill(~kept, -torch.inf)
            assert_equal(found[:2], (logits.logsumexp(1), logits.logsumexp(0)))
            finite = [each[each.isfinite()].sum() for each in found[:2]]
            expected = [each[each.isfinite()].sum() for each in (logits.logsumexp(1), logits.logsumexp(0))]
            assert_equal(
                torch.autograd.grad(sum(finite, torch.zeros(())), (one, other)),
                torch.autograd.grad(sum(expected, torch.zeros(())), (one, other)),
            )

    def all_within_the_limit() -> None:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # by default torch goes on without a graph
            all_kinds()

    torch._dynamo.utils.counters.clear()
    if in_a_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(all_within_the_limit).result()
    else:
        all_within_the_limit()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2 * 8  # two functions


def test_a_gpu_for_which_nothing_compiles_takes_the_functions_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    gpu = torch.device("cuda", 0)
    compiler.compiles.cache_clear()
    monkeypatch.setattr(compiler, "compiler_error", lambda device: "no gcc")
    assert [tiles._for_device(tiles._sums, gpu) for _ in range(2)] == [tiles._sums] * 2
    assert [record.message.split(" (")[1].split(")")[0] for record in caplog.records] == ["no gcc"]
    compiler.compiles.cache_clear()
    monkeypatch.setattr(compiler, "compiler_error", lambda device: "")
    assert tiles._for_device(tiles._sums, gpu) is tiles._compiled(tiles._sums)
    assert tiles._for_device(tiles._sums, torch.device("cpu")) is tiles._sums
    compiler.compiles.cache_clear()


@pytest.mark.parametrize("elements", [1, 6, 1000])
def test_sum_of_nothing_is_minus_infinity_with_gradient_zero(elements: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    rows, columns = features(3)[0], features(4, seed=1)[0]
    with torch.no_grad():
        rows[1], columns[2] = torch.nan, torch.inf  # what is not valid may hold anything
    valid = Exclusions(torch.tensor([True, False, True]), torch.tensor([True, True, False, True]))
    over_columns, over_rows, _ = log_sum_exps(rows, columns, valid)
    assert over_columns.isinf().tolist() == [False, True, False]
    assert over_rows.isinf().tolist() == [False, False, True, False]
    used = torch.cat([over_columns[[0, 2]], over_rows[[0, 1, 3]]]).sum()
    of_rows, of_columns = torch.autograd.grad(used, (rows, columns))
    assert of_rows.isfinite().all()
    assert of_columns.isfinite().all()
    assert (of_rows[1] == 0).all()
    assert (of_columns[2] == 0).all()


@pytest.mark.parametrize(("elements", "forward", "in_all"), [(28, 1, 1), (27, 2, 4)])
def test_one_tile_is_kept_and_several_are_made_again(
    elements: int, forward: int, in_all: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    rows, columns = features(4)[0], features(7, seed=1)[0]
    with Products() as products:
        loss = log_sum_exps(rows, columns)[0].sum()
        assert products.made == forward
        loss.backward()
    assert products.made == in_all


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (0, 0)])
def test_no_rows_or_no_columns_are_sums_of_nothing(rows: int, columns: int):
    over_columns, over_rows, partners = log_sum_exps(torch.zeros(rows, 2), torch.zeros(columns, 2))
    assert over_columns.tolist() == [-math.inf] * rows
    assert over_rows.tolist() == [-math.inf] * columns
    assert partners.tolist() == [0.0] * rows


@pytest.mark.parametrize("elements", [1, 10, 1000])
def test_rowwise_sum_gives_each_block_its_rows_once(elements: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    anchors, columns = features(6)[0], features(5, seed=1)[0]
    scale, seen = scalar(3.0), []

    def hardest(scores: Tensor, rows: slice, scale: Tensor) -> Tensor:
        seen.extend(range(rows.start, rows.stop))
        return scale * scores.amax(1)

    inputs = (anchors, columns, scale)
    ours = value_and_gradients(rowwise_sum(hardest, anchors, columns, [scale]), *inputs)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert_equal(ours, value_and_gradients((scale * (anchors @ columns.T).amax(1)).sum(), *inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("miner", [None, miners.All()])
@pytest.mark.sweep(keep=1)
def test_narrow_scale_and_bias_add_up_in_float32(
    dtype: torch.dtype, miner: miners.Miner | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 512)  # a tile a row
    images, texts = (x.float() for x in features(512))

    def gradients(of: torch.dtype) -> list[torch.Tensor]:
        scale, bias = scalar(10.0, of), scalar(-10.0, of)
        clip = losses.clip_loss(images, texts, scale, miner=miner)
        siglip = losses.siglip_loss(images, texts, scale, bias, miner=miner)
        return [*torch.autograd.grad(clip, scale), *torch.autograd.grad(siglip, (scale, bias))]

    found, exact = gradients(dtype), gradients(torch.float32)
    assert [x.dtype for x in found] == [dtype] * 3
    torch.testing.assert_close([x.float() for x in found], exact, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("miner", [None, miners.All()])
def test_wide_scale_of_one_element_goes_with_float32_features(miner: miners.Miner | None):
    images, texts = (x.float() for x in features(9))
    scale = torch.tensor([10.0], dtype=torch.float64, requires_grad=True)
    plain = scalar(10.0, torch.float32)
    found = losses.clip_loss(images, texts, scale, miner=miner)
    expected = losses.clip_loss(images, texts, plain, miner=miner)
    # Logits of 10; 9 of them are added up for each row, and 18 rows.
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding(10.0, sums=9))
    grads = [torch.autograd.grad(loss, by)[0] for loss, by in ((found, scale), (expected, plain))]
    assert (grads[0].shape, grads[0].dtype) == ((1,), torch.float64)
    torch.testing.assert_close(grads[0].item(), grads[1].item(), rtol=0, atol=rounding(10.0, sums=9))


def test_backward_twice_adds_the_gradient_twice():
    images, texts = features(6)
    loss = losses.clip_loss(images, texts, scalar(9.0))
    loss.backward(retain_graph=True)
    once = images.grad.clone()
    loss.backward()
    torch.testing.assert_close(images.grad, 2 * once)


def dense(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, *, labels: Tensor) -> Tensor:
    """As open_clip computes it: a matrix of logits for each direction."""
    targets = torch.arange(len(images))
    per_image, per_text = scale * images @ texts.T, scale * texts @ images.T
    cross_entropy = torch.nn.functional.cross_entropy
    return (cross_entropy(per_image, targets) + cross_entropy(per_text, targets)) / 2


class Saved:
    """A tensor that autograd holds on to for backward; gone when its graph is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def saved_bytes(loss: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps after forward, inputs included; each storage counts once."""
    alive: WeakSet[Saved] = WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = loss()
    storages = {saved.tensor.untyped_storage().data_ptr(): saved.tensor.untyped_storage().nbytes() for saved in alive}
    del result  # not before: the graph goes with it
    return sum(storages.values())


def peak_bytes(loss: Callable[[], Tensor]) -> int:
    """The most that forward and backward have allocated at one time, of torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss().backward()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def big(name: str) -> Callable[[], Tensor]:
    """The loss of 2,048 rows of width 32: a matrix of similarities has 16 MiB, the features of a side 1/4 MiB."""
    inputs = (*features(2048, 32, dtype=torch.float32), scalar(20.0, torch.float32), scalar(-5.0, torch.float32))
    loss = dense if name == "dense" else LOSSES[name]
    return lambda: loss(*inputs, labels=torch.arange(2048) // 2)


def test_dense_loss_is_seen_to_keep_two_matrices():
    assert saved_bytes(big("dense")) > 32 * MIB
    assert peak_bytes(big("dense")) > 64 * MIB


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sweep(keep=3)
def test_losses_save_features_and_no_similarities(name: str):
    """4 (B, D) of each direction at most, and a few numbers a row: O((B + N) D), where B N would be 16 MiB."""
    assert saved_bytes(big(name)) < 1.25 * MIB


def test_clip_saves_the_features_as_they_are_given():
    """1/4 MiB for each side: a scaled copy of the images would be as much again."""
    assert saved_bytes(big("clip")) < 0.6 * MIB


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sweep(keep=1)
def test_losses_need_the_memory_of_a_few_tiles(name: str, monkeypatch: pytest.MonkeyPatch):
    """Features, what they become and their gradients take 1/4 MiB each; so does a tile."""
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 1 << 16)
    assert peak_bytes(big(name)) < 5 * MIB
