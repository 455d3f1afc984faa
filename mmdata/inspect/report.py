"""The report: one page on what is in a corpus, how it is batched, and how a run on it went.

A section without data (no run, no evaluation, no accounts) says how to get the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmdata.atomic import write_whole
from mmdata.config import DataConfig
from mmdata.config.data import SourceConfig, sources
from mmdata.inspect import corpus, runs
from mmdata.inspect.page import Fact, Page, Section, render
from mmdata.plan import Plan, PlanSummary, summarize
from mmdata.plan.from_config import build_plan
from mmdata.shards import Index
from mmdata.shards.folder import local_folder
from mmdata.transform.text import load_tokenizer

NO_CONFIG = "Give the report a --config to see its buckets, and what its plan pads."
NO_RUN = "No run was given: `mmdata report … --run runs/NAME` adds its curves and scores."


def write_report(
    out: Path,
    *,
    shards: Path | Sequence[Path],
    data: DataConfig | None = None,
    run: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the page as one file, whole or not at all.

    Args:
        out: path of the page; its folders are made.
        shards: folder with a manifest, or several, which are shown as one corpus.
        data: adds buckets and padding. `shards` replaces its shards, weights and repeats, unless it names the same.
        run: folder that `mmdata train` wrote; adds curves and scores.
        settings: sections of settings to list; None lists `data`, if given.

    Raises:
        DataError: no manifest, or a file of the run is damaged.
        ConfigError: no such tokenizer, a shard twice, or a URL.
        ImportError: jinja2 is not installed.
    """
    index = Index.open(shards)
    folders = [local_folder(str(source.folder)) for source in index.sources]
    if data and folders != [Path(source.shards) for source in sources(data)]:
        data = data.model_copy(update={"shards": [SourceConfig(shards=str(folder)) for folder in folders]})
    plan = _plan(index, data) if data and len(index) else None
    summary = summarize(plan) if plan else None
    metrics = runs.read_metrics(run) if run else []
    evaluation = _evaluation(run, metrics) if run else {}
    listed = settings or ({"data": data.model_dump(mode="json")} if data else {})
    ledgers = sorted(run.glob("ledger-rank*.jsonl")) if run else []
    masked = [corpus.ledger("Masked in training", ledgers, "{} rows could not be loaded.")] if ledgers else []
    sections = [
        corpus.samples(index),
        corpus.shapes(index, plan),
        corpus.waste(summary, data.max_length) if data and summary else Section("Padding", missing=NO_CONFIG),
        runs.curves(metrics) if run else Section("Training", missing=NO_RUN),
        runs.scores(evaluation) if run else Section("Evaluation", missing=NO_RUN),
        corpus.accounts(index),
        corpus.quarantine(folders),
        *masked,
        runs.settings(listed) if listed else Section("Settings", missing=NO_CONFIG),
    ]
    resolved = [folder.resolve() for folder in folders]
    subtitle = f"{', '.join(map(str, resolved))}, manifest {index.fingerprint[:12]}" + (f", run {run}" if run else "")
    title = " + ".join(folder.name for folder in resolved)
    page = Page(title, subtitle, _facts(index, summary, evaluation), sections)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, render(page).encode("utf-8", "replace"))


def _plan(index: Index, data: DataConfig) -> Plan:
    return build_plan(data, index, load_tokenizer(data), count_lengths=True)


def _evaluation(run: Path, metrics: runs.Metrics) -> dict[str, Any]:
    """The run's evaluation.json, else the last evaluation in its log."""
    logged = [line for line in metrics if line.get("kind") == "evaluation"]
    return runs.read_evaluation(run) or dict(logged[-1] if logged else {})


def _facts(index: Index, summary: PlanSummary | None, evaluation: Mapping[str, Any]) -> list[Fact]:
    facts = [
        Fact(f"{len(index):,}", "rows", f"{index.captions:,} captions"),
        Fact(f"{index.num_shards:,}", "shards", _bytes(index.bytes)),
    ]
    counts = corpus.caption_lengths(index)
    if counts.sum():
        half = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
        facts.append(Fact(f"{half}", "tokens, median", f"longest {len(counts) - 1}"))
    if summary:
        longest = max(bucket.length for bucket in summary.buckets)
        facts.append(
            Fact(f"{summary.padding_share:.1%}", "padding", f"{summary.padding_share_at(longest):.1%} unplanned")
        )
    if (recall := evaluation.get("text_to_image_r1")) is not None:
        chance = evaluation.get("chance_r1")
        facts.append(Fact(f"{recall:.1%}", "text → image R@1", f"{recall / chance:.0f} × chance" if chance else ""))
    if mean := (evaluation.get("compositional") or {}).get("mean"):
        facts.append(Fact(f"{mean['accuracy']:.1%}", "compositional", "chance is 50%"))
    return facts


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
