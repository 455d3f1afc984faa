"""What holds for every loss: exact gradients, rows that do not count, block sizes, large scales, types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from mmdata.train.losses import tiles
from tests.train.compare import LOSSES, assert_equal, features, scalar, value_and_gradients

pytestmark = pytest.mark.parametrize("name", LOSSES)
LABELS = torch.tensor([0, 1, 0, 2, 3, 3, 0, 4, 5, 6])
SAME = (torch.tensor([0, 1, 2, 3, 4, 5, 6, 1, 8, 2]), torch.tensor([0, 1, 2, 3, 4, 4, 6, 7, 8, 0]))


def case(name: str, rows: int, **masks: object) -> list[Tensor]:
    """Value and gradients by images, texts, scale and bias."""
    inputs = (*features(rows), scalar(9.0), scalar(-4.0))
    return value_and_gradients(LOSSES[name](*inputs, labels=LABELS[:rows], **masks), *inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.sweep(keep=8)
def test_gradients_are_those_of_finite_differences(name: str, masked: bool):
    masks = {"valid": torch.arange(6) != 2, "same": [key[:6] for key in SAME]} if masked else {}
    inputs = (*features(6, 3), scalar(5.0), scalar(-1.0))
    assert gradcheck(lambda *x: LOSSES[name](*x, labels=LABELS[:6], **masks), inputs)


@pytest.mark.parametrize("elements", [1, 8, 30])  # tiles of 1 × 2, 2 × 4, 3 × 10; blocks of 1, 1 and 3 rows
def test_tiles_change_neither_value_nor_gradient(name: str, elements: int, monkeypatch: pytest.MonkeyPatch):
    masks = {"valid": torch.arange(10) != 4, "same": SAME}
    whole = case(name, 10, **masks)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    assert_equal(case(name, 10, **masks), whole)


def test_value_is_the_same_without_gradient(name: str):
    with_gradient = case(name, 10, same=SAME)[0]
    with torch.no_grad():
        inputs = (*features(10), scalar(9.0), scalar(-4.0))
        torch.testing.assert_close(LOSSES[name](*inputs, labels=LABELS, same=SAME), with_gradient, rtol=1e-13, atol=0)


@pytest.mark.parametrize("garbage", [0.3, 1e6, float("nan"), float("inf")])
def test_masked_rows_leave_no_trace(name: str, garbage: float):
    valid = torch.tensor([True, False, True, True, False, True])
    images, texts = (x.detach() for x in features(6))
    scalars = (scalar(10.0), scalar(-3.0))
    kept = tuple(x[valid].requires_grad_() for x in (images, texts)) + scalars
    alone = value_and_gradients(LOSSES[name](*kept, labels=LABELS[:6][valid]), *kept)
    spoiled = tuple(x.masked_fill(~valid[:, None], garbage).requires_grad_() for x in (images, texts)) + scalars
    ours = value_and_gradients(LOSSES[name](*spoiled, labels=LABELS[:6], valid=valid), *spoiled)
    assert_equal([ours[0], ours[1][valid], ours[2][valid], *ours[3:]], alone)
    assert (ours[1][~valid] == 0).all()
    assert (ours[2][~valid] == 0).all()


@pytest.mark.parametrize("rows", [4, 1])
def test_no_valid_row_gives_zero_with_a_graph(name: str, rows: int):
    """A filter that passes nothing on a rank must not end in 0 / 0, and leaves every parameter a gradient."""
    found = case(name, rows, valid=torch.zeros(rows, dtype=torch.bool))
    assert all((x == 0).all() for x in found)


def test_row_without_negatives_has_a_finite_gradient(name: str):
    """-inf before the scale would give the scale the gradient 0 * -inf: NaN."""
    everything_equal = [torch.zeros(4, dtype=torch.long)]
    value, *gradients = case(name, 4, same=everything_equal)
    assert all(x.isfinite().all() for x in (value, *gradients))
    if name in ("clip", "clip_top_2", "clip_weighed", "triplet", "triplet_hardest") or name.startswith("hard"):
        assert all((x == 0).all() for x in (value, *gradients))


def test_scale_100_in_float32_is_that_of_float64(name: str):
    def at(dtype: torch.dtype) -> list[Tensor]:
        images, texts = features(10, dtype=torch.float32)
        inputs = tuple(x.detach().to(dtype).requires_grad_() for x in (images, texts, scalar(100.0), scalar(-10.0)))
        return value_and_gradients(LOSSES[name](*inputs, labels=LABELS), *inputs)

    for got, wanted in zip(at(torch.float32), at(torch.float64), strict=True):
        assert got.dtype == torch.float32
        assert got.isfinite().all()
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def test_partners_that_agree_fully_at_scale_100_are_safe(name: str):
    images = features(6)[0].detach().float().requires_grad_()
    inputs = (images, images, torch.tensor(100.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True))
    found = value_and_gradients(LOSSES[name](*inputs, labels=LABELS[:6]), *inputs)
    assert all(x.isfinite().all() for x in found)


def test_autocast_changes_nothing_and_half_features_give_float32(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 30)  # backward, too, makes products: of all tiles

    def gradients(cast: bool) -> list[Tensor]:
        inputs = (*features(10, dtype=torch.float32), scalar(20.0, torch.float32), scalar(-3.0, torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            loss = LOSSES[name](*inputs, labels=LABELS, same=SAME)
            return value_and_gradients(loss, *inputs)

    assert all(torch.equal(got, wanted) for got, wanted in zip(gradients(True), gradients(False), strict=True))
    images, texts = (x.detach().bfloat16() for x in features(10))
    assert LOSSES[name](images, texts, torch.tensor(20.0), torch.tensor(-3.0), labels=LABELS).dtype == torch.float32


def test_a_second_derivative_is_refused(name: str):
    """It would be 0, or the part of a sum that does not go through the loss: both without a word."""
    inputs = (*features(4, 3), scalar(5.0), scalar(-1.0))

    def loss(images: Tensor) -> Tensor:
        return LOSSES[name](images, *inputs[1:], labels=LABELS[:4])

    refused = r"the losses of mmdata.train have no second derivative, and create_graph=True asks for one: call backward"
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(loss(inputs[0]), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(loss(inputs[0]) + inputs[0].pow(3).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.functional.hessian(loss, inputs[0].detach())
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.functional.hvp(loss, inputs[0].detach(), torch.ones(4, 3, dtype=torch.float64))


def test_scale_and_bias_may_be_numbers(name: str):
    images, texts = features(6)
    given = value_and_gradients(LOSSES[name](images, texts, 9.0, -4, labels=LABELS[:6]), images, texts)
    images, texts = features(6)
    loss = LOSSES[name](images, texts, scalar(9.0), scalar(-4.0), labels=LABELS[:6])
    assert_equal(given, value_and_gradients(loss, images, texts))
