"""examples/compare.py: runs that are paired, made once, and the table of what each arm gains."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mmdata.config import load_config
from mmdata.convert import ConvertConfig, convert
from mmdata.train.run.checkpoint import load_checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples" / "compare.py"
ARMS: dict[str, Any] = {
    "stage": {"settings": ["train.steps=1"]},
    "plain": {"init_from": "stage"},
    "near": {"init_from": "stage", "neighbours": 2, "settings": ["data.groups.share=0.5"]},
}
"""Two arms that are compared, and the one that both begin with."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, make_corpus: Callable[..., Path]) -> Path:
    """config.yaml of two steps a run over shards/ (42 images), and the compositional test pairs.jsonl."""
    folder = tmp_path_factory.mktemp("compare")
    raw = make_corpus(folder / "raw", 42)
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig(train_tokenizer=300))
    names = sorted(path.name for path in (raw / "images").iterdir())
    pairs = [
        {"type": ("order", "place")[i % 2], "image_0": f"raw/images/{names[2 * i]}"}
        | {"image_1": f"raw/images/{names[2 * i + 1]}", "caption_0": "a dog on a cat", "caption_1": "a cat on a dog"}
        for i in range(6)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    shards = str(folder / "shards")
    data: dict[str, Any] = {"shards": shards, "val": {"shards": shards}, "tokenizer": f"{shards}/tokenizer"}
    data |= {"global_batch_size": 8, "image_size": 16, "max_length": 16, "loading": {"num_workers": 0}}
    train = {"steps": 2, "warmup_steps": 0, "evaluate_every_epochs": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": data, "model": {"name": "micro"}, "train": train}))
    return folder


def compare(folder: Path, *words: object, arms: dict[str, Any] = ARMS, **changes: Any) -> int:
    """Run the example in this process on arms.yaml, which is written; returns the exit code."""
    content = {"config": str(folder / "config.yaml"), "output": str(folder / "out"), "baseline": "plain"}
    (folder / "arms.yaml").write_text(
        yaml.safe_dump({**content, "seeds": [1, 2], "arms": arms, **changes}, sort_keys=False)
    )
    before, path = sys.argv, list(sys.path)
    sys.path.insert(0, str(EXAMPLE.parent))  # as `python examples/compare.py` does
    sys.argv = ["compare.py", str(folder / "arms.yaml"), *map(str, words)]
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.argv, sys.path[:] = before, path
    raise AssertionError("a program ends with a code")


def test_runs_are_paired_made_once_and_compared(corpus: Path, capsys: pytest.CaptureFixture[str]):
    pairs = {"pairs": str(corpus / "pairs.jsonl")}
    assert compare(corpus, **pairs) == 0
    printed = capsys.readouterr().out
    runs = re.findall(r"^\$ mmdata train .* train\.output=\S*/(\S+)", printed, re.MULTILINE)
    assert runs == ["stage-1", "plain-1", "near-1", "stage-2", "plain-2", "near-2"]
    configs = {name: load_config(corpus / "out" / name / "config.yaml") for name in runs}
    assert {name: config.model.init_from for name, config in configs.items()} == {
        name: None if name.startswith("stage") else str(corpus / "out" / f"stage-{name[-1]}") for name in runs
    }
    groups = configs["near-2"].data.groups
    assert groups is not None
    assert re.fullmatch(rf"{corpus}/out/groups/stage-2-by-2-[0-9a-f]{{8}}\.npy", groups.source)
    assert (groups.size, groups.share) == (2, 0.5)
    assert [(config.train.seed, config.data.seed) for config in configs.values()] == [(1, 1)] * 3 + [(2, 2)] * 3
    tables = re.findall(
        r"^\| arm \| seeds \| (\w+) \| gain over plain \(95 %\) \| seeds won \|$", printed, re.MULTILINE
    )
    assert tables == ["r1", "order", "place", "mean"]
    assert re.findall(r"^\| (\w+) \| 2 \| ", printed, re.MULTILINE) == ["plain", "stage", "near"] * 4
    results = {name: json.loads((corpus / "out" / name / "result.json").read_text())["scores"] for name in runs}
    mean = 100 * (results["plain-1"]["mean"] + results["plain-2"]["mean"]) / 2
    assert f"| plain | 2 | {mean:.1f} |  |  |\n" in printed.partition("| mean |")[2]

    assert compare(corpus, **pairs) == 0
    again = capsys.readouterr().out
    assert "$ mmdata" not in again
    assert printed.endswith(again)

    other = {**ARMS, "stage": {"settings": ["train.steps=2"]}}
    refused = f"{corpus / 'out' / 'plain-1'}: of other settings or another model; remove it and runs from it, or"
    for words, arms in (["train.lr=1e-2"], ARMS), ([], other):
        assert compare(corpus, *words, arms=arms, **pairs) == 1
        assert refused in capsys.readouterr().err


def test_groups_of_another_model_have_another_name(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    read, path = runpy.run_path(str(EXAMPLE))["read"], corpus / "arms.yaml"
    content = {"config": str(corpus / "config.yaml"), "output": "out", "baseline": "plain", "seeds": [1]}
    found = set()
    for steps in (1, 1, 2):
        arms = {**ARMS, "stage": {"settings": [f"train.steps={steps}"]}}
        path.write_text(yaml.safe_dump({**content, "arms": arms}))
        found.add(read(path, [], None).groups("near", 1))
    assert len(found) == 2


def test_only_some_arms_and_seeds_by_retrieval(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arms = {**ARMS, "same": {"init_from": "stage", "settings": ["train.log_every_steps=1"]}, "other": {}}
    assert compare(corpus, "--arms", "same", "--seeds", 5, 6, "--output", tmp_path, "train.steps=1", arms=arms) == 0
    printed = capsys.readouterr().out
    made = [f"{arm}-{seed}" for arm in ("plain", "same", "stage") for seed in (5, 6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == made
    # Equal settings and seeds: equal to the bit.
    assert printed.splitlines()[-1].endswith(" | +0.0 (+0.0 to +0.0) | 0 |")
    checkpoints = [next((tmp_path / name / "checkpoints").glob("step-*")) for name in ("plain-5", "same-5")]
    one, other = (load_checkpoint(path)["model"] for path in checkpoints)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("words", "arms", "code", "message"),
    [
        (["--arms", "nera"], ARMS, 2, "error: no arm 'nera'; there are stage, plain, near"),
        ([], {"plain": {"init_from": "stgae"}}, 2, "arms.yaml: no arm 'stgae'; there are plain"),
        ([], {"plain": {"settings": ["train.losss=x"]}}, 2, "unknown key 'train.losss'"),
        (["train.stepss=1"], ARMS, 2, "unknown key 'train.stepss'"),
        ([], {"plain": {"setings": []}}, 2, "arms.yaml: unknown key 'arms.plain.setings'; did you mean 'settings'"),
        ([], {"plain": {"neighbours": 2}}, 2, "arms.yaml: plain needs plain; an arm cannot need itself"),
        ([], {"plain": {"init_from": "a"}, "a": {"init_from": "plain"}}, 2, "arms.yaml: plain needs a needs plain; an"),
        (["train.seed=9"], ARMS, 2, "arms.yaml: train.seed=9: each run has its own; --output and --seeds set them"),
        ([], {"plain": {"settings": ["train.output=x"]}}, 2, "arms.yaml: train.output=x: each run has its own; --out"),
        (["data.val={}"], ARMS, 2, "arms.yaml: arm 'plain': data.val is not set; retrieval on it is measured"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    arms: dict[str, Any],
    code: int,
    message: str,
):
    assert compare(corpus, *words, "--output", tmp_path / "out", arms=arms) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_experiment_without_seeds_is_refused(corpus: Path, capsys: pytest.CaptureFixture[str]):
    assert compare(corpus, seeds=[]) == 2
    assert "arms.yaml: 'seeds': expected " in capsys.readouterr().err


def test_a_training_that_was_stopped_ends_the_program(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mmdata.cli.main", lambda words: 143)
    assert compare(corpus, "--output", tmp_path / "out") == 143
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.parametrize("path", sorted((EXAMPLE.parent / "arms").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_experiment_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    experiment = runpy.run_path(str(EXAMPLE))["read"](path, [], None)  # which loads the config of each arm
    assert path.read_text().startswith(f"# python examples/compare.py examples/arms/{path.name}\n")
    assert experiment.baseline in experiment.arms
