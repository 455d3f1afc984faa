"""What arrives on a GPU of a loader's batches, whose memory the loader uses again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdata.train import DevicePrefetcher


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU: torch sees none here")
def test_batches_on_a_gpu_equal_the_loaders(corpus: Any):
    prefetcher, loader = DevicePrefetcher(corpus.loader(), "cuda"), corpus.loader()
    for _ in range(2):
        kept: list[Any] = list(prefetcher)
        for expected, found in zip(loader, kept, strict=True):
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert found[name].is_cuda
                    assert torch.equal(found[name].cpu(), value)
