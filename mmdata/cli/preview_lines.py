"""What `mmdata convert --plan` prints: a table of rows with their intervals, then a line for each thing to know."""

from __future__ import annotations

from rich.table import Table

from mmdata.convert.preview import Preview
from mmdata.convert.sampling import Estimate
from mmdata.errors import counted
from mmdata.progress import duration


def preview_table(found: Preview) -> Table:
    """The rows of the corpus: how many will be written, and what becomes of the others."""
    table = Table("rows", "predicted", "95 % interval", "in the sample", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("in", f"{found.rows:,}", "known", f"{found.sample.size:,}")
    foretold = {"merged": found.knows_merges, "duplicate": found.keeps_duplicates}
    for name in ("written", "merged", "duplicate", "filtered", "quarantined"):
        count: Estimate = getattr(found, name)
        table.add_row(
            name, *(_cells(count) if foretold.get(name, True) or count.sampled else ("", "not predicted", ""))
        )
    for reason, count in found.reasons.items():
        table.add_row(f"  {reason}", *(f"[dim]{cell}[/dim]" for cell in _cells(count)))
    return table


def preview_lines(found: Preview, out: str) -> list[str]:
    """What the table does not say; `out` is the folder that is meant.

    Returns:
        Lines with text of the corpus in them, which are not yet printable.
    """
    lines = [f"  {reason}: {example}" for reason, example in found.examples.items()]
    if lines:
        lines.insert(0, "the first of each reason in the sample:")
    lines += [_sample(found), *_duplicates(found)]
    if found.urls:
        share = _percent(found.fetched, found.urls)
        lines.append(f"fetched: {found.fetched:,} of the sample's {counted(found.urls, 'URL')} ({share})")
    lines += [_shards(found), _time(found), _room(found, out)]
    if (lengths := found.lengths) is not None:
        lines.append(
            f"captions: half have at most {counted(lengths.half, 'token')}, 95 % at most {lengths.most:,}, the longest "
            f"of {lengths.captions:,} has {lengths.longest:,}; {_percent(lengths.cut, lengths.captions)} are cut"
        )
    return lines + _verdict(found)


def _cells(count: Estimate) -> tuple[str, str, str]:
    is_known = count.low == count.high
    interval = "known" if is_known else f"{count.low:,} to {count.high:,}"
    return f"{count.likely:,}", interval, f"{count.sampled:,}"


def _sample(found: Preview) -> str:
    sample = found.sample
    if sample.is_whole:
        return f"sample: all {counted(sample.rows, 'row')}, so these are no guesses"
    places = "" if sample.run == 1 else f" at {len(sample.ranges)} places"
    unseen = sample.count([False] * sample.size).high
    return (
        f"sample: {sample.size:,} of {counted(sample.rows, 'row')}{places}, spread over all of them; a reason that it "
        f"does not show may still have up to {counted(unseen, 'row')}"
    )


def _duplicates(found: Preview) -> list[str]:
    lines: list[str] = []
    if not found.keeps_duplicates:
        lines.append(
            "duplicates: equal images under different names cannot be predicted from a sample, and count as written "
            "here"
        )
    if not found.knows_merges:
        lines.append("merged: rows of one image are found by reading all images, and count as written here")
    return lines


def _shards(found: Preview) -> str:
    low, high = size(found.bytes.low), size(found.bytes.high)
    within = "" if low == high else f" ({low} to {high})"
    about = "" if found.sample.is_whole else "about "
    return f"shards: {about}{counted(found.packing.shards, 'shard')}, {size(found.bytes.likely)}{within}"


def _time(found: Preview) -> str:
    cost = f"{found.cpu_s * 1000:.2g} ms of CPU a row were measured here, on the sample"
    if found.seconds is None:
        return f"time: the servers decide how long it takes, not this machine; {cost}, without fetching"
    return (
        f"time: about {duration(found.seconds)} with {found.workers} at work; {cost}. It holds for a machine like this "
        "one with nothing else to do, whose disks are fast enough"
    )


def _room(found: Preview, out: str) -> str:
    likely, most = found.room_bytes
    line = f"room: {size(likely)} in {out}, and at most {size(most)}, if duplicates are left out of every shard"
    return line if found.free_bytes is None else f"{line}; {size(found.free_bytes)} are free"


def _verdict(found: Preview) -> list[str]:
    lines: list[str] = []
    if found.free_bytes is not None and found.room_bytes[0] > found.free_bytes:
        lines.append("not enough room: choose a folder on another disk, or shrink the images with --resize")
    cannot = "cannot be used; repair the corpus, or allow more with --max-bad-share"
    dead = "have a URL that gives no image; allow more with max_unfetched_share in the recipe"
    for count, share, what in zip((found.bad, found.unfetched), found.largest_shares, (cannot, dead), strict=True):
        if count.high > share * found.rows:
            would = "would be published: more" if count.low > share * found.rows else "may be published: perhaps more"
            lines.append(f"nothing {would} than {100 * share:g} % of the rows {what}")
    return lines


def size(number: int) -> str:
    """Bytes for people: "812 bytes", "1.2 MB", "345 GB"."""
    if number < 1000:
        return counted(number, "byte")
    units = ("kB", "MB", "GB", "TB", "PB")
    value, place = number / 1000, 0
    while value >= 999.5 and place + 1 < len(units):
        value, place = value / 1000, place + 1
    return f"{value:.3g} {units[place]}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
