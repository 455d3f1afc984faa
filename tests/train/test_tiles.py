"""Sums over similarities that are never stored whole, and what the losses on them keep in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from mmdata.config.train import LossPrecision
from mmdata.train import compiler, losses, miners
from mmdata.train.losses import global_batch, tiles
from mmdata.train.losses.pairs import Pairs
from mmdata.train.losses.rows import rowwise_sum
from mmdata.train.losses.tiles import log_sum_exps, softplus_sums
from tests.rounding import rounding
from tests.train.compare import LOSSES, assert_equal, features, scalar, value_and_gradients

MIB = 1 << 20


def test_log_sum_exps_of_the_docstring():
    rows, columns = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [math.log(3), 0.0]])
    over_columns, over_rows = log_sum_exps(rows, columns)
    torch.testing.assert_close(over_columns, torch.tensor([math.log(4)]))
    torch.testing.assert_close(over_rows, torch.tensor([0.0, math.log(3)]))


def some_pairs(partner: int | None, *, masks: bool) -> tuple[Pairs, Tensor]:
    """Of 4 rows and 7 columns: with masks also by validity and two keys; and the negatives, (4, 7)."""
    negatives = torch.ones(4, 7, dtype=torch.bool)
    if partner is not None:
        negatives &= torch.arange(4)[:, None] + partner != torch.arange(7)
    if not masks:
        return Pairs(partner=partner), negatives
    valid_rows, valid_columns = torch.tensor([1, 1, 0, 1]).bool(), torch.tensor([1, 1, 1, 0, 1, 1, 1]).bool()
    keys = [(torch.tensor([5, 2, 9, 4]), torch.tensor([5, 5, 2, 9, 4, 2, 7])), (torch.arange(4), torch.arange(7, 14))]
    negatives &= valid_rows[:, None] & valid_columns & (keys[0][0][:, None] != keys[0][1])
    return Pairs(*map(tuple, zip(*keys, strict=True)), valid_rows, valid_columns, partner), negatives


@pytest.fixture(params=["cpu", "compiled"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways of a CPU, and those of a GPU on a CPU: functions of a tile compiled, without a compiler."""
    if request.param == "compiled":
        compile_on_a_cpu(monkeypatch)
    return request.param


def compile_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "BACKEND", "aot_eager")
    monkeypatch.setattr(tiles, "on_device", lambda function, _: tiles._compiled(function))
    monkeypatch.setattr(global_batch, "on_device", lambda function, _: tiles._compiled(function))
    tiles._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("elements", [1, 6, 20, 1000])
