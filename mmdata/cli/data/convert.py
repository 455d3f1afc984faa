"""mmdata convert: make shards with an index, and a list of every row that was left out, from a raw corpus or shards.

SOURCE is a table (.csv .tsv .txt .jsonl .json .parquet .arrow) of images and captions, COCO's captions, a folder with
caption files beside the images (.txt, .caption or .json), class folders, an imagefolder or Parquet files of the Hugging
Face hub, a dataset of save_to_disk, a .zip of any folder of images, or shards: a folder of WebDataset tars, whose keys,
captions, labels and metadata are kept. Tables may be behind a URL (https, s3, gs, hf), and so may their images. Images
are left out if their owners opted out (robots.txt, X-Robots-Tag, TDMRep). Tables may be packed with gzip or zstd.
Shrinking makes web photos load twice as fast, and larger images even faster:

    mmdata convert shards/photos shards/photos-256 --resize 256 --tokenizer shards/photos/tokenizer
"""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdata.cli.flags import add_flags, settings_given
from mmdata.cli.parser import PLAIN_SETTING
from mmdata.cli.paths import check_source, next_commands
from mmdata.config.convert import ConvertConfig, load_recipe
from mmdata.errors import ConfigError, DataError, Reason, counted, printable
from mmdata.progress import duration, progress_in_rows
from mmdata.storage.folder import INNER, QUARANTINE_NAME, find_ledger
from mmdata.storage.urls import is_url

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mmdata.convert import PartReport, Report
    from mmdata.convert.sources.chosen import Choice, SelectedRows
    from mmdata.convert.units.engines import Engine
    from mmdata.index import Manifest

FLAGS = (
    *("table", "images", "split", "image_column", "caption_columns", "label_column", "caption_templates"),
    *("val_share", "resize", "max_bad_share", "shard_rows", "tokenizer", "train_tokenizer", "allow_private_addresses"),
)
"""Settings that have a flag; the others are given as key=value, or in a recipe."""
UNPUBLISHED = "nothing was published, run the same command again: it continues where this ended"


def run(options: argparse.Namespace) -> int:
    """Convert, and print the accounts and the next commands; with --plan 1 if nothing would be published."""
    wanted = settings_and_rows(options)
    signal.signal(signal.SIGTERM, stop)
    if options.plan:
        return show_plan(options, *wanted)
    signal.signal(signal.SIGINT, interrupt)
    if (report := do(options, wanted)) is not None:
        folder = options.out if report.val is None else inside(options.out, "train")
        for line in next_commands(folder, report.manifest):
            print(printable(line))
    return 0


def do(options: argparse.Namespace, wanted: tuple[ConvertConfig, Choice | None] | None = None) -> Report | None:
    """Convert, and print the accounts; None of a part. `wanted` are the settings and the rows that `options` name."""
    config, rows = wanted or settings_and_rows(options)
    from mmdata.convert import PartReport, convert, convert_part

    show_fetching()
    engine = choose_engine(options.engine, options.workers)
    began = time.monotonic()
    with progress_in_rows() as track:
        common: dict[str, Any] = {"rows": rows, "not_in": options.not_in, "engine": engine, "track": track}
        if options.part:
            made = convert_part(options.source, options.out, config, part=options.part, **common)
        else:
            more = {"overwrite": options.overwrite, "finish": options.finish}
            made = convert(options.source, options.out, config, **common, **more)
    if isinstance(made, PartReport):
        show_part(made, options.part)
        return None
    show(made, options, config)
    if not made.was_complete:
        print(pace(made, made.accounts["rows"] - track.skipped, time.monotonic() - began))
    return made


def settings_and_rows(options: argparse.Namespace) -> tuple[ConvertConfig, Choice | None]:
    """The settings of the conversion, and the rows that it takes; None takes all."""
    check_flags(options)
    check_source(options.source)
    given = [*settings_given(options, ConvertConfig, FLAGS), *options.settings]
    config = load_recipe(options.recipe, overrides=given)
    return config, options.rows if options.select is None else selected_rows(options.source, options.select)


