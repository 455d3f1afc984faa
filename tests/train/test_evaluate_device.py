"""`mmdata evaluate` of a run with `data.decode: device` counts the rows that the device's decoder does not take."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mmdata.index import build_index
from tests.loader.member_tars import write_tar
from tests.programs import PATIENCE_S, run_program

TOOLS = Path(__file__).parents[2] / "tools"


def run(name: str, *words: object) -> Any:
    command = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, words)]
    return run_program(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_rows_that_the_device_refuses_are_counted_and_replay_says_why(tmp_path: Path, photo: Callable[..., bytes]):
    samples = {
        f"{row:04d}": {"jpg": photo(40, 40, seed=row, format="JPEG"), "txt": f"a photo, number {row}".encode()}
        for row in range(12)
    }
    image = bytearray(samples["0005"]["jpg"])
    image[image.index(b"\xff\xdb") + 4] = 3  # the first quantization table under a number that no component uses
    samples["0005"]["jpg"] = bytes(image)
    write_tar(tmp_path / "shards" / "a.tar", samples)
    build_index(tmp_path / "shards")
    data = {"shards": str(tmp_path / "shards"), "val": {"shards": str(tmp_path / "shards")}, "tokenizer": "clip"}
    data |= {"global_batch_size": 4, "image_size": 32, "decode": "device"}
    data |= {"loading": {"num_workers": 0, "max_bad_share": 0.5}}
    train = {"steps": 1, "warmup_steps": 0, "device": "cpu", "output": str(tmp_path / "run")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": data, "model": {"name": "micro"}, "train": train}))
    assert (trained := run("train", tmp_path / "run.yaml")).returncode == 0, trained.stderr
    done = run("evaluate", tmp_path / "run", "--out", tmp_path / "scores.json")
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert (scores["rows"], scores["rows_masked"]) == (11, {"device_decoder": 1})
    assert "left out: 1 row that could not be loaded (device_decoder), listed in" in done.stderr
    replayed = run("replay", tmp_path / "run.yaml", "5")
    assert replayed.returncode == 1
    assert "masked" in replayed.stdout.splitlines()[-1]
    assert "the device's decoder does not take it" in replayed.stdout
