"""Buckets of images at their own size: a batch fixes how many patches an image may have, not their arrangement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket, Shapes


class NativePolicy:
    """Text length bounds × numbers of patches, for models that take images in their own aspect ratio (NaFlex).

    A row goes to the smallest bound that holds its caption and to the smallest number of patches that holds its image
    at its own size; to the largest, if none does.

    Args:
        lengths: rising bounds, in tokens.
        patches: rising numbers of patches.
        patch_size: side of a patch, in pixels.

    Example:
        patches (64, 256) of 16 pixels: an image of 100 × 130 pixels needs 7 · 9 = 63 and goes to 64; one of 100 × 150
        needs 7 · 10 = 70 and goes to 256; one of 1000 × 1500 goes to 256 too, where it is made smaller.

    Source: Tschannen et al. 2025, SigLIP 2, section 2.4.2 (arXiv:2502.14786).
    """

    def __init__(self, lengths: Sequence[int], patches: Sequence[int], *, patch_size: int) -> None:
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths must rise: got {list(lengths)}")
        if not patches or list(patches) != sorted(set(patches)) or patches[0] < 1:
            raise ValueError(f"patches must rise, from 1 on: got {list(patches)}")
        if patch_size < 1:
            raise ValueError(f"patch_size must be 1 pixel or more: got {patch_size}")
        self._lengths = np.asarray(lengths, np.int64)
        self._patches = np.asarray(patches, np.int64)
        self._patch_size = patch_size
        self.buckets = tuple(Bucket(length, 0, 0, number) for number in patches for length in lengths)

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        """Positions in `buckets`, int64 (n,)."""
        needed = -(-shapes.height // self._patch_size) * -(-shapes.width // self._patch_size)
        number = np.minimum(np.searchsorted(self._patches, needed), len(self._patches) - 1)
        bound = np.minimum(np.searchsorted(self._lengths, shapes.length), len(self._lengths) - 1)
        return number * len(self._lengths) + bound
