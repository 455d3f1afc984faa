"""Means of patch features in boxes, against torchvision's RoIAlign."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import roi_align

from mmdata.train.models.region_pooling import pool_boxes
from tests.rounding import rounding

CORNER = st.floats(-3.0, 12.0, allow_nan=False, width=32)


def oracle(tokens: Tensor, boxes: Tensor, shape: tuple[int, int], *, bins: int, samples: int) -> Tensor:
    """(B, M, C): the mean over the bins of torchvision's output."""
    grid = tokens.transpose(1, 2).unflatten(2, shape)
    found = roi_align(grid, list(boxes.to(grid)), output_size=bins, sampling_ratio=samples, aligned=True)
    return found.mean((2, 3)).view(*boxes.shape[:2], -1)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    boxes=st.lists(st.tuples(CORNER, CORNER, CORNER, CORNER), min_size=1, max_size=4),
    bins=st.sampled_from([1, 2, 7]),
    samples=st.sampled_from([1, 2, 4]),
)
@example(rows=3, columns=5, boxes=[(0.0, 0.0, 5.0, 3.0), (0.0, 0.0, 0.0, 0.0)], bins=7, samples=2)
def test_means_and_gradients_are_those_of_roi_align(
    rows: int, columns: int, boxes: list[tuple[float, ...]], bins: int, samples: int
):
    generator = torch.Generator().manual_seed(rows * columns)
    tokens = torch.randn(2, rows * columns, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    # No sample on the borders beyond which it counts as 0: there rounding would decide.
    corners = torch.tensor(boxes).sort(1).values + 0.01234567
    places = torch.stack([corners, corners[:, [1, 0, 3, 2]]])
    found = pool_boxes(tokens, places, (rows, columns), samples=bins * samples)
    expected = oracle(tokens, places, (rows, columns), bins=bins, samples=samples)
    # Sums of so many samples; a place is up to 12, and is rounded before the weights are taken.
    bound = rounding(12.0 * 5, sums=4 * (bins * samples) ** 2, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    upstream = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    of_found, of_expected = (torch.autograd.grad((each * upstream).sum(), tokens)[0] for each in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=0, atol=bound)


def test_patches_of_native_shapes_are_those_of_each_grid():
    generator = torch.Generator().manual_seed(0)
    shapes = torch.tensor([[2, 6], [4, 3], [1, 1]])
    tokens = torch.randn(3, 14, 4, generator=generator, dtype=torch.float64)  # two places are padding
    boxes = torch.rand(3, 5, 4, generator=generator) * 3
    boxes[..., 2:] += boxes[..., :2]
    found = pool_boxes(tokens, boxes, shapes)
    for image, (rows, columns) in enumerate(shapes.tolist()):
        own = tokens[image : image + 1, : rows * columns]
        expected = pool_boxes(own, boxes[image : image + 1], (rows, columns))
        torch.testing.assert_close(found[image : image + 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_box_of_the_whole_image_is_the_mean_of_all_patches(dtype: torch.dtype):
    tokens = torch.randn(2, 28, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = pool_boxes(tokens, torch.tensor([[[0.0, 0.0, 7.0, 4.0]]]).expand(2, 1, 4), (4, 7))
    assert found.dtype == dtype
    # Patches weigh 1/28 each, but for those at the edges, of which bilinear samples see a little more or less.
    torch.testing.assert_close(found[:, 0].float(), tokens.float().mean(1), rtol=0, atol=0.1)


def test_shapes_depend_on_no_number():
    tokens, boxes = torch.empty(2, 12, 5, device="meta"), torch.empty(2, 3, 4, device="meta")
    assert pool_boxes(tokens, boxes, (3, 4)).shape == (2, 3, 5)
