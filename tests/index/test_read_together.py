"""Parts of files in shared memory: each has its own bytes, however many there are and whoever reads them."""

from __future__ import annotations

import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mmdata.errors import DataError
from mmdata.index.store import ALIGNMENT, BLOCK_BYTES, read_together


def write(folder: Path, sizes: list[int]) -> list[tuple[Path, bytes]]:
    rng = np.random.default_rng(0)
    files = [(folder / f"{i}", rng.bytes(size)) for i, size in enumerate(sizes)]
    for path, content in files:
        path.write_bytes(content)
    return files


def test_files_read_together_keep_their_bytes_in_any_number_of_threads(tmp_path: Path):
    sizes = [0, 1, 63, 64, 65, 100_000, BLOCK_BYTES // 8, BLOCK_BYTES // 8 + 1, *[300_001] * 30]  # over two blocks
    files = write(tmp_path, sizes)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda file: read_together(file[0], "file", 0, len(file[1])), files * 3))
    for part, (_, content) in zip(found, files * 3, strict=True):
        assert part == content
        assert part.readonly
        address = np.frombuffer(part, np.uint8).ctypes.data
        assert address % ALIGNMENT == 0 or len(part) == 0 or len(part) > BLOCK_BYTES // 8


def test_a_part_of_a_file_ends_where_the_file_ends(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"0123456789")
    for offset, size in ((0, 4), (3, 4), (8, 4), (20, 4), (2, 2**50)):
        assert read_together(tmp_path / "file", "file", offset, size) == b"0123456789"[offset : offset + size]


def test_a_block_is_freed_with_its_last_file(tmp_path: Path):
    files = write(tmp_path, [300_000] * 30)
    with ThreadPoolExecutor(1) as pool:  # a thread of its own begins a block of its own
        first, *others = pool.map(lambda file: read_together(file[0], "file", 0, len(file[1])), files)
    piece = weakref.ref(first.obj)
    del first
    gc.collect()
    assert piece() is not None
    del others
    gc.collect()
    assert piece() is None


def test_what_is_not_there_or_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match=r"index '.*/fifo': is a FIFO, and only regular files are read"):
        read_together(tmp_path / "fifo", "index", 0, 1)
    with pytest.raises(FileNotFoundError):
        read_together(tmp_path / "none", "index", 0, 1)
