"""What `mmdata convert --plan` prints: a table of rows with their intervals, then a line for each thing to know."""

from __future__ import annotations

from rich.table import Table

from mmdata.convert.preview import Preview
from mmdata.convert.sampling import Estimate
from mmdata.errors import Reason, counted
from mmdata.progress import duration


def preview_table(found: Preview) -> Table:
    """The rows of the corpus: how many will be written, and what becomes of the others."""
    table = Table("rows", "predicted", "95 % interval", "in the sample", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("in", f"{found.sample.rows:,}", "known", f"{found.sample.size:,}")
    for status, count in found.statuses.items():
        table.add_row(status, *_cells(count, _bound(found, status)))
    for reason, count in found.reasons.items():
        bound = _bound(found, "duplicate") if reason is Reason.DUPLICATE_IMAGE else ""
        table.add_row(f"  {reason}", *(f"[dim]{cell}[/dim]" for cell in _cells(count, bound)))
    return table


def preview_lines(found: Preview) -> list[str]:
    """What the table does not say, in lines with text of the corpus in them, which are not yet printable."""
    lines = [f"  {reason}: {example}" for reason, example in found.examples.items()]
    if lines:
        lines.insert(0, "the first of each reason in the sample:")
    lines += [*_sample(found)]
    if found.sample.urls:
        lines.append(f"urls: {counted(found.sample.urls, 'image')} to fetch")
    about = "" if found.sample.is_whole else "about "
    lines.append(f"shards: {about}{counted(found.shards, 'shard')}, {size(found.bytes)}")
    return [*lines, _time(found), *_verdict(found)]


def _bound(found: Preview, status: str) -> str:
    """The end of its interval that a status has, "at least" or "at most", where a sample shows too few equal images."""
    sample = found.sample
    misses_duplicates = not (found.config.keep_duplicates or sample.is_whole) or not sample.knows_merges
    misses = {"merged": not sample.knows_merges, "duplicate": misses_duplicates}
    if status == "written":
        return "at most" if any(misses.values()) else ""
    return "at least" if misses.get(status) else ""


def _cells(count: Estimate, bound: str) -> tuple[str, str, str]:
    interval = "known" if count.low == count.high else f"{count.low:,} to {count.high:,}"
    if bound:
        interval = f"{bound} {count.high if bound == 'at most' else count.low:,}"
    return f"{count.likely:,}", interval, f"{count.sampled:,}"


def _sample(found: Preview) -> list[str]:
    sample = found.sample
    if sample.is_whole:
        return [f"sample: all {counted(sample.rows, 'row')}, so these are no guesses"]
    lines = [
        f"sample: {sample.size:,} of {counted(sample.rows, 'row')}, spread over all of them; a reason that it does not "
        f"show may still have up to {counted(sample.count(0).high, 'row')}"
    ]
    if not found.config.keep_duplicates:
        lines.append("duplicates: equal images under different names are seldom both in a sample; there may be more")
    if not sample.knows_merges:
        lines.append("merged: rows of one image are seldom all in this sample; there may be more")
    return lines


def _time(found: Preview) -> str:
    cost = f"{found.cpu_s * 1000:.2g} ms of CPU a row were measured here, on the sample"
    if found.seconds is None:
        return f"time: the servers decide how long it takes, not this machine; {cost}, without fetching"
    return (
        f"time: about {duration(found.seconds)} with {found.workers} at work; {cost}. It holds for a machine like this "
        "one with nothing else to do, whose disks are fast enough"
    )


def is_refused(found: Preview) -> bool:
    """Whether the conversion would surely publish nothing."""
    counts = zip((found.bad, found.unfetched), found.config.largest_shares, strict=True)
    return bool(found.nothing) or any(count.low > share * found.sample.rows for count, share in counts)


def _verdict(found: Preview) -> list[str]:
    lines = [f"nothing would be published of this sample: {found.nothing}"] if found.nothing else []
    cannot = "cannot be used; repair the corpus, or allow more with --max-bad-share"
    dead = "have a URL that gives no image; allow more with max_unfetched_share=… after OUT"
    shares = found.config.largest_shares
    for count, share, what in zip((found.bad, found.unfetched), shares, (cannot, dead), strict=True):
        most = share * found.sample.rows
        if count.high > most:
            would = "would be published: more" if count.low > most else "may be published: perhaps more"
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
