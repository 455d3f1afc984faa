"""How many boxes each row has: counted of real tars once, kept beside the index, and the same for all who ask."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdata import Index, Loader
from mmdata.cli.data.join import join_tables, settings_of
from mmdata.errors import ConfigError, DataError
from mmdata.index import ShardStore, build_index
from mmdata.loader.corpus import open_corpus
from mmdata.loader.loader import data_config
from mmdata.plan import Bucket, Shapes
from mmdata.plan.boxes import box_counts
from mmdata.plan.from_config import build_plan
from tests.joins import join_first
from tests.loader.member_tars import json_of, npy, write_tar
from tests.programs import PATIENCE_S

ROWS = 24
BOX = [1, 2, 3, 4]
JSONS: dict[int, bytes] = {
    0: json_of({"boxes": [{"bbox": BOX}] * 3, "in": {"boxes": [1, 2]}}),
    1: json_of({"boxes": []}),
    2: json_of({"caption": "no boxes"}),
    3: json_of({"boxes": {"bbox": BOX}}),
    4: json_of({"boxes": "four"}),
    5: json_of({"boxes": None}),
    6: b'{"boxes": [[1, 2',
    7: b"\xff\xfe",
    8: json_of([[1, 2, 3, 4]]),
    9: b"[" * 100_000,
}
COUNTS = [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, *(row % 5 for row in range(10, ROWS))]


def sample(row: int, photo: Callable[..., bytes]) -> dict[str, bytes]:
    boxes = json_of({"boxes": [{"bbox": BOX, "category": "dog"}] * (row % 5)})
    members = {"jpg": photo(24, 24 + row, seed=row), "txt": b"a dog", "json": JSONS.get(row, boxes)}
    if row == ROWS - 1:
        del members["json"]
    return members


@pytest.fixture
def folder(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Two indexed tars of 24 rows, whose numbers of boxes are `COUNTS`, but 0 in the last, which has no JSON."""
    samples = {f"{row:04d}": sample(row, photo) for row in range(ROWS)}
    half = ROWS // 2
    write_tar(tmp_path / "shards" / "a.tar", dict(list(samples.items())[:half]))
    write_tar(tmp_path / "shards" / "b.tar", dict(list(samples.items())[half:]))
    build_index(tmp_path / "shards")
    return tmp_path / "shards"


EXPECTED = [*COUNTS[:-1], 0]


def settings(folder: Path, source: str = "json:boxes", **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"shards": str(folder), "global_batch_size": 4, "image_size": 32}
    given["targets"] = {"boxes": source, **changes.pop("targets", {})}
    return {**given, "loading": {"num_workers": 1, "num_processes": 0, **changes.pop("loading", {})}, **changes}


def counted(config: dict[str, Any]) -> list[int]:
    data = data_config(config)
    corpus = open_corpus(data)
    found = box_counts(data, corpus.index, corpus.joined)
    assert found is not None
    assert found.dtype == np.int32
    return found.tolist()


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "__mmdata__" / "joins").glob("*.arrow"))


def test_boxes_are_the_lengths_of_lists_and_0_of_all_else(folder: Path):
    assert counted(settings(folder)) == EXPECTED
    assert counted(settings(folder, "json:in.boxes")) == [2] + [0] * (ROWS - 1)
    assert counted(settings(folder, "json:boxes.category")) == EXPECTED
    assert counted(settings(folder, "seg.json:boxes")) == [0] * ROWS


def test_boxes_may_be_arrays(tmp_path: Path, photo: Callable[..., bytes]):
    arrays = [np.zeros((3, 4)), np.zeros((0, 4)), np.float32(7)]
    samples = {
        f"{row}": {"jpg": photo(24, 24, seed=row), "txt": b"a", "boxes.npy": npy(one)} for row, one in enumerate(arrays)
    }
    write_tar(tmp_path / "a.tar", samples)
    build_index(tmp_path)
    assert counted(settings(tmp_path, "boxes.npy")) == [3, 0, 0]


def test_without_targets_nothing_is_counted(folder: Path):
    data = data_config({**settings(folder), "targets": {"masks": "seg.png"}})
    corpus = open_corpus(data)
    assert box_counts(data, corpus.index, corpus.joined) is None
    assert build_plan(data, corpus.index, None).policy.buckets[0].boxes == 0
    assert files_of(folder) == []


def test_boxes_are_counted_once_and_kept_beside_the_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "mmdata")
    first = counted(settings(folder))
    assert "data.targets.boxes: the number of boxes of 24 rows: not known yet; made now and kept" in caplog.text
    assert len(files_of(folder)) == 1
    caplog.clear()
    monkeypatch.setattr(ShardStore, "read_member", None)  # no member is read again
    assert counted(settings(folder)) == first
    assert not caplog.records


