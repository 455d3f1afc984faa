"""Rows of an index as a plan sees them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdata.images import probe
from mmdata.index import Index
from mmdata.plan import CaptionSources, IndexRows, LengthAspectPolicy, Rows, ShardCaptions, choose_captions
from mmdata.tars.write import Sample
from tests.shard_writer import ShardWriter


class Letters:
    """The tokenizer that counted the fixtures' captions."""

    name, fingerprint = "", "letters"

    def count(self, captions: Any) -> list[int]:
        return list(map(len, captions))


def captions_of(index: Index, tokens: Any) -> CaptionSources:
    return CaptionSources.in_turn(ShardCaptions(index, tokens))


def test_choose_captions_goes_through_all_of_them():
    rows, counts = np.arange(200), np.tile([1, 2, 3, 5, 7], 40)
    chosen = np.stack([choose_captions(rows, counts, epoch) for epoch in range(14)])
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        turn = chosen[:count, row]
        assert sorted(turn.tolist()) == list(range(count))
        np.testing.assert_array_equal(chosen[:, row], np.resize(turn, 14))


def test_choose_captions_begins_at_another_one_from_row_to_row():
    first = choose_captions(np.arange(3000), np.full(3000, 3), 0)
    counts = np.bincount(first)
    assert ((counts - 1000) ** 2 / 1000).sum() < 13.8  # chi-square, 2 degrees of freedom, 0.999


def test_choose_captions_depends_on_the_row_alone():
    rows, counts = np.array([9, 2, 400, 2]), np.array([4, 3, 5, 3])
    together = choose_captions(rows, counts, 3)
    for i in range(4):
        assert choose_captions(rows[i : i + 1], counts[i : i + 1], 3) == together[i]
    assert together.dtype == np.int64
    assert choose_captions(np.empty(0, np.int64), np.empty(0, np.int64), 0).tolist() == []


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Eight rows of 20 × 30 pixels, EXIF orientations 1 to 8, two captions each, in shards of three."""
    with ShardWriter(
        tmp_path, shard_rows=3, count_tokens=lambda captions: [len(c) for c in captions], tokenizer="letters"
    ) as writer:
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            buffer = io.BytesIO()
            Image.new("RGB", (30, 20)).save(buffer, "JPEG", exif=exif)
            image = buffer.getvalue()
            writer.write(Sample(f"{orientation}", image, probe(image), ["a" * orientation, "b" * 10 * orientation]))
    return Index.open(tmp_path)


def test_index_rows_have_the_size_displayed_and_the_length_of_the_chosen_caption(index: Index):
    rows = IndexRows(index, captions_of(index, "index"))
    asked = np.array([7, 0, 4, 3])
    assert rows.starts.tolist() == [0, 3, 6, 8]
    counted = IndexRows(index, captions_of(index, index.lists("caption_tokens")))
    for epoch in range(3):
        shapes = rows.shapes(asked, epoch)
        assert counted.shapes(asked, epoch).length.tolist() == shapes.length.tolist()
        assert shapes.height.tolist() == [30, 20, 30, 20]
        assert shapes.width.tolist() == [20, 30, 20, 30]
        chosen = choose_captions(asked, np.full(4, 2), epoch)
        assert shapes.length.tolist() == [(row + 1) * (1, 10)[c] for row, c in zip(asked, chosen, strict=True)]


def test_index_rows_without_lengths_are_all_one_token_long(index: Index):
    rows = IndexRows(index)
    assert rows.shapes(np.array([2, 1]), 0).length.tolist() == [1, 1]


def test_index_rows_fingerprint_tells_apart_what_decides_a_plan(index: Index):
    by_letters = captions_of(index, None)
    by_letters.count(Letters())
    fingerprints = [
        IndexRows(index, captions_of(index, "index")).fingerprint,
        IndexRows(index, by_letters).fingerprint,
        IndexRows(index).fingerprint,
    ]
    assert len(set(fingerprints)) == 3


@pytest.fixture
def one_caption(tmp_path: Path) -> Index:
    """300 rows with one caption of 1 to 12 letters each, of many aspect ratios, in shards of 70."""
    rng = np.random.default_rng(0)
    with ShardWriter(
        tmp_path, shard_rows=70, count_tokens=lambda captions: [len(c) for c in captions], tokenizer="letters"
    ) as writer:
        for row in range(300):
            height, width = (int(side) for side in rng.integers(4, 60, 2))
            buffer = io.BytesIO()
            Image.new("RGB", (width, height), (row % 256, row // 256, 0)).save(buffer, "PNG")
            image = buffer.getvalue()
            writer.write(Sample(f"{row:03d}", image, probe(image), ["a" * int(rng.integers(1, 13))]))
    return Index.open(tmp_path)


@pytest.mark.parametrize("lengths", ["index", None])
def test_index_rows_count_from_the_manifest_what_the_shapes_say(one_caption: Index, lengths: Any, monkeypatch):
    rows = IndexRows(one_caption, captions_of(one_caption, lengths))
    policy = LengthAspectPolicy([3, 7, 12], [(32, 32), (24, 32), (32, 24), (16, 48)])
    long_way = Rows.bucket_counts(rows, policy, 0, np.arange(len(rows.starts) - 1))
    assert long_way.sum(axis=1).tolist() == [70, 70, 70, 70, 20]
    monkeypatch.setattr(IndexRows, "shapes", None)  # nothing of a row is looked at
    assert rows.bucket_counts(policy, 0, np.arange(len(rows.starts) - 1)).tolist() == long_way.tolist()


def test_index_rows_of_several_captions_are_counted_by_their_shapes(index: Index):
    rows, policy = IndexRows(index, captions_of(index, "index")), LengthAspectPolicy([4, 80], [(20, 30), (30, 20)])
    for epoch in (0, 1):
        counts = rows.bucket_counts(policy, epoch, np.arange(len(rows.starts) - 1))
        assert counts.sum(axis=1).tolist() == [3, 3, 2]
        assert counts.tolist() == Rows.bucket_counts(rows, policy, epoch, np.arange(len(rows.starts) - 1)).tolist()
