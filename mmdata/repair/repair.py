"""Repairs tars: each is read tolerantly, and what makes whole samples is written into a new tar of the same name.

Same input, same bytes. Damaged tars are only read. A tar without damage is copied byte for byte. The accounts are
checked against the written tars, which are read again, strictly.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from mmdata.atomic import naming
from mmdata.errors import DataError
from mmdata.index.manifest import Manifest
from mmdata.repair.accounts import RepairLedger, Report
from mmdata.repair.choose import Chooser, Chosen, Found, Run, join_edges, runs_of
from mmdata.repair.output import RepairOutput, open_output
from mmdata.repair.payloads import NOT_INDEXED, CheckImage, Indexed, Payloads, check_header, read_indexed
from mmdata.repair.salvage import Salvaged, salvage
from mmdata.repair.source import Source, open_source, repaired_name
from mmdata.storage.folder import local_folder, manifest_prefix
from mmdata.tars.given_tars import TAR_ENDS, given_tars
from mmdata.tars.samples import SampleReader
from mmdata.tars.scan import Progress
from mmdata.tars.tar import END, padding, read_members

_CHUNK = 1 << 20  # bytes


def repair_tars(
    given: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    check_image: CheckImage | None = check_header,
    check: str = "header",
    keep_incomplete: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write what can be saved of tars into new tars of the same names.

    Args:
        given: tars, folders of tars, brace patterns; those of a split sample must follow one another.
        out: folder for the repaired tars and the ledger `__mmdata__/repaired.jsonl`.
        check_image: tells a damaged image; None: images are not looked at. Where a tar has an index, its hashes are
            compared, too.
        check: names `check_image` in the ledger, so that a run that is repeated is recognised.
        keep_incomplete: keep samples without an image, or without a caption or label, also in damaged tars.
        progress: called with (bytes done, bytes in all).

    Returns:
        The accounts. A folder that holds the same repair already is left alone, and gives the same accounts.

    Raises:
        DataError: no tar, one that is no regular file, nothing can be saved, or `out` holds other files.
        ConfigError: a URL.
        OSError: `out` cannot be written.
    """
    paths = given_tars(given)
    _check_names(paths)
    folder = local_folder(out)
    status = [path.stat() for path in paths]
    listed = [[path.name, one.st_size, one.st_mtime_ns] for path, one in zip(paths, status, strict=True)]
    run = {"tars": listed, "check": check, "keep_incomplete": keep_incomplete}
    with open_output(folder, paths) as output:
        if (accounts := output.published(run)) is not None:
            return Report.from_dict(accounts)
        output.staging.mkdir()
        unfinished = output.staging / "unfinished.jsonl"
        report = Report(tars=len(paths))
        with naming(unfinished), unfinished.open("wb") as file:
            ledger = RepairLedger(file, report, run)
            payloads = Payloads(check_image)
            _Repair(paths, output, report, ledger, payloads, progress, keep_incomplete).run()
            report.unchecked = payloads.unchecked
            ledger.close()
            file.flush()
            os.fsync(file.fileno())
        if not report.written:
            raise DataError(f"nothing of {len(paths)} tar(s) can be saved, such as '{paths[0]}'; fetch them again")
        output.complete(unfinished)
        output.publish()
    return report


def _check_names(paths: Sequence[Path]) -> None:
    """Raise DataError if two tars would be written under one name, or one under a name that is not a tar's."""
    names: dict[str, Path] = {}
    for path in paths:
        if not path.name.endswith(TAR_ENDS):  # such as that of the ledger
            raise DataError(
                f"'{path}': its name does not end in {', '.join(TAR_ENDS)}, and the repaired tar would have it, too; "
                f"rename it, such as to '{path.name}.tar'"
            )
        other = names.setdefault(repaired_name(path.name), path)
        if other is not path:
            raise DataError(
                f"'{other}' and '{path}': both would be written as '{repaired_name(path.name)}'; "
                "repair one of them into another folder"
            )


