"""The room for boxes in the batches of a stream: chosen from its first window, and the same on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

import mmdata
from mmdata import Loader
from mmdata.errors import ConfigError
from mmdata.index import build_index
from mmdata.loader.growing import tars
from tests.loader.member_tars import json_of, write_tar

BOXES = [row % 4 for row in range(24)] + [9, 2]


def sample(row: int, photo: Callable[..., bytes]) -> dict[str, bytes]:
    image = {"jpg": photo(24, 24 + row % 3, seed=row), "txt": f"a dog {row}".encode()}
    boxes = [[1, 2, 3, 4]] * BOXES[row]
    return {**image, "json": json_of({"boxes": boxes, "others": boxes})}


@pytest.fixture
def folder(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Four tars of 26 rows, with up to 3 boxes, and 9 in the last tar."""
    for shard, rows in enumerate([range(8), range(8, 16), range(16, 24), range(24, 26)]):
        write_tar(tmp_path / "tars" / f"{shard}.tar", {f"{row:04d}": sample(row, photo) for row in rows})
    return tmp_path / "tars"


def settings(**targets: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 4,
        "image_size": 32,
        "shuffle": False,
        "transform": "eval",
        "targets": {"boxes": "json:boxes", **targets},
        "loading": {"num_workers": 1, "num_processes": 0},
    }


def rows_of(stream: Any) -> list[tuple[int, list[int]]]:
    """Room for boxes and the boxes of each row, of each step of a pass."""
    with stream:
        steps = list(stream.plan.steps(0))
        rows = stream.plan.rows
        return [(step.bucket.boxes, rows.boxes(step.rows[step.rows >= 0]).tolist()) for step in steps]


def test_a_stream_has_room_for_the_boxes_of_its_rows(folder: Path):
    steps = rows_of(mmdata.stream(str(folder), settings(box_buckets=[1, 3, 9])))
    assert all(max(boxes) <= room for room, boxes in steps)
    assert {room for room, _ in steps} == {1, 3, 9}
    assert sorted(count for _, boxes in steps for count in boxes) == sorted(BOXES)


def test_a_stream_of_samples_has_the_same_room(folder: Path):
    def samples() -> Iterator[dict[str, Any]]:
        shards = [str(folder / f"{shard}.tar") for shard in range(4)]
        yield from webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)

    class Again:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return samples()

    own = mmdata.stream(Again(), settings(box_buckets=[1, 3, 9]))
    assert sorted(rows_of(own)) == sorted(rows_of(mmdata.stream(str(folder), settings(box_buckets=[1, 3, 9]))))


def test_the_bounds_are_those_of_the_first_window_and_more_boxes_are_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tars, "FIRST_ROWS", 8)
    steps = rows_of(mmdata.stream(str(folder), settings(box_buckets=2) | {"shuffle_window_rows": 8}))
    assert {room for room, _ in steps} <= {1, 2, 3}
    assert sorted(count for _, boxes in steps for count in boxes) == sorted(BOXES)
    said = [record.message for record in caplog.records if "more than 3 boxes" in record.message]
    assert len(said) == 1
    assert "1 of 10 rows have more than 3 boxes, up to 9: the largest of them are kept" in said[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_a_stream_have_equal_room_and_each_row_once(folder: Path, world_size: int):
    given = {**settings(box_buckets=2), "shuffle": True}
    steps: list[list[Any]] = []
    for rank in range(world_size):
        with mmdata.stream(str(folder), given, rank=rank, world_size=world_size) as stream:
            steps.append(list(stream.plan.steps(0, rank=rank, world_size=world_size)))
    for ranks in zip(*steps, strict=True):
        assert len({step.bucket for step in ranks}) == 1
    seen = np.concatenate([step.rows for own in steps for step in own])
    assert len(np.unique(seen[seen >= 0])) == np.count_nonzero(seen >= 0) == len(BOXES)


def test_a_stream_whose_rows_are_selected_has_the_boxes_of_these(folder: Path):
    steps = rows_of(mmdata.stream(str(folder), settings(box_buckets=[9]) | {"select": "width == 24"}))
    assert sorted(count for _, boxes in steps for count in boxes) == sorted(BOXES[::3])


def test_a_loader_of_the_same_tars_counts_the_same(folder: Path):
    streamed = rows_of(mmdata.stream(str(folder), settings(box_buckets=[1, 3, 9])))
    build_index(folder)
    with Loader.from_config({**settings(box_buckets=[1, 3, 9]), "shards": str(folder)}) as loader:
        rows = loader.plan.rows
        counts = rows.shapes(np.arange(len(BOXES)), 0).boxes.tolist()
        steps = [(step.bucket.boxes, counts_of(counts, step.rows)) for step in loader.plan.steps(0)]
    assert sorted(steps) == sorted(streamed)


def counts_of(counts: list[int], rows: Any) -> list[int]:
    return [counts[row] for row in rows.tolist() if row >= 0]


def test_a_stream_joins_no_tars(folder: Path):
    given = {**settings(), "targets": {"boxes": "join:more:json:boxes"}}
    with pytest.raises(ConfigError, match=r"^data\.targets\.boxes: no source 'join:more:json:boxes'; no table is join"):
        mmdata.stream(str(folder), given)


def test_a_state_says_the_source_of_the_boxes(folder: Path):
    with mmdata.stream(str(folder), settings(box_buckets=[3])) as stream:
        state = stream.state_dict()
    with (
        mmdata.stream(str(folder), settings(boxes="json:others", box_buckets=[3])) as stream,
        pytest.raises(ConfigError, match="boxes"),
    ):
        stream.load_state_dict(state)
