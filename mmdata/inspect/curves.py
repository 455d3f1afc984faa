"""The section of the report with the curves of one run, or of several in the same charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mmdata.inspect.charts import Series, line_chart
from mmdata.inspect.page import Chart, Section
from mmdata.inspect.run_sections import WAYS
from mmdata.inspect.runs import METRICS, Run

BY_STEP = " Runs with batches of other sizes have seen other numbers of rows at the same step."


def curves(runs: Sequence[Run]) -> Section:
    """Loss, retrieval, shares of time and padding, and speed, by step. Of several runs, each chart shows one number."""
    charts: list[Chart] = []
    _add(charts, runs, "train", {"loss": "loss"}, y_label="loss", caption="Mean training loss between two log lines.")
    said = "Retrieval over the evaluation rows: the right one {}."
    if len(runs) == 1:
        recalls = {f"{name} R@{k}": f"{key}_r{k}" for name, key in WAYS.items() for k in (1, 10)}
        _add(
            charts,
            runs,
            "evaluation",
            recalls,
            y_label="recall",
            percent=True,
            caption=said.format("first, or among the first ten"),
        )
        shares = {"waiting for data": "data_wait_share", "padding": "padding_share"}
        caption = "Share of time spent waiting for data, and of text positions that hold padding."
        _add(charts, runs, "train", shares, y_label="share", percent=True, caption=caption)
    else:
        for name, key in WAYS.items():
            one = {name: f"{key}_r1"}
            _add(charts, runs, "evaluation", one, y_label=f"{name} R@1", percent=True, caption=said.format("first"))
        shares = {"waiting": "data_wait_share"}
        caption = "Share of time spent waiting for data."
        _add(charts, runs, "train", shares, y_label="share of time", percent=True, caption=caption)
    _add(charts, runs, "train", {"samples/s": "samples_per_s"}, y_label="samples/s", caption="Speed over all ranks.")
    without = [run.name for run in runs if not run.metrics]
    note = f"Without a {METRICS}, and so without curves: {', '.join(without)}." if without else ""
    if charts:
        return Section("Training", note + (BY_STEP if len(runs) > 1 else ""), charts=charts)
    return Section("Training", missing=f"The run has no {METRICS} yet: `mmdata train` writes it.")


def _add(
    charts: list[Chart],
    runs: Sequence[Run],
    kind: str,
    names: Mapping[str, str],
    *,
    y_label: str,
    caption: str,
    percent: bool = False,
) -> None:
    """Add a chart of the numbers in the lines of a kind, unless no run has any. Of several runs each is a line."""
    found: dict[str, Series] = {}
    for run in runs:
        for name, key in names.items():
            lines = [line for line in run.metrics if line.get("kind") == kind and line.get(key) is not None]
            if lines:
                x, y = np.asarray([(line["step"], line[key]) for line in lines], np.float64).T
                found[run.name if len(runs) > 1 else name] = Series(x, y)
    if found:
        charts.append(Chart(line_chart(found, x_label="step", y_label=y_label, percent=percent), caption))
