"""A run's log: metrics.jsonl, plain lines, a progress bar on a terminal, and TensorBoard if the settings ask for it.

metrics.jsonl holds each step at most once, however often the run was killed and resumed. A lost terminal never stops a
run.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mmdata.errors import printable
from mmdata.files import naming, read_json_lines, write_whole

METRICS = "metrics.jsonl"


class RunLog:
    """The log of rank 0; on other ranks (`speaks` False) every method does nothing.

    Args:
        folder: the run's folder.
        step: updates already made; lines of later steps, left by a killed run, are removed.
        total_steps: updates of the whole run.
        tensorboard: also write scalars into folder/tensorboard.
        speaks: False on all ranks but the first.

    Raises:
        ImportError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, *, step: int, total_steps: int, tensorboard: bool, speaks: bool) -> None:
        self._speaks = speaks
        self._progress: Progress | None = None
        self._writer: Any = None
        if not speaks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        truncate_metrics(folder / METRICS, step)
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        if tensorboard:
            self._writer = _summary_writer(folder / "tensorboard", step)
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task: TaskID = self._progress.add_task("training", total=total_steps, completed=step)
            self._progress.start()

    def advance(self, step: int) -> None:
        """Move the bar to `step` updates made."""
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.update(self._task, completed=step)

    def record(self, kind: str, values: Mapping[str, Any], *, aloud: bool = True) -> None:
        """Append one line to metrics.jsonl: {"kind": "train" | "evaluation" | "mining", "time": …, "step": …, …}.

        It is printed too if it is `aloud`, without lists, such as histograms.
        """
        if not self._speaks:
            return
        # JSON has neither infinity nor NaN; the norm of an update that fp16 skips is one of them.
        finite = {name: _finite(value) for name, value in values.items()}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with naming(self._metrics.name):
            self._metrics.write(json.dumps({"kind": kind, "time": now, **finite}) + "\n")
            self._metrics.flush()
        numbers = {name: value for name, value in finite.items() if isinstance(value, (int, float))}
        if self._writer is not None:
            for name, value in numbers.items():
                if kind != "start" and name not in ("step", "epoch", "epochs_done"):
                    self._writer.add_scalar(f"{kind}/{name}", value, numbers["step"])
        if aloud:
            self.say(f"{'' if kind == 'train' else kind + ': '}{format_values(numbers)}")

    def say(self, line: str) -> None:
        """Print one line; a lost terminal is no error."""
        if self._speaks:
            with contextlib.suppress(OSError):
                self._console.print(printable(line, keep="\n"))
                sys.stdout.flush()

    def close(self) -> None:
        """Stop the bar and close the files."""
        if not self._speaks:
            return
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
        if self._writer is not None:
            self._writer.close()
        self._metrics.close()


def format_values(values: Mapping[str, float]) -> str:
    """Values for a person: shares as percentages, the rest with four digits, and large numbers whole.

    Example:
        {"step": 20, "loss": 1.23456, "data_wait_share": 0.031} gives "step 20 · loss 1.235 · data wait 3.1%";
        {"step_ms": 43520.6} gives "step ms 43,521".
    """
    parts: list[str] = []
    for name, value in values.items():
        words = name.replace("_per_s", "/s").replace("_", " ")
        if name.endswith("_share"):
            parts.append(f"{words.removesuffix(' share')} {100 * value:.1f}%")
        else:
            parts.append(f"{words} {_number(value)}")
    return " · ".join(parts)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e9 else f"{value:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path, kind: str = "") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, or those of one kind, oldest first."""
    return [line for line in read_json_lines(path, {"kind": str, "step": int}) if kind in ("", line["kind"])]


def evaluated_steps(path: Path) -> tuple[int, ...]:
    """The steps of which metrics.jsonl holds an evaluation."""
    return tuple(line["step"] for line in read_lines(path, "evaluation"))


def truncate_metrics(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`; a line that a kill cut short is removed too.

    Raises:
        DataError: another line is no JSON object with a step.
    """
    if path.is_file():
        kept = [json.dumps(line) + "\n" for line in read_json_lines(path, {"step": int}) if line["step"] <= step]
        write_whole(path, "".join(kept).encode())


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("train.tensorboard needs TensorBoard: pip install 'mmdata[tensorboard]'") from error
    return SummaryWriter(str(folder), purge_step=step + 1)
