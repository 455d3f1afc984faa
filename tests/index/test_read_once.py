"""Tars are read once, and several processes find what one does: the same index, errors and problems, in order."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmdata.errors import DataError
from mmdata.index import build_index, verify
from mmdata.index.verify import verify_tars
from tests.index.rewrite import published

from .test_damaged_shards import cut


@pytest.fixture
def folder(tmp_path: Path, tar: Any, photo: Any) -> Path:
    """Five tars of four samples: with names of classes, a sample without an image, one that is no image, one mute."""
    path = tmp_path / "tars"
    path.mkdir()
    for shard in range(5):
        members: list[tuple[str, bytes]] = []
        for i in range(4):
            key = f"{shard}{i}"
            image = b"no image" if key == "13" else photo(20, 30, seed=4 * shard + i)
            members += [] if key == "21" else [(f"{key}.jpg", image)]
            members += [(f"{key}.cls", b"class %d" % (7 * shard % 5))]
            members += [] if key == "32" else [(f"{key}.txt", b"a dog %d" % i)]
        (path / f"{shard}.tar").write_bytes(tar(members))
    return path


def indexed(folder: Path, num_workers: int, **given: Any) -> tuple[dict[str, bytes], Any]:
    report = build_index(folder, num_workers=num_workers, max_bad_share=0.5, **given)
    found = published(folder), (report.accounts, report.lost, report.quarantined)
    shutil.rmtree(folder / "__mmdata__")
    return found


def test_index_of_several_processes_is_that_of_one(folder: Path):
    told: list[tuple[int, int]] = []
    alone = indexed(folder, 1)

    def progress(done: int, total: int) -> None:
        told.append((done, total))

    assert indexed(folder, 3, progress=progress) == alone
    total = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert told[-1] == (total, total)
    assert alone[1][0]["quarantined"] == 3
    cut(folder / "1.tar", "12")
    cut(folder / "4.tar", "41")
    assert indexed(folder, 3, skip_damaged=True) == indexed(folder, 1, skip_damaged=True)


def test_errors_of_several_processes_are_those_of_one(folder: Path):
    cut(folder / "1.tar", "12")
    cut(folder / "4.tar", "41")
    said: list[str] = []
    for num_workers in (1, 3):
        with pytest.raises(
            DataError, match=r"^2 of 5 shards are damaged: shard '1.tar', byte \d+: a member of "
        ) as caught:
            build_index(folder, num_workers=num_workers)
        said.append(str(caught.value))
        shutil.rmtree(folder / ".mmdata-index")
    assert said[0] == said[1]


def test_problems_of_several_processes_are_those_of_one(folder: Path):
    alone = verify_tars([folder], num_workers=1)
    assert len(alone.problems) == 3
    assert verify_tars([folder], num_workers=3) == alone
    build_index(folder, max_bad_share=0.5)
    assert verify(folder, num_workers=3) == []
    content = bytearray((folder / "2.tar").read_bytes())
    content[600] ^= 1
    (folder / "2.tar").write_bytes(content)
    cut(folder / "3.tar", "33")
    (folder / "4.tar").unlink()
    problems = verify(folder, num_workers=1)
    assert list(dict.fromkeys(problem.shard for problem in problems)) == ["2.tar", "3.tar", "4.tar"]
    assert verify(folder, num_workers=3) == problems
    only = verify(folder, num_workers=3, shards=["3.tar"])
    assert only == [problem for problem in problems if problem.shard == "3.tar"]
    assert verify_tars([folder], num_workers=3) == verify_tars([folder], num_workers=1)


@pytest.mark.parametrize("reads", ["index", "verify", "verify_tars"])
def test_each_byte_of_a_tar_is_read_and_hashed_once(
    folder: Path, tmp_path: Path, tar: Any, photo: Any, monkeypatch: pytest.MonkeyPatch, reads: str
):
    for shard in folder.glob("*.tar"):
        shard.unlink()
    large = photo(20, 30) + bytes(500_000)  # decoders ignore what follows the end of the image
    members = [(f"{i:03d}.{end}", data) for i in range(12) for end, data in (("jpg", large), ("txt", b"a dog"))]
    path = folder / "0.tar"
    path.write_bytes(tar(members))
    size = path.stat().st_size
    if reads == "verify":
        build_index(folder)
    hashed = 0
    sha256 = hashlib.sha256

    def act() -> None:
        if reads == "index":
            build_index(folder)
        elif reads == "verify":
            assert verify(folder) == []
        else:
            assert verify_tars([folder]).problems == []

    def bytes_read() -> int:
        """By all calls of this process."""
        return int(Path("/proc/self/io").read_text().split()[1])

    class Counting:
        def __init__(self, data: bytes = b"") -> None:
            self._digest = sha256()
            self.update(data)

        def update(self, data: bytes) -> None:
            nonlocal hashed
            hashed += len(data)
            self._digest.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._digest, name)

    act()  # imports what is imported late
    monkeypatch.setattr(hashlib, "sha256", Counting)
    before = bytes_read()
    act()
    assert size <= bytes_read() - before <= size + 2**19
    images = 12 * len(large)  # the index holds their SHA-256, too
    assert hashed <= (size if reads != "verify_tars" else 0) + images + 2**16
