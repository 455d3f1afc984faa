"""mmdata convert: a raw corpus, or shards, to shards with an index and a ledger of every row that was left out.

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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdata.cli.paths import check_source, next_commands
from mmdata.errors import ConfigError, Reason, counted, printable
from mmdata.progress import duration, progress_in_rows
from mmdata.storage.folder import INNER, QUARANTINE_NAME, find_ledger
from mmdata.storage.urls import is_url

if TYPE_CHECKING:
    from mmdata.convert import ConvertConfig, PartReport, Report
    from mmdata.convert.sources.chosen import Choice
    from mmdata.convert.units.engines import Engine
    from mmdata.index import Manifest

SETTINGS = {
    "table": "table in SOURCE, or a pattern for several",
    "images": "folder that the table's paths are relative to, itself relative to SOURCE (or to the folder of a table)",
    "split": "part of SOURCE to convert, such as train, where it has several",
    "format": "format of the table, where its name does not tell: csv, tsv, jsonl, json, parquet or arrow",
    "delimiter": 'character between the fields of a CSV, or "tab" (default: the one that fits the first lines)',
    "encoding": "encoding of text tables, such as latin-1 (default utf-8)",
    "columns": "names of the columns of a CSV without a header line, as image,caption",
    "image-column": "column with paths or images, or in tars the extension of the image",
    "caption-column": "column with captions, or in tars a member or a key in JSON, as json:TEXT; "
    "may be given more than once",
    "label-column": 'column with class numbers or names; "" takes none',
    "hash-column": "column with the MD5 or SHA-256 of each image; images with another one are left out",
    "blur-boxes": "column with boxes to blur, such as faces: lists of [left, top, right, bottom], each from 0 to 1; "
    "images with boxes are stored as JPEG",
    "contact": "URL or mail address that servers of images see in the User-Agent, where the table holds URLs",
    "connections": "images behind URLs fetched at once (default 128)",
    "connections-per-host": "images fetched at once from one host (default 2); more is for servers of your own",
    "caption-template": 'caption made of the class name of an image without one, as "a photo of a {}."; '
    "may be given more than once",
    "keep": "column to store in each sample's JSON (\"path\" is the image's, '*' stands for all columns); "
    "may be given more than once",
    "group-by": "rows that become one sample with all their captions: image (the same path; the default for tables), "
    "content (images equal byte for byte), or none",
    "val-share": "share of the images (0 to 1) that goes into OUT/val, the others into OUT/train",
    "resize": "shorter side, in pixels, to which larger images are shrunk, as JPEG; the others stay byte for byte",
    "quality": "JPEG quality of the images that are shrunk or blurred, 1 to 100 (default 95)",
    "check": "full (default) decodes every image; header reads only the headers of images that are stored unchanged",
    "min-side": "smallest height or width, in pixels",
    "max-aspect": "largest ratio of the sides",
    "max-pixels": "most pixels an image may have",
    "max-bad-share": "share of unusable rows above which nothing is published (default 0.05); rows whose URL gives no "
    "image do not count",
    "shard-rows": "most samples of a shard (default 10000)",
    "shard-bytes": "most bytes of a shard (default 1e9)",
    "tokenizer": "tokenizer that counts caption lengths: a folder, or a Hugging Face name",
    "train-tokenizer": "entries of a tokenizer to train on the captions, into OUT/tokenizer",
}
"""Flags that replace a recipe's setting of the same name."""
CLASSES_SHOWN = 10
REPEATED = {"caption-column": "caption_columns", "caption-template": "caption_templates", "keep": "keep"}
WHOLE = (
    "connections",
    "connections-per-host",
    "resize",
    "quality",
    "min-side",
    "max-pixels",
    "train-tokenizer",
    "shard-rows",
)
NUMBERS: dict[str, Callable[[str], int | float]] = {
    **dict.fromkeys(WHOLE, int),
    **dict.fromkeys(("max-aspect", "max-bad-share", "val-share"), float),
    "shard-bytes": lambda text: int(float(text)),
}


