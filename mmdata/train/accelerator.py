"""Which device is there, and what Apple's GPUs (mps) do not have: float64, several ranks, a generator as CUDA's."""

from __future__ import annotations

import torch
from torch import Tensor


def best_device() -> str:
    """The type of the fastest device of this machine: cuda, mps, or cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def widest(device: torch.device) -> torch.dtype:
    """float64, where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def where_float64_is(tensor: Tensor) -> Tensor:
    """The tensor, or its copy on the CPU if its device has no float64."""
    return tensor if widest(tensor.device) == torch.float64 else tensor.cpu()


def generator_states() -> list[Tensor]:
    """States of the generators of all GPUs that this process has used, or of Apple's."""
    if torch.cuda.is_initialized():
        return torch.cuda.get_rng_state_all()
    return [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else []


def set_generator_states(states: list[Tensor]) -> None:
    """Restore what `generator_states` gave."""
    if torch.backends.mps.is_available():
        for state in states:
            torch.mps.set_rng_state(state)
    elif states:
        torch.cuda.set_rng_state_all(states)
