"""The scripts of docs/benchmarks as modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.docs.rehearsal import SCRIPT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """`script("gpu_report")`: a file of docs/benchmarks as a module."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module
