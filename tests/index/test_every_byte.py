"""Each byte of a shard, its index and its manifest, flipped or cut: an error, or the same samples, never fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mmdata
from mmdata.errors import BadSample, DataError
from mmdata.images import probe
from mmdata.index import Index, verify
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.conftest import make_photo
from tests.shard_writer import ShardWriter

FILES = ["000000.tar", "__mmdata__/index-00000.arrow", "__mmdata__/manifest.json"]
LOADER_STRIDE = 97
"""A loader is made for each of so many damages; a prime number, so that all parts of a header are met."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A shard of two samples, and a tokenizer beside it."""
    path = tmp_path_factory.mktemp("every_byte")
    train_tokenizer(["picture one again", "picture two"], path / "tokenizer", vocab_size=300)
    count = Tokenizer.load(path / "tokenizer")
    with ShardWriter(path / "shards", count_tokens=count.count, tokenizer=count.fingerprint) as writer:
        for i in range(2):
            image = make_photo(8, 9 + i, seed=i, format="PNG")
            writer.write(Sample(f"{i:04d}", image, probe(image), [f"picture {i}"], None))
    return path


def flipped(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


def cut(data: bytes) -> Iterator[bytes]:
    for place in range(0, len(data), 1 if len(data) < 4000 else 7):
        yield data[:place]


def from_index(folder: Path) -> list[object]:
    index = Index.open(folder / "shards")
    found: list[object] = []
    for row in range(len(index)):
        try:
            sample = index[row]
            found.append((sample.key, sample.captions, sample.label, sample.image_bytes))
        except (DataError, BadSample) as error:
            found.append(error)
    return found


def from_loader(folder: Path) -> dict[int, object]:
    """Pixels and token ids of each row; of a masked row, None."""
    loader = mmdata.Loader.from_config(
        {
            "shards": str(folder / "shards"),
            "tokenizer": str(folder / "tokenizer"),
            "global_batch_size": 2,
            "image_buckets": [[8, 8]],
            "loading": {"num_workers": 0, "max_bad_share": 1.0},
        }
    )
    found: dict[int, object] = {}
    masked = 0
    with loader:
        for batch in loader:
            for i, row in enumerate(batch["rows"].tolist()):
                if bool(batch["valid"][i]):
                    found[row] = (batch["pixel_values"][i].tolist(), batch["input_ids"][i].tolist())
        masked = loader.ledger.masked.total()
    assert len(found) + masked == 2  # no row is missing without a reason
    return found


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damages", [flipped, cut])
@pytest.mark.sweep
def test_a_damaged_byte_is_an_error_or_changes_no_sample(
    folder: Path, name: str, damages: Callable[[bytes], Iterator[bytes]]
) -> None:
    path = folder / "shards" / name
    data, whole, loaded = path.read_bytes(), from_index(folder), from_loader(folder)
    assert verify(folder / "shards") == []
    unseen: list[int] = []
    try:
        for number, damaged in enumerate(damages(data)):
            path.write_bytes(damaged)
            try:
                found = from_index(folder)
                assert len(found) == len(whole)
                for one, expected in zip(found, whole, strict=True):
                    assert isinstance(one, Exception) or one == expected
                if not number % LOADER_STRIDE:
                    for row, content in from_loader(folder).items():
                        assert content == loaded[row]
            except DataError:
                pass
            try:
                if not verify(folder / "shards") and damaged + b"\n" != data:  # the last line end says nothing
                    unseen.append(number)
            except DataError:
                pass
    finally:
        path.write_bytes(data)
    assert unseen == []
