"""The section of the report with the curves of one run, or of several in the same charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmdata.inspect.charts import Series, line_chart
from mmdata.inspect.page import Chart, ReportSection, ReportTable
from mmdata.inspect.run_sections import WAYS
from mmdata.inspect.runs import METRICS, RunRecord, flat_settings

LOSS_SETTINGS = (
    *("data.global_batch_size", "data.token_budget", "data.groups", "data.negative_captions"),
    *("train.loss", "train.positives", "train.hard_negative_beta", "train.mining_after_steps"),
    *("train.miner", "train.teacher", "train.queue", "train.feature_cache", "train.mask_false_negatives"),
)
"""Beginnings of the settings that say what a loss is, and over which negatives."""
BY_STEP = " Runs with batches of other sizes have seen other numbers of rows at the same step."


def curves(runs: Sequence[RunRecord]) -> ReportSection:
    """Loss, retrieval, shares of time and padding, and speed, by step. Of several runs, each chart shows one number.

    A number that no run has logged twice makes no line: a table gives it.
    """
    drawn = _Drawn(runs)
    alike = _alike(runs, _loss_of)
    caption = "Mean training loss between two log lines."
    if len(alike) > 1:
        caption += " Runs with another loss or other negatives have a chart of their own: such losses do not compare."
    for some in alike:
        drawn.add("train", {"loss": "loss"}, y_label="loss", caption=caption, runs=some)
    said = "Retrieval over the evaluation rows: the right one {}."
    if len(runs) == 1:
        recalls = {f"{name} R@{k}": f"{key}_r{k}" for name, key in WAYS.items() for k in (1, 10)}
        caption = said.format("first, or among the first ten")
        drawn.add("evaluation", recalls, y_label="recall", caption=caption, percent=True)
        shares = {"waiting for data": "data_wait_share", "padding": "padding_share"}
        caption = "Share of time spent waiting for data, and of text positions that hold padding."
        drawn.add("train", shares, y_label="share", caption=caption, percent=True)
    else:
        alike = _alike(runs, _candidates_of)
        if len(alike) > 1:
            said += " Runs that search among other numbers of rows have a chart of their own."
        for name, key in WAYS.items():
            for some in alike:
                recall, caption = {f"{name} R@1": f"{key}_r1"}, said.format("first")
                drawn.add("evaluation", recall, y_label=f"{name} R@1", caption=caption, percent=True, runs=some)
        shares = {"waiting for data": "data_wait_share"}
        caption = "Share of time spent waiting for data."
        drawn.add("train", shares, y_label="share of time", caption=caption, percent=True)
    drawn.add("train", {"samples/s": "samples_per_s"}, y_label="samples/s", caption="Speed over all ranks.")
    without = [run.name for run in runs if not run.metrics]
    note = f"Without a {METRICS}, and so without curves: {', '.join(without)}." if without else ""
    if not (drawn.charts or drawn.single):
        return ReportSection("Training", missing=f"The run has no {METRICS} yet: `mmdata train` writes it.")
    note += BY_STEP if drawn.charts and len(runs) > 1 else ""
    return ReportSection("Training", note.strip(), charts=drawn.charts, tables=drawn.tables())


def _alike(runs: Sequence[RunRecord], key: Callable[[RunRecord], object]) -> list[list[RunRecord]]:
    """The runs in groups of the same key, in order."""
    groups: dict[object, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _loss_of(run: RunRecord) -> object:
    """The settings that a run's loss depends on, written out."""
    settings = flat_settings(run.settings)
    return tuple((name, settings[name]) for name in sorted(settings) if name.startswith(LOSS_SETTINGS))


def _candidates_of(run: RunRecord) -> object:
    """The numbers of images and texts that the run's last evaluation searched among."""
    return tuple(run.evaluation.get(name) for name in ("images", "texts"))


@dataclass
class _Drawn:
    """The charts of the runs' numbers, and the table rows of those numbers that were logged once."""

    runs: Sequence[RunRecord]
    charts: list[Chart] = field(default_factory=list[Chart])
    single: list[tuple[str, str, str, str]] = field(default_factory=list[tuple[str, str, str, str]])

    def add(
        self,
        kind: str,
        names: Mapping[str, str],
        *,
        y_label: str,
        caption: str,
        percent: bool = False,
        runs: Sequence[RunRecord] | None = None,
    ) -> None:
        """Add a chart of the numbers in the lines of a kind, unless no run has any. Of several runs each is a line.

        Args:
            kind: of the lines of metrics.jsonl: train or evaluation.
            names: name of a number → its key in the lines. For several runs: one number.
            y_label: what the chart measures.
            caption: below the chart.
            percent: the numbers are shares, shown in per cent.
            runs: only these; None: all.
        """
        found: dict[tuple[str, str], Series] = {}
        for run in self.runs if runs is None else runs:
            for name, key in names.items():
                lines = [line for line in run.metrics if line.get("kind") == kind and line.get(key) is not None]
                if lines:
                    x, y = np.asarray([(line["step"], line[key]) for line in lines], np.float64).T
                    found[run.name, name] = Series(x, y)
        if any(len(np.asarray(line.x)) > 1 for line in found.values()):
            several = len(self.runs) > 1
            lines = {run if several else name: line for (run, name), line in found.items()}
            self.charts.append(Chart(line_chart(lines, x_label="step", y_label=y_label, percent=percent), caption))
            return
        for (run, name), line in found.items():
            (step,), (value,) = np.asarray(line.x), np.asarray(line.y)
            self.single.append((name, run, f"{step:,.0f}", f"{value:.1%}" if percent else f"{value:.4g}"))

    def tables(self) -> list[ReportTable]:
        """The numbers that were logged once: no table if there are none."""
        if not self.single:
            return []
        caption = "Logged once so far; a second time makes a curve"
        return [ReportTable(("", "run", "step", "value"), self.single, caption)]
