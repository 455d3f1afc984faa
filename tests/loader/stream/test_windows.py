"""The windows of a pass: small at first, planned as those of a loader, with what is left over carried on."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import mmdata
from mmdata.batch import Batch
from mmdata.errors import ConfigError
from mmdata.loader.growing.tars import TarFiles


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first window has 8 rows or more, instead of 1,024."""
    monkeypatch.setattr("mmdata.loader.growing.tars.FIRST_ROWS", 8)


def keys(batches: list[Batch]) -> list[list[str]]:
    return [batch["keys"] for batch in batches]


def test_windows_double_up_to_shuffle_window_rows_and_carry_what_is_left_over(uneven, config):
    """Eight tars of 5: windows of 10, 20 and 10 rows. Only the last batch of the pass is filled up."""
    folder = uneven(*[5] * 8)
    settings = config(global_batch_size=2, shuffle_window_rows=16)
    first, second = ([*mmdata.stream(folder, settings)] for _ in range(2))
    assert keys(first) == keys(second)
    found = [key for batch in first for key in batch["keys"]]
    assert Counter(found) == Counter(f"{i:04d}" for i in range(40))
    assert [batch["valid"].all().item() for batch in first] == [True] * 20
    order = [int(key) // 5 for key in found]
    assert len(set(order[:8])) <= 3, "the first batches need two tars, and those left over of them"
    assert all(len({batch["input_ids"].shape[1]}) == 1 for batch in first)


@pytest.mark.parametrize("steps", [1, 7, 13, 18])
def test_a_stream_of_many_windows_goes_on_exactly(uneven, config, steps: int):
    folder = uneven(*[5] * 8)
    settings = config(global_batch_size=2, shuffle_window_rows=16, transform="train")
    undisturbed = mmdata.stream(folder, settings)
    expected = keys([batch for _ in range(2) for batch in undisturbed])
    running = mmdata.stream(folder, settings)
    list(islice(running, steps))
    state = json.loads(json.dumps(running.state_dict()))
    assert len(json.dumps(state)) < 2000
    resumed = [mmdata.stream(folder, settings, rank=rank, world_size=2) for rank in range(2)]
    for stream in resumed:
        stream.load_state_dict(state)
    parts = [keys([batch for _ in range(2) for batch in stream]) for stream in resumed]
    assert [a + b for a, b in zip(*parts, strict=True)] == expected[steps:]


def test_the_identity_of_a_stream_does_not_change_on_the_way(uneven, config):
    settings = config(global_batch_size=2, image_patches=[4, 9], patch_size=8, shuffle_window_rows=16)
    del settings["image_size"]
    folder = uneven(*[5] * 8)
    stream, other = mmdata.stream(folder, settings), mmdata.stream(folder, settings)
    assert len([*stream]) == 20
    assert stream.identity == other.identity
    other.load_state_dict(stream.state_dict())


def test_bad_samples_of_a_window_are_told_once_whatever_the_ranks(uneven, tar, config):
    folder = uneven(*[5] * 4)
    for i in range(4):
        (folder / f"bad{i}.tar").write_bytes(tar([(f"b{i}/{j}.txt", b"no image") for j in range(3)]))
    settings = config(global_batch_size=2, max_bad_share=0.5)
    alone = mmdata.stream(folder, settings)
    assert len([*alone]) == 10
    expected = sorted(entry.key for entry in alone.ledger)
    assert len(expected) == 12
    ranks = [mmdata.stream(folder, settings, rank=rank, world_size=2) for rank in range(2)]
    for stream in ranks:
        list(stream)
    assert sorted(entry.key for stream in ranks for entry in stream.ledger) == expected
    merged = ranks[0].merge_states([stream.state_dict() for stream in ranks])
    assert (merged["rows_seen"], sum(merged["rows_masked"].values())) == (32, 12)


def test_a_tar_that_is_not_kept_is_read_again(uneven, config, monkeypatch):
    folder = uneven(*[5] * 8)
    settings = config(global_batch_size=2, shuffle_window_rows=16)
    expected = keys([*mmdata.stream(folder, settings)])
    monkeypatch.setattr("mmdata.loader.growing.tars.HELD_ROWS", 5)
    stream = mmdata.stream(folder, settings)
    stream.builder.index.tars._held_rows = 5
    assert keys([*stream]) == expected


def test_select_takes_the_rows_that_the_loader_takes(shards: Path, config: Any, tmp_path: Path):
    (tmp_path / "keys.txt").write_text("0003\n0017\n0030\n")
    for select in ("width > height", str(tmp_path / "keys.txt")):
        settings = config(shards=str(shards), select=select, global_batch_size=2)
        streamed, loaded = mmdata.stream(None, settings), mmdata.Loader.from_config(settings)
        expected = sorted(key for batch in loaded for key in batch["keys"] if key)
        assert sorted(key for batch in streamed for key in batch["keys"] if key) == expected != []


def keys_of(batches: Iterable[Batch]) -> list[str]:
    return sorted(key for batch in batches for key in batch["keys"] if key)


@pytest.mark.parametrize("condition", ["{}", "key in lines('{}')"])
def test_a_file_of_keys_is_read_once_for_all_tars(uneven: Any, config: Any, tmp_path: Path, condition: str):
    folder = uneven(*[5] * 8)
    every = keys_of(mmdata.stream(folder, config(global_batch_size=2)))
    names = tmp_path / "keys.txt"
    names.write_text("\n".join(every[::2]))
    settings = config(global_batch_size=2, shuffle_window_rows=5, select=condition.format(names))
    stream = mmdata.stream(folder, settings)  # reads the first tars
    names.unlink()
    assert keys_of(stream) == every[::2] != []


def test_select_names_a_tar_by_its_file_name_and_the_ledger_by_its_place(shards: Path, config: Any):
    settings = config(shards=str(shards), select="shard != '000002.tar'", global_batch_size=2)
    expected = keys_of(mmdata.Loader.from_config(settings))
    stream = mmdata.stream(None, settings)
    assert keys_of(stream) == expected == [f"{i:04d}" for i in range(38) if i // 10 != 2]
    index = stream.builder.index
    assert index.listed(1).name == "000001.tar"
    assert index.shard_place(1) == index.shard_name(1) == str(shards / "000001.tar")


def test_the_two_sides_of_a_share_are_those_of_the_loader(shards: Path, config: Any):
    settings = config(shards=str(shards), val={"share": 0.3})
    expected = sorted(key for batch in mmdata.Loader.from_config(settings) for key in batch["keys"] if key)
    assert sorted(key for batch in mmdata.stream(None, settings) for key in batch["keys"] if key) == expected
    assert 10 < len(expected) < 38


def test_fields_of_members_are_in_the_batches(tmp_path: Path, tar: Any, photo: Any, config: Any):
    for shard in range(3):
        members = []
        for i in range(4 * shard, 4 * shard + 4):
            document = json.dumps({"caption": f"picture {i}", "score": i / 2}).encode()
            members += [(f"{i}.jpg", photo(20, 20, seed=i)), (f"{i}.json", document)]
        (tmp_path / f"{shard}.tar").write_bytes(tar(members))
    stream = mmdata.stream(tmp_path, config(fields={"score": "json:score"}))
    found = {k: s for batch in stream for k, s in zip(batch["keys"], batch["score"].tolist(), strict=True)}
    assert found == {str(i): i / 2 for i in range(12)}


def test_a_token_budget_and_shapes_that_are_chosen_hold(shards: Path, config: Any):
    chosen = {"image_buckets": 2, "image_size": 32, "patch_size": 8}
    settings = config(token_budget=600, global_batch_size=64, **chosen)
    stream = mmdata.stream(shards, settings)
    batches = [*stream]
    assert len({batch["pixel_values"].shape[2:] for batch in batches}) == 2
    for batch in batches:
        rows, _, height, width = batch["pixel_values"].shape
        assert rows * (batch["input_ids"].shape[1] + height // 8 * (width // 8)) <= 600
    assert sorted(key for batch in batches for key in batch["keys"] if key) == [f"{i:04d}" for i in range(38)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"captions": "every"}, "captions: every"),
        ({"select": "mask.npy"}, r"select by a \.npy file"),
        ({"num_lanes": 2}, "num_lanes"),
        ({"leftover": "drop"}, "leftover: drop"),
        ({"join": [{"table": "scores.parquet", "key": "key"}]}, "join"),
    ],
)
def test_settings_that_need_all_rows_are_refused(shards: Path, config: Any, changes: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=rf"no index of all rows, and cannot do {named}; .*`mmdata index`"):
        mmdata.stream(shards, config(**changes))


@pytest.mark.parametrize(("leftover", "most"), [("merge", 1), ("pad", 8)])
def test_what_is_left_of_each_bucket_comes_at_the_end_of_a_pass(uneven, config, leftover, most):
    folder = uneven(*[5] * 8)
    batches = [*mmdata.stream(folder, config(global_batch_size=4, leftover=leftover))]
    assert sorted(key for batch in batches for key in batch["keys"] if key) == [f"{i:04d}" for i in range(40)]
    assert sum(not bool(batch["valid"].all()) for batch in batches) <= most


def test_a_window_of_many_small_tars_opens_each_once_to_index_and_once_to_read(uneven, config, monkeypatch):
    opened = Counter[int]()
    open_tar = TarFiles.open

    def counting(self: TarFiles, tar: int, stop: threading.Event) -> int:
        opened[tar] += 1
        return open_tar(self, tar, stop)

    monkeypatch.setattr(TarFiles, "open", counting)
    settings = config(global_batch_size=4, shuffle_window_rows=300, loading={"num_workers": 0})
    found = keys_of(mmdata.stream(uneven(*[2] * 120), settings))
    assert len(found) == 240
    assert opened == dict.fromkeys(range(120), 2)
