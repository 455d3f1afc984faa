"""The lines of a run's log: metrics.jsonl holds each step at most once, however often a run was killed and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdata.files import read_json_lines, write_whole

METRICS = "metrics.jsonl"


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