def run(options: argparse.Namespace) -> int:
    """Convert, and print the accounts."""
    check_flags(options)
    check_source(options.source)
    from mmdata.convert import PartReport, convert, convert_part, load_recipe

    signal.signal(signal.SIGTERM, stop)
    show_fetching()
    config = load_recipe(options.recipe, overrides(options))
    rows: Choice | None = options.rows
    if options.select:
        # Imported here: it alone needs torch, which takes seconds and hundreds of megabytes.
        from mmdata.cli.chosen import chosen_rows

        rows = chosen_rows(options.source, options.select, options.join)
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
        show(made, options.source, options.out, config)
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
    parser.add_argument("--recipe", help="a corpus of datasets/, or a YAML file of settings; flags replace them")
    for name, text in SETTINGS.items():
        action = "append" if name in REPEATED else "store"
        extra: dict[str, Any] = {"type": NUMBERS[name], "metavar": "N"} if name in NUMBERS else {"metavar": "NAME"}
        parser.add_argument(f"--{name}", help=text, action=action, **extra)
    parser.add_argument(
        "--select", metavar="CONDITION", help="of shards with an index, the rows to take; as data.select"
    )
    parser.add_argument("--join", metavar="TABLE", action="append", default=[], help="table that --select names")
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
        help="folder of another conversion: leave out the images that it has; may be given more than once",
    )
    parser.add_argument("--no-quotes", action="store_true", help="read quotation marks of a CSV or TSV as text")
    parser.add_argument("--keep-duplicates", action="store_true", help="write images again whose bytes came before")
    parser.add_argument(
        "--ignore-opt-outs",
        action="store_true",
        help="take images behind URLs although robots.txt, X-Robots-Tag or TDMRep opt out; the manifest says so",
    )
    parser.add_argument(
        "--allow-private-addresses",
        action="store_true",
        help="fetch images behind URLs from this machine and private networks too",
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
    if options.rows and options.select:
        raise ConfigError("--rows and --select both say which rows are taken: give one of them")
    if options.join and not options.select:
        raise ConfigError("--join is for a condition: give --select as well")


def place(text: str) -> Path | str:
    """A folder on this disk, or a URL."""
    return text if is_url(text) else Path(text)


def part_of(text: str) -> tuple[int, int]:
    """ "3/64" as (3, 64)."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N, as 3/64: got {text!r}")
    return int(number), int(parts)


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Settings given as flags."""
    given = {name: getattr(options, name.replace("-", "_")) for name in SETTINGS}
    settings = {REPEATED.get(k, k.replace("-", "_")): v for k, v in given.items() if v is not None}
    if options.columns is not None:
        settings["columns"] = options.columns.split(",")
    if options.no_quotes:
        settings["quotes"] = False
    for name in ("keep_duplicates", "ignore_opt_outs", "allow_private_addresses"):
        if getattr(options, name):
            settings[name] = True
    return settings


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
    print("terminated; nothing was published, run the same command again: it goes on where this ended", file=sys.stderr)
    raise SystemExit(128 + number)


def interrupt(number: int, frame: object) -> None:
    """Handle Ctrl-C: say what the next run does, and let the exception take its way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("nothing was published, run the same command again: it goes on where this ended", file=sys.stderr)
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


def show(report: Report, source: str, out: Path | str, config: ConvertConfig) -> None:
    """Print the accounts, the places of the files, and the next commands."""
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
            printable(f"header: none in the table, whose first line holds a URL; took {said}; --columns names others")
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
            "same image that was written: --group-by content gives that row their captions"
        )
    elif accounts["duplicate"]:
        print("duplicates: the first row of each image was written; --keep-duplicates writes all")


def show_next(report: Report, out: Path | str) -> None:
    """Print the next commands."""
    folder = out if report.val is None else inside(out, "train")
    for line in next_commands(folder, report.manifest):
        print(printable(line))


def pace(report: Report, made: int, seconds: float) -> str:
    """A sentence about how long a conversion took; `made` are the rows that no earlier run had examined."""
    from mmdata.cli.preview_lines import size

    rows = report.accounts["rows"]
    written = size(sum(manifest.bytes for manifest in (report.manifest, report.val) if manifest is not None))
    if not made:
        return f"{counted(rows, 'row')} were examined before, and put together in {duration(seconds)}; {written}"
    before = f"; {rows - made:,} more had been examined before" if made < rows else ""
    return f"{counted(made, 'row')} in {duration(seconds)}, {made / seconds:,.0f} a second{before}; {written}"


def show_plan(options: argparse.Namespace, config: ConvertConfig, rows: Choice | None) -> None:
    """Print what a conversion would give; nothing is written."""
    from rich.console import Console

    from mmdata.cli.preview_lines import preview_lines, preview_table
    from mmdata.convert import preview

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
