"""Reads a tar strictly: each sample becomes a row, or a line of the quarantine list with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmdata.errors import BadSample, Reason
from mmdata.shards.columns.encode import Row
from mmdata.shards.images.decoder_warnings import name_warnings, sample_name
from mmdata.shards.images.probe import Limits
from mmdata.shards.samples import Group, SampleReader, describe
from mmdata.shards.tar import Member
from mmdata.shards.texts import Loss

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True)
class Scan:
    """The samples of a tar.

    Attributes:
        rows: of the usable samples; the label is -1 if it is a name.
        labels: of the usable samples: class number, class name, or None.
        losses: (key, what was lost) of usable samples with losses.
        quarantined: entries of the other samples, as in `IndexReport`.
        samples: number of samples, counted independently of the two lists.
        ignored: members that belong to no sample.
        edges: (key, complete) of the first and the last sample.
    """

    rows: list[Row]
    labels: list[int | str | None]
    losses: list[tuple[str, dict[Loss, str]]]
    quarantined: list[dict[str, Any]]
    samples: int
    ignored: int
    edges: list[tuple[str, bool]]


def scan_shard(path: Path, *, limits: Limits, step: Callable[[int], None]) -> Scan:
    """Read a tar strictly; `step` is called with the offset of each sample."""
    rows: list[Row] = []
    labels: list[int | str | None] = []
    losses: list[tuple[str, dict[Loss, str]]] = []
    quarantined: list[dict[str, Any]] = []
    edges: list[tuple[str, bool]] = []
    samples = 0
    with path.open("rb") as file:

        def read(member: Member) -> bytes:
            file.seek(member.offset)
            return file.read(member.size)

        reader = SampleReader(file, name=path.name)
        for group in reader:
            samples += 1
            reason = None
            try:
                with name_warnings(partial(sample_name, path.name, group.key)):
                    row, label, lost = describe(group, read, limits=limits)
                rows.append(row)
                labels.append(label)
                if lost:
                    losses.append((group.key, lost))
            except BadSample as bad:
                reason = bad.reason
                quarantined.append(_quarantine_line(path, group, bad))
            edge = (group.key, reason not in (Reason.MISSING_IMAGE, Reason.MISSING_CAPTION))
            edges = [edge, edge] if not edges else [edges[0], edge]
            step(group.start)
        return Scan(rows, labels, losses, quarantined, samples, reader.ignored, edges)


def steps(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    """A callback for `scan_shard` that reports progress over many shards.

    Args:
        progress: gets the sums; may be None.
        done: bytes of the shards before the current one.
        total: bytes of all shards.
    """

    def step(offset: int) -> None:
        if progress:
            progress(done + offset, total)

    return step


def _quarantine_line(path: Path, group: Group, bad: BadSample) -> dict[str, Any]:
    return {
        "shard": path.name,
        "key": group.key,
        "offset": group.start,
        "reason": bad.reason.value,
        "detail": bad.detail,
    }
