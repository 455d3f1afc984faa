"""The loss's Triton kernels, in Triton's interpreter: it has to be chosen before anything imports Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.programs import PATIENCE_S


def test_numbers_of_the_kernels_are_those_of_float64():
    pytest.importorskip("triton", reason="torch brings Triton on Linux only")
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/train/kernels_interpreted.py", "-vv"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout
