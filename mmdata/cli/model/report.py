"""mmdata report: one self-contained HTML page about a corpus, about runs on it, and about what a trained model finds.

mmdata report shards/photos
mmdata report runs/photos                      # the folder of a run: adds scores, and what its model finds
mmdata report runs/a runs/b runs/c
mmdata report photos.yaml                      # adds batch shapes and padding
mmdata report shards/photos "data.select=width >= 64"      # with the plan of these rows
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.cli.paths import check_folder
from mmdata.errors import ConfigError, DataError, printable
from mmdata.recognize import Kind, recognize
from mmdata.storage.folder import local_folder

if TYPE_CHECKING:
    from mmdata.inspect.page import ReportSection

QUERY_ROWS = 1000
"""Images that the queries of a report are asked among, unless --query-rows says otherwise."""
MAX_QUERY_ROWS = 10_000
"""Every caption is compared with every image: 10,000 of them take 400 MB."""

MAX_SECONDS = 60.0
"""After this time the report embeds no further images; several runs share it."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SHARDS | RUN | CONFIG | section.key=value",
        help="folders of shards, folders that `mmdata train` wrote, or a YAML file; default: the shards of the config",
    )
    parser.add_argument(
        "--query-rows",
        type=int,
        default=QUERY_ROWS,
        metavar="N",
        help=f"validation images that each run's model searches (default: {QUERY_ROWS:,}; 0: no search)",
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="default: report.html")


def run(given: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from mmdata.config import load_config
    from mmdata.config.corpus import sources
    from mmdata.config.wrong_place import find_shipped, is_near_a_run, not_a_run

    overrides = [word for word in given.words if "=" in word and not Path(word).exists()]
    places = [Path(word) for word in given.words if word not in overrides]
    runs = [place for place in places if recognize(place) is Kind.RUN]
    shipped = [place for place in places if not place.exists() and find_shipped(place)]
    configs = [place for place in places if recognize(place) is Kind.CONFIG or place in shipped]
    shards = [place for place in places if place not in (*runs, *configs)]
    if len(configs) > 1:
        raise ConfigError(f"one config at a time: got {', '.join(map(str, configs))}")
    if not 0 <= given.query_rows <= MAX_QUERY_ROWS:
        raise ConfigError(f"--query-rows {given.query_rows}: give 0 to {MAX_QUERY_ROWS:,}")
    is_given = bool(configs)  # the config of a run has the sizes of its model, whose folder may be gone
    configs += [run / "config.yaml" for run in runs if (run / "config.yaml").is_file()]
    config = load_config(configs[0], overrides) if configs else None
    if config and not shards:
        shards = [local_folder(source.shards) for source in sources(config.data)]
    if not shards:
        raise ConfigError("say what to report on: `mmdata report SHARDS`, or a run, or a config")
    for folder in shards:
        check_folder(str(folder))
        if is_near_a_run(folder):
            raise DataError(f"'{folder}': {not_a_run(folder)}")
    from mmdata.cli.data.plan import plan_of
    from mmdata.inspect.report import write_report
    from mmdata.train.models.expected_inputs import with_inputs_of_model

    config = with_inputs_of_model(config) if config and is_given else config
    data = config.data if config else None
    planned = None
    if overrides and config is None:
        if len(shards) > 1:
            raise ConfigError(f"{overrides[0]}: of several folders of shards settings are given in a config")
        planned = plan_of(str(shards[0]), overrides)
        data, shards = planned.data, [local_folder(source.shards) for source in sources(planned.data)]
    found = found_by(runs, max_rows=given.query_rows)
    write_report(
        given.out,
        shards=shards,
        data=data,
        runs=runs,
        found=found,
        plan=planned.plan if planned else None,
    )
    print(f"{printable(str(given.out))}: {given.out.stat().st_size / 1000:.0f} kB; open it in a browser")
    return 0


def found_by(runs: Sequence[Path], *, max_rows: int) -> list[ReportSection]:
    """Sections with queries and what they find, on the CPU; where something is missing, a section that says what.

    Args:
        runs: folders that `mmdata train` wrote. Runs with one validation set get the same queries.
        max_rows: images to search; with 0 there are no sections.
    """
    from mmdata.inspect.runs import short_names

    if not max_rows:
        return []
    sections: list[ReportSection] = []
    for run, name in zip(runs, short_names(runs), strict=True):
        found = _found_by(run, max_rows, MAX_SECONDS / len(runs))
        sections += [replace(part, title=f"{part.title}: {name}") for part in found] if len(runs) > 1 else found
    return sections


def _found_by(run: Path, max_rows: int, max_seconds: float) -> list[ReportSection]:
    from mmdata.inspect.page import ReportSection
    from mmdata.inspect.queries import TITLE, queries
    from mmdata.trained import load_run

    try:
        trained = load_run(run, "cpu", precision=None)
        with trained.numerics():
            return queries(
                trained.model,
                trained.config.data,
                name=str(run),
                max_rows=max_rows,
                max_seconds=max_seconds,
                autocast_dtype=trained.autocast_dtype,
            )
    except (ConfigError, DataError, OSError) as error:
        return [ReportSection(TITLE, missing=f"No queries: {error}")]
