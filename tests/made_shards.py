"""Shards and tars that several test files share."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the tests of the GPU half run where the index's packages are missing
    from mmdata.tars.write import Sample


def length_in_characters(captions: list[str]) -> list[int]:
    """Stands in for a tokenizer where only the counts matter."""
    return [len(caption) for caption in captions]


@pytest.fixture(scope="session")
def count():
    """A `count_tokens` that needs no tokenizer."""
    return length_in_characters


@pytest.fixture(scope="session")
def samples(photo) -> list[Sample]:
    """Ten samples: three formats, one to three captions, labels on some, extra JSON on one."""
    from mmdata.images import probe
    from mmdata.tars.write import Sample

    made = []
    for i in range(10):
        image = photo(20 + i, 30, seed=i, format=("JPEG", "PNG", "WEBP")[i % 3])
        captions = [f"picture {i}" + " again" * j for j in range(1 + i % 3)]
        label = i if i % 4 == 0 else None
        extra = {"source": "ü"} if i == 7 else None
        made.append(Sample(f"{i:04d}", image, probe(image), captions, label, extra))
    return made


@pytest.fixture
def shards(tmp_path: Path, samples, count) -> Path:
    """The ten samples in shards of four, four and two."""
    from tests.shard_writer import ShardWriter

    folder = tmp_path / "shards"
    with ShardWriter(folder, shard_rows=4, count_tokens=count, tokenizer="characters") as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def make_tar(members: list[tuple[str, bytes]], *, format: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar by Python's own writer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def tar():
    """`tar([(name, data), …], format=tarfile.USTAR_FORMAT) -> bytes`."""
    return make_tar
