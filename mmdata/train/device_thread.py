"""Threads that work beside the training loop, on the loop's GPU: the current GPU of a new thread is the first one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def device_thread(name: str) -> ThreadPoolExecutor:
    """An executor of one thread, whose name begins with `name`; its current GPU is that of the calling thread."""
    device = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    return ThreadPoolExecutor(1, name, _use, (device,))


def _use(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
