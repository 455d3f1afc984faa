"""Groups of neighbours that a run makes between its epochs: recorded, and the same after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mmdata import Index, Loader
from mmdata.config import load_config
from mmdata.config.batches import GroupsConfig
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from mmdata.loader.regrouped import RegroupedLoader
from mmdata.train.memory.neighbours import group_neighbours
from tests.joins import join_first
from tests.programs import PATIENCE_S, Program, run_program
from tests.train.test_loop import last_state
from tests.waiting import wait_until

STEPS = 24
"""Four epochs of six batches of eight."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, make_corpus: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("regroup")
    raw = make_corpus(folder / "raw", 48)
    shards = folder / "shards"
    convert(raw / "captions.jsonl", shards, ConvertConfig(train_tokenizer=300))
    data: dict[str, Any] = {"shards": str(shards), "tokenizer": str(shards / "tokenizer"), "global_batch_size": 8}
    data |= {"image_size": 16, "text_buckets": 1, "loading": {"num_workers": 1}}
    data |= {"groups": {"source": "run", "size": 2, "share": 0.5}}
    train: dict[str, Any] = {
        "steps": STEPS,
        "warmup_steps": 1,
        "log_every_steps": 1,
        "schedule": "constant",
    }
    train |= {"schedule": "constant", "checkpoint_every_steps": 4, "feature_cache": "pair"}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"data": data, "model": {"name": "micro"}, "train": train}))
    return path


def command(config: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "mmdata", "train", str(config), f"train.output={output}"]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    finish(command(config, output))
    return output


