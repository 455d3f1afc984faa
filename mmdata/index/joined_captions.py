"""The captions in members of tars without images, kept beside their index: a plan must know all captions beforehand.

They are a Parquet file of a column a selector, a list of texts for each sample, in the order of the index. It names the
index that it belongs to, and its pages have checksums.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from mmdata.atomic import sync_folder
from mmdata.errors import BadSample, ConfigError, DataError, Reason, counted
from mmdata.tars.captions import MAX_CAPTION_BYTES, clean_captions
from mmdata.tars.member_values import absent, kind_of, open_member, pick
from mmdata.tars.members import Selector
from mmdata.tars.samples import Group, ReadMember

CAPTIONS_NAME = "members.captions.parquet"
_OF = b"mmdata.members"
_LISTS = pa.list_(pa.field("item", pa.string(), nullable=False))


def parse_captions(text: str | None, *, of: str) -> list[Selector]:
    """The selectors of captions, separated by commas.

    Raises:
        ConfigError: one is no selector, or none of a member with texts.
    """
    found = [Selector.parse(one.strip()) for one in (text or "").split(",") if one.strip()]
    for selector in found:
        kind = kind_of(selector, of=of)
        if kind not in ("json", "txt") or (kind == "json" and not selector.key):
            raise ConfigError(f"{of}: '{selector}': captions are in json:KEY or txt")
        if found.count(selector) > 1:
            raise ConfigError(f"{of}: '{selector}' is named twice: name each member once")
    return found


class CaptionWriter:
    """Reads the captions of samples, and writes them aside until the index is whole.

    Args:
        selectors: of the captions.
        folder: for the file.

    Attributes:
        captions: of all samples, by selector.
        lacking: samples without a usable caption, by selector.
        first: place and reason of the first damaged one, by selector.
    """

    def __init__(self, selectors: Sequence[Selector], folder: Path) -> None:
        self._selectors = list(selectors)
        self._folder, self._aside = folder, folder / f".{CAPTIONS_NAME}.part"
        names = [str(selector) for selector in selectors]
        self.captions, self.lacking = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        self.first: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        self._schema = pa.schema([pa.field(name, _LISTS) for name in names])
        self._rows: list[list[list[str] | None]] = [[] for _ in names]
        self._writer: Any = None

    def add(self, group: Group, read: ReadMember, shard: str) -> None:
        """Read the captions of the next sample; those that cannot be used are counted."""
        for selector, rows in zip(self._selectors, self._rows, strict=True):
            name, captions = str(selector), None
            try:
                captions = _captions(group, read, selector)
                self.captions[name] += len(captions)
            except BadSample as bad:
                self.lacking[name] += 1
                first = self._absent if bad.reason is Reason.MISSING_FIELD else self.first
                first.setdefault(name, f"shard '{shard}', sample '{group.key}': {bad}")
            rows.append(captions)

    def end_tar(self) -> None:
        """Write what was read."""
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = pyarrow.parquet.ParquetWriter(
                self._aside, self._schema, compression="zstd", write_page_checksum=True
            )
        columns = [pa.array(rows, _LISTS) for rows in self._rows]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self._rows = [[] for _ in self._selectors]

    def end(self) -> None:
        """Check what was read, before anything is published.

        Raises:
            DataError: no sample has a caption for a selector; names what the first of them has.
        """
        for name, captions in self.captions.items():
            if not captions and self.lacking[name]:
                why = self._absent.get(name) or self.first[name]
                raise DataError(f"--caption {name}: none of {counted(self.lacking[name], 'sample')} has one: {why}")

    def publish(self, checksum: int) -> None:
        """Give the file its name; `checksum` is that of the index it belongs to."""
        self._writer.add_key_value_metadata({_OF: str(checksum).encode()})
        self._writer.close()
        with self._aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self._aside, self._folder / CAPTIONS_NAME)
        sync_folder(self._folder)

    def discard(self) -> None:
        """Remove what was written aside."""
        if self._writer is not None:
            self._writer.close()
        with suppress(FileNotFoundError):
            self._aside.unlink()

    def in_words(self) -> list[str]:
        """A line for each selector."""
        lines: list[str] = []
        for name, captions in self.captions.items():
            lacking = f"; {counted(self.lacking[name], 'sample')} without" if self.lacking[name] else ""
            first = f"; the first damaged one: {self.first[name]}" if name in self.first else ""
            lines.append(f"captions of {name}: {captions:,}{lacking}{first}")
        return lines


def read_captions(folder: Path, name: str, rows: int, checksum: int, *, of: str, remedy: str) -> Any:
    """The captions of a selector, an Arrow array of lists of texts, null where a sample has none.

    Args:
        folder: with the file.
        name: of the selector.
        rows: samples of the index.
        checksum: of the index.
        of: name of the setting, for messages.
        remedy: the command that makes the index anew, likewise.

    Raises:
        DataError: the file is damaged, or belongs to another index.
    """
    path = folder / CAPTIONS_NAME
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            metadata: Any = file.metadata
            column = file.read([name]).column(name)
            if (metadata.metadata or {}).get(_OF) != str(checksum).encode() or len(column) != rows:
                raise ValueError("it belongs to another index")
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{of}: '{path}': {error}; make the index anew with `{remedy}`") from error
    return column


def _captions(group: Group, read: ReadMember, selector: Selector) -> list[str]:
    """The captions of a sample, at least one.

    Raises:
        BadSample: there is none (missing_field), or they cannot be used.
    """
    member = group.members.get(selector.extension)
    if member is None:
        raise BadSample(Reason.MISSING_FIELD, f"no member .{selector.extension}")
    if member.size > MAX_CAPTION_BYTES:
        raise BadSample(Reason.CAPTION_TOO_LONG, f"{member.size} bytes; at most {MAX_CAPTION_BYTES}")
    opened = open_member(read(member), kind_of(selector, of="captions"))
    value = pick(opened, selector)
    if value is None:
        raise BadSample(Reason.MISSING_FIELD, absent(selector, opened))
    return clean_captions(value)[0]