@pytest.mark.parametrize("partner", [None, 0, 3, 5, -2])  # also partners of some rows only
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.sweep(keep=8)
def test_sums_of_tiles_are_those_of_the_whole_matrix(
    elements: int, partner: int | None, masks: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    rows, columns, scale, bias = features(4)[0], features(7, seed=1)[0], scalar(3.0), scalar(-1.0)
    pairs, negatives = some_pairs(partner, masks=masks)

    def total(sums: Sequence[Tensor]) -> Tensor:
        weighted = ((x.where(x.isfinite(), 0.0) * torch.linspace(-1, 2, len(x), dtype=x.dtype)).sum() for x in sums)
        return sum(weighted, torch.zeros(()))

    logits = scale * rows @ columns.T
    masked = logits.masked_fill(~negatives, -torch.inf)
    over_columns, over_rows = log_sum_exps(rows, columns, pairs, scale=scale)
    assert over_rows is not None
    inputs = (rows, columns, scale, bias)
    for found, expected in (
        ((over_columns, over_rows), (masked.logsumexp(1), masked.logsumexp(0))),
        (log_sum_exps(rows, columns, pairs, scale=scale, both=False)[:1], (masked.logsumexp(1),)),
        (
            (softplus_sums(rows, columns, pairs, scale=scale, bias=bias),),
            (torch.nn.functional.softplus(logits + bias).where(negatives, 0.0).sum(1),),
        ),
    ):
        ours, theirs = total(found) + 0 * bias, total(expected) + 0 * bias
        assert_equal(value_and_gradients(ours, *inputs), value_and_gradients(theirs, *inputs))


@pytest.mark.parametrize("in_a_thread", [False, True])  # autograd calls backward for a GPU in a thread of its own
@pytest.mark.sweep
def test_many_kinds_of_losses_in_one_process_are_more_than_torchs_eight_graphs(
    in_a_thread: bool, monkeypatch: pytest.MonkeyPatch
):
    compile_on_a_cpu(monkeypatch)
    monkeypatch.setattr(tiles, "one_pass", lambda *_: compiler.up_to_graphs(tiles.MAX_GRAPHS))

    def all_kinds() -> None:
        for rows, columns, number, with_valid in itertools.product((1, 8, 9), (13,), (0, 1, 2), (False, True)):
            one, other = features(rows)[0], features(columns, seed=1)[0]
            keys = [(torch.arange(rows) // 2, torch.arange(columns) // 2) for _ in range(number)]
            valid = (torch.arange(rows) != 1, torch.arange(columns) != 2) if with_valid else (None, None)
            pairs = Pairs(tuple(key for key, _ in keys), tuple(key for _, key in keys), *valid, partner=0)
            found = log_sum_exps(one, other, pairs)
            negatives = torch.arange(rows)[:, None] != torch.arange(columns)
            if with_valid:
                negatives &= (torch.arange(rows) != 1)[:, None] & (torch.arange(columns) != 2)
            if number:
                negatives &= torch.arange(rows)[:, None] // 2 != torch.arange(columns) // 2
            logits = (one @ other.T).masked_fill(~negatives, -torch.inf)
            expected = logits.logsumexp(1), logits.logsumexp(0)
            assert_equal(found, expected)
            finite = [sum((x[x.isfinite()].sum() for x in each), torch.zeros(())) for each in (found, expected)]
            assert_equal(*(torch.autograd.grad(each, (one, other)) for each in finite))

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


def test_tiles_at_other_places_share_their_graphs(monkeypatch: pytest.MonkeyPatch):
    compile_on_a_cpu(monkeypatch)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 64)  # of 8 rows and 16 columns
    rows, columns = features(64)[0], features(64, seed=1)[0]
    keys = (torch.arange(64) // 2,)
    valid = torch.arange(64) % 5 != 3
    torch._dynamo.utils.counters.clear()
    for first in (0, 64):  # a rank's place in the global batch
        log_sum_exps(rows, columns, Pairs(keys, keys, valid, valid, partner=first))[0].sum().backward()
    # Two functions: tiles with partners and without, and the first tile, whose slices begin at 0.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 12


def test_a_gpu_for_which_nothing_compiles_takes_the_functions_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    gpu, function = torch.device("cuda", 0), tiles._log_sum_exps
    compiler.compiles.cache_clear()
    monkeypatch.setattr(compiler, "compiler_error", lambda device: "no gcc")
    assert [tiles.on_device(function, gpu) for _ in range(2)] == [function] * 2
    assert [record.message.split(" (")[1].split(")")[0] for record in caplog.records] == ["no gcc"]
    compiler.compiles.cache_clear()
    monkeypatch.setattr(compiler, "compiler_error", lambda device: "")
    assert tiles.on_device(function, gpu) is tiles._compiled(function)
    assert tiles.on_device(function, torch.device("cpu")) is function
    compiler.compiles.cache_clear()


@pytest.mark.parametrize("elements", [1, 6, 1000])
def test_sum_of_nothing_is_minus_infinity_with_gradient_zero(elements: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    rows, columns = features(3)[0], features(4, seed=1)[0]
    valid = Pairs((), (), torch.tensor([True, False, True]), torch.tensor([True, True, False, True]))
    over_columns, over_rows = log_sum_exps(rows, columns, valid)
    assert over_rows is not None
    assert over_columns.isinf().tolist() == [False, True, False]
    assert over_rows.isinf().tolist() == [False, False, True, False]
    used = torch.cat([over_columns, over_rows]).where(torch.cat([over_columns, over_rows]).isfinite(), 0.0).sum()
    of_rows, of_columns = torch.autograd.grad(used, (rows, columns))
    assert of_rows.isfinite().all()
    assert of_columns.isfinite().all()
    assert (of_rows[1] == 0).all()
    assert (of_columns[2] == 0).all()


PRODUCTS = {
    "clip": lambda rows, columns: log_sum_exps(rows, columns, Pairs(partner=0))[0],
    "siglip": lambda rows, columns: softplus_sums(rows, columns, Pairs(partner=0), scale=scalar(1.0), bias=scalar(0.0)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_tile_is_made_once_forward_and_once_backward(name: str, monkeypatch: pytest.MonkeyPatch):
    made: list[torch.Size] = []
    whole, add = tiles.product, tiles.add_product

    def counted(rows: Tensor, columns: Tensor) -> Tensor:
        made.append(whole(rows, columns).shape)
        return whole(rows, columns)

    def counted_sum(total: Tensor, rows: Tensor, columns: Tensor) -> None:
        made.append(total.shape)
        add(total, rows, columns)

    monkeypatch.setattr(tiles, "product", counted)
    monkeypatch.setattr(tiles, "add_product", counted_sum)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 16)  # of 2 × 7
    rows, columns = features(4)[0], features(7, seed=1)[0]
    loss = PRODUCTS[name](rows, columns).sum()
    assert made == [(2, 7)] * 2
    loss.backward()
    assert made[2:] == [(2, 7), (2, 6), (7, 6)] * 2  # the tile, and the gradients of its rows and columns


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize(("precision", "eps"), [("fp32", 2.0**-23), ("tf32", 2.0**-23), ("bf16", 2.0**-8 / 4)])
def test_error_of_the_gradient_in_each_number_format(
    kind: str, precision: LossPrecision, eps: float, monkeypatch: pytest.MonkeyPatch
):
    """A logit's rounding is that of its factors times the scale, 50. On a CPU tf32 is float32.

    In bf16 the errors of 64 products are independent: their sum's is 1/8 of the largest possible.
    """
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 1 << 12)
    torch.manual_seed(0)
    texts = torch.nn.functional.normalize(torch.randn(300, 64, dtype=torch.float64), dim=1)
    images = torch.nn.functional.normalize(texts + 0.8 * torch.randn(300, 64, dtype=torch.float64) / 8, dim=1)
    exact = (images.requires_grad_(), texts.requires_grad_(), scalar(50.0), scalar(-10.0))
    inputs = tuple(x.detach().float().requires_grad_() for x in exact)

    def gradients(inputs: Sequence[Tensor], precision: LossPrecision) -> list[Tensor]:
        images, texts, scale, bias = inputs
        if kind == "clip":
            loss = losses.clip_loss(images, texts, scale, precision=precision) + 0 * bias
        else:
            loss = losses.siglip_loss(images, texts, scale, bias, precision=precision)
        return list(torch.autograd.grad(loss, inputs))

    for found, expected in zip(gradients(inputs, precision), gradients(exact, "auto"), strict=True):
        assert found.dtype == torch.float32
        assert float((found.double() - expected).norm()) <= 51 * eps * float(expected.norm())


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (0, 0)])
def test_no_rows_or_no_columns_are_sums_of_nothing(rows: int, columns: int):
    over_columns, over_rows = log_sum_exps(torch.zeros(rows, 2), torch.zeros(columns, 2))
    assert over_rows is not None
    assert over_columns.tolist() == [-math.inf] * rows
    assert over_rows.tolist() == [-math.inf] * columns


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
