"""Sharded checkpoints: real ranks (gloo), kills, damage, and torch's own reader as the oracle."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mmdata.errors import DataError
from mmdata.train.run.checkpoint import (
    find_damage,
    latest_checkpoint,
    load_checkpoint,
    point_at,
    publish_folder,
    save_checkpoint,
)
from mmdata.train.run.find import find_checkpoint
from mmdata.train.run.sharded_checkpoint import own_part
from mmdata.train.run.sharded_writer import ShardedCheckpointWriter
from tests.programs import Program
from tests.rounding import RUN_IN_DOUBLE
from tests.train.shard_ranks import state_at
from tests.train.test_loop import last_state, read_metrics, run_small

PROGRAM = Path(__file__).with_name("shard_ranks.py")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(folder: Path, *steps: int, keep: int = 2, sound_step: int | None = None) -> Path:
    """The path of the last of these checkpoints, written by this process alone."""
    with ShardedCheckpointWriter(folder, keep=keep, written=lambda step: None, say=print) as writer:
        for step in steps:
            writer.wait()
            writer.save(state_at(step), sound_step=sound_step, background=False)
    return folder / f"step-{steps[-1]:010d}"


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def fsdp(output: Path, *, torchrun: int = 2, **spec: Any) -> subprocess.CompletedProcess[str]:
    train = {"parallel": "fsdp", "teacher": {"decay": 0.9}, **spec.pop("train", {})}
    train |= {"queue": 20, "mask_false_negatives": True}
    return run_small(output, torchrun=torchrun, train=train, **spec)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")
    done = fsdp(output)
    assert done.returncode == 0, done.stderr
    return output


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_sharded_checkpoints_of_a_run_are_folders_with_a_file_a_rank(whole: Path):
    assert names_in(whole) == ["latest", "step-0000000009", "step-0000000012"], "keep_checkpoints is 2"
    files = sorted(path.name for path in (whole / "checkpoints" / "step-0000000012").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "files.json", "run.pt"]


@pytest.mark.sweep
def test_sharded_run_killed_and_resumed_makes_the_same_updates_bit_for_bit(whole: Path, tmp_path: Path):
    killed = fsdp(tmp_path, signal="SIGKILL", at=7, sleep_s=1)
    assert killed.returncode != 0
    newest = last_state(tmp_path)["step"]
    assert newest in (4, 6), "that of step 6 is written meanwhile"
    resumed = fsdp(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from {tmp_path}/checkpoints/step-000000000{newest}: step {newest} of 12" in resumed.stdout
    assert read_metrics(tmp_path) == read_metrics(whole)
    before, after = last_state(whole), last_state(tmp_path)
    assert len(before["optimizer"]["state"]) > 5
    for part in ("model", "optimizer", "teacher", "memory", "rng"):
        assert equal(before[part], after[part]), part


def test_sharded_checkpoint_that_a_killed_rank_did_not_finish_is_never_taken(whole: Path, tmp_path: Path):
    killed = fsdp(tmp_path, signal="SIGKILL", at=7, slow_shards_of=6)
    assert killed.returncode != 0
    assert names_in(tmp_path) == [".step-0000000006.part", "latest", "step-0000000003", "step-0000000004"]
    half = tmp_path / "checkpoints" / ".step-0000000006.part"
    assert {path.name for path in half.iterdir()} <= {"__0_0.distcp"}, "rank 0's part at most"
    assert last_state(tmp_path)["step"] == 4
    resumed = fsdp(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert names_in(tmp_path) == names_in(whole)
    assert read_metrics(tmp_path) == read_metrics(whole)


def test_sharded_checkpoint_is_finished_by_a_rank_that_has_an_error_of_its_own(tmp_path: Path):
    failed = fsdp(tmp_path, error="the loader is broken", at=7, slow_shards_of=6, save_takes_s=0.5)
    assert failed.returncode != 0
    assert "the loader is broken" in failed.stderr
    assert last_state(tmp_path)["step"] == 6
    assert names_in(tmp_path) == ["latest", "step-0000000004", "step-0000000006"]


def test_sharded_checkpoint_has_the_numbers_of_a_whole_one(whole: Path, tmp_path: Path):
    assert fsdp(tmp_path, train={"parallel": "ddp"}).returncode == 0
    assert names_in(tmp_path) == ["latest", "step-0000000009.pt", "step-0000000012.pt"]
    one, other = last_state(whole), last_state(tmp_path)
    assert list(one["model"]) == list(other["model"]), "in the same order"
    for part in ("model", "teacher"):
        torch.testing.assert_close(dict(one[part]), dict(other[part]), rtol=1e-3, atol=1e-5, msg=part)
    for part in ("batches", "rng"):
        assert equal(one[part], other[part]), part


@pytest.mark.parametrize("ranks", [4, 0])
@pytest.mark.sweep
def test_sharded_run_resumes_on_another_number_of_ranks(ranks: int, tmp_path: Path):
    spec: dict[str, Any] = {"dropout": 0.0, "double": True}
    assert fsdp(tmp_path / "whole", **spec).returncode == 0
    stopped = fsdp(tmp_path / "cut", signal="SIGTERM", at=4, **spec)
    assert "stopped by SIGTERM after step 5 of 12" in stopped.stdout, stopped.stderr
    resumed = fsdp(tmp_path / "cut", torchrun=ranks, **spec)
    assert resumed.returncode == 0, resumed.stderr
    assert "step-0000000005: step 5 of 12" in resumed.stdout
    expected, found = ([line["loss"] for line in read_metrics(tmp_path / run)] for run in ("whole", "cut"))
    assert found == pytest.approx(expected, rel=0, abs=RUN_IN_DOUBLE)
    assert names_in(tmp_path / "cut")[-1] == f"step-0000000012{'' if ranks else '.pt'}"
    one, other = last_state(tmp_path / "whole"), last_state(tmp_path / "cut")
    torch.testing.assert_close(other["model"], one["model"], rtol=0, atol=RUN_IN_DOUBLE)
    torch.testing.assert_close(other["teacher"], one["teacher"], rtol=0, atol=RUN_IN_DOUBLE)


def test_sharded_checkpoint_is_what_torch_reads_from_it(whole: Path, tmp_path: Path):
    path = find_checkpoint(whole)
    dcp_to_torch_save(path, tmp_path / "by_torch.pt")
    by_torch = torch.load(tmp_path / "by_torch.pt", weights_only=True)
    state = load_checkpoint(path)
    assert equal(by_torch["model"], dict(state["model"]))
    assert equal(by_torch["teacher"], dict(state["teacher"]))
    assert equal(by_torch["optimizer"]["state"]["0"], state["optimizer"]["state"][0])


def test_sharded_checkpoint_gives_back_the_state_it_was_given(tmp_path: Path):
    path = write(tmp_path, 3)
    found = load_checkpoint(path)
    assert found.pop("format") == 1
    assert equal(found, state_at(3))
    only = load_checkpoint(path, parts=("model",))
    assert equal(only["model"], state_at(3)["model"])
    assert only["optimizer"]["state"] == {0: {}}


def test_sharded_checkpoint_error_of_one_rank_ends_all(tmp_path: Path):
    done = fsdp(tmp_path, largest_file=5000, train={"evaluate_every_epochs": 0})
    assert done.returncode != 0
    assert "File too large" in done.stderr
    assert "CheckpointException" not in done.stderr
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_sharded_writer_deals_out_what_all_ranks_have():
    tensors = {("teacher", str(i)): torch.zeros(size) for i, size in enumerate((4, 3, 2, 1, 2))}
    parts = [[path[1] for path in own_part(tensors, rank, 2)] for rank in range(2)]
    assert parts == [["0", "3", "4"], ["1", "2"]]


def test_sharded_checkpoints_killed_at_any_moment_leave_the_last_good_one(tmp_path: Path):
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
        state.pop("format")
        assert equal(state, state_at(state["step"]))
        assert state["step"] in (written[-1], written[-1] + 1), "the one that was printed, or was just not yet"
        assert written[0] > before
        before = state["step"]
        for other in tmp_path.glob("step-*"):
            assert find_damage(other) == "", "what has its name is whole"


def test_sharded_checkpoints_older_ones_and_half_written_ones_are_removed(tmp_path: Path):
    half = tmp_path / ".step-0000000001.part"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    write(tmp_path, 1, 2, 3, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0000000003", "step-0000000004"]
    save_checkpoint(tmp_path, state_at(5), keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000000004", "step-0000000005.pt"]
    write(tmp_path, 6, keep=1, sound_step=4)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000000004", "step-0000000006"]


def test_sharded_checkpoints_of_later_steps_or_another_form_make_way(tmp_path: Path):
    write(tmp_path, 4, 8)
    save_checkpoint(tmp_path, state_at(6), keep=2)
    (tmp_path / "latest").write_text("step-0000000004\n")
    path = write(tmp_path, 6, keep=1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000006"]
    assert latest_checkpoint(tmp_path) == path
    (tmp_path / "latest").write_text("none yet\n")
    (path / "run.pt").write_bytes(b"of another run")
    assert find_damage(write(tmp_path, 6)) == "", "replaced"


def test_sharded_checkpoint_that_latest_names_is_never_taken_away(tmp_path: Path):
    path = write(tmp_path / "checkpoints", 6)
    aside = path.with_name(".step-0000000006.part")
    shutil.copytree(path, aside)
    (path / "mark").touch()
    publish_folder(aside, path)
    point_at(path, keep=1)
    assert (path / "mark").exists()
    assert not aside.exists()


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("__0_0.distcp", "flip", "the content of '__0_0.distcp' does not have its checksum"),
        (".metadata", "flip", "the content of '.metadata' does not have its checksum"),
        ("run.pt", "cut", r"its file 'run.pt' has \d+ bytes in place of \d+"),
        ("__0_0.distcp", "remove", "its file '__0_0.distcp' is missing"),
        ("files.json", "remove", "it has no files.json, which is written last: it was never complete"),
    ],
)
def test_sharded_checkpoint_that_is_damaged_is_refused(tmp_path: Path, name: str, damage: str, said: str):
    path = write(tmp_path, 1, 2)
    content = (path / name).read_bytes()
    middle = len(content) // 2
    if damage == "remove":
        (path / name).unlink()
    else:
        rest = b"" if damage == "cut" else bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (path / name).write_bytes(content[:middle] + rest)
    with pytest.raises(DataError, match=f"cannot be read .{said}.*write 'step-0000000001' into '.*latest'"):
        load_checkpoint(path)


class Malice:
    def __reduce__(self):
        return (print, ("this would have run",))


def relist(path: Path, name: str) -> None:
    """Give a file that was changed on purpose its checksum."""
    content = (path / name).read_bytes()
    listed = json.loads((path / "files.json").read_text())
    listed["files"][name] = [len(content), zlib.crc32(content)]
    (path / "files.json").write_text(json.dumps(listed))


def test_sharded_checkpoint_runs_no_code_of_its_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Malice()))
    relist(path, ".metadata")
    with pytest.raises(DataError, match="holds Python objects, which could run code"):
        load_checkpoint(path)
    assert capsys.readouterr().out == ""


def test_sharded_checkpoint_takes_no_file_from_elsewhere(tmp_path: Path):
    path = write(tmp_path, 1)
    content = (path / ".metadata").read_bytes()
    assert b"__0_0.distcp" in content
    (path / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../0_0distcp"))
    relist(path, ".metadata")
    with pytest.raises(DataError, match=r"\.metadata names a file that files.json does not list: '../0_0distcp'"):
        load_checkpoint(path)


def test_sharded_checkpoint_is_found_as_a_folder_and_not_as_its_part(tmp_path: Path):
    path = write(tmp_path / "run" / "checkpoints", 2)
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(path) == path
    with pytest.raises(
        DataError, match=r"run.pt': a part of a sharded checkpoint; give its folder, '.*step-0000000002'"
    ):
        load_checkpoint(find_checkpoint(path / "run.pt"))
    with pytest.raises(DataError, match=r"a part of the run '.*/run': give '.*/run'"):
        find_checkpoint(path.parent)
