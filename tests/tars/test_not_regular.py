"""A FIFO, a device or a folder in the place of a shard or of a file beside it: an error, and it is not opened."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mmdata.config import DataConfig
from mmdata.convert import convert
from mmdata.errors import DataError
from mmdata.index import Index, ShardStore, build_index, verify
from mmdata.loader.growing.tars import TarFiles
from mmdata.loader.stream import find_shards
from mmdata.storage import ShardCache
from tests.programs import PATIENCE_S

PLACES: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.fixture(autouse=True)
def _not_for_ever() -> Iterator[None]:
    """Opening a FIFO waits for a writer; here it ends with an error."""

    def end(*_: Any) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=PLACES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def put(kind: str, path: Path) -> str:
    """Replace a file; the message that is to come."""
    path.unlink()
    PLACES[kind](path)
    return f"'.*{path.name}': is a {kind}, and only regular files are read; it was not opened"


def test_index_and_convert_refuse_it(shards: Path, tmp_path: Path, kind: str):
    shutil.rmtree(shards / "__mmdata__")
    message = "^shard " + put(kind, shards / "000001.tar")
    for source in [shards] if kind == "folder" else [shards, shards / "000001.tar"]:
        with pytest.raises(DataError, match=message):
            build_index(source)
    with pytest.raises(DataError, match=message):
        convert(shards, tmp_path / "out")


def test_convert_refuses_it_as_a_table(tmp_path: Path, kind: str):
    (tmp_path / "t.csv").touch()
    message = put(kind, tmp_path / "t.csv")
    with pytest.raises(DataError, match="has no images|the corpus is empty|no image" if kind == "folder" else message):
        convert(tmp_path / "t.csv", tmp_path / "out")


def test_verify_and_the_store_refuse_it(shards: Path, tmp_path: Path, kind: str):
    index, far = Index.open(shards), Index.open(f"file://{shards}", cache=ShardCache(tmp_path / "cache"))
    far.shard(0)
    message = put(kind, shards / "000000.tar")
    with pytest.raises(DataError, match=f"^shard {message}"):
        ShardStore(index).read(0, 0, 1)
    with pytest.raises(DataError, match=message):
        ShardStore(far).read(0, 0, 1)
    assert [str(problem) for problem in verify(shards)] == [
        f"shard '000000.tar': not a regular file, and it was not opened: '{shards}/000000.tar'"
    ]


@pytest.mark.parametrize(
    ("name", "what"),
    [("manifest.json", "file"), ("index-00000.arrow", "index")],
)
def test_opening_an_index_refuses_it(shards: Path, kind: str, name: str, what: str):
    message = f"^{what}.* ?" + put(kind, shards / "__mmdata__" / name)
    with pytest.raises(DataError, match=message):
        Index.open(shards).shard(0)


def test_a_stream_refuses_it(shards: Path, kind: str):
    path = shards / "000000.tar"
    message = "^shard " + put(kind, path)
    with pytest.raises(DataError, match=message):
        find_shards(shards)
    for name in [] if kind == "folder" else [str(path), f"file:{path}", f"{shards}/{{000000..000001}}.tar"]:
        with pytest.raises(DataError, match=message):
            find_shards(name)
    with pytest.raises(DataError, match=message):  # it was a file when the stream began
        TarFiles([str(path)], DataConfig(shards=str(shards), global_batch_size=1)).open(0, Event())
