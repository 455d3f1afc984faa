from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mmdata.errors import ConfigError, DataError
from mmdata.train.checkpoint import (
    MAY_CHANGE,
    check_same_settings,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from mmdata.train.randomness import rng_state, seed_rank, set_rng_state


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
        "from mmdata.train import checkpoint\n"
        "def cut(state, file):\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "torch.save = cut\n"
        "checkpoint.save_checkpoint(Path(sys.argv[1]), {'step': 2, 'model': {}}, keep=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120)
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
    with pytest.raises(DataError, match=r"step-0000000003.pt': cannot be read \(.*to use an older one, write its name"):
        load_checkpoint(path)


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
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(DataError, match="not written by mmdata train"):
        load_checkpoint(tmp_path / "other.pt")
    torch.save({"format": 99, "model": {}}, tmp_path / "new.pt")
    with pytest.raises(DataError, match=r"format 99 is newer than 1; update mmdata"):
        load_checkpoint(tmp_path / "new.pt")
    with pytest.raises(DataError, match=r"nowhere.pt': no such file"):
        load_checkpoint(tmp_path / "nowhere.pt")


def test_checkpoint_pointer_to_a_missing_file_names_the_others(tmp_path: Path):
    save(tmp_path, 1)
    save(tmp_path, 2).unlink()
    with pytest.raises(DataError, match=r"'step-0000000002.pt', which is missing; .*into it: step-0000000001.pt$"):
        latest_checkpoint(tmp_path)


def test_checkpoint_weights_that_do_not_fit_are_an_error():
    state = {"model": torch.nn.Embedding(5, 2).state_dict()}
    with pytest.raises(
        ConfigError, match=r"'x.pt': its weights do not fit the model \(size mismatch for weight: .*tokenizer"
    ):
        load_weights(torch.nn.Embedding(6, 2), state, origin="x.pt")


def test_settings_that_change_numbers_are_named():
    saved = {"data": {"seed": 0, "num_workers": 1}, "train": {"lr": 0.1, "betas": [0.9, 0.98]}}
    check_same_settings(
        saved, {"data": {"seed": 0, "num_workers": 9}, "train": {"lr": 0.1, "betas": (0.9, 0.98)}}, origin="x"
    )
    with pytest.raises(
        ConfigError, match=r"cannot resume from x: data.seed was 0, is 1; train.lr was 0.1, is 0.2. Rest"
    ):
        check_same_settings(saved, {"data": {"seed": 1}, "train": {"lr": 0.2, "betas": [0.9, 0.98]}}, origin="x")


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
    from mmdata.config import ModelConfig, TrainConfig
    from mmdata.data_config import DataConfig

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