def selected_rows(shards: str, select: str) -> SelectedRows:
    """The rows of a folder with an index that a condition, or a file of keys or a mask, selects, as `data.select`.

    Raises:
        ConfigError: a wrong condition or file, or one that leaves no row.
        DataError: the folder has no index.
    """
    # Imported here: it alone needs torch, which takes seconds and hundreds of megabytes.
    import numpy as np

    from mmdata.config import Config
    from mmdata.config.strict_yaml import parse
    from mmdata.convert.sources.chosen import SelectedRows
    from mmdata.loader.corpus import open_index
    from mmdata.tables.select import select_rows

    content = {"data": {"shards": shards, "select": select, "global_batch_size": 1}}
    data = parse(Config, content, origin="--select").data
    try:
        index = open_index(data)
    except (ConfigError, DataError) as error:
        raise DataError(f"--select takes rows of shards with an index: {error}") from error
    selection = select_rows(data, index, of="--select")
    assert selection is not None, "there is a condition"
    offsets: dict[str, NDArray[np.int64]] = {}
    for shard in range(index.num_shards):
        places = selection.of_shard(shard) - int(index.starts[shard])
        found = index.shard(shard).fixed("image_offset")[places]
        offsets[index.listed(shard).name] = np.sort(found.astype(np.int64))
    return SelectedRows(select, offsets)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument(
        "out",
        type=place,
        metavar="OUT",
        help="folder for the shards, or s3://BUCKET/PREFIX; made if missing, else empty",
    )
    parser.add_argument(
        "settings", nargs="*", metavar=PLAIN_SETTING, help="e.g. quality=90; `mmdata settings convert` lists all"
    )
    parser.add_argument("--recipe", metavar="NAME", help="a corpus of datasets/, or a YAML file of settings")
    add_flags(parser, ConvertConfig, FLAGS)
    parser.add_argument(
        "--select", metavar="CONDITION", help="rows to take from shards with an index, as for data.select"
    )
    parser.add_argument(
        "--rows",
        metavar="FILE",
        action="append",
        help="convert only these rows of SOURCE: a row number (from 0) on each line, or the quarantine.jsonl of "
        "another conversion, whose failed rows are meant; may be repeated",
    )
    parser.add_argument(
        "--not-in",
        metavar="FOLDER",
        action="append",
        default=[],
        help="folder of another conversion: leave out each image whose original it has written; may be repeated",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="write nothing to OUT: convert about 1 %% of the rows elsewhere, and predict the result for all",
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="what makes the shards")
    parser.add_argument("--workers", type=int, help="processes, or Ray tasks at once (default: one a core)")
    parser.add_argument(
        "--part", metavar="K/N", type=part_of, help="make the K-th of N parts, for N jobs that share OUT; then --finish"
    )
    parser.add_argument("--finish", action="store_true", help="publish what the parts have made")
    parser.add_argument("--overwrite", action="store_true", help="replace another conversion in OUT")


