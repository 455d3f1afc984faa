"""The section of the report on runs: one table of how each was made, the settings in which they differ, and scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import yaml

from mmdata.convert.sampling import wilson
from mmdata.errors import DataError, excerpt
from mmdata.inspect.page import ReportSection, ReportTable, flat
from mmdata.progress import duration
from mmdata.train.log.advice import advise, measured
from mmdata.train.log.log import METRICS, read_lines
from mmdata.train.run.report import EVALUATION

Values = Mapping[str, Any]
RECALLS = {
    **{f"image → text R@{k}": (f"image_to_text_r{k}", "images") for k in (1, 5, 10)},
    **{f"text → image R@{k}": (f"text_to_image_r{k}", "texts") for k in (1, 5, 10)},
    "chance R@1": ("chance_r1", ""),
    "zero-shot top 1": ("zero_shot_top1", ""),
    "zero-shot top 5": ("zero_shot_top5", ""),
    "zero-shot chance": ("zero_shot_chance", ""),
    "phrase grounding": ("grounding_accuracy", "phrases"),
    "grounding chance": ("grounding_chance", ""),
}
"""A score's name on the page: its key in an evaluation, and the key of its number of queries."""
INTERPOLATED = ("image → text R@1", "text → image R@1", "zero-shot top 1")
"""Scores of the curve of `mmdata evaluate --interpolate-with`."""
CHANCE = {"accuracy": 1 / 2, "text": 1 / 4, "image": 1 / 4, "group": 1 / 6}
"""Compositional scores of a model that guesses (arXiv:2204.03162)."""


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says of it.

    Attributes:
        folder: the run's folder.
        name: the end of its path that tells it from the other runs of the report.
        evaluation: of evaluation.json, else the last evaluation in metrics.jsonl; empty without one.
        starts: lines "start" of metrics.jsonl that made updates, oldest first, with the seconds up to the last line.
        settings: section → key → value, of config.yaml; empty without the file.
    """

    folder: Path
    name: str
    evaluation: Values
    starts: Sequence[Values]
    settings: Values

    def lines(self, kind: str = "") -> Sequence[Values]:
        """The lines of metrics.jsonl, or those of one kind, oldest first."""
        return read_lines(self.folder / METRICS, kind)


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read the runs' folders.

    Raises:
        DataError: a file of a run is damaged.
    """
    runs: list[RunRecord] = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        lines = read_lines(folder / METRICS)
        logged = [line for line in lines if line["kind"] == "evaluation"]
        evaluation = read_evaluation(folder) or (logged[-1] if logged else {})
        runs.append(RunRecord(folder, name, evaluation, _starts(lines), _read_settings(folder)))
    return runs


def _starts(lines: Sequence[Values]) -> list[dict[str, Any]]:
    """The starts of a run with `wall_s`; without those that made no update, unless there are no others."""
    starts = list[dict[str, Any]]()
    for line in lines:
        if line["kind"] == "start":
            starts.append({**line, "wall_s": 0.0, "last_step": line["step"]})
        elif starts:
            began, now = (datetime.fromisoformat(each["time"]) for each in (starts[-1], line))
            starts[-1] |= {"wall_s": (now - began).total_seconds(), "last_step": line["step"]}
    return [start for start in starts if start["last_step"] > start["step"]] or starts


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ: runs/a/run, runs/b/run → a/run, b/run."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read_settings(run: Path) -> dict[str, Any]:
    """Sections of a run's config.yaml as plain data, not validated."""
    path = run / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}': not YAML: {error}; the run's checkpoints hold its settings too") from error
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


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


def table_of_runs(runs: Sequence[RunRecord]) -> ReportSection:
    """One column a run: when, where and with which code it was made, settings that differ, scores, hard negatives."""
    rows = _rows([_facts(run) for run in runs])
    differing = differences(runs)
    rows += [(name, *values) for name, values in differing.items()]
    rows += _rows([_scores(run.evaluation) for run in runs])
    rows += _rows([_negatives(run) for run in runs])
    notes: list[str] = []
    if without := [run.name for run in runs if not run.starts]:
        notes.append(f"{METRICS} does not name machine, version and time of {', '.join(without)}.")
    if without := [run.name for run in runs if not run.evaluation]:
        notes.append(f"No {EVALUATION} in {', '.join(without)}: `mmdata evaluate` writes it.")
    if any(run.evaluation for run in runs):
        notes.append("Scores are of the last evaluation, in parentheses with the 95 % interval for so many queries.")
    if len(runs) > 1:
        if not differing:
            notes.append("The settings of the runs do not differ.")
        notes.append("Several seeds of each say whether one is better: examples/compare.py of the checkout.")
    for run in runs:
        if advice := advise(run.lines(), run.settings):
            notes.append(f"{run.name}: {advice}" if len(runs) > 1 else f"{advice[0].upper()}{advice[1:]}")
    table = ReportTable(("", *(run.name for run in runs)), rows, numeric=False)
    return ReportSection("Runs" if len(runs) > 1 else "Run", " ".join(notes), tables=[table])