def test_boxes_of_another_index_are_counted_anew(folder: Path, photo: Callable[..., bytes]):
    counted(settings(folder))
    samples = {f"{row:04d}": {**sample(10 + row, photo), "json": json_of({"boxes": [BOX] * 6})} for row in range(3)}
    (folder / "b.tar").unlink()
    write_tar(folder / "a.tar", samples)
    build_index(folder, overwrite=True)
    assert counted(settings(folder)) == [6, 6, 6]
    assert len(files_of(folder)) == 1


def test_a_damaged_file_is_made_again(folder: Path):
    counted(settings(folder))
    (path,) = files_of(folder)
    path.write_bytes(path.read_bytes()[:-7] + b"changed")
    assert counted(settings(folder)) == EXPECTED
    assert counted(settings(folder)) == EXPECTED


def test_where_nothing_can_be_written_boxes_are_counted_in_memory(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (folder / "__mmdata__" / "joins").write_text("a file in the folder's place")
    (tmp_path / "cache").write_text("another")
    given = settings(folder, loading={"cache_dir": str(tmp_path / "cache")})
    for _ in range(2):
        caplog.clear()
        assert counted(given) == EXPECTED
        assert "neither the folder of the index nor the loader's cache can be written" in caplog.text
    with pytest.raises(ConfigError, match="neither the folder of the index"):
        list(join_tables(data_config(given)))


def test_in_a_folder_that_cannot_be_written_they_are_kept_in_the_cache(folder: Path, tmp_path: Path):
    (folder / "__mmdata__" / "joins").write_text("a file in the folder's place")
    given = settings(folder, loading={"cache_dir": str(tmp_path / "cache")})
    assert counted(given) == counted(given) == EXPECTED
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 1


def test_a_member_that_changed_is_an_error_and_no_other_plan(folder: Path):
    data = (folder / "b.tar").read_bytes()
    (folder / "b.tar").write_bytes(data.replace(b'"dog"', b'"cat"', 1))
    with pytest.raises(
        DataError, match=r"^data\.targets\.boxes: shard .*b\.tar', sample '0012', member \.json: its by"
    ):
        counted(settings(folder))
    assert files_of(folder) == []


PROGRAM = """
import logging, sys
from mmdata import Index
from mmdata.config import DataConfig
from mmdata.plan.from_config import build_plan
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
data = DataConfig.model_validate({settings})
index = Index.open(data.shards)
sys.stdin.readline()
print(build_plan(data, index, None).identity())
"""


def test_several_processes_agree_and_one_counts(folder: Path):
    code = PROGRAM.replace("{settings}", repr(settings(folder, targets={"box_buckets": 3})))
    begin = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in begin:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=PATIENCE_S)[0] for process in begin]
    assert [process.returncode for process in begin] == [0] * 3
    assert sum(text.count("not known yet") for text in said) == 1
    assert len({text.splitlines()[-1] for text in said}) == 1
    assert counted(settings(folder)) == EXPECTED


# Joined tars


def test_boxes_of_joined_tars_are_those_of_the_rows_keys(folder: Path, tmp_path: Path):
    others = {f"{row:04d}": {"json": json_of({"found": [BOX] * (row % 3)})} for row in range(2, ROWS)[::-1]}
    write_tar(tmp_path / "more" / "x.tar", others)
    build_index(tmp_path / "more")
    joined = {"shards": str(tmp_path / "more"), "name": "more", "missing": "keep"}
    given = settings(folder, "join:more:json:found", join=[joined])
    said = join_first(given)
    assert f"data.targets.boxes: {sum(row % 3 for row in range(2, ROWS))} boxes, up to 2 in a row" in said
    assert counted(given) == [0, 0, *(row % 3 for row in range(2, ROWS))]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("join:more:json:boxes", "no source 'join:more:json:boxes'; no table is joined"),
        ("boxes", "no source 'boxes'; no table is joined .* written json, json:KEY"),
        ("txt:boxes", "member 'txt:boxes': .txt has no keys"),
    ],
)
def test_another_source_is_refused(folder: Path, source: str, message: str):
    with pytest.raises(ConfigError, match=rf"^data\.targets\.boxes: {message}"):
        counted(settings(folder, source))


# Plans of settings