def check_flags(options: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers must be at least 1: got {options.workers}")
    if options.part and (options.overwrite or options.finish):
        raise ConfigError("--part makes a part, and neither replaces nor publishes anything: leave the other flag out")
    if options.plan and (options.part or options.overwrite or options.finish):
        raise ConfigError(
            "--plan looks at the whole corpus and writes nothing: leave --part, --finish and --overwrite out"
        )
    if str(options.out).partition("=")[0] in ConvertConfig.model_fields:
        raise ConfigError(f"OUT is missing: '{options.out}' is a setting; the folder for the shards comes before it")
    if options.rows is not None and options.select is not None:
        raise ConfigError("--rows and --select both say which rows are taken: give one of them")
    for flag, values in (("--rows", options.rows or []), ("--select", [options.select])):
        for value in values:
            if value is not None and not value.strip():
                raise ConfigError(f"{flag} '{value}': names no rows; leave the flag out to convert all")


def place(text: str) -> Path | str:
    """A folder on this disk, or a URL."""
    return text if is_url(text) else Path(text)


def part_of(text: str) -> tuple[int, int]:
    """ "3/64" as (3, 64)."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N, as 3/64: got {text!r}")
    return int(number), int(parts)


def choose_engine(name: str, workers: int | None) -> Engine:
    """The engine with this name; Ray is imported only for its own."""
    from mmdata.convert.units.engines import local

    if name == "ray":
        from mmdata.convert.units.ray import ray_engine

        return ray_engine(workers)
    return local(workers)


class OnStderr(logging.Handler):
    """Prints log records, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        print(record.getMessage(), file=sys.stderr)


def show_fetching() -> None:
    """Show how the fetching of images behind URLs goes."""
    log = logging.getLogger("mmdata.fetch")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(OnStderr())


def stop(number: int, frame: object) -> None:
    """Handle SIGTERM like an exception: whole units stay, and the same command goes on with them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"terminated; {UNPUBLISHED}", file=sys.stderr)
    raise SystemExit(128 + number)


def interrupt(number: int, frame: object) -> None:
    """Handle Ctrl-C: say what the next run does, and let the exception take its way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(UNPUBLISHED, file=sys.stderr)
    raise KeyboardInterrupt


def show_part(made: PartReport, part: tuple[int, int]) -> None:
    """Print what a part has."""
    if not made.units:
        print(f"part {part[0]} of {part[1]}: nothing to do")
        return
    print(
        f"part {part[0]} of {part[1]}: {counted(made.rows, 'row')} done, of which {made.quarantined:,} cannot be used; "
        "when all parts are done, run the same command with --finish in place of --part"
    )


def show(report: Report, options: argparse.Namespace, config: ConvertConfig) -> None:
    """Print the accounts and the places of the files."""
    from rich.console import Console
    from rich.table import Table

    from mmdata.convert.report_lines import caption_lines, duplicate_lines, source_lines

    if report.was_complete:
        print(f"{printable(str(options.out))} already holds this conversion; nothing to do")
    accounts = report.accounts
    table = Table("rows", "count", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    table.add_row("in", f"{accounts['rows']:,}")
    for name in ("written", "merged", "duplicate", "filtered", "quarantined"):
        table.add_row(name, f"{accounts[name]:,}")
    for reason, count in accounts["reasons"].items():
        if reason not in (Reason.DUPLICATE_IMAGE, Reason.FILTERED):  # which have a line of their own
            table.add_row(f"  {reason}", f"[dim]{count:,}[/dim]")
    for loss, count in accounts.get("lost", {}).items():
        table.add_row(f"written without: {loss}", f"[dim]{count:,}[/dim]")
    Console().print(table)
    parts = {options.out: report.manifest}
    if report.val is not None:
        parts = {inside(options.out, "train"): report.manifest, inside(options.out, "val"): report.val}
    for line in (
        *source_lines(report, options.source, config),
        *caption_lines(report, config),
        *(one_folder(folder, manifest) for folder, manifest in parts.items()),
        *duplicate_lines(report, has_not_in=bool(options.not_in)),
        *again_lines(accounts, options, config, [*parts]),
    ):
        print(printable(line))


def again_lines(
    accounts: dict[str, Any], options: argparse.Namespace, config: ConvertConfig, parts: list[Path | str]
) -> Iterator[str]:
    """The command that converts the quarantined rows again, if the URLs of some gave no image."""
    unfetched, quarantined = accounts.get("unfetched", 0), accounts["quarantined"]
    if not unfetched or not isinstance(options.out, Path):  # of a bucket, files would have to be copied first
        return
    changed = {"val_share": "null"} if config.val_share else {}
    if quarantined - unfetched > config.max_bad_share * quarantined:
        changed["max_bad_share"] = "1"
    if config.train_tokenizer:
        changed |= {"train_tokenizer": "null", "tokenizer": f"{parts[0]}/tokenizer"}
    given = [*settings_given(options, ConvertConfig, FLAGS), *options.settings]
    kept = [setting for setting in given if setting.partition("=")[0] not in changed]
    words = [options.source, f"{options.out}-again", *kept, *(f"{name}={value}" for name, value in changed.items())]
    flags = [("--recipe", options.recipe)] if options.recipe else []
    flags += [("--rows", str(find_ledger(Path(part)))) for part in parts]
    if not config.keep_duplicates:
        flags += [("--not-in", str(folder)) for folder in (*options.not_in, options.out)]
    command = shlex.join(["mmdata", "convert", *words, *chain.from_iterable(flags)])
    yield f"urls: {unfetched:,} of the quarantined rows have a URL that gave no image; to convert them again: {command}"


def pace(report: Report, made: int, seconds: float) -> str:
    """A sentence about how long a conversion took; `made` are the rows that no earlier run had examined."""
    from mmdata.convert.preview_lines import size

    rows = report.accounts["rows"]
    written = size(sum(manifest.bytes for manifest in (report.manifest, report.val) if manifest is not None))
    if not made:
        return f"{counted(rows, 'row')} were examined before, and put together in {duration(seconds)}; {written}"
    before = f"; {rows - made:,} more had been examined before" if made < rows else ""
    return f"{counted(made, 'row')} in {duration(seconds)}, {made / seconds:,.0f} a second{before}; {written}"


def show_plan(options: argparse.Namespace, config: ConvertConfig, rows: Choice | None) -> int:
    """Print what a conversion would give; nothing is written. 1 if nothing would be published."""
    from rich.console import Console

    from mmdata.convert import preview
    from mmdata.convert.preview_lines import is_refused, preview_lines, preview_table

    show_fetching()
    out = options.out if isinstance(options.out, Path) else None  # of a bucket nothing is known
    with progress_in_rows() as track:
        chosen: dict[str, Any] = {"rows": rows, "not_in": options.not_in}
        found = preview(options.source, config, out=out, workers=options.workers, **chosen, track=track)
    Console().print(preview_table(found))
    for line in preview_lines(found):
        print(printable(line))
    return int(is_refused(found))


def inside(out: Path | str, name: str) -> Path | str:
    """A sub-folder of the output."""
    return out / name if isinstance(out, Path) else f"{out.rstrip('/')}/{name}"


def one_folder(folder: Path | str, manifest: Manifest) -> str:
    """A sentence about a folder of shards."""
    accounts = manifest.accounts or {}
    left_out = sum(accounts["reasons"].values())
    ledger = find_ledger(folder) if isinstance(folder, Path) else inside(folder, INNER + QUARANTINE_NAME)
    listed = f"; {left_out:,} left out, each with its reason in {ledger}" if left_out else ""
    texts = counted(manifest.captions, "caption") if manifest.has_captions else "labels only"
    return f"{counted(manifest.num_shards, 'shard')} in {folder}: {counted(manifest.rows, 'image')}, {texts}{listed}"
