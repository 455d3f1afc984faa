"""mmdata demo: the whole way, once. Renders a raw corpus, converts, verifies, trains, evaluates, reports.

    mmdata demo
    mmdata demo --out runs/longer train.epochs=6

Each stage is a command that is printed before it runs; any of them can be run again by hand.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmdata.errors import ConfigError
from mmdata.files import shipped

CORPUS = ["--seed", "0", "--train", "16000", "--val", "500", "--pairs", "200-per-type"]
MARK = ".mmdata-demo"
"""File that marks the folder of an earlier demo, which may be removed."""

console = Console()


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="made anew each time (default: runs/demo)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of the training")


def run(options: argparse.Namespace) -> int:
    """Run all stages and print the closing table."""
    from mmdata.config import load_config

    out: Path = options.out
    load_config("demo", options.overrides)  # raises for a mistake before the corpus is rendered
    # Ctrl-C reaches the stage too, and the stage ends itself.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    make_folder(out)

    seconds: dict[str, float] = {}
    todo = stages(out, options.overrides)
    for number, (title, command) in enumerate(todo):
        console.print(f"\n[bold]{title}[/bold]\n[dim]$ {escape(shlex.join(command))}[/dim]", soft_wrap=True)
        started = time.perf_counter()
        status = subprocess.run(program(command), check=False).returncode
        seconds[title] = time.perf_counter() - started
        if status:
            console.print(f"[red]stopped:[/red] {title} ended with exit code {status}; to go on by hand from there:")
            console.print(escape("\n".join(shlex.join(command) for _, command in todo[number:])), soft_wrap=True)
            return status
    evaluation = json.loads((out / "run" / "evaluation.json").read_text())
    closing_table(evaluation, seconds)
    console.print(f"\nReport: [bold]{out / 'report.html'}[/bold]  (open it in a browser)")
    if not shutil.which("mmdata"):
        console.print(f"For the commands above: source {Path(sys.executable).with_name('activate')}", soft_wrap=True)
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
        console.print(f"removing the demo that is in {out}")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def stages(out: Path, overrides: list[str]) -> list[tuple[str, list[str]]]:
    """(title, command) of each stage, as a user would type it."""
    raw, shards, model = out / "raw", out / "shards", out / "run"
    render = str(shipped("datasets", "scenes", "render.py"))
    config = str(shipped("configs", "demo.yaml"))
    paths = [
        f"data.shards={shards / 'train'}",
        f"data.val.shards={shards / 'val'}",
        f"data.tokenizer={shards / 'train' / 'tokenizer'}",
        f"train.output={model}",
    ]

    def convert(split: str) -> list[str]:
        return ["mmdata", "convert", str(raw / split), str(shards / split), "--recipe", "scenes"]

    tests = ["--pairs", str(raw / "pairs.jsonl"), "--classes", str(raw / "classes.json")]
    return [
        ("Render a raw corpus", ["python", render, str(raw), *CORPUS]),
        ("Convert the training set", [*convert("train"), "--train-tokenizer", "2000"]),
        ("Convert the validation set", [*convert("val"), "--tokenizer", str(shards / "train" / "tokenizer")]),
        ("Verify the shards", ["mmdata", "verify", str(shards / "train")]),
        ("Train", ["mmdata", "train", config, *paths, *overrides]),
        ("Evaluate", ["mmdata", "evaluate", str(model), *tests]),
        ("Report", ["mmdata", "report", "--run", str(model), "--out", str(out / "report.html")]),
    ]


def program(command: list[str]) -> list[str]:
    """The command as run by this interpreter, whatever the PATH says."""
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    return [sys.executable, "-m", *command]


def closing_table(evaluation: dict[str, Any], seconds: dict[str, float]) -> None:
    """Print the time of each stage, and the scores."""
    table = Table(title="mmdata demo", title_justify="left")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for title, time_s in seconds.items():
        table.add_row(title, f"{time_s:.0f}")
    table.add_section()
    table.add_row("Total", f"{sum(seconds.values()):.0f}")
    console.print("\n", table)

    table = Table(title="on scenes never seen in training", title_justify="left")
    for name in ("score", "result", "chance"):
        table.add_column(name, justify="left" if name == "score" else "right")
    for direction in ("image_to_text", "text_to_image"):
        name = direction.replace("_", " ").replace(" to ", " → ")
        table.add_row(f"R@1 {name}", f"{evaluation[f'{direction}_r1']:.1%}", f"{evaluation['chance_r1']:.1%}")
    pairs = evaluation["compositional"]
    for kind, scores in pairs.items():
        if kind != "mean":
            table.add_row(f"compositional: {kind} swapped", f"{scores['accuracy']:.1%}", "50.0%")
    table.add_row("compositional, mean", f"{pairs['mean']['accuracy']:.1%}", "50.0%")
    console.print(table)
