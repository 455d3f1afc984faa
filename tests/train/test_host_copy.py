from __future__ import annotations

import pytest
import torch

from mmdata.train.prefetch import HostCopy


def test_copies_come_in_order():
    assert [x.tolist() for x in HostCopy(torch.tensor([1, 2]), torch.tensor(3.0)).read()] == [[1, 2], 3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU: torch sees none here")
def test_reading_does_not_wait_for_what_the_device_was_given_since():
    coming = HostCopy(torch.ones(1, device="cuda"))
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second
    since = torch.cuda.Event()
    since.record()
    assert coming.read()[0].tolist() == [1.0]
    assert not since.query()
