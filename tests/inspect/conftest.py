"""A small corpus with everything a report can show, and a run on it; all made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata.cli import main
from mmdata.config import Config
from mmdata.images import probe
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from mmdata.trained.training import train
from tests.shard_writer import ShardWriter

ROWS = 22
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> & 'quotes'"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`command("report", "--out", "x")` runs a command in this process: exit code, stdout, stderr."""

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "400")
        code = main([name, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    """The section `data` of settings on two shards with 22 rows; row 0 has a caption of markup, and two more."""
    folder = tmp_path_factory.mktemp("corpus") / "shards"
    rng = np.random.default_rng(0)
    captions = [[" ".join(rng.choice(["a", "red", "blue", "dog", "cat"], size=2 + 3 * (i % 3)))] for i in range(ROWS)]
    captions[0] = [HOSTILE, "a second caption", "كلب أحمر"]
    train_tokenizer([c for group in captions for c in group], folder / "tokenizer", vocab_size=300, max_length=32)
    tokenizer = Tokenizer.load(folder / "tokenizer", max_length=32)
    accounts = {"rows": 24, "written": 22, "quarantined": 2, "reasons": {"corrupt_image": 1, "empty_caption": 1}}
    with ShardWriter(folder, shard_rows=12, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint) as writer:
        for i, group in enumerate(captions):
            image = photo(40, 40 + 20 * (i % 2), seed=i)
            writer.write(Sample(f"{i:04d}", image, probe(image), group, label=i % 3))
        writer.close(accounts)
    lines = [
        {"row": 7, "place": "captions.csv:8", "path": HOSTILE, "reason": "corrupt_image", "detail": "PNG is truncated"},
        {
            "row": 9,
            "place": "captions.csv:10",
            "path": "x.png",
            "reason": "empty_caption",
            "detail": "caption is empty",
        },
    ]
    (folder / "__mmdata__/quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "shards": str(folder),
        "tokenizer": str(folder / "tokenizer"),
        "global_batch_size": 8,
        "image_buckets": [[32, 32], [32, 48]],
        "max_length": 32,
        "text_buckets": 2,
    }


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `mmdata train` and `mmdata evaluate` leave: a log whose last line a kill has cut, and an evaluation."""
    folder = tmp_path_factory.mktemp("run")
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": s, "epoch": s // 30, "loss": 4 / s, "samples_per_s": 400.0, "data_wait_share": 0.04,
         "padding_share": 0.1} for s in range(10, 100, 10)
    ]  # fmt: skip
    lines += [
        {"kind": "evaluation", "step": s, "text_to_image_r1": s / 100, "image_to_text_r1": s / 90} for s in (30, 60)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "train", "st')
    recalls = {f"{way}_r{k}": 0.5 + k / 100 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    scores = {"accuracy": 0.8125, "text": 0.7, "image": 0.65, "group": 0.6}
    evaluation = recalls | {
        "chance_r1": 0.01,
        "chance_r5": 0.05,
        "chance_r10": 0.1,
        "matryoshka_64_image_to_text_r1": 0.25,
    }
    evaluation |= {"compositional": {"colour": scores | {"pairs": 16.0}, "mean": scores | {"pairs": 16.0}}}
    evaluation |= {"interpolation": [{"alpha": 0.25, **recalls}, {"alpha": 1.0, **recalls, "zero_shot_top1": 0.75}]}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


@pytest.fixture(scope="session")
def trained_run(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two updates with a small model; its validation set is its training set."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = Config.model_validate(
        {
            "data": data | {"val": {"shards": data["shards"]}},
            "model": {"name": "tiny"},
            "train": {"output": str(folder), "steps": 2, "warmup_steps": 0},
        }
    )
    train(config, folder, torch.device("cpu"))
    return folder