def finish(words: list[str]) -> None:
    done = run_program(words, capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def groups_of(path: Path) -> np.ndarray[Any, Any]:
    return np.load(path)["group"]


def test_each_epoch_but_the_first_has_groups_of_near_rows(whole: Path):
    assert sorted(path.name for path in (whole / "groups").iterdir()) == [f"epoch-{n}.npy" for n in (1, 2, 3)]
    for number in (1, 2, 3):
        groups = groups_of(whole / "groups" / f"epoch-{number}.npy")
        counts = np.bincount(groups[groups >= 0])
        assert len(groups) == 48
        assert set(counts.tolist()) == {2}
    told = lines(whole, "groups")
    assert [line["step"] for line in told] == [6, 12, 18]
    assert all(line["similarity"] > line["random_similarity"] for line in told)


def test_groups_are_those_of_the_features_that_the_run_had(config: Path, whole: Path, tmp_path: Path):
    finish([*command(config, tmp_path), "train.steps=18"])  # the updates before the last search
    features = torch.from_numpy(np.load(tmp_path / "features.npy")).float()
    loader = RegroupedLoader(load_config(config).data, tmp_path, rank=0, world_size=1)
    expected = group_neighbours(features, 2, seed=0 + 3, same=loader.rows_alike())
    assert groups_of(whole / "groups" / "epoch-3.npy").tolist() == expected.tolist()


def test_rows_of_one_caption_hash_stand_in_no_group_together(config: Path, tmp_path: Path):
    content = yaml.safe_load(config.read_text())
    index = Index.open(content["data"]["shards"])
    rows = [f"{key},{row % 3}" for row, key in enumerate(index.keys(np.arange(48)))]
    (tmp_path / "meant.csv").write_text("\n".join(["key,meant", *rows]))
    content["data"] |= {"join": [{"table": str(tmp_path / "meant.csv")}], "caption_hash": "meant"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    join_first(tmp_path / "run.yaml")
    finish([*command(tmp_path / "run.yaml", tmp_path / "run"), "train.steps=12"])
    groups = groups_of(tmp_path / "run" / "groups" / "epoch-1.npy")
    pairs = [np.flatnonzero(groups == group) for group in range(groups.max() + 1)]
    assert len(pairs) > 15
    assert all(a % 3 != b % 3 for a, b in pairs)


def test_batches_hold_the_groups_together(config: Path, whole: Path, tmp_path: Path):
    data = load_config(config).data
    loader = RegroupedLoader(data, whole / "groups", rank=0, world_size=1)
    loader.use_groups(2)
    groups = groups_of(whole / "groups" / "epoch-2.npy")
    together = 0
    rows: list[int] = []
    for batch in loader:
        own = batch["rows"].tolist()
        rows += own
        found = groups[own]
        together += sum(bool(found[i] >= 0 and found[i] == found[i + 1]) for i in range(0, 8, 2))
    assert sorted(rows) == list(range(48))
    assert together >= 12  # half of 24 pairs of rows
    assert loader.state_dict()["groups_of"] == 2


def test_a_state_from_before_the_groups_goes_back_to_none(config: Path, whole: Path):
    loader = RegroupedLoader(load_config(config).data, whole / "groups", rank=0, world_size=1)
    without = loader.state_dict()
    first = next(iter(loader))["rows"].tolist()
    loader.use_groups(1)
    with_groups = loader.state_dict()
    assert next(iter(loader))["rows"].tolist() != first
    loader.load_state_dict(without)
    assert next(iter(loader))["rows"].tolist() == first
    loader.load_state_dict(with_groups)
    assert (loader.state_dict()["groups_of"], loader.state_dict()["epoch"]) == (1, 1)
    loader.close()


HELD = """
import sys, time
from mmdata.cli import main
from mmdata.train.run.trainer import Trainer

update, step = Trainer._update, int(sys.argv[1])

def held(self, batch):
    while self.step == step and not self.stop.received:
        time.sleep(0.01)
    update(self, batch)

Trainer._update = held
del sys.argv[:2]
sys.exit(main(sys.argv))
"""
"""A run that waits for its signal before it goes on from a step: a test may be late."""


def held_at(step: int, config: Path, output: Path) -> Program:
    return Program([sys.executable, "-c", HELD, str(step), *command(config, output)[3:]], env=ENVIRONMENT)


@pytest.mark.parametrize("after", [5, 9, 20])
@pytest.mark.sweep(keep=1)
def test_killed_and_resumed_has_the_same_groups_and_weights_bit_for_bit(
    config: Path, whole: Path, tmp_path: Path, after: int
):
    output = tmp_path / "run"
    killed = held_at(after + 2, config, output)
    metrics = output / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and len(lines(output, "train")) >= after, program=killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=PATIENCE_S)
    finish(command(config, output))
    for number in (1, 2, 3):
        name = Path("groups") / f"epoch-{number}.npy"
        assert (output / name).read_bytes() == (whole / name).read_bytes(), number
    before, found = last_state(whole), last_state(output)
    assert all(torch.equal(before["model"][name], found["model"][name]) for name in before["model"])
    assert found["batches"] == before["batches"]


@pytest.mark.sweep
def test_resumed_on_two_ranks_goes_on_with_the_recorded_groups(config: Path, whole: Path, tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    for output, ranks in ((one, 0), (two, 2)):
        stopped = held_at(9, config, output)
        wait_until((output / "groups" / "epoch-1.npy").is_file, program=stopped)
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words = command(config, output)
        finish([*launcher, *words[1:]] if ranks else words)
    name = Path("groups") / "epoch-1.npy"
    assert (one / name).read_bytes() == (two / name).read_bytes() == (whole / name).read_bytes()
    # The losses of two ranks are those of one but for the order of sums: the batches are the same.
    losses = [[line["loss"] for line in lines(run, "train")][:12] for run in (whole, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert last_state(two)["step"] == STEPS


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"source": "run", "candidates": 2}, "source 'run' needs a size: how many near neighbours stand together"),
        ({"size": 2, "every_epochs": 3}, "every_epochs belongs to source 'run', and source is 'label': leave it out"),
    ],
)
def test_settings_that_do_not_fit_together(groups: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        GroupsConfig.model_validate(groups)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.feature_cache=null"], "needs train.feature_cache=pair, from which neighbours are found"),
        (["train.steps=null", "train.epochs=2"], "needs train.steps in place of train.epochs, since the number"),
    ],
    ids=["cache", "steps"],
)
def test_what_it_needs_is_said(config: Path, tmp_path: Path, words: list[str], said: str):
    done = run_program(
        [*command(config, tmp_path / "run"), *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0
    assert f"data.groups.source 'run' {said}" in done.stderr
    assert done.stderr.count("data.groups.source 'run' needs") == 1


def test_a_loader_of_its_own_says_that_only_a_run_makes_groups(config: Path, caplog: pytest.LogCaptureFixture):
    Loader.from_config(load_config(config).data, rank=0, world_size=1).close()
    assert any("only `mmdata train` makes such groups: these batches have none" in line for line in caplog.messages)


def test_groups_that_are_gone_are_named(config: Path, tmp_path: Path):
    loader = RegroupedLoader(load_config(config).data, tmp_path, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"epoch-2.npy': the run's groups of epoch 2 are gone, .*: put the file back"):
        loader.load_state_dict({**loader.state_dict(), "groups_of": 2})
