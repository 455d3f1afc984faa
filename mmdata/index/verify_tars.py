"""Reads anyone's tars strictly, without an index: what is wrong in each, with the offset and the remedy.

Headers have checksums; payloads have none. Without an index only the headers of images and the texts are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.atomic import explain
from mmdata.errors import BadSample, DataError, Reason
from mmdata.images.probe import NO_LIMITS
from mmdata.index.verify import Problem
from mmdata.processes import map_in_processes, workers_for
from mmdata.safe_read import check_regular
from mmdata.tars.foreign import guess_members
from mmdata.tars.given_tars import given_tars
from mmdata.tars.members import USUAL, Members
from mmdata.tars.samples import split_sample
from mmdata.tars.scan import Bar, Edge, Progress, Scan, scan_shard

_DAMAGED = Reason.DAMAGED_SHARD.value  # its sample is told with the damage


@dataclass
class TarsReport:
    """What was read.

    Attributes:
        problems: in the order of the tars.
        tars, samples, bytes: of all tars; of a damaged one the samples before the damage.
    """

    problems: list[Problem] = field(default_factory=list[Problem])
    tars: int = 0
    samples: int = 0
    bytes: int = 0


def verify_tars(
    given: Sequence[str | os.PathLike[str]], progress: Progress | None = None, *, num_workers: int | None = None
) -> TarsReport:
    """Read tars strictly. A damaged tar is told, and the others are read.

    Args:
        given: tars, folders of tars, brace patterns.
        progress: called with (bytes done, bytes in all).
        num_workers: processes; None takes one for each core from 256 MB of tars on.

    Raises:
        DataError, ConfigError: see `given_tars`.
    """
    paths = given_tars(given)
    report = TarsReport(tars=len(paths))
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    members = _members([path for path in paths if path.is_file()])
    scans: list[tuple[str, Scan]] = []
    captioned = False
    before: tuple[Edge, str] | None = None
    bar, workers, names = Bar(progress, sizes), workers_for(sum(sizes), num_workers), [path.name for path in paths]
    found = map_in_processes(partial(_read, members=members), paths, names=names, workers=workers, step=bar.steps)
    for place, one in enumerate(found):
        name = names[place]
        bar.finish(place, sizes[place])
        if isinstance(one, str):
            report.problems.append(Problem(name, one))
            before = None
            continue
        report.bytes += one.bytes
        report.samples += one.scan.samples
        captioned |= one.has_captions
        before = _split(report, before, name, one.scan)
        scans.append((name, one.scan))
        if one.scan.damage is not None:
            report.problems.append(Problem(name, _detail(name, one.scan.damage)))
            before = None
    for name, scan in scans:
        seen = scan.in_captioned_corpus(name, members) if captioned else scan
        report.problems += [Problem(name, _unusable(line)) for line in seen.quarantined if line["reason"] != _DAMAGED]
    places = {path.name: number for number, path in reversed([*enumerate(paths)])}
    report.problems.sort(key=lambda problem: places[problem.shard])
    if progress:
        progress(sum(sizes), sum(sizes))
    return report


class _Read(NamedTuple):
    """What was read of a tar: its faults, whether its usable samples have captions, and its size."""

    scan: Scan
    has_captions: bool
    bytes: int


def _read(path: Path, step: Callable[[int], None], *, members: Members) -> _Read | str:
    """Read a tar; why it cannot be read, if it cannot."""
    try:
        check_regular(path, "shard")
        scan = scan_shard(path, limits=NO_LIMITS, members=members, step=step)
        return _Read(_faults_only(scan), scan.has_captions, path.stat().st_size)
    except (DataError, OSError) as error:
        return _detail(path.name, error)


def _members(paths: list[Path]) -> Members:
    """The members by the first samples; the usual ones where damage is in these."""
    try:
        return guess_members(paths)
    except (BadSample, DataError, OSError):
        return USUAL


def _faults_only(scan: Scan) -> Scan:
    """A scan without the rows that need no second look, so that memory holds those of one tar."""
    mute = [i for i, row in enumerate(scan.rows) if not row.captions]
    return Scan(
        rows=[scan.rows[i] for i in mute],
        starts=[scan.starts[i] for i in mute],
        labels=[scan.labels[i] for i in mute],
        quarantined=scan.quarantined,
        mute=scan.mute,
        samples=scan.samples,
        edges=scan.edges,
        damage=scan.damage,
    )


def _split(report: TarsReport, before: tuple[Edge, str] | None, name: str, scan: Scan) -> tuple[Edge, str] | None:
    """Tell a sample that stands in two tars; returns the last sample of this one."""
    if not scan.edges:
        return before
    first, last = scan.edges
    if before is not None and before[0].key == first.key and not (before[0].complete and first.complete):
        report.problems.append(Problem(name, str(split_sample(first.key, before[1], name))))
    return last, name


def _unusable(line: dict[str, Any]) -> str:
    return f"byte {line['offset']}: sample '{line['key']}' cannot be used: {line['reason']}: {line['detail']}"


def _detail(name: str, error: Exception) -> str:
    text = explain(error) if isinstance(error, OSError) else str(error)
    return text.removeprefix(f"shard '{name}', ").removeprefix(f"shard '{name}': ")
