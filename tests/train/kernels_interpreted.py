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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmdata.train.losses import kernels

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Tiles have several blocks, and blocks that are cut."""
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 16, "FEATURE_BYTES": 64}.items():
            patch.setattr(kernels, constant, value)
        yield


@st.composite
def tiles(draw: st.DrawFn) -> dict[str, Any]:
    """A tile with blocks that are cut, rows without any pair, and partners beside it."""
    rows, columns, width = draw(st.integers(1, 70)), draw(st.integers(1, 70)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def features(count: int) -> Tensor:
        return F.normalize(torch.randn(count, width, generator=generator), dim=1).bfloat16().float()

    def keys(count: int) -> Tensor:
        return torch.randint(-(2**62), 2**62, (5,), generator=generator)[
            torch.randint(5, (count,), generator=generator)
        ]

    def valid(count: int) -> Tensor:
        return torch.rand(count, generator=generator) > 0.3

    masked = draw(st.booleans())
    shared = keys(columns)
    return {
        "rows": features(rows),
        "columns": features(columns),
        "scale": torch.tensor(draw(st.sampled_from([1.0, 14.3, 100.0]))),
        "first": draw(st.integers(-80, 80)),
        "valid": (valid(rows), valid(columns)) if masked else None,
        "keys": tuple((shared[torch.arange(rows) % columns], shared) for _ in range(draw(st.integers(0, 2)))),
    }


def reference(tile: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Similarities in float64, which of them count, and which are partners'."""
    rows, columns = len(tile["rows"]), len(tile["columns"])
    partners = torch.arange(rows)[:, None] + tile["first"] == torch.arange(columns)
    kept = torch.ones(rows, columns, dtype=torch.bool)
    for ours, theirs in tile["keys"]:
        kept &= (ours[:, None] != theirs) | partners
    if tile["valid"] is not None:
        kept &= tile["valid"][0][:, None] & tile["valid"][1]
    return tile["scale"].double() * tile["rows"].double() @ tile["columns"].double().T, kept, partners


def finite(sums: Tensor) -> Tensor:
    return sums.masked_fill(sums == -torch.inf, 0.0)


@settings(max_examples=25)
@given(tiles())
def test_log_sum_exps_and_their_gradient(given_tile: dict[str, Any]):
    tile = kernels.Tile(**given_tile)
    scores, kept, partners = reference(given_tile)
    scores = scores.masked_fill(~kept, -torch.inf)
    wanted = scores.logsumexp(1), scores.logsumexp(0)
    error = 8 * float(given_tile["scale"]) * EPS * math.sqrt(tile.rows.shape[1])  # of a similarity
    found = tile.sums()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=4 * EPS, atol=error)
    rows, columns = scores.shape
    grads = torch.rand(rows), torch.rand(columns), -torch.rand(rows)
    ours = tile.gradient(finite(found[0]), grads[0], finite(found[1]), grads[1], grads[2])
    theirs = (scores - finite(wanted[0])[:, None]).exp() * grads[0][:, None]
    theirs += (scores - finite(wanted[1])).exp() * grads[1] + torch.where(partners, grads[2][:, None], 0.0)
    torch.testing.assert_close(ours, theirs.float(), rtol=0.0, atol=4 * error + 8 * EPS)


@settings(max_examples=25)
@given(tiles(), st.sampled_from([-10.0, 0.0, 30.0]))
def test_sigmoid_sum_and_its_gradient(given_tile: dict[str, Any], bias: float):
    tile = kernels.Tile(**given_tile)
    scores, kept, partners = reference(given_tile)
    logits = torch.where(partners, -1.0, 1.0).double() * (scores + bias)
    each = 8 * float(given_tile["scale"]) * EPS * math.sqrt(tile.rows.shape[1]) + 8 * EPS * abs(bias)
    wanted = float(F.softplus(logits)[kept].sum())
    assert float(tile.sigmoid_sum(torch.tensor(bias))) == pytest.approx(wanted, rel=32 * EPS, abs=each * kept.numel())
    gradient, of_bias = tile.sigmoid_gradient(torch.tensor(bias), torch.tensor(0.25))
    theirs = 0.25 * torch.where(partners, -1.0, 1.0) * logits.sigmoid() * kept
    torch.testing.assert_close(gradient, theirs.float(), rtol=16 * EPS, atol=each)
    assert float(of_bias) == pytest.approx(float(theirs.sum()), rel=32 * EPS, abs=each * kept.numel())
