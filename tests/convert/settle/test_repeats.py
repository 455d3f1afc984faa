"""Repeats are found as pandas finds them, however many files the keys are divided over."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.convert.settle import repeats
from mmdata.convert.settle.repeats import Repeats
from mmdata.convert.settle.spill import Spill
from mmdata.convert.sources.rows import KEY_BYTES, InputRow, image_key


def key(image: int) -> bytes:
    return hashlib.sha256(b"%d" % image).digest()[:KEY_BYTES]


@given(
    images=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), max_size=60),
    bucket_rows=st.integers(1, 70),
    with_firsts=st.booleans(),
    data=st.data(),
)
def test_repeats_are_those_that_pandas_finds(
    images: list[tuple[int, int]], bucket_rows: int, with_firsts: bool, data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(len(images)))), np.int64)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(repeats, "BUCKET_ROWS", bucket_rows)
        with Repeats(Path(folder), len(images), with_firsts=with_firsts) as found:
            for rows in np.array_split(order, 3):
                keys = b"".join(key(images[row][0]) for row in rows.tolist())
                found.add(keys, rows, np.array([images[row][1] for row in rows.tolist()], np.int64))
            found.sort()
            rows, firsts, same = found.between(0, len(images))
            cut = len(images) // 2
            again = [found.between(cut, len(images)), found.between(0, cut)]
        assert not list(Path(folder).iterdir())
    frame = pd.DataFrame(images, columns=["image", "said"]).reset_index(names="row")
    first = frame.groupby("image")["row"].transform("min")
    expected = first != frame["row"]
    assert found.num_found == expected.sum()
    if with_firsts:
        expected |= frame["row"].isin(first[expected])
    assert rows.tolist() == frame["row"][expected].tolist()
    assert firsts.tolist() == first[expected].tolist()
    says_first = frame["said"].to_numpy()[first[expected].to_numpy(np.int64)]
    assert same.tolist() == (frame["said"][expected].to_numpy() == says_first).tolist()
    assert [*again[1].rows.tolist(), *again[0].rows.tolist()] == rows.tolist()


def test_rows_of_one_key_beyond_memory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdata.convert.settle.spill.BUFFERED_BYTES", 1000)
    with Repeats(tmp_path, 4000) as found:
        for start in range(0, 4000, 100):
            found.add(key(1) * 100, np.arange(start, start + 100))
        found.sort()
        assert found.between(0, 4000).rows.tolist() == list(range(1, 4000))


def test_spill_gives_back_what_was_added_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdata.convert.settle.spill.BUFFERED_BYTES", 5)
    with Spill(tmp_path) as spill:
        for bucket, data in ((3, b"ab"), (0, b"cde"), (3, b"fgh"), (3, b"i")):
            spill.add(bucket, data)
        assert [spill.read(bucket) for bucket in (0, 1, 3)] == [b"cde", b"", b"abfghi"]
    assert not list(tmp_path.iterdir())


def test_rows_without_a_known_image_have_keys_of_their_own() -> None:
    rows = [
        InputRow(0, "", image=None),
        InputRow(1, "", image=None),
        InputRow(2, "", image="a"),
        InputRow(3, "", image=b"a"),
    ]
    assert len({image_key(row) for row in rows}) == 4
