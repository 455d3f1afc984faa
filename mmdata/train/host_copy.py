"""Tensors on their way to the CPU. To read them is to wait for what made them, not for what the device was given since.

`tensor.item()` waits for all that its stream has been given: in a loop that looks at its numbers the device would stand
still while the host prepares the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copies of tensors of one device, asked for now and read later; on a CPU the tensors themselves.

    Args:
        tensors: at least one; not to be changed in place before they are read.

    Example:
        coming = HostCopy(loss)
        next_step()
        loss_before = float(coming.read()[0])
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._done: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[Tensor]:
        """The copies, in order."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
