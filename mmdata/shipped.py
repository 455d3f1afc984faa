"""Paths of the programs, configs and recipes that come with the library, in a checkout or installed."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parent / "_shipped"


def shipped(*parts: str) -> Path:
    """A file or folder of tools/, configs/ or datasets/, from the installed package or else from the checkout.

    Example:
        shipped("configs", "scenes.yaml")
    """
    root = SHIPPED if SHIPPED.is_dir() else Path(__file__).parents[1]
    return root.joinpath(*parts)
