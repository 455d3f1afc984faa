"""Tests of the loss's Triton kernels against float64; `test_kernels` runs them in Triton's interpreter.

The interpreter has no products of bfloat16: features are rounded to it and given in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmdata.train import losses
from mmdata.train.losses import kernels, tiles
from mmdata.train.losses.pairs import Pairs

EPS = torch.finfo(torch.float32).eps

Tile = tuple[Tensor, Tensor, Pairs]
"""Rows (b, D), columns (c, D), and which of their pairs are negatives."""


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Tiles have several blocks, and blocks that are cut."""
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 16, "FEATURE_BYTES": 64}.items():
            patch.setattr(kernels, constant, value)
        yield


@st.composite
def drawn_tiles(draw: st.DrawFn) -> Tile:
    """A tile with rows that have no negative, and with partners in it, beside it, or nowhere."""
    num_rows, num_columns, width = draw(st.integers(1, 70)), draw(st.integers(1, 70)), draw(st.integers(1, 40))
    scale = draw(st.sampled_from([1.0, 14.3, 100.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def features(count: int) -> Tensor:
        return F.normalize(torch.randn(count, width, generator=generator), dim=1)

    def keys(count: int) -> Tensor:
        return torch.randint(2**62, 2**62 + 5, (count,), generator=generator)

    def valid(count: int) -> Tensor | None:
        return torch.rand(count, generator=generator) > 0.3 if draw(st.booleans()) else None

    num_keys = draw(st.integers(0, 2))
    pairs = Pairs(
        row_keys=tuple(keys(num_rows) for _ in range(num_keys)),
        column_keys=tuple(keys(num_columns) for _ in range(num_keys)),
        valid_rows=valid(num_rows),
        valid_columns=valid(num_columns),
        partner=draw(st.none() | st.integers(1 - num_rows, num_columns - 1)),
    )
    return features(num_rows).bfloat16().float(), (scale * features(num_columns)).bfloat16().float(), pairs


def error_of(tile: Tile) -> float:
    """The largest of a similarity, which is a sum of float32."""
    rows, columns, _ = tile
    return 4 * EPS * math.sqrt(rows.shape[1]) * float(rows.norm(dim=1).max() * columns.norm(dim=1).max())


def finite(sums: Tensor) -> Tensor:
    return sums.masked_fill(sums == -torch.inf, 0.0)


LARGE = torch.ones(1, 1), torch.full((1, 1), 100.0), Pairs()
"""exp(100) is infinite in float32: only the difference to a sum may be taken."""


@settings(max_examples=25)
@example(tile=LARGE, both=False, rows_alone=True)
@given(tile=drawn_tiles(), both=st.booleans(), rows_alone=st.booleans())
def test_log_sum_exps_and_their_gradient(tile: Tile, both: bool, rows_alone: bool):
    rows, columns, pairs = tile
    scores = pairs.masked(rows.double() @ columns.double().T, -torch.inf)
    error = error_of(tile)
    over_columns, over_rows = kernels.log_sum_exps(rows, columns, pairs, both)
    torch.testing.assert_close(over_columns, scores.logsumexp(1).float(), rtol=4 * EPS, atol=error + 4 * EPS)
    if both:
        assert over_rows is not None
        torch.testing.assert_close(over_rows, scores.logsumexp(0).float(), rtol=4 * EPS, atol=error + 4 * EPS)
    else:
        assert over_rows is None
    of_rows, of_columns = (
        (finite(scores.logsumexp(axis)), torch.rand(scores.shape[1 - axis], dtype=torch.float64)) for axis in (1, 0)
    )
    theirs = (scores - of_rows[0][:, None]).exp() * of_rows[1][:, None]
    if not rows_alone:
        theirs += (scores - of_columns[0]).exp() * of_columns[1]
    ours = kernels.log_sum_exps_gradient(
        rows,
        columns,
        pairs,
        (of_rows[0].float(), of_rows[1].float()),
        None if rows_alone else (of_columns[0].float(), of_columns[1].float()),
    )
    largest = float(scores[scores.isfinite()].abs().max()) if scores.isfinite().any() else 0.0
    torch.testing.assert_close(ours, theirs.float(), rtol=0.0, atol=2 * error + 8 * EPS * (1 + largest))


@settings(max_examples=25)
@given(drawn_tiles(), st.sampled_from([-10.0, 0.0, 30.0]))
def test_softplus_sums_and_their_gradient(tile: Tile, bias: float):
    rows, columns, pairs = tile
    logits = rows.double() @ columns.double().T + bias
    error = error_of(tile) + 8 * EPS * abs(bias)
    theirs = pairs.masked(F.softplus(logits), 0.0).sum(1)
    ours = kernels.softplus_sums(rows, columns, pairs, torch.tensor(bias))
    torch.testing.assert_close(ours, theirs.float(), rtol=32 * EPS, atol=error * len(columns))
    grads = torch.rand(len(rows))
    theirs = pairs.masked(logits.sigmoid() * grads.double()[:, None], 0.0)
    gradient = kernels.softplus_gradient(rows, columns, pairs, torch.tensor(bias), grads)
    torch.testing.assert_close(gradient, theirs.float(), rtol=16 * EPS, atol=error)


@pytest.mark.parametrize("elements", [1 << 9, 1 << 20])  # of a tile: several tiles, and one
@pytest.mark.parametrize("loss", ["clip", "clip with more texts", "siglip"])
def test_losses_through_the_kernels_are_those_of_torchs_operations(
    monkeypatch: pytest.MonkeyPatch, loss: str, elements: int
):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(tiles, "SUMMED_ELEMENTS", 2 * elements)
    generator = torch.Generator().manual_seed(0)
    sides = [F.normalize(torch.randn(60, 24, generator=generator), dim=1) for _ in range(2)]
    scalars = [torch.tensor(100.0), torch.tensor(-5.0)]
    sides[0] = sides[0].T.contiguous().T  # strides that the kernels do not read
    settings: dict[str, Any] = {
        "valid": torch.stack([torch.arange(60) % 7 != 3] * 2, dim=1)[:, 0],
        "same": [torch.arange(60) // 2, torch.arange(60) % 40],
    }

    def value_and_gradients(*, kernels_run: bool) -> list[Tensor]:
        monkeypatch.setattr(tiles, "has_kernels", lambda _: kernels_run)
        images, texts, scale, bias = (x.clone().requires_grad_() for x in (*sides, *scalars))
        if loss != "siglip":
            more = {"extra_texts": losses.ExtraNegatives(2 * sides[1])} if "more" in loss else {}
            value = losses.clip_loss(images, texts, scale, **settings, **more)
            return [value, *torch.autograd.grad(value, (images, texts, scale))]
        value = losses.siglip_loss(images, texts, scale, bias, **settings)
        return [value, *torch.autograd.grad(value, (images, texts, scale, bias))]

    for ours, theirs in zip(value_and_gradients(kernels_run=True), value_and_gradients(kernels_run=False), strict=True):
        assert float((ours - theirs).norm()) <= 8 * 100 * EPS * float(theirs.norm())  # a logit of 100 has such an error
