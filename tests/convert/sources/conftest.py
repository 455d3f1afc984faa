"""Corpora that several files read, and none changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.convert.sources.corpora import make_coco


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Path:
    """See `make_coco`."""
    return make_coco(tmp_path_factory.mktemp("corpus"), photo)


@pytest.fixture(scope="module")
def photos(photo: Callable[..., bytes]) -> list[bytes]:
    """Three different JPEGs."""
    return [photo(24, 32, seed=200 + number) for number in range(3)]
