"""The mean of patch features in each box of an image: RoIAlign with torch alone, in shapes that no number changes."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLES = 28
"""Points along each side of a box, those of RoIAlign with 14 × 14 bins of 2 × 2 samples."""


def pool_boxes(tokens: Tensor, boxes: Tensor, shapes: tuple[int, int] | Tensor, *, samples: int = SAMPLES) -> Tensor:
    """The mean of bilinear samples in each box, evenly spaced.

    A bilinear sample is a product of a weight along each side, so that the mean is one matrix product with the patches.
    Its gradient is deterministic on a GPU, where that of `grid_sample` is not.

    Args:
        tokens: (B, N, C), patches from left to right and from top to bottom.
        boxes: (B, M, 4), left, top, right and bottom, one patch being 1 wide and 1 high.
        shapes: rows and columns of patches, of all images or (B, 2) of each; tokens after the last patch weigh 0.
        samples: points along each side of a box.

    Returns:
        (B, M, C), in the type of tokens: the mean over the output of `torchvision.ops.roi_align(…, aligned=True)` with
        samples points along each side, those of all bins together. It gives boxes no gradient.

    Source: He et al. 2017, Mask R-CNN, section 3 (arXiv:1703.06870).
    """
    exact = torch.promote_types(tokens.dtype, torch.float32)
    left, top, right, bottom = boxes.detach().to(exact).unbind(-1)  # (B, M) each
    if isinstance(shapes, tuple):
        (down, rows), (across, columns) = ((torch.arange(size, device=boxes.device), size) for size in shapes)
        by_row = _weights(top, bottom, down, rows, samples)[..., None]  # (B, M, h, 1)
        weights = (by_row * _weights(left, right, across, columns, samples)[..., None, :]).flatten(2)  # (B, M, N)
    else:
        rows, columns = shapes.to(boxes.device, non_blocking=True)[..., None, None].unbind(1)  # (B, 1, 1) each
        places = torch.arange(tokens.shape[1], device=boxes.device)
        down, across = ((places // columns)[:, None], (places % columns)[:, None])  # (B, 1, 1, N)
        weights = _weights(top, bottom, down, rows, samples) * _weights(left, right, across, columns, samples)
    return weights.to(tokens.dtype) @ tokens


def _weights(low: Tensor, high: Tensor, places: Tensor, size: int | Tensor, samples: int) -> Tensor:
    """(B, M, P): what samples from `low` to `high`, both (B, M), weigh at the middle of each place along one side."""
    shares = (torch.arange(samples, device=low.device, dtype=low.dtype) + 0.5) / samples
    at = low[..., None] - 0.5 + (high - low)[..., None] * shares  # (B, M, samples)
    inside = (at >= -1) & (at <= size)
    at = at.clamp(min=0).clamp(max=size - 1)  # at the edge as in the middle of the last patch
    weights = (1 - (at[..., None] - places).abs()).clamp(min=0)  # (B, M, samples, P)
    return (weights * inside[..., None]).mean(2)
