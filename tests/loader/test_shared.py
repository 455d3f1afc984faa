"""Results in shared memory: they come back as they were, and their memory comes back when the pixels are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata.errors import ConfigError
from mmdata.loader.workers.shared import SharedBuffers, write


def test_a_result_comes_back_as_it_was_and_its_memory_when_the_pixels_are_gone():
    buffers = SharedBuffers()
    buffer = buffers.take()
    result: dict[str, Any] = {
        "ids": torch.arange(6).view(2, 3),
        "image": torch.full((2, 3, 40), 7, dtype=torch.uint8),
        "turned": torch.arange(6.0).view(2, 3).T,
        "every second": torch.arange(8)[::2],
        "none": torch.empty(0, 4),
        "valid": torch.tensor([True, False]),
        "keys": ["a", "b"],
    }
    for add in range(2):  # the second time into the memory of the first
        result["image"] += add
        found = buffers.read(buffer, *write(result, buffer.file))
        for name, value in result.items():
            if isinstance(value, Tensor):
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value)
            else:
                assert found[name] == value
        assert buffers.take() is not buffer
        labels = found["valid"]
        del found
        assert buffers.take() is buffer
        assert labels.tolist() == [True, False]


def test_a_buffer_without_room_is_an_error_with_a_remedy():
    with open("/dev/full", "wb") as full, pytest.raises(ConfigError, match=r"no shared memory.*num_processes to 0"):
        write({"image": torch.zeros(2**20)}, full.fileno())
