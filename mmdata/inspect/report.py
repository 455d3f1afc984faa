"""The report: one page on what is in a corpus, how it is batched, and how runs on it went.

A section without data (no config, no run, no accounts) says how to get the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ImportError as error:  # raised before anything is computed
    raise ImportError("the report needs Jinja and MarkupSafe: pip install 'mmdata[report]'") from error

from mmdata.config import DataConfig
from mmdata.config.corpus import SourceConfig, sources, val_in_words
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError, DataError
from mmdata.files import write_whole
from mmdata.index import Index
from mmdata.inspect import corpus
from mmdata.inspect.gallery import samples
from mmdata.inspect.page import Fact, ReportSection
from mmdata.inspect.runs import read_runs, table_of_runs
from mmdata.plan import Plan, PlanSummary, summarize
from mmdata.plan.from_config import build_plan, num_rows
from mmdata.storage.folder import local_folder
from mmdata.text.tokenizer import load_tokenizer

NO_CONFIG = "Give the report a config to see its buckets, and what its plan pads."
NO_RUN = "No run was given: `mmdata report … runs/NAME` adds its scores, and what its model finds."


def write_report(
    out: Path,
    *,
    shards: Path | Sequence[Path],
    data: DataConfig | None = None,
    runs: Sequence[Path] = (),
    found: Sequence[ReportSection] = (),
    plan: Plan | None = None,
) -> None:
    """Write the page as one file, whole or not at all.

    Args:
        out: path of the page; its folders are made.
        shards: folder with a manifest, or several, which are shown as one corpus.
        data: adds buckets and padding. `shards` replaces its shards, weights and repeats, unless it names the same.
        runs: folders that `mmdata train` wrote; they are the columns of one table.
        found: sections on what the models of the runs find, as `mmdata.inspect.queries` makes them.
        plan: of `data`; None: it is made here.

    Raises:
        DataError: no manifest, or a file of a run is damaged.
        ConfigError: no such tokenizer, a shard twice, a URL, or shards without images.
    """
    index = Index.open(shards)
    index.check_images()
    folders = [local_folder(str(source.folder)) for source in index.sources]
    if data and folders != [Path(source.shards) for source in sources(data)]:
        data = data.model_copy(update={"shards": [SourceConfig(shards=str(folder)) for folder in folders]})
    if data and len(index):
        plan = plan or build_plan(data, index, load_tokenizer(data), count_lengths=True)
    summary = summarize(plan) if plan else None
    ledgers = [path for run in runs for path in sorted(run.glob("ledger-rank*.jsonl"))]
    sections = [
        samples(index, data, plan),
        *([corpus.labels(index)] if index.has_labels else []),
        corpus.shapes(index, plan),
        corpus.buckets(summary, data, plan, num_rows=len(index))
        if data and plan and summary
        else ReportSection("Buckets", missing=NO_CONFIG),
        table_of_runs(read_runs(runs)) if runs else ReportSection("Runs", missing=NO_RUN),
        *found,
        corpus.accounts(index),
        corpus.left_out(folders),
        *([corpus.ledger("Masked in training", ledgers, "{} rows could not be loaded.")] if ledgers else []),
    ]
    resolved = [folder.resolve() for folder in folders]
    named = [*map(str, resolved), f"manifest {index.fingerprint[:12]}", *(f"run {run}" for run in runs)]
    page = _render(" + ".join(map(_name, resolved)), ", ".join(named), _facts(index, data, plan, summary), sections)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page.encode("utf-8", "replace"))


def _name(folder: Path) -> str:
    """shards/photos → "photos", and shards/photos/train, which `mmdata convert --val-share` makes → "photos/train"."""
    return f"{folder.parent.name}/{folder.name}" if folder.name in ("train", "val") else folder.name


def _facts(index: Index, data: DataConfig | None, plan: Plan | None, summary: PlanSummary | None) -> list[Fact]:
    used = f", {plan.num_rows:,} used" if plan and plan.num_rows < len(index) else ""
    facts = [Fact(f"{len(index):,}", "rows", f"{index.captions:,} captions{used}")]
    if data and data.val:
        facts += _validation_fact(index, data)
    shards = "shard" if index.num_shards == 1 else "shards"
    facts.append(Fact(f"{index.num_shards:,}", shards, f"{index.bytes / 1e6:,.1f} MB"))
    counts = corpus.caption_lengths(index)
    if counts.sum():
        half = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
        facts.append(Fact(f"{half}", "tokens, median", f"longest {len(counts) - 1}"))
    if data and data.tokenizer is not None and summary:
        baseline = f"{summary.padding_share_at(data.max_length):.1%} padded to {data.max_length} tokens"
        facts.append(Fact(f"{summary.padding_share:.1%}", "padding", baseline))
    return facts


def _validation_fact(index: Index, data: DataConfig) -> list[Fact]:
    """The rows of the validation set, and how they and the rows of the page add up; empty for one that is not here."""
    evaluated = evaluation_data(data)
    try:
        folders = {local_folder(source.shards).resolve() for source in sources(evaluated)}
        count = num_rows(evaluated)
    except (ConfigError, DataError):  # on another machine, or deleted since: the page is on the other rows
        return []
    own = {Path(str(source.folder)).resolve() for source in index.sources}
    total = len(index)
    if folders <= own:
        note = f"of the {total:,} rows; {total - count:,} others"
    else:
        note = f"{val_in_words(data)}; {total:,} + {count:,} = {total + count:,} rows"
    return [Fact(f"{count:,}", "validation rows", note)]


def _render(title: str, subtitle: str, facts: Sequence[Fact], sections: Sequence[ReportSection]) -> str:
    """The page as HTML; every text from data is escaped."""
    loader = PackageLoader("mmdata.inspect", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("report.html.j2")
    return template.render(title=title, subtitle=subtitle, facts=facts, sections=sections)
