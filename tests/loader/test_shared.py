"""Results in shared memory: they come back as they were, arrays are not copied on the way, memory comes back after."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from typing import Any

import torch
from torch import Tensor

from mmdata.loader.workers.buffers import BufferPool
from mmdata.loader.workers.shared import ExportedBuffers, ImportedBuffers


def test_a_result_comes_back_as_it_was_and_its_memory_when_it_is_gone():
    imported, announced = ImportedBuffers(), list[int]()
    ours, theirs = Pipe()

    def announce(number: int, size: int, file: int) -> None:
        send_handle(theirs, file, None)
        imported.map(number, size, ours)
        announced.append(number)

    exported = ExportedBuffers(announce)
    pixels, rest = BufferPool(exported.allocate), BufferPool(exported.allocate)
    image = pixels.lend((2, 3)).fill_(7)
    result: dict[str, Any] = {
        "image": image,
        "ids": torch.arange(6).view(2, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
        "every second": torch.arange(8)[::2],
        "none": torch.empty(0, 4),
        "valid": torch.tensor([True, False]),
        "keys": ["a", "b"],
    }
    packed, kept = exported.pack(result, rest)
    assert (announced, set(kept), exported.freed()) == ([0, 1], {0, 1}, [])
    found = imported.unpack(packed)
    for name, value in result.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value
    image.fill_(9)
    assert (found["image"] == 9).all()
    last = found["valid"]
    del found
    assert imported.release_notice()[0] == [0], "the pool of pixels allocates first"
    del last
    assert imported.release_notice()[0] == [1]

    del image, result, value, kept, pixels, rest
    assert sorted(exported.freed()) == [0, 1]
