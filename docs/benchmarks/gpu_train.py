"""`mmdata train` from nothing to an evaluation on one device: a corpus of drawn scenes, shards, a run.

PYTHONPATH=. python docs/benchmarks/gpu_train.py --device cuda
PYTHONPATH=. python docs/benchmarks/gpu_train.py --device cpu --small       # rehearses the script; says nothing
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import yaml

from mmdata.convert import convert, load_recipe

ROOT = Path(__file__).parents[2]


def call(*words: object) -> None:
    """Run a program; what it prints is no row."""
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="few rows, to rehearse this script")
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a run takes the GPU where it sees one
    count, val, words = (48, 16, 400) if given.small else (16000, 500, 2000)
    with tempfile.TemporaryDirectory(prefix="mmdata-gpu-train-") as name:
        raw, shards, run = (Path(name) / part for part in ("raw", "shards", "run"))
        call("datasets/scenes/render.py", raw, "--seed", 0, "--train", count, "--val", val, "--pairs", "1-per-type")
        tokenizer = shards / "train" / "tokenizer"
        convert(raw / "train", shards / "train", load_recipe("scenes", {"train_tokenizer": words}))
        convert(raw / "val", shards / "val", load_recipe("scenes", {"tokenizer": str(tokenizer)}))
        settings = {
            "data.shards": shards / "train",
            "data.val.shards": shards / "val",
            "data.tokenizer": tokenizer,
            "train.output": run,
            "train.log_every_steps": 1 if given.small else 20,
            "train.epochs": 1 if given.small else 4,
        }
        if given.small:
            settings |= {"data.global_batch_size": 16, "model.name": "micro", "train.warmup_steps": 1}
        started = time.perf_counter()
        call("-m", "mmdata", "train", "configs/demo.yaml", *(f"{name}={value}" for name, value in settings.items()))
        seconds = time.perf_counter() - started
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if line["kind"] == "train"]
        later = train[len(train) // 2 :]  # without what is slow once
        evaluations = [line for line in lines if line["kind"] == "evaluation"]
        row = {
            "name": f"mmdata train, {count:,} scenes",
            "seconds": round(seconds, 1),
            "precision": yaml.safe_load((run / "config.yaml").read_text())["train"]["precision"],
            "samples_per_s": round(median(line["samples_per_s"] for line in later), 1),
            "data_wait_share": round(median(line["data_wait_share"] for line in later), 4),
            "last_loss": round(train[-1]["loss"], 4),
            "text_to_image_r1": round(evaluations[-1]["text_to_image_r1"], 4),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
