"""What a repair counts: members and samples found = kept + dropped, each dropped one with a reason and a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, BinaryIO

MAX_LISTED = 5
"""Most names of tars in one line."""


class Dropped(str, Enum):
    """Why a member or a sample is not in the repaired tars. The list is closed: ledgers rely on it."""

    CUT = "cut"  # a part of its payload is missing
    NAME_LOST = "name_lost"  # the header with its long name is damaged
    REFUSED = "refused"  # its headers contradict each other, or have no name
    NOT_A_FILE = "not_a_file"  # a link, a device, a sparse file
    TWICE = "twice"  # the sample has this member already, or the tar this name
    KEY_COMES_BACK = "key_comes_back"  # the sample of this key is complete without it
    DAMAGED_IMAGE = "damaged_image"  # does not decode
    ONLY_ZEROS = "only_zeros"  # a text of which each byte is zero
    CHANGED = "changed"  # not the content whose hash is in the index
    OF_DROPPED_SAMPLE = "of_dropped_sample"  # sound, and its sample is not
    NO_IMAGE = "no_image"  # samples: no image is left
    NO_TEXT = "no_text"  # samples: neither a caption nor a label is left

    def __str__(self) -> str:
        return self.value


@dataclass
class Counts:
    """Found = kept + dropped, of members or of samples.

    Attributes:
        found: counted as they are read.
        kept: counted in the repaired tars, which are read again.
        dropped: by reason.
    """

    found: int = 0
    kept: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter[Dropped])

    @property
    def balance(self) -> bool:
        """Whether nothing is missing."""
        return self.found == self.kept + self.dropped.total()

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Counts:
        """The inverse of `as_dict`."""
        dropped = Counter({Dropped(reason): count for reason, count in content["dropped"].items()})
        return cls(content["found"], content["kept"], dropped)

    def as_dict(self) -> dict[str, Any]:
        """For the ledger."""
        reasons = {str(reason): self.dropped[reason] for reason in sorted(self.dropped)}
        return {"found": self.found, "kept": self.kept, "dropped": reasons}


@dataclass
class Report:
    """The accounts of a repair.

    Attributes:
        members, samples: of all tars; a sample whose members stand in two tars counts once.
        tars: tars that were read.
        written: names of the repaired tars.
        copied: tars without damage, copied byte for byte.
        empty: tars of which nothing could be saved; they are not written.
        partial: kept samples that lost a member which they do not need.
        joined: samples whose members stood in two tars.
        bytes_skipped: bytes that belong to no member.
        unchecked: images of a format that is not decoded here, or too large for it: they are kept.
        notes: what else a user must know, a line each.
        repeated: whether an earlier run has done all of it, and nothing was written.
    """

    members: Counts = field(default_factory=Counts)
    samples: Counts = field(default_factory=Counts)
    tars: int = 0
    written: list[str] = field(default_factory=list[str])
    copied: int = 0
    empty: list[str] = field(default_factory=list[str])
    partial: int = 0
    joined: int = 0
    bytes_skipped: int = 0
    unchecked: int = 0
    notes: list[str] = field(default_factory=list[str])
    repeated: bool = False

    @property
    def balance(self) -> bool:
        """Whether members and samples found are those kept and dropped."""
        return self.members.balance and self.samples.balance

    def as_dict(self) -> dict[str, Any]:
        """For the ledger's last line."""
        counts = {"members": self.members.as_dict(), "samples": self.samples.as_dict()}
        return {name: value for name, value in {**vars(self), **counts}.items() if name != "repeated"}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Report:
        """The inverse of `as_dict`."""
        values: dict[str, Any] = {**content, "repeated": True}
        report = cls(**values)
        report.members, report.samples = (Counts.from_dict(content[name]) for name in ("members", "samples"))
        return report


class RepairLedger:
    """Writes what is not in the repaired tars into an open file, a JSON object a line.

    Args:
        file: open for writing.
        report: counts the same.
        run: what decides the result; the first line.
    """

    def __init__(self, file: BinaryIO, report: Report, run: dict[str, Any]) -> None:
        self._file, self._report = file, report
        self._write({"run": run})

    def skip(self, shard: str, offset: int, size: int, what: str) -> None:
        """Count bytes that belong to no member."""
        self._report.bytes_skipped += size
        self._write({"shard": shard, "offset": offset, "bytes": size, "skipped": what})

    def drop_member(self, shard: str, name: str, offset: int, reason: Dropped, detail: str) -> None:
        """Count a member that was found and is not kept."""
        self._report.members.dropped[reason] += 1
        self._write({"shard": shard, "offset": offset, "member": name, "reason": str(reason), "detail": detail})

    def drop_sample(self, shard: str, key: str, offset: int, reason: Dropped, detail: str) -> None:
        """Count a sample that was found and is not kept."""
        self._report.samples.dropped[reason] += 1
        self._write({"shard": shard, "offset": offset, "key": key, "reason": str(reason), "detail": detail})

    def note(self, shard: str, what: str) -> None:
        """Keep a line about a tar."""
        self._report.notes.append(f"shard '{shard}': {what}")
        self._write({"shard": shard, "note": what})

    def close(self) -> None:
        """Write the accounts as the last line."""
        self._write({"accounts": self._report.as_dict()})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace")
        self._file.write(text + b"\n")


def account_lines(report: Report) -> Iterator[str]:
    """What was saved and what was not, a line each."""
    for what, counts in (("member", report.members), ("sample", report.samples)):
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.dropped.items()))
        total = counts.dropped.total()
        yield f"{what}s: {counts.found:,} found = {counts.kept:,} kept + {total:,} dropped" + (
            f" ({dropped})" if dropped else ""
        )
    if report.bytes_skipped:
        yield f"skipped: {report.bytes_skipped:,} bytes that belong to no member"
    if report.partial:
        yield f"partial: {report.partial:,} kept samples lost a member which they do not need"
    if report.unchecked:
        yield f"unchecked: {report.unchecked:,} images that cannot be decoded here are kept as they are"
    yield from (f"note: {note}" for note in report.notes[:MAX_LISTED])
    if len(report.notes) > MAX_LISTED:
        yield f"note: {len(report.notes) - MAX_LISTED:,} more are in the ledger"
    if report.joined:
        yield f"joined: {report.joined:,} samples whose members stood in two tars"
    if report.empty:
        yield f"empty: {len(report.empty):,} tars of which nothing is left are not written: {_few(report.empty)}"
    if report.repeated:
        yield "repaired before: these are the accounts of that run, and nothing was written"
    yield f"tars: {report.tars:,} read, {report.copied:,} of them without damage and copied byte for byte"


def _few(names: list[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else "")
