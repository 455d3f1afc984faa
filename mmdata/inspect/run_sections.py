"""Sections of the report on one run or several: how each was made, what differs, evaluation, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmdata.convert.sampling import wilson
from mmdata.inspect.page import ReportSection, ReportTable
from mmdata.inspect.runs import EVALUATION, RunRecord, Values, differences
from mmdata.train.run.advice import advise, measured
from mmdata.train.run.sessions import SESSIONS

WAYS = {"image → text": "image_to_text", "text → image": "text_to_image"}
INTERVALS = "In parentheses the 95 % interval for so many queries."
NO_EVALUATION = f"The run has no {EVALUATION} yet: `mmdata evaluate` writes it."


def overview(runs: Sequence[RunRecord]) -> ReportSection:
    """When, where, with which code and for how long each run was trained; and the settings in which runs differ."""
    facts = [_facts_of(run) for run in runs]
    names = dict.fromkeys(name for fact in facts for name in fact)
    rows = [(name, *(fact.get(name, "") for fact in facts)) for name in names]
    head = ("", *(run.name for run in runs))
    tables = [ReportTable(head, rows, numeric=False)]
    if len(runs) > 1:
        differing = [(name, *values) for name, values in differences(runs).items()] or [("none", *("" for _ in runs))]
        tables.append(ReportTable(("setting", *head[1:]), differing, "Settings that differ", numeric=False))
    without = [run.name for run in runs if not run.sessions]
    note = f"No {SESSIONS}, which tells machine, version and time, in {', '.join(without)}: `mmdata train` writes it."
    return ReportSection("Runs" if len(runs) > 1 else "Run", note if without else "", tables=tables)


def _facts_of(run: RunRecord) -> dict[str, str]:
    """Facts of a run in words. Where the starts of a run differ, all of their values, in order."""

    def each(key: str) -> str:
        return " → ".join(dict.fromkeys(str(entry[key]) for entry in run.sessions if entry.get(key)))

    facts = {"folder": str(run.folder)}
    training = [line for line in run.metrics if line.get("kind") == "train"]
    updates = int(training[-1]["step"]) if training else 0
    if training:
        facts |= {"updates": f"{updates:,}"}
    if run.sessions:
        starts, written = len(run.sessions), int(run.sessions[-1].get("step", 0))
        took = duration(sum(float(entry.get("wall_s", 0)) for entry in run.sessions))
        # Written with each checkpoint, and metrics.jsonl more often.
        until = f", up to update {written:,}" if written < updates else ""
        facts |= {"wall time": took + (f", {starts} starts" if starts > 1 else "") + until}
        facts |= {"started": str(run.sessions[0].get("started", ""))}
        facts |= {"machine": " → ".join(dict.fromkeys(_machine(entry) for entry in run.sessions))}
        named = {"ranks": "ranks", "mmdata": "mmdata", "mmdata, commit": "mmdata_commit", "commit": "commit"}
        named |= {"torch": "torch", "Python": "python", "system": "system"}
        facts |= {name: each(key) for name, key in named.items()}
    return {name: value for name, value in facts.items() if value}


def _machine(entry: Values) -> str:
    gpus = [str(name) for name in entry.get("gpus") or []]
    counted = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*counted, str(entry.get("cpu", "")), f"{entry.get('cores', '?')} cores"])


def duration(seconds: float) -> str:
    """75.3 → "1 min 15 s", 4000 → "1 h 6 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def evaluations(runs: Sequence[RunRecord]) -> ReportSection:
    """The last evaluation of a run in full, or the scores of several runs in one table."""
    if len(runs) == 1:
        return scores(runs[0].evaluation)
    names = {f"{way} R@{k}": f"{key}_r{k}" for way, key in WAYS.items() for k in (1, 5, 10)}
    names |= {"chance R@1": "chance_r1", "zero-shot top 1": "zero_shot_top1", "zero-shot top 5": "zero_shot_top5"}
    rows = [("queries, image → text / text → image", *(_queries(run.evaluation) for run in runs))]
    rows += [(name, *(_recall(run.evaluation, key) for run in runs)) for name, key in names.items()]
    pairs: list[dict[str, dict[str, float]]] = [run.evaluation.get("compositional") or {} for run in runs]
    kinds = dict.fromkeys(kind for scores in pairs for kind in scores if kind != "mean")
    for kind in [*kinds, "mean"]:
        accuracies = [_percent(scores.get(kind, {}).get("accuracy")) for scores in pairs]
        rows.append((f"compositional, {kind}", *accuracies))
    rows = [row for row in rows if any(row[1:])]
    steps = [f"{run.name} after step {run.evaluation['step']:,}" for run in runs if "step" in run.evaluation]
    if not rows:
        return ReportSection("Evaluation", missing=NO_EVALUATION)
    note = f"The last evaluation of each run: {', '.join(steps)}. " if steps else ""
    note += f"{INTERVALS} Whether one way to train is better than another, several seeds of each say: `mmdata compare`."
    return ReportSection("Evaluation", note, tables=[ReportTable(("", *(run.name for run in runs)), rows)])


