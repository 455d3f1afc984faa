"""What the folders of runs hold: metrics, evaluation, starts and settings; and the settings in which runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from mmdata.errors import DataError, excerpt
from mmdata.files import read_json_lines
from mmdata.train.run.sessions import SESSIONS, read_sessions

METRICS, EVALUATION, CONFIG = "metrics.jsonl", "evaluation.json", "config.yaml"
Values = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says of it.

    Attributes:
        folder: the run's folder.
        name: the end of its path that tells it from the other runs of the report.
        metrics: lines of metrics.jsonl, oldest first.
        evaluation: of evaluation.json, else the last evaluation in metrics.jsonl; empty without one.
        sessions: of run.json, oldest first: one for each start that made updates.
        settings: section → key → value, of config.yaml; empty without the file.
    """

    folder: Path
    name: str
    metrics: Sequence[Values]
    evaluation: Values
    sessions: Sequence[Values]
    settings: Mapping[str, Any]


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read the runs' folders.

    Raises:
        DataError: a file of a run is damaged.
    """
    runs: list[RunRecord] = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        metrics = read_metrics(folder)
        logged = [line for line in metrics if line.get("kind") == "evaluation"]
        evaluation = read_evaluation(folder) or (logged[-1] if logged else {})
        starts = read_sessions(folder / SESSIONS)
        useful = [start for start in starts if start.get("step", 0) > start["first_step"]]  # others made no update
        runs.append(RunRecord(folder, name, metrics, evaluation, useful or starts, _read_settings(folder / CONFIG)))
    return runs


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ: runs/a/run, runs/b/run → a/run, b/run."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read_settings(path: Path) -> dict[str, Any]:
    """Sections of a run's config.yaml as plain data, not validated."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}': not YAML: {error}; the run's checkpoints hold its settings too") from error
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first; empty without the file. A last line that a kill cut is skipped.

    Raises:
        DataError: another line is no JSON object with a step.
    """
    return list(read_json_lines(run / METRICS, {"step": int}))


def read_evaluation(run: Path) -> dict[str, Any]:
    """The content of evaluation.json; empty without the file."""
    path = run / EVALUATION
    if not path.is_file():
        return {}
    again = "make it again with `mmdata evaluate`"
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}': not JSON: {error}; {again}") from error
    if not isinstance(found, dict):
        raise DataError(f"'{path}': expected scores by name, got {excerpt(found)}; {again}")
    return cast("dict[str, Any]", found)


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The settings in which runs differ: "train.lr" → its value in each run; "–" where a run has no such setting.

    `train.output` is left out, because it always differs.
    """
    flat = [flat_settings(run.settings) for run in runs]
    names = sorted({name for settings in flat for name in settings if name != "train.output"})
    values = {name: [settings.get(name, "–") for settings in flat] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"train": {"lr": 0.1}} → {"train.lr": "0.1"}; values as JSON."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False, default=str)
    return flat
