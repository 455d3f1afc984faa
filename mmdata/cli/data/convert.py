"""mmdata convert: a raw corpus, or shards, to shards with an index and a list of every row that was left out.

SOURCE is a table (.csv .tsv .txt .jsonl .json .parquet .arrow) of images and captions, COCO's captions, a folder with
caption files beside the images (.txt, .caption or .json), class folders, an imagefolder or Parquet files of the Hugging
Face hub, a dataset of save_to_disk, a .zip of any folder of images, or shards: a folder of WebDataset tars, whose keys,
captions, labels and metadata are kept. Tables may be behind a URL (https, s3, gs, hf), and so may their images; where
owners opted out (robots.txt, X-Robots-Tag, TDMRep) they are left out. Tables may be packed with gzip or zstd.
Shrinking makes web photos load twice as fast, larger ones more:

    mmdata convert shards/photos shards/photos-256 --resize 256 --tokenizer shards/photos/tokenizer
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdata.cli.flags import add_flags, settings_given
from mmdata.cli.parser import PLAIN_SETTING
from mmdata.cli.paths import check_source, next_commands
from mmdata.config.convert import ConvertConfig, load_recipe
from mmdata.errors import ConfigError, Reason, counted, printable
from mmdata.progress import duration, progress_in_rows
from mmdata.storage.folder import INNER, QUARANTINE_NAME, find_ledger
from mmdata.storage.urls import is_url

if TYPE_CHECKING:
    from mmdata.convert import PartReport, Report
    from mmdata.convert.sources.chosen import Choice
    from mmdata.convert.units.engines import Engine
    from mmdata.index import Manifest

FLAGS = (
    *("table", "images", "split", "image_column", "caption_columns", "label_column", "caption_templates"),
    *("val_share", "resize", "max_bad_share", "shard_rows", "tokenizer", "train_tokenizer", "allow_private_addresses"),
)
"""Settings that have a flag; the others are given as key=value, or in a recipe."""
CLASSES_SHOWN = 10
UNPUBLISHED = "nothing was published, run the same command again: it continues where this ended"


def run(options: argparse.Namespace) -> int:
    """Convert, and print the accounts."""
    check_flags(options)
    check_source(options.source)
    given = [*settings_given(options, ConvertConfig, FLAGS), *options.settings]
    config = load_recipe(options.recipe, overrides=given)
    from mmdata.convert import PartReport, convert, convert_part

    signal.signal(signal.SIGTERM, stop)
    show_fetching()
    rows: Choice | None = options.rows
    if options.select is not None:
        # Imported here: it alone needs torch, which takes seconds and hundreds of megabytes.
        from mmdata.cli.chosen import chosen_rows

        rows = chosen_rows(options.source, options.select)
    if options.plan:
        show_plan(options, config, rows)
        return 0
    engine = choose_engine(options.engine, options.workers)
    signal.signal(signal.SIGINT, interrupt)
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
    else:
        show(made, options, config)
        if not made.was_complete:
            converted = 0 if options.finish else made.accounts["rows"] - track.skipped
            print(pace(made, converted, time.monotonic() - began))
        show_next(made, options.out)
    return 0


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
        "--select", metavar="CONDITION", help="of shards with an index, the rows to take; as data.select"
    )
    parser.add_argument(
        "--rows",
        metavar="FILE",
        help="text file with the number of a row on each line, from 0: convert these rows of SOURCE",
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
        help="write nothing: convert about 1 %% of the rows elsewhere, and print what would become of all",
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="who makes the shards")
    parser.add_argument("--workers", type=int, help="processes, or Ray tasks at once (default: one a core)")
    parser.add_argument(
        "--part", metavar="K/N", type=part_of, help="do the K-th of N parts, for N jobs that reach OUT; then --finish"
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
    for flag, value in (("--rows", options.rows), ("--select", options.select)):
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
        from mmdata.integrations.ray import ray_engine

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
    """Print the accounts, the places of the files, and the next commands."""
    source, out = options.source, options.out
    from rich.console import Console
    from rich.table import Table

    from mmdata.config.train import MASK_REMEDY

    if report.was_complete:
        print(f"{printable(str(out))} already holds this conversion; nothing to do")
    table = Table("rows", "count", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    table.add_row("in", f"{report.accounts['rows']:,}")
    accounts = report.accounts
    for name in ("written", "merged", "duplicate", "filtered", "quarantined"):
        table.add_row(name, f"{accounts[name]:,}")
    for reason, count in accounts["reasons"].items():
        if reason not in (Reason.DUPLICATE_IMAGE, Reason.FILTERED):  # which have a line of their own
            table.add_row(f"  {reason}", f"[dim]{count:,}[/dim]")
    for loss, count in accounts.get("lost", {}).items():
        table.add_row(f"written without: {loss}", f"[dim]{count:,}[/dim]")
    Console().print(table)
    for name, found in report.source.get("members", {}).items():
        print(printable(f"{name}: the member {' or '.join(found)}; --{name}-column names another one"))
    if config.table is None and len(files := report.source.get("files", ())) == 1 and Path(source).is_dir():
        print(printable(f"table: found {files[0]['name']} in {source}; --table names another one"))
    named = {name: report.source.get(name) for name in ("image", "captions", "label")}
    if "images" in report.source:
        print(printable(f"images: found in the folder '{report.source['images']}'; --images names another one"))
    if texts := report.source.get("ignored_texts"):
        print(f"ignored: {counted(texts, 'text')} without an image of the same name")
    if named_here := report.source.get("columns"):
        said = ", ".join(f"field {place} as {name}" for place, name in enumerate(named_here, 1))
        print(
            printable(f"header: none in the table, whose first line holds a URL; took {said}; columns=[…] names others")
        )
    columns = [f"{k} = {' + '.join(v) if isinstance(v, list) else v}" for k, v in named.items() if v]
    if columns:
        print(printable(f"columns: {', '.join(columns)}"))
    if classes := accounts.get("classes"):
        more = ", …" if len(classes) > CLASSES_SHOWN else ""
        print(printable(f"classes: {len(classes):,}: {', '.join(classes[:CLASSES_SHOWN])}{more}"))
    if not report.manifest.has_captions:
        print(
            "captions: none, a corpus of labels; leave data.tokenizer out, or convert with "
            '--caption-template "a photo of a {}."'
        )
    elif config.caption_templates:
        print(f"captions: images of one class have equal ones, false negatives of each other; {MASK_REMEDY}")
    if unfetched := accounts.get("unfetched"):
        print(f"urls: {unfetched:,} of the quarantined rows have a URL that gave no image; --rows converts them again")
    if outside := accounts["reasons"].get(Reason.OUTSIDE_ROOT):
        print(
            f"images: {counted(outside, 'path')} {'leads' if outside == 1 else 'lead'} out of the corpus's folder; "
            "--images names the folder that has all images, and a link in it may lead to those elsewhere"
        )
    parts = {out: report.manifest}
    if report.val is not None:
        parts = {inside(out, "train"): report.manifest, inside(out, "val"): report.val}
    for folder, manifest in parts.items():
        print(printable(one_folder(folder, manifest)))
    if accounts.get("differing"):
        print(
            f"{accounts['differing']:,} of the duplicates have other captions, or another label, than the row of the "
            "same image that was written: group_by=content gives that row their captions"
        )
    elif accounts["duplicate"] and options.not_in:
        print("duplicates: their image is in a folder of --not-in, or an earlier row of the same image was written")
    elif accounts["duplicate"]:
        print("duplicates: the first row of each image was written; keep_duplicates=true writes all")


def show_next(report: Report, out: Path | str) -> None:
    """Print the next commands."""
    folder = out if report.val is None else inside(out, "train")
    for line in next_commands(folder, report.manifest):
        print(printable(line))


def pace(report: Report, made: int, seconds: float) -> str:
    """A sentence about how long a conversion took; `made` are the rows that no earlier run had examined."""
    from mmdata.convert.preview_lines import size

    rows = report.accounts["rows"]
    written = size(sum(manifest.bytes for manifest in (report.manifest, report.val) if manifest is not None))
    if not made:
        return f"{counted(rows, 'row')} were examined before, and put together in {duration(seconds)}; {written}"
    before = f"; {rows - made:,} more had been examined before" if made < rows else ""
    return f"{counted(made, 'row')} in {duration(seconds)}, {made / seconds:,.0f} a second{before}; {written}"


def show_plan(options: argparse.Namespace, config: ConvertConfig, rows: Choice | None) -> None:
    """Print what a conversion would give; nothing is written."""
    from rich.console import Console

    from mmdata.convert import preview
    from mmdata.convert.preview_lines import preview_lines, preview_table

    out = options.out if isinstance(options.out, Path) else None  # of a bucket nothing is known
    with progress_in_rows() as track:
        chosen: dict[str, Any] = {"rows": rows, "not_in": options.not_in}
        found = preview(options.source, config, out=out, workers=options.workers, **chosen, track=track)
    Console().print(preview_table(found))
    for line in preview_lines(found):
        print(printable(line))


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
