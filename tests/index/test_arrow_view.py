"""Arrow arrays as numpy arrays: the same values as pyarrow's own, in the same memory, and no pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmdata.errors import DataError
from mmdata.index.columns import view
from tests.programs import PATIENCE_S

PROGRAM_OF_LOADER = """
import sys
from mmdata import Loader
data = {"shards": sys.argv[1], "global_batch_size": 4, "loading": {"num_workers": 1, "num_processes": 0}}
with Loader.from_config(data) as loader:
    next(iter(loader))
print("pandas" in sys.modules)
"""


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_view_is_what_pyarrow_gives_and_shares_its_memory(dtype: type):
    array = pa.array(np.arange(10, dtype=dtype))
    for part in (array, array[3:7], array[10:]):
        found = view(part, dtype, of="index 'x'")
        np.testing.assert_array_equal(found, part.to_numpy())
        assert found.dtype == dtype
        assert not len(found) or np.shares_memory(found, array.to_numpy())


def test_view_of_missing_values_names_the_file():
    with pytest.raises(DataError, match="index 'x': 1 of the 2 values of a column are missing; make it anew"):
        view(pa.array([1, None], pa.int64()), np.int64, of="index 'x'")


def test_the_first_batch_comes_without_pandas(shards: Path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_OF_LOADER, shards], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.split() == ["False"], done.stderr
