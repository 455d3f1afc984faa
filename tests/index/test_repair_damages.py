"""Of a damaged tar, all samples that the damage did not touch are saved bit for bit, and nothing else is made up."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmdata.commands.repair import check_decode
from mmdata.errors import DataError
from mmdata.repair import Report, repair_tars
from mmdata.tars.tar import read_members
from tests.conftest import make_photo
from tests.made_shards import make_tar

NUM = 6
LONG = "n" * 120
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


class Whole(NamedTuple):
    """A tar, its members, and the bytes that each sample stands in."""

    data: bytes
    members: dict[str, bytes]
    spans: dict[str, tuple[int, int]]


def whole_tar(format: int) -> Whole:
    """Six samples of a photo, a caption and a label before it; a folder and, but in ustar, a long name of some."""
    members: list[tuple[str, bytes]] = []
    for i in range(NUM):
        prefix = LONG if i == 3 and format != tarfile.USTAR_FORMAT else "sub/" if i == 2 else "größe" if i == 4 else ""
        key = f"{prefix}{i:04d}"
        members += [(f"{key}.cls", b"%d" % i), (f"{key}.jpg", make_photo(24, 40 + i, seed=i))]
        members += [(f"{key}.txt", b"a dog, number %d" % i)]
    data = make_tar(members, format=format)
    spans: dict[str, tuple[int, int]] = {}
    for member in read_members(io.BytesIO(data), name="x"):
        key = member.name.partition(".")[0]
        spans[key] = (spans.get(key, (member.start, 0))[0], member.offset + member.size + -member.size % 512)
    return Whole(data, dict(members), spans)


TARS = {name: whole_tar(format) for name, format in FORMATS.items()}


class Damage(NamedTuple):
    """What is done to a tar at an offset.

    flip: bit `size` of a byte; zero, delete: `size` bytes; insert: `junk` before a byte; cut: from a byte on.
    """

    kind: str
    at: int
    size: int = 0
    junk: bytes = b""

    def apply(self, data: bytes) -> bytes:
        at = self.at
        if self.kind == "flip":
            return data[:at] + bytes([data[at] ^ 1 << self.size % 8]) + data[at + 1 :]
        if self.kind == "zero":
            return (data[:at] + bytes(self.size) + data[at + self.size :])[: len(data)]
        if self.kind == "delete":
            return data[:at] + data[at + self.size :]
        return data[:at] + self.junk + data[at:] if self.kind == "insert" else data[:at]

    def touches(self, start: int, end: int) -> bool:
        """Whether a byte from `start` to `end` is changed, lost, or no longer follows the one before it."""
        if self.kind == "flip":
            return start <= self.at < end
        if self.kind == "insert":
            return start < self.at < end
        if self.kind == "cut":
            return self.at < end
        return self.at < end and self.at + self.size > start


def damages(size: int) -> st.SearchStrategy[Damage]:
    """Damages of a tar of `size` bytes: single bits, and ranges of bytes or of blocks."""
    places = st.integers(0, size - 1) | st.integers(0, size // 512 - 1).map(lambda block: 512 * block)
    sizes = st.integers(1, 4096) | st.integers(1, 8).map(lambda blocks: 512 * blocks)
    junk = st.binary(min_size=1, max_size=1500) | st.integers(1, 4).map(lambda blocks: b"\xa5" * 512 * blocks)
    return st.one_of(
        st.builds(Damage, st.just("flip"), places, st.integers(0, 7)),
        st.builds(Damage, st.just("zero"), places, sizes),
        st.builds(Damage, st.just("delete"), places, sizes),
        st.builds(Damage, st.just("insert"), places, st.just(0), junk),
        st.builds(Damage, st.just("cut"), places),
    )


def repaired(data: bytes, **settings: object) -> tuple[bytes | None, Report | None]:
    """The repaired tar and the accounts; None if nothing could be saved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x.tar").write_bytes(data)
        try:
            report = repair_tars([folder / "x.tar"], folder / "out", check_image=check_decode, **settings)
        except DataError:
            return None, None
        return (folder / "out/x.tar").read_bytes(), report


def by_tarfile(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        read = [(one.name, tar.extractfile(one)) for one in tar]
        assert len({name for name, _ in read}) == len(read)
        return {name: file.read() for name, file in read if file is not None}


def by_webdataset(data: bytes) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "x.tar").write_bytes(data)
        yield from webdataset.WebDataset(str(Path(name) / "x.tar"), shardshuffle=False, empty_check=False)


def check_saved(whole: Whole, data: bytes, touched: set[str], *, is_unseen: bool = False) -> None:
    """The property: see the head of this file. `is_unseen`: two flips may leave the checksum of a header as it is."""
    out, report = repaired(data)
    untouched = whole.spans.keys() - touched
    if out is None:
        assert not untouched
        return
    assert report is not None
    assert report.balance
    found = by_tarfile(out)
    for name, payload in whole.members.items():
        if name.partition(".")[0] in untouched:
            assert found.get(name) == payload, name
    for name, payload in found.items():
        # No checksum covers the payload of a header with a long name, and none tells that such a header is missing: of
        # these samples, if the damage touched them, the name may be another one.
        is_long = not touched.isdisjoint(key for key in whole.spans if not key.isascii() or len(key) > 100)
        assert name in whole.members or is_long or is_unseen, name
        assert payload in data
    samples = {str(sample["__key__"]): sample for sample in by_webdataset(out)}
    assert len(samples) == report.samples.kept
    for key in untouched:
        sample = {one: value for one, value in samples[key].items() if not one.startswith("__")}
        assert sample == {one: whole.members[f"{key}.{one}"] for one in ("cls", "jpg", "txt")}
    for sample in samples.values() if report.bytes_skipped else ():  # else nobody sees that the tar is damaged
        assert {"jpg", "txt"} <= sample.keys() or {"jpg", "cls"} <= sample.keys()


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=40)
@given(data=st.data())
def test_repair_saves_every_sample_that_a_damage_did_not_touch(format: str, data: st.DataObject) -> None:
    whole = TARS[format]
    damage = data.draw(damages(len(whole.data)))
    touched = {key for key, span in whole.spans.items() if damage.touches(*span)}
    check_saved(whole, damage.apply(whole.data), touched)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_repair_saves_every_sample_that_none_of_several_damages_touched(format: str, data: st.DataObject) -> None:
    whole = TARS[format]
    several = data.draw(st.lists(damages(len(whole.data)), min_size=2, max_size=4))
    several.sort(key=lambda damage: -damage.at)  # from the end on, so that offsets stay those of the whole tar
    damaged, apart, end = whole.data, [], len(whole.data)
    for damage in several:
        if damage.at + damage.size * (damage.kind in ("zero", "delete")) < end:
            damaged, end = damage.apply(damaged), damage.at
            apart.append(damage)
    touched = {key for key, span in whole.spans.items() if any(damage.touches(*span) for damage in apart)}
    check_saved(whole, damaged, touched, is_unseen=sum(damage.kind == "flip" for damage in apart) > 1)


@settings(max_examples=5)
@given(data=st.data(), blocks=st.integers(1, 4))
@example(data=None, blocks=0)
def test_repair_of_a_whole_tar_gives_the_same_bytes(data: st.DataObject | None, blocks: int) -> None:
    whole = TARS["pax"].data + bytes(512 * blocks)
    out, report = repaired(whole)
    assert out == whole
    assert report is not None
    assert (report.copied, report.members.kept, report.samples.kept) == (1, 3 * NUM, NUM)
