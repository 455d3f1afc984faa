"""Reads anyone's tars strictly, without an index: what is wrong in each, with the offset and the remedy.

Headers have checksums; payloads have none. Without an index only the headers of images and the texts are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdata.atomic import explain
from mmdata.errors import BadSample, DataError, Reason
from mmdata.safe_read import check_regular
from mmdata.shards.foreign import guess_members
from mmdata.shards.given_tars import given_tars
from mmdata.shards.images.probe import NO_LIMITS
from mmdata.shards.members import USUAL, Members
from mmdata.shards.samples import split_sample
from mmdata.shards.scan import Edge, Progress, Scan, scan_shard, steps
from mmdata.shards.verify import Problem

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


def verify_tars(given: Sequence[str | os.PathLike[str]], progress: Progress | None = None) -> TarsReport:
    """Read tars strictly, one after the other. A damaged tar is told, and the next one is read.

    Args:
        given: tars, folders of tars, brace patterns.
        progress: called with (bytes done, bytes in all).

    Raises:
        DataError, ConfigError: see `given_tars`.
    """
    paths = given_tars(given)
    report = TarsReport(tars=len(paths))
    total = sum(path.stat().st_size for path in paths if path.is_file())
    members = _members([path for path in paths if path.is_file()])
    scans: list[tuple[str, Scan]] = []
    captioned = False
    before: tuple[Edge, str] | None = None
    for path in paths:
        try:
            check_regular(path, "shard")
            scan = scan_shard(path, limits=NO_LIMITS, members=members, step=steps(progress, report.bytes, total))
        except (DataError, OSError) as error:
            report.problems.append(Problem(path.name, _detail(path.name, error)))
            before = None
            continue
        report.bytes += path.stat().st_size
        report.samples += scan.samples
        captioned |= scan.has_captions
        before = _split(report, before, path.name, scan)
        scans.append((path.name, _faults_only(scan)))
        if scan.damage is not None:
            report.problems.append(Problem(path.name, _detail(path.name, scan.damage)))
            before = None
    for name, scan in scans:
        seen = scan.in_captioned_corpus(name, members) if captioned else scan
        report.problems += [Problem(name, _unusable(line)) for line in seen.quarantined if line["reason"] != _DAMAGED]
    places = {path.name: number for number, path in reversed([*enumerate(paths)])}
    report.problems.sort(key=lambda problem: places[problem.shard])
    if progress:
        progress(total, total)
    return report


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
