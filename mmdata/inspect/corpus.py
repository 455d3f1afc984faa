"""Sections of the report on a corpus: labels, shapes, buckets of the plan, accounts, and rows left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.config.texts import TextsConfig
from mmdata.files import read_json_lines
from mmdata.index import Index
from mmdata.inspect.charts import Mark, histogram
from mmdata.inspect.gallery import class_name
from mmdata.inspect.page import Chart, ReportSection, ReportTable, flat
from mmdata.plan import Plan, PlanSummary
from mmdata.storage.folder import QUARANTINE_NAME, find_ledger

LEDGER_ROWS = 20
CLASSES = 20
"""Classes that are listed by name."""
RATIOS = (("1:4", 1 / 4), ("1:2", 1 / 2), ("2:3", 2 / 3), ("1:1", 1.0), ("3:2", 3 / 2), ("2:1", 2.0), ("4:1", 4.0))


def shapes(index: Index, plan: Plan | None) -> ReportSection:
    """Histograms of caption length and aspect ratio, with the plan's bounds.

    Args:
        index: of the corpus.
        plan: gives the bounds, and the caption lengths of epoch 0; None: the lengths of all captions, without bounds.
    """
    planned = list(plan.policy.buckets) if plan else []
    charts: list[Chart] = []
    if plan is not None:
        lengths = plan.rows.shapes(np.arange(int(plan.rows.starts[-1])), 0).length
        counts, source = np.bincount(lengths), f"the captions of epoch 0, {len(lengths):,} rows"
    else:
        counts, source = caption_lengths(index), "all captions"
    if counts[1:].any():
        charts.append(_lengths(counts, sorted({bucket.length for bucket in planned}), source))
    charts.append(_aspects(index, sorted({(bucket.height, bucket.width) for bucket in planned if not bucket.patches})))
    missing = "" if counts.size or not index.captions else (
        "No caption lengths: the index was made without a tokenizer. `--tokenizer DIR` of `mmdata convert` and "
        "`mmdata index` counts them, or give this report a config."
    )  # fmt: skip
    return ReportSection("Shapes", missing=missing, charts=charts)


def caption_lengths(index: Index) -> NDArray[np.int64]:
    """Captions by length: entry i counts those of i tokens; empty if the index was made without a tokenizer."""
    return index.token_histogram() if index.tokenizer else np.zeros(0, np.int64)


def _lengths(counts: NDArray[np.int64], bounds: Sequence[int], source: str) -> Chart:
    low = int(np.flatnonzero(counts)[0])
    # A few very long captions would squeeze all others to the left: the last bar is the sum of the longest 0.2 %.
    high = bounds[-1] if bounds else int(np.searchsorted(np.cumsum(counts), 0.998 * counts.sum()))
    tail = int(counts[high + 1 :].sum())
    shown = np.append(counts[low : high + 1], [tail] if tail else [])
    edges = np.arange(low, low + len(shown) + 1) - 0.5
    marks = [Mark(bound + 0.5, str(bound)) for bound in bounds]
    every = max(1, round((high - low) / 12))
    x_ticks = [Mark(x, str(x)) for x in range(low, high + 1, every)]
    svg = histogram(
        edges, shown, marks=marks, x_ticks=x_ticks, x_label="tokens, special ones included", y_label="captions"
    )
    caption = f"Caption lengths of {source}"
    caption += f"; dashed: the length bounds of the buckets, {', '.join(map(str, bounds))}." if bounds else "."
    if tail:
        caption += f" The last bar holds {tail:,} captions longer than {high}" + (", which are cut." if bounds else ".")
    return Chart(svg, caption)


def _aspects(index: Index, image_shapes: Sequence[tuple[int, int]]) -> Chart:
    turned = index.column("orientation") >= 5
    height, width = index.column("height").astype(np.float64), index.column("width").astype(np.float64)
    log_aspect = np.log2(np.where(turned, height / width, width / height)) if len(index) else np.zeros(0)
    limit = float(np.clip(np.abs(log_aspect).max(initial=0.0) + 0.1, 0.7, 4.5))
    counts, edges = np.histogram(log_aspect, bins=61, range=(-limit, limit))
    x_ticks = [Mark(float(np.log2(ratio)), name) for name, ratio in RATIOS if abs(np.log2(ratio)) <= limit]
    marks = [Mark(float(np.log2(w / h)), f"{h}×{w}") for h, w in image_shapes]
    svg = histogram(edges, counts, marks=marks, x_ticks=x_ticks, x_label="width : height", y_label="images")
    caption = "Aspect ratios, EXIF orientation applied"
    shapes = ", ".join(mark.label for mark in marks)
    return Chart(svg, caption + (f"; dashed: the buckets' image shapes, height × width: {shapes}." if marks else "."))


def buckets(summary: PlanSummary, data: TextsConfig, plan: Plan, *, num_rows: int) -> ReportSection:
    """The buckets of the plan with what each pads, and the rows that the plan leaves out.

    Args:
        summary: of the plan's epoch 0.
        data: settings that the plan was made from.
        plan: that is summarised.
        num_rows: of the index.
    """
    has_texts = data.tokenizer is not None
    rows = [
        (
            f"{bucket.length}",
            bucket.image,
            f"{count.steps:,}",
            f"{count.rows:,}",
            f"{1 - count.tokens / (count.rows * bucket.length):.1%}" if has_texts else "no texts",
        )
        for bucket, count in summary.buckets.items()
        if count.rows
    ]
    filled = f"the last of them filled up with {summary.masked:,} masked rows" if summary.masked else "all of them full"
    note = f"Epoch 0: {summary.rows:,} rows in {summary.steps:,} batches, {filled}."
    if len(rows) > 1:
        padding = f"{summary.padding_share:.1%}" if has_texts else "no texts"
        rows.append(("all", "", f"{summary.steps:,}", f"{summary.rows:,}", padding))
    if not has_texts:
        note += " Without data.tokenizer batches have no texts, and so no padding."
    if summary.cut:
        note += f" {summary.cut:,} captions are longer than max_length ({data.max_length} tokens) and are cut to it."
    if plan.num_rows < num_rows:
        selection = plan.rows.selection
        taken = "the plan takes" if selection is None else f"{selection.name} takes"
        left_out = num_rows - plan.num_rows
        note += f" {taken} {plan.num_rows:,} of {num_rows:,} rows: {left_out:,} are in no batch."
    head = ("text length", "image", "steps", "rows", "padding")
    return ReportSection("Buckets", note, tables=[ReportTable(head, rows)])


def labels(index: Index) -> ReportSection:
    """The largest classes, and how many rows have no label."""
    tables: list[ReportTable] = []
    every, start = index.column("label"), 0
    for manifest in index.manifests:  # each has class numbers of its own
        count = manifest.rows
        values, counts = np.unique(every[start : start + count], return_counts=True)
        start += count
        without, rows = int(counts[values < 0].sum()), counts[values >= 0]
        values = values[values >= 0]
        largest = np.argsort(-rows, kind="stable")[:CLASSES]
        lines = [(class_name(manifest, int(values[i])), f"{rows[i]:,}") for i in largest]
        lines += [(f"{len(rows) - CLASSES:,} more classes", f"{np.sort(rows)[:-CLASSES].sum():,}")] * (
            len(rows) > CLASSES
        )
        lines += [("no label", f"{without:,}")] * (without > 0)
        tables.append(ReportTable(("label", "rows"), lines, str(manifest.folder) if len(index.manifests) > 1 else ""))
    return ReportSection("Labels", tables=tables)


def accounts(index: Index) -> ReportSection:
    """Accounts of convert or index: what became of each input row. A table for each folder."""
    parts = index.manifests
    tables: list[ReportTable] = []
    for part in parts:
        known = part.accounts or {}
        counted = {name: value for name, value in known.items() if name != "run"}  # "run" says of what, not how many
        if "classes" in counted:  # their names
            counted["classes"] = len(counted["classes"])
        ordered = {name: counted[name] for name in sorted(counted, key=_account_order)}
        rows = [(name, _cell(value)) for name, value in flat(ordered, ": ").items() if value != {}]
        if rows:
            tables.append(ReportTable(("", "rows"), rows, str(part.folder) if len(parts) > 1 else ""))
    if not tables:
        return ReportSection(
            "Accounts", missing="These shards carry no accounts; `mmdata convert` and `mmdata index` write them."
        )
    return ReportSection("Accounts", tables=tables)


def left_out(folders: Sequence[Path]) -> ReportSection:
    """Rows left out of the shards: counts by reason, and the first rows."""
    paths = [path for folder in folders if (path := find_ledger(folder)).is_file()]
    if not paths:
        return ReportSection(
            "Left out", missing=f"No {QUARANTINE_NAME} beside the manifest: no row is known to have been left out."
        )
    return ledger("Left out", paths, "{} rows were left out of the shards.")


def ledger(title: str, paths: Sequence[Path], note: str) -> ReportSection:
    """Counts by reason, and the first entries, of files with a JSON object in each line.

    Args:
        title: of the section.
        paths: the files.
        note: a sentence; the number of entries replaces {} in it.

    Raises:
        DataError: a line is no entry.
    """
    reasons: Counter[str] = Counter()
    first: list[dict[str, Any]] = []
    for path in paths:
        for entry in read_json_lines(path, {"reason": str}):
            reasons[entry["reason"]] += 1
            if len(first) < LEDGER_ROWS:
                first.append(entry)
    if not reasons:
        return ReportSection(title, note.format("No"))
    total = reasons.total()
    counts = ReportTable(("reason", "rows"), [(reason, f"{count:,}") for reason, count in reasons.most_common()])
    names = [
        name for name in dict.fromkeys(name for entry in first for name in entry) if name not in ("reason", "detail")
    ]
    head = ["reason", *names, "detail"]
    rows = [[_cell(entry.get(name, "")) for name in head] for entry in first]
    listed = ReportTable(
        head, rows, f"The first {len(first)} of {total:,}" if total > len(first) else "All", numeric=False
    )
    return ReportSection(title, note.format(f"{total:,}"), tables=[counts, listed])


def _account_order(name: str) -> tuple[int, str]:
    """Sort key: rows in, rows kept, rows left out, then the other accounts by name."""
    head = ("rows", "samples", "written", "indexed", "merged", "duplicate", "filtered", "quarantined")
    return (head.index(name) if name in head else len(head), name)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
