"""Keys tell which rows are equal: hashes, labels, groups. They are integers: a float cannot hold a 64-bit hash."""

from __future__ import annotations

import torch
from torch import Tensor


def check_keys(name: str, keys: Tensor) -> None:
    """Raise where keys are no integers.

    In a stack with float32 keys torch would round int64 hashes to float32, and different rows would become equal.

    Args:
        name: of the keys, for the message.
        keys: of any shape.

    Raises:
        ValueError: `keys` are floating-point or complex.
    """
    if keys.is_floating_point() or keys.is_complex():
        raise ValueError(
            f"{name} has dtype {_name(keys.dtype)}, expected integers: as {_name(keys.dtype)}, different hashes become "
            f"equal, and so do the keys stacked with them; give {name} as int64 from where they are made"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