def test_a_config_without_tables_is_joined_for_its_boxes(folder: Path, tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(f"data: {{shards: {folder}, global_batch_size: 4, targets: {{boxes: 'json:boxes'}}}}\n")
    said = list(join_tables(settings_of(str(config), [])))
    assert said == [f"data.targets.boxes: {sum(EXPECTED)} boxes, up to 4 in a row"]
    assert len(files_of(folder)) == 1


def bounds(given: dict[str, Any]) -> list[int]:
    with Loader.from_config(given) as loader:
        return sorted({bucket.boxes for bucket in loader.plan.policy.buckets})


def test_the_bounds_of_a_plan_are_those_of_the_rows_that_are_selected(folder: Path):
    assert bounds(settings(folder)) == [4]
    assert bounds(settings(folder, targets={"box_buckets": [2]})) == [2]
    assert bounds(settings(folder, targets={"box_buckets": [1, 9]})) == [1, 9]
    assert bounds(settings(folder, targets={"box_buckets": 9})) == [1, 2, 3, 4]
    assert bounds(settings(folder, targets={"box_buckets": 9}, select="width < 34")) == [1, 3]


class Own:
    """A user's policy without boxes."""

    buckets = (Bucket(0, 32, 32), Bucket(0, 32, 48))

    def assign(self, shapes: Shapes) -> np.ndarray[Any, Any]:
        return (shapes.width > 32).astype(np.int64)


def test_a_policy_of_ones_own_gives_the_boxes_or_is_refused(folder: Path):
    message = r"^data\.targets\.boxes: the buckets of this policy have no boxes: .*Bucket\(77, 224, 224, boxes=8\)"
    with pytest.raises(ConfigError, match=message):
        Loader.from_config(settings(folder), policy=Own())
    own = Own()
    own.buckets = tuple(bucket._replace(boxes=2) for bucket in Own.buckets)
    with Loader.from_config(settings(folder), policy=own) as loader:
        assert {step.bucket.boxes for step in loader.plan.steps(0)} == {2}


@pytest.mark.parametrize(
    ("source", "targets", "said"),
    [
        ("json:boxes", {"box_buckets": [2]}, "4 boxes"),
        ("json:boxes", {"box_buckets": 3}, "4 boxes"),
        ("json:in.boxes", {"box_buckets": [4]}, "boxes was '.*' and is .*, targets was .* and is .*json:in.boxes"),
    ],
)
def test_states_of_other_boxes_are_refused(folder: Path, source: str, targets: dict[str, Any], said: str):
    with Loader.from_config(settings(folder)) as loader:
        state = loader.state_dict()
    with (
        Loader.from_config(settings(folder, source, targets=targets)) as loader,
        pytest.raises(ConfigError, match=said),
    ):
        loader.load_state_dict(state)


def test_shapes_say_their_boxes(folder: Path):
    with Loader.from_config(settings(folder, targets={"box_buckets": [1, 4]})) as loader:
        words = [words for words, _ in loader.blank_batches()]
        assert "with up to 4 boxes" in repr(loader.plan)
    assert [text.partition(" (")[0] for text in words] == [
        "4 rows of 32 × 32 pixels and 4 boxes",
        "4 rows of 32 × 32 pixels and 1 boxes",
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_of_a_loader_have_equal_room_and_each_row_once(folder: Path, world_size: int):
    given = settings(folder, targets={"box_buckets": 3}, image_buckets=2)
    steps: list[list[Any]] = []
    for rank in range(world_size):
        with Loader.from_config(given, rank=rank, world_size=world_size) as loader:
            steps.append(list(loader.plan.steps(0, rank=rank, world_size=world_size)))
    for ranks in zip(*steps, strict=True):
        assert len({step.bucket for step in ranks}) == 1
        rows = np.concatenate([step.rows for step in ranks])
        assert max(np.array(EXPECTED)[rows[rows >= 0]]) <= ranks[0].bucket.boxes
    seen = np.concatenate([step.rows for own in steps for step in own])
    assert sorted(seen[seen >= 0].tolist()) == list(range(ROWS))


def test_an_index_in_two_folders_has_a_file_of_its_own(folder: Path, tmp_path: Path, photo: Callable[..., bytes]):
    write_tar(tmp_path / "second" / "a.tar", {"x": {**sample(13, photo)}})
    build_index(tmp_path / "second")
    both = {**settings(folder), "shards": [{"shards": str(folder)}, {"shards": str(tmp_path / "second")}]}
    assert counted(both) == [*EXPECTED, 3]
    assert counted(settings(folder)) == EXPECTED
    assert len(files_of(folder)) == 2
    assert len(Index.open([folder, tmp_path / "second"])) == ROWS + 1


def test_a_state_of_other_shards_still_says_so(folder: Path, tmp_path: Path, photo: Callable[..., bytes]):
    with Loader.from_config(settings(folder)) as loader:
        state = loader.state_dict()
    write_tar(tmp_path / "second" / "a.tar", {f"{row}": sample(row, photo) for row in range(13, 19)})
    build_index(tmp_path / "second")
    with Loader.from_config(settings(tmp_path / "second")) as loader:
        assert "other shards than before: their index was" in loader.other_shards(state)