def _rows(cells: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Rows of a table from the cells of each column by the name of their row; a row without content is left out."""
    names = dict.fromkeys(name for column in cells for name in column)
    rows = [(name, *(column.get(name, "") for column in cells)) for name in names]
    return [row for row in rows if any(row[1:])]


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The settings in which runs differ: "train.lr" → its value in each run; "–" where a run has no such setting.

    `train.output` is left out, because it always differs.
    """
    settings = [
        {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in flat(run.settings, ".").items()}
        for run in runs
    ]
    names = sorted({name for found in settings for name in found if name != "train.output"})
    values = {name: [found.get(name, "–") for found in settings] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def _facts(run: RunRecord) -> dict[str, str]:
    """Facts of a run in words. Where the starts of a run differ, all of their values, in order."""

    def each(key: str) -> str:
        return " → ".join(dict.fromkeys(str(entry[key]) for entry in run.starts if entry.get(key)))

    facts = {"folder": str(run.folder)}
    if training := run.lines("train"):
        last = training[-1]
        facts |= {"updates": f"{last['step']:,}"}
        facts |= {"loss, last": f"{last['loss']:.4g}"} if last.get("loss") is not None else {}
        facts |= {"samples/s, last": f"{last['samples_per_s']:,.0f}"} if last.get("samples_per_s") else {}
    if run.starts:
        took = duration(sum(entry["wall_s"] for entry in run.starts))
        facts |= {"wall time": took + (f", {len(run.starts)} starts" if len(run.starts) > 1 else "")}
        facts |= {"started": str(run.starts[0]["time"])}
        facts |= {"machine": " → ".join(dict.fromkeys(map(_machine, run.starts)))}
        named = {"ranks": "ranks", "mmdata": "mmdata", "commit": "commit"}
        named |= {"torch": "torch", "Python": "python", "system": "system"}
        facts |= {name: each(key) for name, key in named.items()}
    return facts


def _machine(entry: Values) -> str:
    gpus = [str(name) for name in entry.get("gpus") or []]
    counted = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*counted, str(entry.get("cpu", "")), f"{entry.get('cores', '?')} cores"])


def _scores(evaluation: Values) -> dict[str, str]:
    """Retrieval with its intervals, zero-shot and compositional scores of the last evaluation, in words."""
    cells = {"evaluated after update": f"{evaluation['step']:,}" if "step" in evaluation else ""}
    counts = [evaluation.get(name) for name in ("images", "texts")]
    cells["queries, image → text / text → image"] = " / ".join(f"{count:,}" for count in counts if count)
    for name, (key, queries) in RECALLS.items():
        cells[name] = _share(evaluation.get(key), evaluation.get(queries))
    lengths = [name for name in evaluation if name.startswith("matryoshka_") and name.endswith("_r1")]
    cells |= {name.replace("_", " "): _share(evaluation[name]) for name in lengths}
    for entry in evaluation.get("interpolation") or []:
        between = {name: _share(entry.get(RECALLS[name][0])) for name in INTERPOLATED}
        found = ", ".join(f"{name} {share}" for name, share in between.items() if share)
        cells[f"interpolated weights, alpha {entry['alpha']:g}"] = found
    compositional = evaluation.get("compositional") or {}
    for kind, found in (compositional | {"chance": CHANCE} if compositional else {}).items():
        each = {name: _share(found.get(name)) for name in CHANCE}
        cells[f"compositional, {kind}"] = ", ".join(f"{name} {share}" for name, share in each.items() if share)
    return cells


def _negatives(run: RunRecord) -> dict[str, str]:
    """How hard the negatives were in the last part of a run, if measured."""
    found = measured(run.lines())
    if found is None:
        return {}
    return {
        "hard negatives, measured": found.origin,
        "in-batch accuracy": _share(found.accuracy),
        "false negatives, estimated": _share(found.false_share),
        "negatives kept": _share(found.kept_share),
        "effective negatives": "" if found.effective is None else f"{found.effective:.1f}",
    }


def _share(value: float | None, queries: int | None = None) -> str:
    """ "10.4%", and with a number of queries its interval: "10.4% (4.5 to 22.2)"; "" for None."""
    if value is None:
        return ""
    low, high = wilson(value, queries) if queries else (value, value)
    return f"{value:.1%} ({100 * low:.1f} to {100 * high:.1f})" if queries else f"{value:.1%}"
