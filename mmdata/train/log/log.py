"""The lines of a run's log: metrics.jsonl holds each step at most once, however often a run was killed and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from mmdata.files import naming, read_json_lines, write_whole

METRICS = "metrics.jsonl"


class TrackedRun(NamedTuple):
    """What a tracker is told of a run.

    Attributes:
        run_id: 8 letters and digits; a resumed run keeps it. "": the run has no other tracker than metrics.jsonl.
        folder: of the run.
        settings: all settings of the run as plain data.
        step: updates already made. A run that was killed repeats the lines of later steps.
    """

    run_id: str
    folder: Path
    settings: Mapping[str, Any]
    step: int


@runtime_checkable
class Tracker(Protocol):
    """Takes the numbers of a run, on rank 0. `train.trackers` may name a class of yours, called without arguments.

    An error in `begin` ends the run before its first step. Later errors are logged and counted, and the run goes on.
    """

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or continue it."""

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl: `kind` is "train", "evaluation", "mining", …; `values` has the "step"."""

    def flush(self) -> None:
        """Send what is buffered: after each evaluation."""

    def close(self, exit_code: int) -> None:
        """End. 0: the run is finished; 128 + a signal's number: it was stopped; 1: it failed."""


class JsonLines:
    """metrics.jsonl, from which a run resumes: an error in it, such as a full disk, ends the run."""

    def begin(self, run: TrackedRun) -> None:
        """Remove the lines of later steps, which a killed run has left."""
        path = run.folder / METRICS
        truncate_metrics(path, run.step)
        self._file = path.open("a", encoding="utf-8")

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a line: {"kind": …, "time": …, "step": …, …}."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with naming(self._file.name):
            self._file.write(json.dumps({"kind": kind, "time": now, **values}) + "\n")
            self._file.flush()

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._file.close()


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


def finite(value: Any) -> Any:
    """The value with None for infinity and NaN, which JSON does not have."""
    if isinstance(value, list):
        return [finite(each) for each in value]
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
