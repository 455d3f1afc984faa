"""`mmdata plan`: what it says of an epoch is what the loader gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

TOOLS = Path(__file__).parents[2] / "tools"


def plan(folder: Path, settings: dict[str, Any], *options: str) -> str:
    (folder / "c.yaml").write_text(yaml.safe_dump({"data": settings}))
    command = [sys.executable, str(TOOLS / "plan.py"), str(folder / "c.yaml"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_program_says_what_the_loader_gives(corpus, tmp_path: Path):
    said = plan(tmp_path, corpus.settings, "--world-size", "2")
    batches = list(corpus.loader())
    assert f"50 rows in {len(batches)} steps" in said
    masked = sum(int((batch["rows"] < 0).sum()) for batch in batches)
    assert f"masked: {masked} places that no row fills" in said
    steps = Counter((*batch["pixel_values"].shape[2:], batch["input_ids"].shape[1]) for batch in batches)
    for (height, width, length), count in steps.items():
        assert re.search(rf"{length} │ {height} × {width} │ +8 │ +{count} │", said)
    assert "duplicates: 0 rows meet their own image or caption in a batch\n" in said
    assert "reading: each of 2 ranks" in said


def test_plan_program_takes_settings_before_and_after_options(corpus, tmp_path: Path):
    one = plan(tmp_path, corpus.settings, "data.text_buckets=[32]", "--epoch", "1", "data.global_batch_size=10")
    assert "epoch 1: 50 rows in 5 steps" in one


def test_plan_program_says_what_each_dataset_gives(corpus, tmp_path: Path):
    few = [replace(sample, key=f"few{sample.key}") for sample in corpus.samples[:5]]
    corpus.write_beside(tmp_path / "few", few)
    shards = [{"shards": corpus.settings["shards"]}, {"shards": str(tmp_path / "few"), "repeat": 10}]
    said = plan(tmp_path, {**corpus.settings, "shards": shards, "text_buckets": [32], "global_batch_size": 20})
    assert "100 rows in 5 steps" in said
    assert re.search(r"dataset '\S+/shards': 50 rows, 50.0% of the epoch\ndataset '\S+/few': 50 rows, 50.0%", said)
    assert re.search(
        r"duplicates: [1-9]\d* rows meet their own image or caption in a batch; data.unique=true keeps", said
    )