class _Opened:
    """A tar that was read: its content, and where it comes from."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.salvaged: Salvaged = salvage(source.file, name=source.name)
        self.runs: list[Run] = []


class _Repair:
    """One repair. Two tars are open at a time, because a sample may stand in both."""

    def __init__(
        self,
        paths: Sequence[Path],
        output: RepairOutput,
        report: Report,
        ledger: RepairLedger,
        payloads: Payloads,
        progress: Progress | None,
        keep_incomplete: bool,
    ) -> None:
        self._paths, self._output, self._report, self._ledger = paths, output, report, ledger
        self._payloads, self._progress, self._keep_incomplete = payloads, progress, keep_incomplete
        self._open: dict[int, _Opened] = {}
        self._manifests: dict[Path, tuple[Manifest, dict[str, int]] | None] = {}

    def run(self) -> None:
        """Repair all tars."""
        total = sum(path.stat().st_size for path in self._paths)
        done = 0
        with ExitStack() as files:
            for number, path in enumerate(self._paths):
                self._read(number, files)
                if number + 1 < len(self._paths):
                    self._read(number + 1, files)
                    if join_edges(self._open[number].runs, self._open[number + 1].runs):
                        self._report.joined += 1
                self._repair(number)
                self._open.pop(number).source.file.close()
                done += path.stat().st_size
                if self._progress:
                    self._progress(done, total)

    def _read(self, number: int, files: ExitStack) -> None:
        """Open and read a tar, once."""
        if number in self._open:
            return
        source = open_source(self._paths[number], self._output.staging / "unpacked")
        files.callback(source.file.close)
        opened = self._open[number] = _Opened(source)
        opened.runs = runs_of(number, opened.salvaged.members)
        self._report.members.found += len(opened.salvaged.members) + len(opened.salvaged.lost)
        for skipped in opened.salvaged.skipped:
            self._ledger.skip(source.name, skipped.offset, skipped.size, skipped.what)
        for lost in opened.salvaged.lost:
            self._ledger.drop_member(source.name, lost.name, lost.offset, lost.reason, lost.detail)
        if source.damage:
            self._ledger.note(source.name, source.damage)
        if not opened.salvaged.has_end:
            self._ledger.note(source.name, "the end blocks are missing: members behind its end may be, too")

    def _repair(self, number: int) -> None:
        """Write the repaired tar, and count what is in it."""
        opened = self._open[number]
        indexed = self._indexed(self._paths[number], opened.source.name)
        chooser = Chooser(
            opened.runs,
            opened.salvaged,
            self._payload,
            self._payloads,
            indexed,
            keeps_incomplete=self._keep_incomplete,
        )
        chosen = chooser.choose()
        self._count(opened.source.name, chosen)
        is_whole = opened.salvaged.is_whole and not opened.source.damage
        is_copy = is_whole and chosen.kept == [Found(number, one) for one in opened.salvaged.members]
        if not chosen.kept and not is_copy:
            self._report.empty.append(opened.source.name)
            return
        path = self._output.staging / opened.source.out
        with naming(path), path.open("x+b") as file:
            if is_copy:
                self._report.copied += 1
                _copy(opened.source.file, 0, None, file)
            else:
                self._write(chosen, file)
            file.flush()
            os.fsync(file.fileno())
            self._recount(file, path.name)
        self._report.written.append(path.name)

    def _write(self, chosen: Chosen, file: BinaryIO) -> None:
        """Write members as they are: their headers and payloads, with zeros as padding."""
        for tar, member in chosen.kept:
            source = self._open[tar].source.file
            _copy(source, member.start, member.offset + member.size - member.start, file)
            file.write(padding(member.size))
        file.write(END)

    def _count(self, name: str, chosen: Chosen) -> None:
        self._report.samples.found += chosen.samples
        self._report.partial += chosen.partial
        for (tar, member), reason, detail in chosen.members:
            self._ledger.drop_member(self._open[tar].source.name, member.name, member.start, reason, detail)
        for sample in chosen.dropped:
            self._ledger.drop_sample(name, *sample)

    def _recount(self, file: BinaryIO, name: str) -> None:
        """Read a repaired tar strictly, and count what is in it."""
        members = 0
        reader = SampleReader(read_members(file, name=name), name=name)
        for group in reader:
            self._report.samples.kept += 1
            members += len(group.members)
        self._report.members.kept += members + reader.ignored

    def _payload(self, found: Found) -> bytes:
        file = self._open[found.tar].source.file
        file.seek(found.member.offset)
        return file.read(found.member.size)

    def _indexed(self, path: Path, name: str) -> Indexed:
        """The hashes of a tar, if its folder has an index of it."""
        folder = path.parent
        try:
            if folder not in self._manifests:
                manifest = Manifest.read(folder) if manifest_prefix(folder) is not None else None
                listed = {entry.name: number for number, entry in enumerate(manifest)} if manifest else {}
                self._manifests[folder] = (manifest, listed) if manifest else None
            known = self._manifests[folder]
            if known is None or name not in known[1]:
                return NOT_INDEXED
            return read_indexed(known[0], known[1][name])
        except DataError as error:
            self._manifests.setdefault(folder, None)
            self._ledger.note(name, f"its index is damaged, and was not compared: {error}")
            return NOT_INDEXED


def _copy(source: BinaryIO, start: int, size: int | None, target: BinaryIO) -> None:
    """Copy bytes of a file; None: to its end."""
    source.seek(start)
    left = size
    while left is None or left > 0:
        data = source.read(_CHUNK if left is None else min(_CHUNK, left))
        if not data:
            break
        target.write(data)
        left = None if left is None else left - len(data)
