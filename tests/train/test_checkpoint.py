"""Checkpoints of one process: what is kept, damage, planted pickles, kills; and the settings of a resumed run."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata.errors import ConfigError, DataError
from mmdata.train.ranks import collectives
from mmdata.train.run.checkpoint import (
    Share,
    find_checkpoint,
    find_damage,
    known_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    read_tensors,
    save_checkpoint,
)
from mmdata.train.run.random_state import rng_state, seed_rank, set_rng_state
from mmdata.train.run.same_run import MAY_CHANGE, changed_settings
from tests.programs import Program
from tests.train.shard_ranks import state_at

PROGRAM = Path(__file__).with_name("shard_ranks.py")


def save(folder: Path, *steps: int, keep: int = 2, sound_step: int | None = None) -> Path:
    """The path of the last of these checkpoints."""
    for step in steps:
        path = save_checkpoint(folder, Share.of(state_at(step)), keep=keep, sound_step=sound_step)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def equal(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors included."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_checkpoint_gives_back_the_state_it_was_given(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    assert latest_checkpoint(folder) is None
    path = save(folder, 7)
    assert path == latest_checkpoint(folder) == folder / "step-0000000007"
    assert names_in(path) == [".metadata", "__0_0.distcp", "files.json", "run.pt"]
    assert equal(load_checkpoint(path), {"format": 1, **state_at(7)})
    only = load_checkpoint(path, parts=("model",))
    assert equal(only["model"], state_at(7)["model"])
    assert only["optimizer"] == {"w": {}}


def test_checkpoint_is_read_into_the_tensors_that_are_there(tmp_path: Path):
    path = save(tmp_path, 7)
    weight, other_shape = torch.zeros(300, 300), torch.zeros(8)
    state = load_checkpoint(path, parts=())
    read_tensors(path, state, like={"model": {"w": weight, "b": other_shape}, "memory": {}})
    assert state["model"]["w"] is weight
    assert weight.unique().tolist() == [7.0]
    assert other_shape.tolist() == [0.0] * 8, "left for who compares the shapes"
    assert equal(state["model"], state_at(7)["model"])


def test_checkpoints_older_ones_and_half_written_ones_are_removed(tmp_path: Path):
    half = tmp_path / ".step-0000000001.part"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    save(tmp_path, 1, 2, 3, 4)
    assert names_in(tmp_path) == ["step-0000000003", "step-0000000004"]


def test_checkpoint_that_is_sound_outlives_newer_ones(tmp_path: Path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, sound_step=min(step, 2))
    assert [name[-1] for name in names_in(tmp_path)] == ["2", "4", "5"]
    save(tmp_path, 6)
    assert [name[-1] for name in names_in(tmp_path)] == ["5", "6"]


def test_checkpoint_whose_removal_is_cut_short_has_its_name_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1, 2)
    unlink = os.unlink

    def cut_short(path: Any, **given: Any) -> None:
        unlink(path, **given)
        if str(path).endswith(".distcp"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", cut_short)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 3)
    assert names_in(tmp_path) == [".step-0000000001.part", "step-0000000002", "step-0000000003"]
    assert [find_damage(path) for path in known_checkpoints(tmp_path)] == ["", ""]
    save(tmp_path, 4)
    assert names_in(tmp_path) == ["step-0000000003", "step-0000000004"]


def test_checkpoint_gives_back_a_loaders_state_whatever_its_keys(tmp_path: Path):
    batches = {"of_worker": {0: torch.tensor([1]), "0": torch.tensor(2)}, "a.b": torch.tensor(3), "a": {"b": [4]}}
    path = save_checkpoint(tmp_path, Share.of({**state_at(1), "batches": batches}), keep=1)
    assert equal(load_checkpoint(path)["batches"], batches)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ({"epoch": 1, "shards": {"order": np.arange(3)}}, r"'batches\.shards\.order' \(ndarray\)"),
        ({"draw": lambda: 3}, r"'batches\.draw' \(function\)"),
    ],
)
def test_checkpoint_of_what_could_not_be_read_back_is_not_written(batches: dict[str, Any], said: str):
    with pytest.raises(
        ConfigError, match=rf"the value of {said} cannot be read back: give tensors, .*torch.from_numpy"
    ):
        Share.of({**state_at(1), "batches": batches})


def test_checkpoint_of_a_step_that_has_one_is_never_taken_away(tmp_path: Path):
    path = save(tmp_path, 5, 6)
    (path / "mark").touch()
    save(tmp_path, 6)
    assert names_in(tmp_path) == ["step-0000000005", "step-0000000006"]
    assert (path / "mark").exists()


def test_checkpoints_killed_at_any_moment_leave_the_last_good_one(tmp_path: Path):
    before = 0
    for number in range(8):
        with Program([sys.executable, PROGRAM, tmp_path], stdout=subprocess.PIPE, text=True) as program:
            written = [int(program.stdout.readline())]
            time.sleep(0.003 * number)  # another moment each time
            program.send_signal(signal.SIGKILL)
            written += map(int, program.stdout.read().split())
        path = latest_checkpoint(tmp_path)
        assert path is not None
        state = load_checkpoint(path)
        assert equal(state, {"format": 1, **state_at(state["step"])})
        assert [find_damage(known) for known in known_checkpoints(tmp_path)] in ([""], ["", ""])
        assert state["step"] in (written[-1], written[-1] + 1), "the one that was printed, or was just not yet"
        assert written[0] > before
        before = state["step"]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("__0_0.distcp", "flip", "the content of '__0_0.distcp' does not have its checksum"),
        (".metadata", "flip", "the content of '.metadata' does not have its checksum"),
        ("run.pt", "cut", r"its file 'run.pt' has \d+ bytes in place of \d+"),
        ("__0_0.distcp", "remove", "its file '__0_0.distcp' is missing"),
        ("files.json", "remove", "it has no files.json, which is written last: it was never complete"),
        ("files.json", "cut", "Expecting|Unterminated"),
        ("files.json", "nest", "maximum recursion depth exceeded.*"),
    ],
)
def test_checkpoint_that_is_damaged_is_refused(tmp_path: Path, name: str, damage: str, said: str):
    save(tmp_path, 1, 2, 3, keep=9)
    for path in (tmp_path / "step-0000000002", tmp_path / "step-0000000003"):
        content = (path / name).read_bytes()
        middle = len(content) // 2
        if damage == "remove":
            (path / name).unlink()
        else:
            flipped = bytes([content[middle] ^ 1]) + content[middle + 1 :]
            damaged = {"cut": content[:middle], "flip": content[:middle] + flipped, "nest": b"[" * 10**5}
            (path / name).write_bytes(damaged[damage])
    way_back = r"to go on from 'step-0000000001', delete the checkpoints after it$"
    with pytest.raises(DataError, match=rf"step-0000000003': cannot be read .({said}).*; {way_back}"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["run.pt", ".metadata"])
def test_checkpoint_whose_files_are_not_all_listed_is_refused(tmp_path: Path, name: str):
    path = save(tmp_path, 3)
    listed = json.loads((path / "files.json").read_text())
    del listed["files"][name]
    (path / "files.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=f"files.json does not list '{name}'"):
        load_checkpoint(path)


def test_checkpoint_that_is_damaged_and_the_only_one_has_a_remedy_too(tmp_path: Path):
    path = save(tmp_path, 3)
    (path / "run.pt").unlink()
    said = r"; no whole one before it lies in '.*': put back a copy, or give another train.output to start anew$"
    with pytest.raises(DataError, match=said):
        load_checkpoint(path)


def test_checkpoint_with_a_flipped_bit_is_an_error_or_equal(tmp_path: Path):
    path = save(tmp_path, 7)
    expected, draw = load_checkpoint(path), random.Random(0)
    for file in sorted(path.iterdir()):
        sound, refused = file.read_bytes(), 0
        for place in (draw.randrange(len(sound)) for _ in range(60)):
            damaged = bytearray(sound)
            damaged[place] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            try:
                assert equal(load_checkpoint(path), expected), (file.name, place)
            except DataError as error:
                refused += str(error).startswith(f"checkpoint '{path}': cannot be read (")
        file.write_bytes(sound)
        assert refused == 60 or file.name == "files.json", "a flip in its spaces may change nothing"


class Malice:
    def __reduce__(self):
        return (os.mkdir, ("harm",))


def relist(path: Path, name: str) -> None:
    """Give a file that was changed on purpose its checksum."""
    content = (path / name).read_bytes()
    listed = json.loads((path / "files.json").read_text())
    listed["files"][name] = [len(content), zlib.crc32(content)]
    (path / "files.json").write_text(json.dumps(listed))


@pytest.mark.parametrize("name", [".metadata", "run.pt", "__0_0.distcp"])
def test_checkpoint_never_runs_code(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1)
    if name == "run.pt":
        torch.save({"format": 1, "model": Malice()}, path / name)
    else:
        size = (path / name).stat().st_size
        (path / name).write_bytes(pickle.dumps(Malice(), protocol=2).ljust(size, b"\0"))
    relist(path, name)
    with pytest.raises(DataError, match="cannot be read"):
        load_checkpoint(path)
    assert not (tmp_path / "harm").exists()


def test_checkpoint_says_that_objects_could_run_code(tmp_path: Path):
    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Malice()))
    relist(path, ".metadata")
    with pytest.raises(DataError, match="holds Python objects, which could run code"):
        load_checkpoint(path)


def test_checkpoint_takes_no_file_from_elsewhere(tmp_path: Path):
    path = save(tmp_path, 1)
    content = (path / ".metadata").read_bytes()
    assert b"__0_0.distcp" in content
    (path / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../0_0distcp"))
    relist(path, ".metadata")
    with pytest.raises(DataError, match=r"\.metadata names a file that files.json does not list: '../0_0distcp'"):
        load_checkpoint(path)
    listed = json.loads((path / "files.json").read_text())
    listed["files"]["../x"] = [0, 0]
    (path / "files.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"files.json lists '../x', which is no file of its folder"):
        load_checkpoint(path)


def test_checkpoint_of_others_and_of_the_future_are_refused(tmp_path: Path):
    path = save(tmp_path, 1)
    for content, said in (
        ({"state_dict": {}}, r"cannot be read \('format'\)"),
        ([1], "cannot be read .list indices must be"),
        ({"format": 99}, "format 99 is newer than 1; update mmdata"),
    ):
        torch.save(content, path / "run.pt")
        relist(path, "run.pt")
        with pytest.raises(DataError, match=said):
            load_checkpoint(path)
    with pytest.raises(DataError, match=r"nowhere': no such folder"):
        load_checkpoint(tmp_path / "nowhere")


def test_checkpoint_is_found_by_its_run_and_by_itself(tmp_path: Path):
    path = save(tmp_path / "run" / "checkpoints", 2)
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(path) == path
    (tmp_path / "run" / "config.yaml").touch()
    for part in (path.parent, path / "run.pt"):
        with pytest.raises(DataError, match=r"a part of the run '.*/run': give '.*/run'"):
            find_checkpoint(part)
    torch.save({}, tmp_path / "theirs.pt")
    with pytest.raises(DataError, match=r"theirs.pt': a file of weights, and a run is expected"):
        find_checkpoint(tmp_path / "theirs.pt")


def test_checkpoint_share_deals_out_what_is_equal_on_all_ranks(monkeypatch: pytest.MonkeyPatch):
    weights = {str(i): torch.zeros(size) for i, size in enumerate((4, 3, 2, 1, 2))}
    state = {"step": 1, "model": weights | {"running_mean": torch.zeros(1)}, "optimizer": {key: {} for key in weights}}
    parts: list[list[str]] = []
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        parts.append(list(Share.of(state).tensors["model"]))
    assert parts == [["0", "3", "4", "running_mean"], ["1", "2"]]


def test_checkpoint_weights_that_do_not_fit_are_an_error():
    state = {"model": torch.nn.Embedding(5, 2).state_dict()}
    with pytest.raises(
        ConfigError,
        match=r"'x.pt': its weights do not fit the model \(weight: 1 of another shape \(weight is .*tokenizer",
    ):
        load_weights(torch.nn.Embedding(6, 2), state, origin="x.pt")


def test_settings_that_change_numbers_are_named():
    saved = {"data": {"seed": 0, "loading": {"num_workers": 1}}, "train": {"lr": 0.1, "betas": [0.9, 0.98]}}
    moved = {"data": {"seed": 0, "loading": {"num_workers": 9}}, "train": {"lr": 0.1, "betas": (0.9, 0.98)}}
    assert changed_settings(saved, moved) == []
    other = {"data": {"seed": 1}, "train": {"lr": 0.2, "betas": [0.9, 0.98]}}
    assert changed_settings(saved, other) == ["data.seed was 0, is 1", "train.lr was 0.1, is 0.2"]


def test_files_of_a_selection_and_of_a_table_may_have_moved():
    def saved_as(folder: str, key: str = "uid") -> dict[str, object]:
        join = [{"table": f"{folder}/scores.parquet", "key": key}]
        return {"data": {"shards": "a", "select": f"{folder}/good.parquet", "join": join}}

    assert changed_settings(saved_as("here"), saved_as("there")) == []
    assert changed_settings(saved_as("here"), saved_as("there", key="id")) == ["data.join.0.key was 'uid', is 'id'"]


@pytest.mark.parametrize(
    ("before", "now", "may"),
    [
        ("width > 3", "width > 4", False),
        ("a/good.txt", "width > 4", False),
        (None, "a/good.txt", False),
        ("a/good.txt", "b/mask.NPY", True),
    ],
)
def test_another_selection_is_refused(before: str | None, now: str, may: bool):
    def saved_as(select: str | None) -> dict[str, object]:
        return {"data": {"shards": [{"shards": "a", "select": select}], "val": {"shards": "v", "select": select}}}

    changed = [f"{place}.select was {before!r}, is {now!r}" for place in ("data.shards.0", "data.val")]
    assert changed_settings(saved_as(before), saved_as(now)) == ([] if may else changed)


@pytest.mark.parametrize(
    ("sources", "changed"),
    [
        ([("moved/a", 3), ("moved/b", 1)], []),
        ([("a", 3), ("b", 5)], ["data.shards.1.weight was 1, is 5"]),
        ([("b", 1), ("a", 3)], ["data.shards.0.weight was 3, is 1", "data.shards.1.weight was 1, is 3"]),
        ([("a", 3)], ["data.shards.1.weight was 1, is None"]),
        (None, ["data.shards.0.weight was 3, is None", "data.shards.1.weight was 1, is None"]),
    ],
)
def test_settings_of_a_mixture_may_change_in_their_folders_only(
    sources: list[tuple[str, int]] | None, changed: list[str]
):
    def mixture(sources: list[tuple[str, int]]) -> dict[str, object]:
        return {"data": {"shards": [{"shards": shards, "weight": weight} for shards, weight in sources]}}

    current = {"data": {"shards": "a"}} if sources is None else mixture(sources)
    assert changed_settings(mixture([("a", 3), ("b", 1)]), current) == changed


def test_settings_that_may_change_exist():
    from mmdata.config import DataConfig, ModelConfig, TrainConfig

    sections = {k: s.model_fields for k, s in (("data", DataConfig), ("model", ModelConfig), ("train", TrainConfig))}
    assert all(key.split(".")[1] in sections[key.split(".")[0]] for key in MAY_CHANGE)


def draw() -> list[float]:
    """A few numbers of each generator."""
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), *torch.rand(2).tolist()]


def test_random_state_goes_through_a_checkpoint(tmp_path: Path):
    cpu = torch.device("cpu")
    seed_rank(3, 0)
    random.gauss(0, 1)  # leaves half of a pair behind, as does numpy's
    np.random.standard_normal()
    state = {"step": 1, "model": {}, "rng": [rng_state(cpu)]}
    expected = draw()
    path = save_checkpoint(tmp_path, Share.of(state), keep=1)
    seed_rank(4, 1)
    set_rng_state(load_checkpoint(path)["rng"][0], cpu)
    assert draw() == expected


def test_ranks_draw_different_numbers():
    drawn = set()
    for rank in range(4):
        seed_rank(0, rank)
        drawn.add((random.random(), np.random.rand(), torch.rand(()).item()))
    assert len({x for triple in drawn for x in triple}) == 12
