"""mmdata duplicates: a table of near copies, of leaks into other shards, and of a split that keeps copies together.

    mmdata duplicates shards/web --out copies.parquet
    mmdata duplicates shards/web --out copies.parquet --against shards/val shards/coco
    mmdata duplicates shards/web --out copies.parquet --val-share 0.01

Near copies are images that were encoded again, resized, or cropped by at most 5 %; with --flipped also mirrored ones.
No row is dropped: the table has a row for each, and the loader does what a config says.

    data:
      join: [{table: copies.parquet}]
      select: first and leak is None      # one row of each group, and none that the other shards have
      caption_hash: group                 # or: near copies are not used as negatives for each other

With --val-share the column "split" is train or val (data.select: split == 'train'): one of the two for all rows that
chains of the near copies found connect.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.cli.flags import CACHE, add_flags, cache_of
from mmdata.cli.paths import check_folder
from mmdata.config import LoadingConfig
from mmdata.errors import ConfigError, counted, printable
from mmdata.processes import usable_cores

if TYPE_CHECKING:
    from mmdata.duplicates.table import Advance, Duplicates


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help="folder or URL with an index")
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="OTHER", help="shards whose images SHARDS should not have"
    )
    parser.add_argument("--val-share", type=float, help="share of the images (0 to 1) that the column split calls val")
    parser.add_argument("--flipped", action="store_true", help="a mirrored copy is a near copy, too")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a row leaks or could not be hashed")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="threads; default: all usable cores")
    add_flags(parser, LoadingConfig, CACHE)


def run(options: argparse.Namespace) -> int:
    """Write the table, print how many rows are what; 1 with --strict if a row leaks or has no hash."""
    check(options)
    cache = cache_of(options)
    for folder in (options.shards, *options.against):
        check_folder(folder)
    check_out(options.out)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from mmdata.duplicates.table import find_duplicates

    with ExitStack() as stack:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        bars = stack.enter_context(Progress(*columns, console=console, transient=True, disable=not console.is_terminal))

        def progress(what: str, total: int) -> Advance:
            return partial(bars.advance, bars.add_task(what, total=total))

        found = find_duplicates(
            options.shards,
            options.out,
            against=options.against,
            val_share=options.val_share,
            flipped=options.flipped,
            num_workers=options.workers,
            cache=cache,
            progress=progress,
        )
    for line in lines(found, options):
        print(printable(line))
    return 1 if options.strict and (found.leaks or found.problems) else 0


def check(options: argparse.Namespace) -> None:
    """Refuse options that cannot end well."""
    if options.out.suffix != ".parquet":
        raise ConfigError(f"--out '{options.out}': the table is a Parquet file; end its name with .parquet")
    if options.out.is_dir():
        raise ConfigError(f"--out '{options.out}': a folder; give the file to write, such as copies.parquet")
    if options.val_share is not None and not 0 < options.val_share < 1:
        raise ConfigError(f"--val-share {options.val_share:g}: must be above 0 and below 1, such as 0.01")
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: must be at least 1")


def check_out(out: Path) -> None:
    """Refuse a file that is no table of this program, before hours of decoding; make the folder of the table."""
    from mmdata.duplicates.table import is_table

    if out.exists() and not (out.is_file() and is_table(out)):
        raise ConfigError(
            f"--out '{out}': exists, and is no table of this program, so it is not overwritten; give another name, or "
            "remove it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)


def lines(found: Duplicates, options: argparse.Namespace) -> list[str]:
    """The accounts of the rows, and what to put into a config."""
    from mmdata.duplicates.groups import MAX_PAIRS

    kept = found.rows - found.exact - found.near
    said = [
        f"{counted(found.rows, 'row')}: {kept:,} first + {found.exact:,} exact copies + {found.near:,} near copies",
        f"{counted(found.groups, 'group')} of more than one row; the largest has {found.largest_group:,}",
    ]
    if found.problems:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(found.problems.items()))
        said.append(f"{counted(sum(found.problems.values()), 'row')} without a hash: {reasons}")
    if found.bounded:
        said.append(
            f"{counted(found.bounded, 'image')} with more than {MAX_PAIRS} candidates: only the closest were compared, "
            "and near copies among the others may be missed"
        )
    if options.against:
        exact, near = found.leaks["exact"], found.leaks["near"]
        said.append(
            f"{counted(exact + near, 'row')} also in {', '.join(options.against)}: {exact:,} exact, {near:,} near"
        )
    if found.val is not None:
        said.append(
            f"split: {found.rows - found.val:,} train, {found.val:,} val; at most {found.largest_component:,} rows had "
            "to stay together"
        )
    select = " and ".join(["first"] + (["leak is None"] if options.against else []))
    if found.val is not None:
        select = f"{select} and split == 'train'"
    settings = f"data.join: [{{table: {options.out}}}], data.select: {select}"
    return [*said, f"{options.out}; to use it: {settings}; then `mmdata join CONFIG`"]
