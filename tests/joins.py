"""Joins the tables of settings, as `mmdata join` does before a start."""

from __future__ import annotations

from typing import Any

from mmdata import Loader
from mmdata.cli.data.join import join_tables
from mmdata.loader.loader import data_config


def join_first(config: Any) -> list[str]:
    """Write what settings name of their tables and tars, if they join any; the lines that the command prints."""
    data = data_config(config)
    return list(join_tables(data)) if data.join else []


def load(config: Any, **ranks: int) -> Loader:
    """A loader of settings, what they join being joined before."""
    join_first(config)
    return Loader.from_config(config, **ranks)
