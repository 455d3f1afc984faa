from __future__ import annotations

import os
import pickle
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata.errors import ConfigError, DataError
from mmdata.files import write_whole
from mmdata.train.run import checkpoint
from mmdata.train.run.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    rng_state,
    save_checkpoint,
    seed_rank,
    set_rng_state,
)
from mmdata.train.run.same_run import MAY_CHANGE, check_same_settings
from tests.programs import PATIENCE_S, run_program


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, {"step": step, "model": {"w": torch.full((3,), float(step))}}, keep=keep)


def test_checkpoint_comes_back_and_latest_points_at_it(tmp_path: Path):
    assert latest_checkpoint(tmp_path) is None
    path = save(tmp_path / "a" / "b", 7)
    assert path.name == "step-0000000007.pt"
    assert latest_checkpoint(tmp_path / "a" / "b") == path
    assert torch.equal(load_checkpoint(path)["model"]["w"], torch.full((3,), 7.0))


def test_checkpoint_keeps_the_newest(tmp_path: Path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0000000003.pt", "step-0000000004.pt"]


def test_checkpoint_resumed_from_further_back_drops_what_lies_ahead(tmp_path: Path):
    for step in (10, 20):
        save(tmp_path, step)
    save(tmp_path, 15, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0000000015.pt"]


def test_checkpoint_killed_in_mid_write_leaves_the_one_before(tmp_path: Path):
    save(tmp_path, 1)
    program = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from mmdata.train.run import checkpoint\n"
        "def cut(state, file):\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "torch.save = cut\n"
        "checkpoint.save_checkpoint(Path(sys.argv[1]), {'step': 2, 'model': {}}, keep=1)\n"
    )
    done = run_program([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=PATIENCE_S)
    assert done.returncode == -signal.SIGKILL
    path = latest_checkpoint(tmp_path)
    assert path is not None
    assert load_checkpoint(path)["step"] == 1
    save(tmp_path, 3, keep=1)  # what the kill left half-written, as large as a checkpoint, does not stay
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0000000003.pt"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_checkpoint_cut_short_is_an_error_with_a_remedy(share: float, tmp_path: Path):
    path = save(tmp_path, 3)
    os.truncate(path, int(path.stat().st_size * share))
    said = r"step-0000000003.pt': cannot be read \(.*; no whole one before it lies in '.*': put back a copy, or give an"
    with pytest.raises(DataError, match=said):
        load_checkpoint(path)


def equal(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors included."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def load_or_error(path: Path, *, mapped: bool) -> dict[str, Any] | DataError:
    try:
        return load_checkpoint(path, mapped=mapped)
    except DataError as error:
        return error


@pytest.mark.parametrize("mapped", [False, True])
def test_checkpoint_with_a_flipped_bit_is_an_error_or_equal(mapped: bool, tmp_path: Path):
    model = torch.nn.Linear(20, 20)
    model(torch.ones(2, 20)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = {"step": 7, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "settings": {"a": [1, "x"]}}
    path = save_checkpoint(tmp_path, state, keep=2)
    sound, expected = path.read_bytes(), load_checkpoint(path)
    draw, refused = random.Random(0), 0
    # The last bytes are the table of the zip, where a flip leads to other places of the file.
    places = [*(draw.randrange(len(sound)) for _ in range(400)), *range(len(sound) - 100, len(sound))]
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        found = load_or_error(path, mapped=mapped)
        assert equal(found, expected) or str(found).startswith(f"checkpoint '{path}': cannot be read ("), place
        refused += isinstance(found, DataError)
    assert refused > len(places) / 2, "the others lie in the padding between records"


def test_checkpoint_that_is_damaged_offers_the_newest_whole_one_before_it(tmp_path: Path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    for step in (2, 3):
        flip_a_weight(tmp_path / f"step-000000000{step}.pt", step)
    said = (
        r"step-0000000003.pt': cannot be read \(the content of '.*data/0' does not have its checksum\); to go on from "
        r"the one before it, write 'step-0000000001.pt' into '.*latest'$"
    )
    with pytest.raises(DataError, match=said):
        load_checkpoint(tmp_path / "step-0000000003.pt")


def flip_a_weight(path: Path, value: float) -> None:
    content = path.read_bytes()
    weight = np.float32(value).tobytes()
    assert content.count(3 * weight) == 1
    path.write_bytes(content.replace(3 * weight, 2 * weight + bytes([weight[0] ^ 1]) + weight[1:]))


def test_checkpoint_has_checksums_where_a_program_has_switched_them_off(tmp_path: Path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path, 1)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_checkpoint(path)["step"] == 1


def mapped_files() -> set[str]:
    """Paths of the files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/" in line}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what a process has mapped")
def test_checkpoint_is_mapped_until_its_tensors_are_gone(tmp_path: Path):
    path = save(tmp_path, 7)
    state = load_checkpoint(path, mapped=True)
    assert os.fspath(path) in mapped_files()
    path.unlink()  # as a run does that goes on; the pages stay
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(3))
    load_weights(model, state, origin="x.pt")
    state["model"]["w"] += 1  # private pages: nothing that others could see
    del state
    assert not any(name.startswith(os.fspath(path)) for name in mapped_files())
    assert model.w.tolist() == [7.0] * 3


def test_checkpoint_on_a_file_system_that_maps_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, load = save(tmp_path, 7), torch.load

    def refuse(file: Path, *, mmap: bool = False, **settings: Any) -> Any:
        if mmap:
            raise RuntimeError(f"unable to mmap 77 bytes from file <{file}>: No such device (19)")
        return load(file, **settings)

    monkeypatch.setattr(torch, "load", refuse)
    assert load_checkpoint(path, mapped=True)["model"]["w"].tolist() == [7.0] * 3


class Harmful:
    def __reduce__(self):
        return (os.mkdir, ("harm",))


def test_checkpoint_never_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, "model": Harmful()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"format": 1, "model": Harmful()}, protocol=2))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(DataError, match="cannot be read"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def test_checkpoint_of_others_and_of_the_future_are_refused(tmp_path: Path):
    for number, content in enumerate(({"state_dict": {}}, [1], {"format": "pt", "model": {}})):
        torch.save(content, tmp_path / f"{number}.pt")
        with pytest.raises(DataError, match="not written by mmdata train"):
            load_checkpoint(tmp_path / f"{number}.pt")
    torch.save({"format": 99, "model": {}}, tmp_path / "new.pt")
    with pytest.raises(DataError, match=r"format 99 is newer than 1; update mmdata"):
        load_checkpoint(tmp_path / "new.pt")
    with pytest.raises(DataError, match=r"nowhere.pt': no such file"):
        load_checkpoint(tmp_path / "nowhere.pt")


def test_checkpoint_pointer_to_a_missing_file_names_the_others(tmp_path: Path):
    save(tmp_path, 1)
    save(tmp_path, 2).unlink()
    said = (
        r"'step-0000000002.pt', which is missing; write one of these into it to go on from there: step-0000000001.pt$"
    )
    with pytest.raises(DataError, match=said):
        latest_checkpoint(tmp_path)


def test_checkpoint_pointer_that_is_gone_or_damaged_names_the_checkpoints(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path, step)
    pointer, names = tmp_path / "latest", "step-0000000001.pt, step-0000000002.pt"
    for content in (b"", b"step-0000000002.p\xf4\n", b"../step-0000000002.pt\n"):
        pointer.write_bytes(content)
        said = f"latest: holds '.*', not the name of a checkpoint; write one of these into it .*: {names}$"
        with pytest.raises(DataError, match=said):
            latest_checkpoint(tmp_path)
    pointer.unlink()
    said = f"latest: no such file; write one of these into it .*: {names}; or give another train.output to start anew$"
    with pytest.raises(DataError, match=said):
        latest_checkpoint(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "nothing was deleted"


def test_checkpoint_pointer_is_there_before_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kill between the two leaves no run that cannot begin."""
    monkeypatch.setattr(checkpoint, "write_whole", killed_after_the_first_checkpoint)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert (tmp_path / "step-0000000001.pt").is_file()
    assert latest_checkpoint(tmp_path) is None
    monkeypatch.undo()
    assert latest_checkpoint(save(tmp_path, 1).parent) == tmp_path / "step-0000000001.pt"


def killed_after_the_first_checkpoint(path: Path, data: Any) -> None:
    write_whole(path, data)
    if path.suffix == ".pt":
        raise KeyboardInterrupt


def test_checkpoint_that_is_sound_outlives_newer_ones(tmp_path: Path):
    for step in (1, 2, 3, 4, 5):
        save_checkpoint(tmp_path, {"step": step, "model": {}}, keep=2, sound_step=min(step, 2))
    assert sorted(p.stem[-1] for p in tmp_path.glob("*.pt")) == ["2", "4", "5"]
    save_checkpoint(tmp_path, {"step": 6, "model": {}}, keep=2)
    assert sorted(p.stem[-1] for p in tmp_path.glob("*.pt")) == ["5", "6"]


def test_checkpoint_weights_that_do_not_fit_are_an_error():
    state = {"model": torch.nn.Embedding(5, 2).state_dict()}
    with pytest.raises(
        ConfigError, match=r"'x.pt': its weights do not fit the model \(size mismatch for weight: .*tokenizer"
    ):
        load_weights(torch.nn.Embedding(6, 2), state, origin="x.pt")


def test_settings_that_change_numbers_are_named():
    saved = {"data": {"seed": 0, "loading": {"num_workers": 1}}, "train": {"lr": 0.1, "betas": [0.9, 0.98]}}
    moved = {"data": {"seed": 0, "loading": {"num_workers": 9}}, "train": {"lr": 0.1, "betas": (0.9, 0.98)}}
    check_same_settings(saved, moved, origin="x")
    with pytest.raises(
        ConfigError, match=r"cannot resume from x: data.seed was 0, is 1; train.lr was 0.1, is 0.2. Rest"
    ):
        check_same_settings(saved, {"data": {"seed": 1}, "train": {"lr": 0.2, "betas": [0.9, 0.98]}}, origin="x")


def test_files_of_a_selection_and_of_a_table_may_have_moved():
    def saved_as(folder: str, key: str = "uid") -> dict[str, object]:
        join = [{"table": f"{folder}/scores.parquet", "key": key}]
        return {"data": {"shards": "a", "select": f"{folder}/good.parquet", "join": join}}

    check_same_settings(saved_as("here"), saved_as("there"), origin="x")
    with pytest.raises(ConfigError, match=r"data.join.0.key was 'uid', is 'id'. Rest"):
        check_same_settings(saved_as("here"), saved_as("there", key="id"), origin="x")


@pytest.mark.parametrize(
    ("before", "now"), [("width > 3", "width > 4"), ("a/good.txt", "width > 4"), (None, "a/good.txt")]
)
def test_another_selection_is_refused(before: str | None, now: str):
    def saved_as(select: str | None) -> dict[str, object]:
        return {"data": {"shards": [{"shards": "a", "select": select}], "val": {"shards": "v", "select": select}}}

    message = f"data.shards.0.select was {before!r}, is {now!r}; data.val.select was {before!r}, is {now!r}. Rest"
    with pytest.raises(ConfigError, match=message):
        check_same_settings(saved_as(before), saved_as(now), origin="x")
    check_same_settings(saved_as("a/good.txt"), saved_as("b/mask.NPY"), origin="x")


def test_settings_of_a_mixture_may_change_in_their_folders_only():
    def mixture(*sources: tuple[str, int]) -> dict[str, object]:
        return {"data": {"shards": [{"shards": shards, "weight": weight} for shards, weight in sources]}}

    saved = mixture(("a", 3), ("b", 1))
    check_same_settings(saved, mixture(("moved/a", 3), ("moved/b", 1)), origin="x")
    for current, message in (
        (mixture(("a", 3), ("b", 5)), "data.shards.1.weight was 1, is 5. Rest"),
        (mixture(("b", 1), ("a", 3)), "data.shards.0.weight was 3, is 1; data.shards.1.weight was 1, is 3. Rest"),
        (mixture(("a", 3)), "data.shards.1.weight was 1, is None. Rest"),
        ({"data": {"shards": "a"}}, "data.shards.0.weight was 3, is None; data.shards.1.weight was 1, is None. Rest"),
    ):
        with pytest.raises(ConfigError, match=f"cannot resume from x: {message}"):
            check_same_settings(saved, current, origin="x")


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
    path = save_checkpoint(tmp_path, state, keep=1)
    seed_rank(4, 1)
    set_rng_state(load_checkpoint(path)["rng"][0], cpu)
    assert draw() == expected


def test_ranks_draw_different_numbers():
    drawn = set()
    for rank in range(4):
        seed_rank(0, rank)
        drawn.add((random.random(), np.random.rand(), torch.rand(()).item()))
    assert len({x for triple in drawn for x in triple}) == 12
