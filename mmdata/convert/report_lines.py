"""What `mmdata convert` prints of a finished conversion: a line for each thing to know, which is not yet printable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mmdata.config.convert import ConvertConfig
from mmdata.config.train import MASK_REMEDY
from mmdata.convert.convert import Report
from mmdata.errors import Reason, counted

CLASSES_SHOWN = 10


def source_lines(report: Report, source: str, config: ConvertConfig) -> Iterator[str]:
    """What was found in the source without being named, and what names another."""
    found_in = report.source
    for name, found in found_in.get("members", {}).items():
        yield f"{name}: the member {' or '.join(found)}; --{name}-column names another one"
    if config.table is None and len(files := found_in.get("files", ())) == 1 and Path(source).is_dir():
        yield f"table: found {files[0]['name']} in {source}; --table names another one"
    if "images" in found_in:
        yield f"images: found in the folder '{found_in['images']}'; --images names another one"
    if texts := found_in.get("ignored_texts"):
        yield f"ignored: {counted(texts, 'text')} without an image of the same name"
    named = {name: found_in[name] for name in ("image", "captions", "label") if found_in.get(name)}
    if columns := [f"{name} = {' + '.join(v) if isinstance(v, list) else v}" for name, v in named.items()]:
        yield f"columns: {', '.join(columns)}"


def caption_lines(report: Report, config: ConvertConfig) -> Iterator[str]:
    """What to know of classes, captions, and images that were not reached."""
    accounts = report.accounts
    if classes := accounts.get("classes"):
        more = ", …" if len(classes) > CLASSES_SHOWN else ""
        yield f"classes: {len(classes):,}: {', '.join(classes[:CLASSES_SHOWN])}{more}"
    if not report.manifest.has_captions:
        yield (
            "captions: none, a corpus of labels; leave data.tokenizer out, or convert with "
            '--caption-template "a photo of a {}."'
        )
    elif config.caption_templates:
        yield f"captions: images of one class have equal ones, false negatives of each other; {MASK_REMEDY}"
    if outside := accounts["reasons"].get(Reason.OUTSIDE_ROOT):
        yield (
            f"images: {counted(outside, 'path')} {'leads' if outside == 1 else 'lead'} out of the corpus's folder; "
            "--images names the folder that has all images, and a link in it may lead to those elsewhere"
        )


def duplicate_lines(report: Report, *, has_not_in: bool) -> Iterator[str]:
    """Which of equal images were written, and the setting that changes it."""
    accounts = report.accounts
    if accounts.get("differing"):
        yield (
            f"{accounts['differing']:,} of the duplicates have other captions, or another label, than the row of the "
            "same image that was written: group_by=content gives that row their captions"
        )
    elif accounts["duplicate"] and has_not_in:
        yield "duplicates: their image is in a folder of --not-in, or an earlier row of the same image was written"
    elif accounts["duplicate"]:
        yield "duplicates: the first row of each image was written; keep_duplicates=true writes all"
