"""Parts of files: read up to the end of the file, and of regular files alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmdata.errors import DataError
from mmdata.index.store import read_part


def test_a_part_of_a_file_ends_where_the_file_ends(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"0123456789")
    for offset, size in ((0, 4), (3, 4), (8, 4), (20, 4), (2, 2**50)):
        part = read_part(tmp_path / "file", "file", offset, size)
        assert part == b"0123456789"[offset : offset + size]
        assert part.readonly


def test_what_is_not_there_or_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match=r"index '.*/fifo': is a FIFO, and only regular files are read"):
        read_part(tmp_path / "fifo", "index", 0, 1)
    with pytest.raises(FileNotFoundError):
        read_part(tmp_path / "none", "index", 0, 1)
