"""Sections of the report on a run: curves, evaluation, settings. Reads metrics.jsonl and evaluation.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmdata.errors import DataError
from mmdata.inspect.charts import Series, line_chart
from mmdata.inspect.page import Chart, Section, Table

METRICS, EVALUATION = "metrics.jsonl", "evaluation.json"
RECALLS = {
    f"{source} → {target} R@{k}": f"{source}_to_{target}_r{k}"
    for source, target in (("image", "text"), ("text", "image"))
    for k in (1, 5, 10)
}
Metrics = Sequence[Mapping[str, Any]]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first; empty without the file. A last line that a kill cut is skipped.

    Raises:
        DataError: another line is not JSON.
    """
    path = run / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DataError(f"'{path}', line {number}: not JSON: {error}; delete the line to go on") from error
    return found


def read_evaluation(run: Path) -> dict[str, Any]:
    """The content of evaluation.json; empty without the file."""
    path = run / EVALUATION
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"'{path}': not JSON: {error}; make it again with `mmdata evaluate`") from error


def curves(metrics: Metrics) -> Section:
    """Loss, retrieval, shares of time and padding, and speed, by step."""
    training = [line for line in metrics if line.get("kind") == "train"]
    evaluations = [line for line in metrics if line.get("kind") == "evaluation"]
    charts: list[Chart] = []
    if loss := _series(training, {"loss": "loss"}):
        charts.append(
            Chart(line_chart(loss, x_label="step", y_label="loss"), "Mean training loss between two log lines.")
        )
    if recalls := _series(evaluations, {name: key for name, key in RECALLS.items() if not name.endswith("R@5")}):
        svg = line_chart(recalls, x_label="step", y_label="recall", percent=True)
        charts.append(Chart(svg, "Retrieval over the evaluation rows: the right one among the first 1 or 10."))
    shares = _series(training, {"waiting for data": "data_wait_share", "padding": "padding_share"})
    if shares:
        svg = line_chart(shares, x_label="step", y_label="share", percent=True)
        charts.append(Chart(svg, "Share of time spent waiting for data, and of text places that hold padding."))
    if speed := _series(training, {"samples/s": "samples_per_s"}):
        charts.append(Chart(line_chart(speed, x_label="step", y_label="samples/s"), "Speed over all ranks."))
    missing = "" if charts else f"The run has no {METRICS} yet: `mmdata train` writes it."
    return Section("Training", missing=missing, charts=charts)


def _series(lines: Metrics, names: Mapping[str, str]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for name, key in names.items():
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            x, y = np.asarray(points, np.float64).T
            found[name] = Series(x, y)
    return found


def scores(evaluation: Mapping[str, Any]) -> Section:
    """Retrieval, zero-shot and compositional scores of the last evaluation."""
    tables: list[Table] = []
    recalls = [
        (way, *(_percent(evaluation.get(f"{key}_r{k}")) for k in (1, 5, 10)))
        for way, key in (("image → text", "image_to_text"), ("text → image", "text_to_image"), ("chance", "chance"))
        if f"{key}_r1" in evaluation
    ]
    if recalls:
        tables.append(Table(("retrieval", "R@1", "R@5", "R@10"), recalls))
    if "zero_shot_top1" in evaluation:
        names = ("zero_shot_top1", "zero_shot_top5", "zero_shot_chance")
        row = ("accuracy", *(_percent(evaluation.get(name)) for name in names))
        tables.append(Table(("zero-shot", "top 1", "top 5", "chance"), [row]))
    if pairs := evaluation.get("compositional"):
        tables.append(_compositional(pairs))
    missing = "" if tables else f"The run has no {EVALUATION} yet: `mmdata evaluate` writes it."
    return Section("Evaluation", missing=missing, tables=tables)


def _compositional(pairs: Mapping[str, Mapping[str, float]]) -> Table:
    kinds = [*(kind for kind in pairs if kind != "mean"), *(["mean"] if "mean" in pairs else [])]
    columns = ("accuracy", "text", "image", "group")
    rows = [
        (kind, f"{pairs[kind].get('pairs', 0):,.0f}", *(_percent(pairs[kind].get(name)) for name in columns))
        for kind in kinds
    ]
    rows.append(("chance", "", "50.0%", "25.0%", "25.0%", "16.7%"))
    caption = "Pairs that differ in one swap: accuracy, and text, image and group scores (arXiv:2204.03162)"
    return Table(("compositional", "pairs", *columns), rows, caption)


def settings(values: Mapping[str, Any]) -> Section:
    """Settings by section."""
    tables = [
        Table(
            (section, "value"),
            [(str(key), json.dumps(value, ensure_ascii=False)) for key, value in keys.items()],
            numeric=False,
        )
        for section, keys in values.items()
        if keys is not None  # no `compare`
    ]
    return Section("Settings", tables=tables)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
