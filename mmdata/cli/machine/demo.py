"""mmdata demo: the whole way, once. Renders a raw corpus, converts, verifies, trains, evaluates, reports.

    mmdata demo
    mmdata demo --out runs/longer train.epochs=6

Each command is printed before it runs; any of them can be run again by hand.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from mmdata.errors import ConfigError
from mmdata.files import shipped

CORPUS = ["--seed", "0", "--train", "16000", "--val", "500", "--pairs", "200-per-type"]
MARK = ".mmdata-demo"
"""File that marks the folder of an earlier demo, which may be removed."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="made anew each time (default: runs/demo)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of the training")


def run(options: argparse.Namespace) -> int:
    """Run all commands, each in a process of its own; the exit code of one that fails."""
    from mmdata.config import load_config

    load_config("demo", options.overrides)  # raises for a mistake before the corpus is rendered
    # Ctrl-C reaches the command too, and the command ends itself.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    make_folder(options.out)
    todo = commands(options.out, options.overrides)
    for number, command in enumerate(todo):
        print(f"\n$ {shlex.join(command)}", flush=True)
        # By this interpreter, whatever the PATH says.
        words = [sys.executable, *command[1:]] if command[0] == "python" else [sys.executable, "-m", *command]
        if status := subprocess.run(words, check=False).returncode:
            print(f"\nthe last command ended with exit code {status}; to go on by hand from there:")
            print("\n".join(map(shlex.join, todo[number:])))
            return status
    print(f"\nReport: {options.out / 'report.html'}  (open it in a browser)")
    if not shutil.which("mmdata"):
        print(f"For the commands above: source {Path(sys.executable).with_name('activate')}")
    return 0


def make_folder(out: Path) -> None:
    """Make an empty folder. An earlier demo in it is removed; anything else is an error.

    Raises:
        ConfigError: the folder holds something else.
    """
    if out.exists() and not (out / MARK).is_file():
        if any(out.iterdir()):
            raise ConfigError(f"'{out}' exists and is not an earlier demo's: name another folder with --out")
    elif out.exists():
        print(f"removing the demo that is in {out}")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def commands(out: Path, overrides: list[str]) -> list[list[str]]:
    """The commands, as a user would type them."""
    raw, shards, model = out / "raw", out / "shards", out / "run"
    render = str(shipped("datasets", "scenes", "render.py"))
    tokenizer = str(shards / "train" / "tokenizer")
    paths = [f"data.shards={shards / 'train'}", f"data.val.shards={shards / 'val'}", f"data.tokenizer={tokenizer}"]

    def convert(split: str, *tokens: str) -> list[str]:
        return ["mmdata", "convert", str(raw / split), str(shards / split), "--recipe", "scenes", *tokens]

    tests = ["--pairs", str(raw / "pairs.jsonl"), "--classes", str(raw / "classes.json")]
    train = ["mmdata", "train", str(shipped("configs", "demo.yaml")), *paths, f"train.output={model}", *overrides]
    return [
        ["python", render, str(raw), *CORPUS],
        convert("train", "--train-tokenizer", "2000"),
        convert("val", "--tokenizer", tokenizer),
        ["mmdata", "verify", str(shards / "train")],
        train,
        ["mmdata", "evaluate", str(model), *tests],
        ["mmdata", "report", str(model), "--out", str(out / "report.html")],
    ]
