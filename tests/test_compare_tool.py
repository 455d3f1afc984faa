"""mmdata compare: runs that are paired, made once, and what the table says of them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from mmdata import Index, cli
from mmdata.cli import experiment as compare
from mmdata.convert import ConvertConfig, convert
from mmdata.train.ranks import collectives
from mmdata.train.run.checkpoint import load_checkpoint
from mmdata.train.run.find import find_checkpoint

COLOURS = ("red", "blue", "green")


def run_tool(*words: object) -> int:
    """Run the command in this process."""
    return cli.main(["compare", *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_corpus: Callable[..., Path]) -> Path:
    """config.yaml of an experiment of two steps a run over shards/ (42 images); run once, whole."""
    folder = tmp_path_factory.mktemp("compare")
    raw = make_corpus(folder / "raw", 42)
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig(train_tokenizer=300))
    keys = Index.open(folder / "shards").keys(np.arange(42))
    pq.write_table(pa.table({"key": keys, "captions": [["a dog"]] * 42}), folder / "extra.parquet")
    names = sorted(path.name for path in (raw / "images").iterdir())
    pairs = [
        {"type": kind, "image_0": f"images/{names[2 * i]}", "image_1": f"images/{names[2 * i + 1]}"}
        | {"caption_0": f"a {COLOURS[i % 3]} dog on a cat", "caption_1": f"a cat on a {COLOURS[i % 3]} dog"}
        for i in range(6)
        for kind in (("order", "place")[i % 2],)
    ]
    (raw / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    shards = str(folder / "shards")
    data: dict[str, Any] = {"shards": shards, "val": {"shards": shards}, "tokenizer": f"{shards}/tokenizer"}
    data |= {"global_batch_size": 8, "image_size": 16, "max_length": 16, "loading": {"num_workers": 0}}
    arms: dict[str, Any] = {
        "extra": {"settings": [f"data.negative_captions={folder / 'extra.parquet'}"]},
        "same": {"settings": ["train.log_every_steps=1"]},
        "near": {"neighbours": 2},
        "plain": {},
    }
    compare: dict[str, Any] = {"output": str(folder / "out"), "arms": arms, "baseline": "plain", "seeds": [1, 2]}
    compare |= {"pairs": str(raw / "pairs.jsonl")}
    train = {"steps": 2, "warmup_steps": 0, "evaluate_every_epochs": 0}
    sections = {"data": data, "model": {"name": "micro"}, "train": train, "compare": compare}
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    assert run_tool(folder / "config.yaml", "--seeds", 1) == 0
    assert run_tool(folder / "config.yaml") == 0
    return folder


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]


def test_each_run_is_made_once(lines: list[dict[str, Any]]):
    runs = [(line["arm"], line["seed"]) for line in lines]
    assert len(runs) == len(set(runs)) == 4 * 2
    assert sorted(seed for _, seed in runs) == [1] * 4 + [2] * 4
    assert runs[0][0] == "plain", "the baseline first"


def test_arms_of_the_same_settings_and_seed_score_the_same_to_the_bit(lines: list[dict[str, Any]]):
    scores = [{k: v for k, v in line.items() if type(v) is float and not k.endswith("_s")} for line in lines]
    of = {(line["arm"], line["seed"]): score for line, score in zip(lines, scores, strict=True)}
    for (arm, *rest), score in of.items():
        if arm == "same":
            assert score == of[("plain", *rest)]
    plain = [score for (arm, *_), score in of.items() if arm == "plain"]
    assert plain[0] != plain[1], "other seeds, other runs"


def test_blind_control_is_at_half_by_construction(lines: list[dict[str, Any]]):
    assert {line[f"{kind}_blind"] for line in lines for kind in ("order", "place", "mean")} == {0.5}


def test_neighbours_are_those_of_the_baseline_of_the_same_seed(folder: Path, lines: list[dict[str, Any]]):
    near = next(line for line in lines if line["arm"] == "near" and line["seed"] == 2)
    plain = next(line for line in lines if line["arm"] == "plain" and line["seed"] == 2)
    run = folder / "out" / "runs" / f"near-2-{near['digest']}"
    settings = load_checkpoint(find_checkpoint(run))["settings"]
    groups = folder / "out" / "groups" / f"plain-2-{plain['digest']}-by-2.npy"
    assert settings["data"]["groups"] == {
        "source": str(groups),
        "size": 2,
        "candidates": None,
        "share": 1.0,
        "every_epochs": 1,
    }
    assert groups.is_file()
    assert (settings["data"]["seed"], settings["train"]["seed"]) == (2, 2)


def test_table_says_what_there_is(folder: Path, lines: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]):
    assert run_tool(folder / "config.yaml", "--table", "--metric", "place") == 0
    printed = capsys.readouterr().out.splitlines()
    names = "arm | seeds | place | gain over plain (95 %) | seeds won | order | mean | r1 | mean_blind | mean_shuffled"
    assert printed[0] == f"| {names} |"
    assert [line.split(" | ")[0] for line in printed[2:6]] == ["| plain", "| extra", "| near", "| same"]
    mean = sum(line["place"] for line in lines if line["arm"] == "plain") / 2
    assert printed[2].startswith(f"| plain | 2 | {100 * mean:.1f} |  |  | ")
    assert " | +0.0 (+0.0 to +0.0) | 0 | " in printed[5]
    assert re.fullmatch(r"plain: \d+\.\d s of processor time a run", printed[6])


def test_table_of_some_arms_and_seeds(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run_tool(folder / "config.yaml", "--table", "--arms", "near", "--seeds", 2) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in printed[2:4]] == [["| plain", "1"], ["| near", "1"]]
    assert [line.partition(":")[0] for line in printed[4:]] == ["plain", "near"]


def test_seeds_that_the_config_does_not_list_are_run_and_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = (folder / "config.yaml", f"compare.output={tmp_path / 'out'}")
    words += ("--arms", "plain", "near", "--seeds", 101, 103)
    assert run_tool(*words) == 0
    assert run_tool(*words, "--table") == 0
    printed = capsys.readouterr().out
    made = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["seed"]) for line in made] == [(a, s) for s in (101, 103) for a in ("plain", "near")]
    tables = re.findall(r"^\| (plain|near) \| 2 \| .*$", printed, re.MULTILINE)
    assert tables == ["plain", "near"] * 2
    # Runs of other seeds, as those that the config lists, are not in the table.
    assert run_tool(*words[:-3], "--table") == 2
    assert "'plain' there yet (there are runs of other seeds: --seeds 101 103)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "r2", "--table"], "error: --metric r2: expected one of order, place, mean, r1"),
        (["--arms", "near", "far"], "error: --arms far: expected some of extra, near, plain, same"),
        (["compare=null"], "no section compare; see configs/mining.yaml for one"),
        (["--table", "train.steps=3"], "results.jsonl': no run of the baseline 'plain' there yet"),
        (["compare.baseline=near"], "baseline 'near' must be one of the arms, without neighbours of its own"),
        (
            ["compare.arms.same.init_from=plian"],
            "arm 'same': init_from 'plian' is none of the arms; did you mean 'plain'?",
        ),
        (
            ["compare.arms.same.init_from=extra", "compare.arms.extra.init_from=same"],
            "arms begin with each other's models: extra <- same <- extra",
        ),
        (["compare.pairs=null", "--metric", "order"], "error: --metric order: expected one of r1"),
        (["train.seed=3"], "train.seed: each run has its own, which compare.seeds gives; change that, or leave it out"),
        (["train.output=runs"], "train.output: each run has its own, which compare.output gives; change that, or"),
        (["data.val=null"], "data.val is not set: retrieval on it is measured"),
        (["compare.seeds=[1,1]"], "seeds must differ: got [1, 1]"),
        (["--seeds", "3", "3"], "error: --seeds must differ: got [3, 3]"),
        (["compare.arms.same.settings=[train.losss=x]"], "compare.arms.same: "),
        (
            [f"compare.arms.{name}.settings=[train.lr=1]" for name in ("same", "extra", "near", "plain")]
            + ["train.lr=2"],
            "train.lr: each arm sets it, so that no run would have this one; change it there",
        ),
    ],
)
def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert run_tool(folder / "config.yaml", *words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "$ mmdata train" not in said.out


def test_corpus_without_pairs_is_compared_by_retrieval(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    smaller = [f"compare.output={tmp_path}", "compare.arms={plain: {}, faster: {settings: [train.lr=1e-2]}}"]
    assert run_tool(folder / "config.yaml", "compare.pairs=null", *smaller) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["seed"]) for line in lines] == [(a, s) for s in (1, 2) for a in ("plain", "faster")]
    printed = capsys.readouterr().out.splitlines()
    assert "| arm | seeds | r1 | gain over plain (95 %) | seeds won |" in printed
    assert re.fullmatch(r"plain: \d+\.\d s of processor time a run", printed[-2])
    checkpoints = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/checkpoints/*.pt")}
    assert run_tool(folder / "config.yaml", *smaller, "--metric", "order") == 0
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[-4:-2]] == ["| plain", "| faster"]
    assert len(checkpoints) == 4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/checkpoints/*.pt")} == checkpoints


def test_arms_begin_with_the_finished_model_of_another_arm(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arms: dict[str, Any] = {
        "near": {"init_from": "stage", "neighbours": 2, "settings": ["data.groups.share=0.5"]},
        "later": {"init_from": "stage"},
        "stage": {"settings": ["train.lr=1e-2"]},
    }
    words = [
        "compare.pairs=null",
        f"compare.output={tmp_path}",
        f"compare.arms={json.dumps(arms)}",
        "compare.baseline=later",
    ]
    assert run_tool(folder / "config.yaml", *words, "--table") == 2
    assert "no run of the baseline 'later' there yet" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert run_tool(folder / "config.yaml", *words, "--seeds", 1) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["seed"]) for line in lines] == [("stage", 1), ("later", 1), ("near", 1)]
    stage, later, near = (tmp_path / "runs" / f"{line['arm']}-1-{line['digest']}" for line in lines)
    settings = [load_checkpoint(find_checkpoint(run))["settings"] for run in (stage, later, near)]
    assert [one["model"]["init_from"] for one in settings] == [None, str(stage), str(stage)]
    groups = str(tmp_path / "groups" / f"{stage.name}-by-2.npy")
    assert settings[2]["data"]["groups"] == {
        "source": groups,
        "size": 2,
        "candidates": None,
        "share": 0.5,
        "every_epochs": 1,
    }
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in printed if line.startswith("| ")][1:] == ["| later", "| stage", "| near"]


def test_a_run_that_begins_with_another_has_its_weights(folder: Path, tmp_path: Path):
    arms: dict[str, Any] = {"stage": {}, "later": {"init_from": "stage", "settings": ["train.lr=1e-30"]}}
    words = [
        "compare.pairs=null",
        f"compare.output={tmp_path}",
        f"compare.arms={json.dumps(arms)}",
        "compare.baseline=later",
    ]
    assert run_tool(folder / "config.yaml", *words, "--seeds", 2) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    stage, later = (
        load_checkpoint(find_checkpoint(tmp_path / "runs" / f"{line['arm']}-2-{line['digest']}"))["model"]
        for line in lines
    )
    assert stage.keys() == later.keys()
    assert all(torch.equal(stage[name], later[name]) for name in stage)


@pytest.fixture
def earlier(folder: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """Results of runs whose settings had other digests, and the words that name them: a default was not saved."""
    shutil.copytree(folder / "out", tmp_path / "out")
    out = tmp_path / "out"
    digests: dict[str, str] = {}
    for run in list((out / "runs").iterdir()):
        settings = yaml.safe_load((run / "config.yaml").read_text())
        del settings["train"]["tensorboard"]
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        digest = run.name.rpartition("-")[2]
        digests[digest] = digest[::-1]
    for path in [*(out / "runs").iterdir(), *(out / "groups").iterdir()]:
        path.rename(path.with_name(_with_new(path.name, digests)))
    for path in [out / "results.jsonl", *out.glob("runs/*/config.yaml")]:
        path.write_text(_with_new(path.read_text(), digests).replace(str(folder / "out"), str(out)))
    return out, [f"compare.output={out}"]


def _with_new(text: str, digests: dict[str, str]) -> str:
    return re.sub(r"\b[0-9a-f]{16}\b", lambda found: digests.get(found[0], found[0]), text)


def test_results_under_other_digests_are_found(
    folder: Path, earlier: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
):
    out, words = earlier
    before = (out / "results.jsonl").read_text()
    assert run_tool(folder / "config.yaml", "--table") == 0
    table = capsys.readouterr().out
    assert run_tool(folder / "config.yaml", *words) == 0
    assert capsys.readouterr().out == table  # no run was made
    assert (out / "results.jsonl").read_text() == before


def test_results_without_their_runs_are_found(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "results.jsonl").write_text((folder / "out" / "results.jsonl").read_text())
    words = [f"compare.output={tmp_path}", "compare.arms={plain: {}, same: {settings: [train.log_every_steps=1]}}"]
    assert run_tool(folder / "config.yaml", *words, "--table") == 0
    assert "| plain | 2 | " in capsys.readouterr().out


def test_results_of_other_settings_are_said_to_be_that(
    folder: Path, earlier: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
):
    out, words = earlier
    assert run_tool(folder / "config.yaml", "--table", "train.steps=3") == 2
    said = capsys.readouterr().err
    assert "no run of the baseline 'plain' there yet (the run in " in said
    assert "has other settings: train.steps was 2, is 3)" in said
    for path in out.glob("runs/*/config.yaml"):
        path.write_text(path.read_text().replace("leftover:", "unique:"))
    assert run_tool(folder / "config.yaml", *words, "--table") == 2
    assert re.search(
        r"there yet \(the settings of the run in '.*' cannot be read: .*unknown key 'data.unique'",
        capsys.readouterr().err,
    )


def test_signal_in_a_training_ends_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(compare, "mmdata", lambda words: 143)
    assert run_tool(folder / "config.yaml", f"compare.output={tmp_path}") == 143
    assert not (tmp_path / "results.jsonl").exists()


def test_runs_see_no_gpu_unless_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    seen: list[str | None] = []

    def train(words: object) -> int:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return 143

    monkeypatch.setattr(compare, "mmdata", train)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    words = (folder / "config.yaml", f"compare.output={tmp_path}")
    assert run_tool(*words) == 143
    assert run_tool(*words, "--device", "cuda") == 2
    assert "error: device 'cuda': torch sees no GPU" in capsys.readouterr().err
    monkeypatch.setattr(collectives, "init", lambda device: torch.device(device))
    assert run_tool(*words, "--device", "cuda") == 143
    assert seen == ["", "3"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run_tool(*words) == 143
    assert seen[-1] == ""
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
