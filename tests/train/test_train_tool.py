from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.bert import BertTokenizerFast  # pyright: ignore[reportAttributeAccessIssue]

import mmdata
from mmdata import Index, cli
from mmdata.config.corpus import ValConfig
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from mmdata.hashing import in_share
from mmdata.text.tokenizer import CLIP, Tokenizer, train_tokenizer
from mmdata.trained import carried
from mmdata.trained.carried import keep_tokenizer
from mmdata.trained.evaluation import evaluate_shards, with_settings
from tests.programs import Program
from tests.train.small_run import go_back

CLOCKS = ("time", "samples_per_s", "step_ms", "data_wait_share")


def run_tool(name: str, *words: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process."""
    return cli.main([name, *map(str, words)])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with raw/ (24 labelled images of 3 classes, pairs.jsonl, classes.json) and shards/."""
    folder = tmp_path_factory.mktemp("corpus")
    raw = folder / "raw"
    raw.mkdir()
    lines = []
    for i in range(24):
        name, label = f"{i:02d}.png", i % 3
        pixels = torch.zeros(16, 16, 3, dtype=torch.uint8)
        pixels[:, :, label] = 80 + 7 * i
        Image.fromarray(pixels.numpy()).save(raw / name)
        color = ("red", "green", "blue")[label]
        lines.append(
            {"path": name, "caption": f"a {color} square of brightness {i}" + " again" * (i % 5), "label": label}
        )
    (raw / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = [
        {"type": kind, **{f"{key}_{side}": lines[i + side][column] for side in (0, 1) for key, column in COLUMNS}}
        for i, kind in ((0, "colour"), (4, "colour"), (8, "shade"))
    ]
    (raw / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (raw / "classes.json").write_text(
        json.dumps({"classes": ["red", "green", "blue"], "templates": ["a {} square", "{}", "the {} one", "{} again"]})
    )
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig(train_tokenizer=300))
    return folder


COLUMNS = (("image", "path"), ("caption", "caption"))


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    """Three epochs of four steps over the corpus, evaluated on itself."""
    shards = str(corpus / "shards")
    data: dict[str, Any] = {"shards": shards, "val": {"shards": shards}, "tokenizer": f"{shards}/tokenizer"}
    data |= {"global_batch_size": 6, "image_size": 16, "text_buckets": 2, "loading": {"num_workers": 1}}
    train = {"output": str(tmp_path / "run"), "epochs": 3, "warmup_steps": 2, "log_every_steps": 1}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({"data": data, "train": train}))
    return path


def read_metrics(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines if line["kind"] != "start"]


def kind_of(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def test_train_stopped_by_sigterm_goes_on_with_the_same_command(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = [config, "train.epochs=24", "train.evaluate_every_epochs=12", "model.dropout=0.1"]
    command = [sys.executable, "-m", "mmdata", "train", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # The pipe holds a quarter of the lines: then the program waits for this test, and cannot end before the signal.
    with Program(command, env=environment, stdout=subprocess.PIPE, text=True, pipesize=4096) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step 2 "):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step " in said
    assert "; the same command resumes\n" in said
    assert len(read_metrics(tmp_path / "run")) < 98
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    assert run_tool("train", *words, f"train.output={tmp_path / 'whole'}", monkeypatch=monkeypatch) == 0
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    assert [line["step"] for line in kind_of(read_metrics(tmp_path / "run"), "evaluation")] == [48, 96]


def test_train_writes_config_and_evaluation_that_evaluate_extends(
    config: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    overrides = ("train.output=null", "train.epochs=1", "train.mask_false_negatives=true", "train.precision=bf16")
    miner = "train.miner={name: top_k, k: 2}"
    classes = f"data.val.classes={corpus / 'raw/classes.json'}"
    assert run_tool("train", config, *overrides, miner, classes, monkeypatch=monkeypatch) == 0
    output = tmp_path / "runs" / "small"
    written = yaml.safe_load((output / "config.yaml").read_text())
    left_out = {"false_negative_margin": None, "drop_hardest": None}
    assert written["train"]["miner"] == {"name": "top_k", "k": 2, **left_out}
    assert written["data"]["global_batch_size"] == 6
    scores = json.loads((output / "evaluation.json").read_text())
    assert (scores["step"], scores["epochs_done"], scores["rows"]) == (4, 1, 24)
    assert scores["chance_r1"] == pytest.approx(1 / 24)

    raw = corpus / "raw"
    words = ("runs/small", "--pairs", raw / "pairs.jsonl", "--classes", raw / "classes.json", "--device", "cpu")
    capsys.readouterr()
    assert run_tool("evaluate", *words, monkeypatch=monkeypatch) == 0
    extended = json.loads((output / "evaluation.json").read_text())
    assert {name: extended[name] for name in scores} == scores
    assert scores["zero_shot_chance"] == pytest.approx(1 / 3)
    assert scores["zero_shot_top5"] == 1.0
    assert {kind: values["pairs"] for kind, values in extended["compositional"].items()} == {
        "colour": 2,
        "shade": 1,
        "mean": 3,
    }
    shown = " ".join(capsys.readouterr().out.split())
    words = ("retrieval", "image to text", "R@10", "zero-shot", "colour", "group", "evaluation.json")
    for word in (*words, 'classes named by "a {} square", "{}", "the {} one" and 1 more'):
        assert word in shown


def test_train_killed_before_its_first_checkpoint_starts_again(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = [config, "train.epochs=1"]
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "starting: 4 steps" in said
    assert "evaluation: step 4 · epochs done 1 · " in said
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    assert "starting: 4 steps" in capsys.readouterr().out
    assert run_tool("plan", tmp_path / "run", monkeypatch=monkeypatch) == 0
    page = tmp_path / "r.html"
    assert run_tool("report", tmp_path / "run", "--query-rows", 0, "--out", page, monkeypatch=monkeypatch) in (0, None)
    assert page.is_file()


def test_train_and_evaluate_keep_a_share_of_the_rows_apart(
    config: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    held_out = sum(in_share(int(one), 0.4) for one in Index.open(corpus / "shards").column("image_hash"))
    words = [config, "data.val={share: 0.4}", "train.epochs=1"]
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (scores["rows"], scores["step"]) == (held_out, -(-(24 - held_out) // 6))
    assert run_tool("evaluate", tmp_path / "run", "--device", "cpu", monkeypatch=monkeypatch) == 0
    extended = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert {name: extended[name] for name in scores} == scores
    assert extended["shards"] == f"{corpus / 'shards'} (data.val.share 0.4)"
    assert "other shards" not in caplog.text
    changed = [config, "data.val={share: 0.5}", "train.epochs=2"]
    assert run_tool("train", *changed, monkeypatch=monkeypatch) == 2
    assert "val.share" in capsys.readouterr().err


def test_evaluation_says_that_shards_with_a_share_for_it_have_changed(
    config: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    shards = tmp_path / "shards"
    shutil.copytree(corpus / "shards", shards)
    words = [config, f"data.shards={shards}", "data.val={share: 0.4}", "train.epochs=1"]
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    shutil.rmtree(shards)
    convert(corpus / "raw" / "captions.jsonl", shards, ConvertConfig(resize=8, train_tokenizer=300))
    assert run_tool("evaluate", tmp_path / "run", "--device", "cpu", monkeypatch=monkeypatch) == 0
    assert f"data.shards '{shards}': other shards than before: their index was " in caplog.text
    assert "unless its image file has changed, as by --resize: then the run may have been trained on it" in caplog.text


def test_rows_to_evaluate_on_that_cannot_be_loaded_are_called_so_and_listed(
    config: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(corpus / "shards", tmp_path / "val")
    index = Index.open(tmp_path / "val")
    with index.shard_path(0).open("r+b") as file:
        for row in (3, 5):
            file.seek(int(index.take(np.array([row]), ["image_offset"])["image_offset"][0]) + 33)  # behind the header
            file.write(bytes(30))
    words = [config, f"data.val={{shards: {tmp_path / 'val'}}}", "train.epochs=1"]
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert f"rows to evaluate on, of {tmp_path / 'val'}: 2 of 24 rows could not be used (file_changed 2)" in error
    assert error.splitlines()[-1].count("mmdata verify") == 1
    listed = (tmp_path / "run" / "evaluation-ledger-rank0.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["row"] for line in listed) == [3, 5]
    words += ["data.loading.max_bad_share=0.5", f"train.output={tmp_path / 'run2'}"]
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    assert run_tool("evaluate", tmp_path / "run2", "--device", "cpu", monkeypatch=monkeypatch) == 0
    assert (tmp_path / "run2" / "evaluation-ledger-rank0.jsonl").read_text().count("\n") == 2


def test_train_resumed_from_further_back_lists_each_masked_row_once(
    config: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):
    shutil.copytree(corpus / "shards", tmp_path / "shards")
    index = Index.open(tmp_path / "shards")
    with index.shard_path(0).open("r+b") as file:
        file.seek(int(index.take(np.array([5]), ["image_offset"])["image_offset"][0]) + 33)  # behind the header
        file.write(bytes(30))
    words = [config, f"data.shards={tmp_path / 'shards'}", "train.checkpoint_every_steps=2", "train.keep_checkpoints=9"]
    words += ["data.val=null", "data.loading.max_bad_share=0.5"]
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    ledger = tmp_path / "run" / "ledger-rank0.jsonl"
    assert f"masked, as later rows like it will be: '{ledger}' lists them" in caplog.text
    written = ledger.read_text()
    entries = [json.loads(line) for line in written.splitlines()]
    assert [(entry["epoch"], entry["row"], entry["reason"]) for entry in entries] == [
        (epoch, 5, "file_changed") for epoch in range(3)
    ]
    go_back(tmp_path / "run", 2)
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
    assert ledger.read_text() == written
    # A line of another program's.
    go_back(tmp_path / "run", 2)
    ledger.write_text(f"[3]\n{written}")
    assert run_tool("train", *words, monkeypatch=monkeypatch) == 2
    message = f"error: '{ledger}', line 1: expected a JSON object, got a list; delete the line to go on\n"
    assert capsys.readouterr().err.endswith(message)


def test_a_run_without_a_usable_row_ends_with_the_first_reason(
    config: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(corpus / "shards", tmp_path / "shards")
    index = Index.open(tmp_path / "shards")
    with index.shard_path(0).open("r+b") as file:
        for offset in index.take(np.arange(24), ["image_offset"])["image_offset"]:
            file.seek(int(offset) + 33)  # behind the header
            file.write(bytes(30))
    words = [f"data.shards={tmp_path / 'shards'}", "data.val=null", "train.epochs=null", "train.steps=3"]
    assert run_tool("train", config, *words, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr()
    assert (
        "error: 18 of 18 rows could not be used (file_changed 18), more than max_bad_share 5.0%; the first: "
        in said.err
    )
    assert "finished" not in said.out


def test_train_into_a_folder_of_shards_is_refused_and_changes_nothing(
    config: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(corpus / "shards", tmp_path / "shards")

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "shards").rglob("*") if path.is_file()}

    before = content()
    assert run_tool("train", config, f"train.output={tmp_path / 'shards'}", monkeypatch=monkeypatch) == 2
    said = f"train.output '{tmp_path / 'shards'}': a folder of shards; it holds files that are not a run's"
    assert said in capsys.readouterr().err
    assert content() == before


def test_train_goes_on_with_a_run_whose_own_config_is_given(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = yaml.safe_load(config.read_text())
    text["train"] |= {"output": None, "epochs": 1}
    config.write_text(yaml.safe_dump(text))
    monkeypatch.chdir(tmp_path)
    assert run_tool("train", config, monkeypatch=monkeypatch) == 0
    assert run_tool("train", "runs/small/config.yaml", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "resuming from runs/small/checkpoints/step-0000000004: step 4 of 4" in said
    assert said.endswith(
        "; next: `mmdata report runs/small`, or in Python: import mmdata; mmdata.load_run('runs/small')\n"
    )
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["small"]


def test_a_resumed_run_keeps_the_precision_that_it_began_with(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    written = tmp_path / "run" / "config.yaml"
    for asked, kept in (("bf16", "bf16"), ("auto", "bf16")):
        words = (config, "train.epochs=1", f"train.precision={asked}")
        assert run_tool("train", *words, monkeypatch=monkeypatch) == 0
        assert yaml.safe_load(written.read_text())["train"]["precision"] == kept
    said = capsys.readouterr()
    assert "step 4 of 4; on cpu, in bf16\n" in said.out
    assert (
        f"train.precision is bf16, as the run in '{tmp_path / 'run'}' began; for a new run on this device auto is fp32"
        in (caplog.messages)
    )
    (tmp_path / "run").rename(tmp_path / "other")
    assert run_tool("train", config, "train.epochs=1", monkeypatch=monkeypatch) == 0
    assert yaml.safe_load(written.read_text())["train"]["precision"] == "fp32"  # this device is a CPU


def test_train_refuses_to_resume_under_other_settings(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_tool("train", config, "train.epochs=1", monkeypatch=monkeypatch) == 0
    assert run_tool("train", config, "train.epochs=1", "data.seed=5", monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "data.seed was 0, is 5" in error


def test_train_on_other_shards_than_the_run_names_them_before_the_settings_that_follow(
    config: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = [config, "data.val=null", "train.epochs=null", f"data.shards={tmp_path / 'shards'}"]
    lines = (corpus / "raw" / "captions.jsonl").read_text().splitlines(keepends=True)
    for rows, warmup_steps, code in ((24, 2, 0), (20, 1, 2)):
        table = corpus / "raw" / f"first-{rows}.jsonl"
        table.write_text("".join(lines[:rows]))
        shutil.rmtree(tmp_path / "shards", ignore_errors=True)
        convert(table, tmp_path / "shards", ConvertConfig(tokenizer=str(corpus / "shards" / "tokenizer")))
        settings = ["train.steps=1", f"train.warmup_steps={warmup_steps}"]
        assert run_tool("train", *words, *settings, monkeypatch=monkeypatch) == code
    run = tmp_path / "run"
    error = capsys.readouterr().err
    assert re.fullmatch(
        rf"error: cannot resume from {run}/checkpoints/step-0000000001: data.shards '{tmp_path}/shards': other "
        r"shards than before: their index was \w{16} \(24 rows\), and is \w{16} \(20 rows\). The settings differ too: "
        r"train.warmup_steps was 2, is 1. To train on these shards, give another train.output, or delete "
        rf"'{run}'; to go on with the run, put back the shards that it was trained on\n",
        error,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.learning_rate=1"], "unknown key 'train.learning_rate'; did you mean 'train.lr'?"),
        (["train.epochs=null"], "train.epochs or train.steps is required"),
        (["train.steps=5"], "epochs (3) and steps (5) exclude each other"),
        (["data.shards=/nowhere"], "/nowhere"),
        (
            ["train.miner={name: hardest}"],
            "'train.miner': expected {name: all, gumbel_top_k, same_group, semi_hard, top_k, user} or null",
        ),
        (["train.precision=fp8"], "'train.precision': expected auto, bf16, fp16, tf32 or fp32; got 'fp8'"),
    ],
)
def test_train_says_in_one_line_what_is_wrong(
    words: list[str], expected: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_tool("train", config, *words, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error


def test_evaluate_says_in_one_line_what_is_wrong(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_tool("train", config, "train.steps=1", "train.epochs=null", monkeypatch=monkeypatch) == 0
    bare = tmp_path / "bare"
    assert (
        run_tool(
            "train",
            config,
            "train.steps=1",
            "train.epochs=null",
            "data.val=null",
            f"train.output={bare}",
            monkeypatch=monkeypatch,
        )
        == 0
    )
    classes, good = tmp_path / "classes.json", tmp_path / "good.json"
    classes.write_text('{"classes": ["a"], "templates": ["a photo"]}')
    good.write_text('{"classes": ["a"]}')
    listed = tmp_path / "listed.json"
    listed.write_text('["a", "b"]')
    for words, expected in (
        ([tmp_path / "none"], f"'{tmp_path / 'none'}': no such run; `mmdata train CONFIG` makes one"),
        (
            [tmp_path / "run", "--classes", tmp_path / "no.json"],
            f"classes '{tmp_path / 'no.json'}': no such file; it is JSON",
        ),
        (
            [tmp_path / "run", "--classes", listed],
            f"classes '{listed}': file: Input should be an object; expected JSON such as "
            '{"classes": ["dog", "cat"], "templates": ["a photo of a {}"]}\n',
        ),
        (
            [tmp_path / "run", "--classes", good],
            "--classes has 1 classes, for the labels 0 to 0, and shards '",
        ),
        ([tmp_path / "run", "--pairs", good], f"pairs '{good}', entry 'classes': entry: Input should be an object"),
        ([tmp_path / "run", "--classes", classes], "template 'a photo' has no {} where the class name goes"),
        ([config], f"'{config}': a config, and a run is expected; its run is 'runs/{config.stem}'"),
        ([classes], f"'{classes}': a JSON file, and a run is expected; `mmdata train CONFIG` makes one"),
        (
            [tmp_path / "run" / "metrics.jsonl"],
            f"metrics.jsonl': a part of the run '{tmp_path / 'run'}': give '{tmp_path / 'run'}'",
        ),
        ([tmp_path / "run" / "config.yaml"], f"a part of the run '{tmp_path / 'run'}': give '{tmp_path / 'run'}'"),
        ([bare], "nothing to evaluate on: the run has no data.val; give --shards or --pairs"),
        (
            [tmp_path / "run", "data.seed=1"],
            "'data.seed=1': an evaluation has the settings of its run; data.decode and those of data.loading can be",
        ),
        ([tmp_path / "run", "data.decode=exat"], "'data.decode'"),
        ([bare, "--select", "width > 3"], "--select chooses rows of --shards, which is missing"),
        (
            [bare, "--pairs", good, "--classes", good],
            "--classes needs images with labels: the run has no data.val",
        ),
    ):
        capsys.readouterr()
        assert run_tool("evaluate", *words, monkeypatch=monkeypatch) == 2
        said = capsys.readouterr().err
        assert expected in said
        assert "embedding" not in said


def test_evaluate_takes_another_decoder_and_other_workers(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["train.steps=1", "train.epochs=null"]
    assert run_tool("train", config, *words, monkeypatch=monkeypatch) == 0
    run = tmp_path / "run"
    given = ["data.decode=exact", "--out", tmp_path / "out.json", "data.loading.num_workers=2"]
    assert run_tool("evaluate", run, *given, monkeypatch=monkeypatch) == 0
    scores = json.loads((tmp_path / "out.json").read_text())
    trained = json.loads((run / "evaluation.json").read_text())
    assert scores["image_to_text_r1"] == trained["image_to_text_r1"]
    other = with_settings(mmdata.load_run(run, "cpu"), ["data.decode=exact", "data.loading.num_workers=2"])
    assert (other.config.data.decode, other.config.data.loading.num_workers) == ("exact", 2)


def test_run_moved_to_another_machine_embeds_and_classifies_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for i in range(6):
        photo = tmp_path / "raw" / ("red", "blue")[i % 2] / f"{i}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (40 * i, 0, 90)).save(photo)
    shards = tmp_path / "shards"
    convert(tmp_path / "raw", shards, ConvertConfig(caption_templates=["a {} square"], train_tokenizer=300))
    # A folder with a model beside the tokenizer: only the tokenizer is copied.
    (shards / "tokenizer" / "model.safetensors").write_bytes(bytes(1000))
    data: dict[str, Any] = {"shards": str(shards), "tokenizer": str(shards / "tokenizer")}
    data |= {"global_batch_size": 6, "image_size": 16, "loading": {"num_workers": 0}}
    config = tmp_path / "moved.yaml"
    train = {"output": str(tmp_path / "run"), "steps": 1}
    config.write_text(yaml.safe_dump({"data": data, "model": {"name": "micro"}, "train": train}))
    assert run_tool("train", config, monkeypatch=monkeypatch) == 0
    assert {path.name for path in (tmp_path / "run" / "tokenizer").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == {"classes": ["blue", "red"]}
    photos = sorted((tmp_path / "raw").rglob("*.png"))
    texts = ["a red square", "a blue one"]
    before = mmdata.load_run(tmp_path / "run", "cpu")
    expected = before.embed_images(photos), before.embed_texts(texts), before.zero_shot(photos).probabilities

    moved = tmp_path / "elsewhere" / "copy"
    moved.parent.mkdir()
    shutil.move(tmp_path / "run", moved)
    shutil.move(shards, tmp_path / "gone")
    after = mmdata.load_run(moved, "cpu")
    assert after.class_names == ["blue", "red"]
    found = after.embed_images(photos), after.embed_texts(texts), after.zero_shot(photos).probabilities
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    convert(tmp_path / "raw", tmp_path / "new", ConvertConfig(caption_templates=["a {} square"]))
    assert evaluate_shards(after, ValConfig(shards=str(tmp_path / "new")))["rows"] == 6

    train_tokenizer(["quite other words"], moved / "tokenizer", vocab_size=310)
    message = r"tokenizer '.*copy/tokenizer': not the one that the run was trained with \(fingerprint .*remove it"
    with pytest.raises(ConfigError, match=message):
        mmdata.load_run(moved, "cpu")
    shutil.rmtree(moved / "tokenizer")
    with pytest.raises(ConfigError, match=r"tokenizer '.*shards/tokenizer': no such folder"):
        mmdata.load_run(moved, "cpu")
    shutil.move(tmp_path / "gone", shards)
    assert torch.equal(mmdata.load_run(moved, "cpu").embed_texts(texts), expected[1])


def test_run_keeps_clip_and_unusual_tokenizers_whole(tmp_path: Path):
    clip = Tokenizer.load("clip")
    keep_tokenizer(tmp_path / "run", clip)
    keep_tokenizer(tmp_path / "run", clip)  # as a resumed run does
    text = "a photo of a Cat, sitting"
    kept = AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer")
    assert kept(text)["input_ids"] == AutoTokenizer.from_pretrained(CLIP)(text)["input_ids"]
    assert Tokenizer.load(tmp_path / "run" / "tokenizer").identity == clip.identity

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    bert = Tokenizer.load(tmp_path / "bert")
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{")  # damaged: copied anew
    keep_tokenizer(tmp_path / "run", bert)
    assert Tokenizer.load(tmp_path / "run" / "tokenizer").identity == bert.identity != clip.identity
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer").mask_token == "[MASK]"


def test_run_keeps_no_copy_of_a_tokenizer_that_is_damaged_by_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    clip = Tokenizer.load("clip")
    keep_tokenizer(tmp_path / "run", clip)
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{")
    monkeypatch.setattr(carried, "save_tokenizer", lambda _, folder: (folder / "tokenizer.json").write_text("{"))
    keep_tokenizer(tmp_path / "run", clip)
    assert list((tmp_path / "run").iterdir()) == []
    assert "transformers saves it as one that cannot be loaded, or that gives other ids, so the run" in caplog.text
