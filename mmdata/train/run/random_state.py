"""Random numbers of a run: Python's, numpy's and torch's generators, seeded, read and put back together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_rank(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch, each rank differently: dropout must differ between ranks."""
    words = np.random.SeedSequence([seed, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of the generators of Python, numpy and torch (and of the GPU) in this process, as plain data."""
    keys, position, has_gauss, cached = np.random.get_state(legacy=True)[1:]  # type: ignore[misc]  # a tuple, as legacy says
    return {
        "python": random.getstate(),
        "numpy": [keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        **({"mps": torch.mps.get_rng_state()} if device.type == "mps" else {}),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `rng_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    if device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