def scores(evaluation: Mapping[str, Any]) -> ReportSection:
    """Retrieval, zero-shot and compositional scores of the last evaluation."""
    tables: list[ReportTable] = []
    recalls = [
        (way, *(_recall(evaluation, f"{key}_r{k}") for k in (1, 5, 10)))
        for way, key in (("image → text", "image_to_text"), ("text → image", "text_to_image"), ("chance", "chance"))
        if f"{key}_r1" in evaluation
    ]
    if recalls:
        queries = _queries(evaluation)
        caption = f"{queries} queries (image → text / text → image). {INTERVALS}" if queries else ""
        tables.append(ReportTable(("retrieval", "R@1", "R@5", "R@10"), recalls, caption))
    if "zero_shot_top1" in evaluation:
        names = ("zero_shot_top1", "zero_shot_top5", "zero_shot_chance")
        row = ("accuracy", *(_percent(evaluation.get(name)) for name in names))
        tables.append(ReportTable(("zero-shot", "top 1", "top 5", "chance"), [row]))
    if pairs := evaluation.get("compositional"):
        tables.append(_compositional(pairs))
    return ReportSection("Evaluation", missing="" if tables else NO_EVALUATION, tables=tables)


def _last(run: RunRecord, kind: str) -> Mapping[str, Any] | None:
    """The last line of a kind in a run's metrics."""
    return next((line for line in reversed(run.metrics) if line.get("kind") == kind), None)


def negatives(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """How hard the negatives were in the last part of each run, if measured, and whether harder ones can help."""
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for run in runs:
        lines = [line for line in run.metrics if line.get("kind") == "mining"]
        found = measured(lines, run.settings)
        if found is None:
            continue
        shares = (found.accuracy, found.false_share, found.kept_share)
        effective = "" if found.effective is None else f"{found.effective:.1f}"
        rows.append((run.name, found.origin, *map(_percent, shares), effective))
        if advice := advise(lines, run.settings, _last(run, "evaluation")):
            notes.append(f"{run.name}: {advice}" if len(runs) > 1 else f"{advice[0].upper()}{advice[1:]}")
    if not rows:
        return []
    columns = ("", "measured", "in-batch accuracy", "false negatives, estimated", "kept", "effective negatives")
    return [ReportSection("Hard negatives", " ".join(notes), tables=[ReportTable(columns, rows)])]


def _compositional(pairs: Mapping[str, Mapping[str, float]]) -> ReportTable:
    kinds = [*(kind for kind in pairs if kind != "mean"), *(["mean"] if "mean" in pairs else [])]
    columns = ("accuracy", "text", "image", "group")
    rows = [
        (kind, f"{pairs[kind].get('pairs', 0):,.0f}", *(_percent(pairs[kind].get(name)) for name in columns))
        for kind in kinds
    ]
    rows.append(("chance", "", "50.0%", "25.0%", "25.0%", "16.7%"))
    caption = "Pairs that differ in one swap: accuracy, and text, image and group scores (arXiv:2204.03162)"
    return ReportTable(("compositional", "pairs", *columns), rows, caption)


def settings(values: Mapping[str, Any], *, num_runs: int = 0) -> ReportSection:
    """Settings by section; of several runs, those of the first."""
    tables = [
        ReportTable(
            (section, "value"),
            [(str(key), json.dumps(value, ensure_ascii=False)) for key, value in keys.items()],
            numeric=False,
        )
        for section, keys in values.items()
        if keys is not None  # no `compare`
    ]
    note = "Of the first run, or of --config. Under Runs are those that differ." if num_runs > 1 else ""
    return ReportSection("Settings", note, tables=tables)


def recall_interval(evaluation: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """The 95 % interval of a recall such as text_to_image_r1; None without its number of queries."""
    queries = evaluation.get("images" if key.startswith("image_to_text") else "texts")
    share = evaluation.get(key)
    if not queries or share is None or key.startswith(("chance", "zero_shot")):
        return None
    return wilson(share, queries)


def _recall(evaluation: Mapping[str, Any], key: str) -> str:
    """ "10.4% (4.5 to 22.2)"; without the interval where the number of queries is not known."""
    interval = recall_interval(evaluation, key)
    text = _percent(evaluation.get(key))
    return text if interval is None else f"{text} ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def _queries(evaluation: Mapping[str, Any]) -> str:
    """ "48 / 240": the images and the texts of an evaluation; "" if it does not say them."""
    counts = [evaluation.get(name) for name in ("images", "texts")]
    return " / ".join(f"{count:,}" for count in counts if count) if all(counts) else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
