"""Chooses which members of a tar make whole samples. A key is never changed: tables and indexes refer to it.

Members of one key that stand apart, or at the edges of two tars that follow one another, are put together if none of
the parts is whole. Else the first whole part is the sample, and the others are left out: they are another sample of the
same name. Only where both parts at the edges of two tars are whole does each stay in its tar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mmdata.repair.accounts import Dropped
from mmdata.repair.payloads import Indexed, Payloads, changed, has_image_magic, is_image, is_text
from mmdata.repair.salvage import Salvaged
from mmdata.tars.samples import Group
from mmdata.tars.tar import Member, split_name


class Found(NamedTuple):
    """A member, and the number of its tar."""

    tar: int
    member: Member


_NO_PLACE: int = 2**63 - 1
Read = Callable[[Found], bytes]


@dataclass
class Run:
    """Members of one key that follow one another; key None: a member that belongs to no sample."""

    key: str | None
    members: list[tuple[str, Found]] = field(default_factory=list[tuple[str, Found]])  # extension, member

    @property
    def is_complete(self) -> bool:
        """Whether it has an image, and a caption or a label."""
        return any(is_image(one) for one, _ in self.members) and any(is_text(one) for one, _ in self.members)


class DroppedMember(NamedTuple):
    """A member that is left out."""

    found: Found
    reason: Dropped
    detail: str


class DroppedSample(NamedTuple):
    """A sample that is left out, and the offset of its first member."""

    key: str
    offset: int
    reason: Dropped
    detail: str


@dataclass
class Chosen:
    """What of a tar is kept, in order, and what is not.

    Attributes:
        kept: members.
        samples: number of samples that were found.
        partial: kept samples that lost a member.
    """

    kept: list[Found] = field(default_factory=list[Found])
    members: list[DroppedMember] = field(default_factory=list[DroppedMember])
    dropped: list[DroppedSample] = field(default_factory=list[DroppedSample])
    samples: int = 0
    partial: int = 0


def runs_of(tar: int, members: Iterable[Member]) -> list[Run]:
    """The members of a tar, in runs of one key."""
    runs: list[Run] = []
    last: Run | None = None  # of a sample; members of no sample do not end it
    for member in members:
        split = split_name(member.name)
        if split is None:
            runs.append(Run(None, [("", Found(tar, member))]))
            continue
        key, extension = split
        if last is None or last.key != key:
            last = Run(key)
            runs.append(last)
        last.members.append((extension, Found(tar, member)))
    return runs


def join_edges(before: list[Run], after: list[Run]) -> bool:
    """Move the rest of a sample from the start of a tar to the end of the tar before; whether it was put together.

    If one of the two parts is whole, they become two runs of the tar before: `Chooser` settles which of them is left,
    once it knows which members are damaged.
    """
    last = next((run for run in reversed(before) if run.key is not None), None)
    first = next((run for run in after if run.key is not None), None)
    if last is None or first is None or last.key != first.key or (last.is_complete and first.is_complete):
        return False
    if last.is_complete or first.is_complete:
        before.append(first)
        after.remove(first)
        return False
    if {extension for extension, _ in last.members} & {extension for extension, _ in first.members}:
        return False
    last.members += first.members
    after.remove(first)
    return True


class Chooser:
    """Chooses members of one tar.

    Args:
        runs: of the tar.
        salvaged: what else was found in it.
        read: gives the bytes of a member.
        payloads: tells damaged payloads.
        indexed: hashes of the tar.
        keeps_incomplete: keep samples without an image or without a text, too.
    """

    def __init__(
        self,
        runs: list[Run],
        salvaged: Salvaged,
        read: Read,
        payloads: Payloads,
        indexed: Indexed,
        *,
        keeps_incomplete: bool,
    ) -> None:
        self._runs, self._salvaged, self._read, self._payloads = runs, salvaged, read, payloads
        self._indexed, self._keeps_incomplete = indexed, keeps_incomplete
        self._chosen = Chosen()
        self._losers: set[str] = set()  # keys of samples that lost a member
        self._first: dict[str, int] = {}  # key to the offset of its first member

    def choose(self) -> Chosen:
        """The members to keep."""
        parts: dict[str, list[Run]] = {}
        for lost in self._salvaged.lost:
            if lost.is_named and (split := split_name(lost.name)) is not None:
                self._losers.add(split[0])
                self._first.setdefault(split[0], lost.offset)
        for run in self._runs:
            if run.key is not None:
                first = run.members[0][1]
                # What came from the next tar is behind all of this one.
                if first.tar == self._runs[0].members[0][1].tar:
                    self._first[run.key] = min(first.member.start, self._first.get(run.key, _NO_PLACE))
                parts.setdefault(run.key, []).append(self._sound(run))
        samples = {key: self._sample(key, runs) for key, runs in parts.items()}
        self._chosen.samples = len(self._first)
        others: set[str] = set()
        for run in self._runs:
            if run.key is None:
                self._keep_other(run.members[0][1], others)
            elif run.key in samples:  # at the place of its first member
                self._chosen.kept += samples.pop(run.key)
        for key in self._first.keys() - parts.keys():
            self._drop_sample(key, Dropped.NO_IMAGE, "no member is left")
        self._chosen.dropped.sort(key=lambda one: (one.offset, one.key))
        return self._chosen

    def _keep_other(self, found: Found, names: set[str]) -> None:
        if found.member.name in names:
            self._drop(found, Dropped.TWICE, "the tar has a member of this name")
        else:
            names.add(found.member.name)
            self._chosen.kept.append(found)

    def _sound(self, run: Run) -> Run:
        """The members of a run whose payload is not damaged, the first of each extension."""
        sound = Run(run.key)
        for extension, found in run.members:
            if fault := self._payloads.fault(
                extension, found.member, lambda one, of=found: self._read(Found(of.tar, one))
            ):
                self._losers.add(run.key or "")
                self._drop(found, *fault)
            elif extension in dict(sound.members):
                self._drop(found, Dropped.TWICE, f"its sample has a .{extension}")
            else:
                sound.members.append((extension, found))
        return sound

    def _sample(self, key: str, runs: list[Run]) -> list[Found]:
        """The members of a sample; empty if it is dropped."""
        whole = next((run for run in runs if run.is_complete), None)
        sample = whole or Run(key)
        for run in runs:
            if run is whole:
                continue
            for extension, found in run.members:
                if extension in dict(sample.members):
                    self._drop(found, Dropped.TWICE, f"its sample has a .{extension}")
                elif whole is not None:
                    self._drop(found, Dropped.KEY_COMES_BACK, f"sample '{key}' is whole without it")
                else:
                    sample.members.append((extension, found))
        self._drop_changed(sample)
        if (missing := self._missing(sample)) is not None:
            for _, found in sample.members:
                self._drop(found, Dropped.OF_DROPPED_SAMPLE, f"sample '{key}': {missing[1]}")
            self._drop_sample(key, *missing)
            return []
        self._chosen.partial += key in self._losers
        return [found for _, found in sample.members]

    def _drop_changed(self, sample: Run) -> None:
        """Leave out the members that are not what was indexed."""
        if sample.key not in self._indexed.images or not sample.members:
            return
        places = {found.member: found for _, found in sample.members}
        group = Group(sample.key or "", 0, {extension: found.member for extension, found in sample.members})
        lost = sample.key in self._losers
        wrong = changed(self._indexed, group, lambda one: self._read(places[one]), is_partial=lost)
        for extension, found in sample.members:
            if extension in wrong:
                self._losers.add(sample.key or "")
                self._drop(found, Dropped.CHANGED, wrong[extension])
        sample.members = [(extension, found) for extension, found in sample.members if extension not in wrong]

    def _missing(self, sample: Run) -> tuple[Dropped, str] | None:
        """What a sample needs and has not. In a tar without damage, that a sample never had is its own affair."""
        if not sample.members:
            return Dropped.NO_IMAGE, "no member is left"
        if self._keeps_incomplete or (self._salvaged.is_whole and sample.key not in self._losers):
            return None
        listed = ", ".join(f".{extension}" for extension, _ in sample.members)
        if not any(is_image(one) or self._starts_as_image(one, found) for one, found in sample.members):
            return Dropped.NO_IMAGE, f"no image among {listed}"
        if not any(is_text(one) for one, _ in sample.members):
            return Dropped.NO_TEXT, f"neither a caption nor a label among {listed}"
        return None

    def _starts_as_image(self, extension: str, found: Found) -> bool:
        if is_text(extension):
            return False
        return has_image_magic(found.member, lambda one: self._read(Found(found.tar, one)))

    def _drop(self, found: Found, reason: Dropped, detail: str) -> None:
        self._chosen.members.append(DroppedMember(found, reason, detail))

    def _drop_sample(self, key: str, reason: Dropped, detail: str) -> None:
        self._chosen.dropped.append(DroppedSample(key, self._first[key], reason, detail))
