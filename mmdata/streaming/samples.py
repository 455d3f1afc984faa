"""Reads the samples of a shard in the order of the tar: the rows that `mmdata index` finds, and their bytes.

The strict reader (`mmdata.shards.tar`) walks the tar, because Python's tarfile ends without an error if the tar is cut
between members or a header is damaged. webdataset groups the members into samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from webdataset.tariterators import group_by_keys

from mmdata.errors import BadSample, DataError, excerpt
from mmdata.hashing import hash64
from mmdata.shards import ImageInfo, Member, read_members
from mmdata.shards.images.decoder_warnings import name_warnings, sample_name
from mmdata.shards.images.probe import DEFAULT_LIMITS
from mmdata.shards.members import USUAL, Members
from mmdata.shards.remote.fetch import display_name
from mmdata.shards.samples import MAX_IMAGE_BYTES, Group, describe
from mmdata.shards.tar import split_name
from mmdata.shards.texts import Loss
from mmdata.streaming.forward_file import ForwardFile, open_shard
from mmdata.transform.pixels import EncodedImage


@dataclass(frozen=True)
class StreamSample:
    """A sample as read; its image is not decoded yet.

    Attributes:
        label: -1 if the sample has none, or if the label is a name, because only an index gives names numbers.
        image_hash: as in an index. Identifies the sample in every pass, whatever the order of the pass.
        losses: the text members that could not be used.
    """

    shard: str
    key: str
    image: bytes
    info: ImageInfo
    captions: list[str]
    label: int
    image_hash: int
    losses: dict[Loss, str] = field(default_factory=dict[Loss, str])


class Dropped(NamedTuple):
    """A sample that cannot be used."""

    shard: str
    key: str
    error: BadSample


class _Payload(NamedTuple):
    member: Member
    data: bytes  # empty if the member is larger than MAX_IMAGE_BYTES: `describe` then refuses it by its size


def read_shard(shard: str, *, needs_caption: bool = True, members: Members = USUAL) -> Iterator[StreamSample | Dropped]:
    """The samples of a shard.

    Args:
        shard: path or URL.
        needs_caption: False takes samples that have a label and no caption, too.
        members: which members are image, caption and label.

    Raises:
        DataError: the shard cannot be read, is cut or is not a plain tar (see `read_members`), or a key occurs twice.
            The samples before the damage have been yielded.
    """
    name = display_name(shard)
    starts: dict[str, int] = {}
    with open_shard(shard) as file:
        for group, payloads in _groups(file, name):
            if group.key in starts:
                raise DataError(
                    f"shard '{name}': sample '{group.key}' starts at byte {starts[group.key]} and again at byte "
                    f"{group.start}; pack the tar again, sorted by name"
                )
            starts[group.key] = group.start
            yield _sample(name, group, payloads, needs_caption=needs_caption, members=members)


def _groups(file: ForwardFile, name: str) -> Iterator[tuple[Group, dict[int, bytes]]]:
    """The members of each sample, and their payloads by offset."""
    grouped = group_by_keys(_members(file, name), keys=lambda member: split_name(member) or (None, None))
    try:
        for entries in cast(Iterable[dict[str, Any]], grouped):
            found = {extension: entry for extension, entry in entries.items() if isinstance(entry, _Payload)}
            members = {extension: entry.member for extension, entry in found.items()}
            start = min(member.start for member in members.values())
            yield Group(entries["__key__"], start, members), {e.member.offset: e.data for e in found.values()}
    except DataError:
        raise
    except ValueError as error:  # extensions that differ only in case
        raise DataError(f"shard '{name}': {error.args[0]}; remove one") from error


def _members(file: ForwardFile, name: str) -> Iterator[dict[str, Any]]:
    """The members in the form that webdataset's `group_by_keys` takes."""
    for member in read_members(cast(BinaryIO, file), name=name):
        split = split_name(member.name)
        # Skipped, because webdataset's grouping takes an extension such as "__bad__" for a command.
        if split is None or split[1].startswith("__"):
            continue
        data = b""
        if member.size <= MAX_IMAGE_BYTES:
            file.seek(member.offset)
            data = file.read(member.size)
            if len(data) < member.size:
                raise DataError(
                    f"shard '{name}', byte {member.start}: member '{member.name}' has {member.size} bytes, and the "
                    f"stream ends after {len(data)} of them: cut; fetch or convert the shard again"
                )
        yield {"fname": member.name, "data": _Payload(member, data), "__url__": name}


def _sample(
    shard: str, group: Group, payloads: dict[int, bytes], *, needs_caption: bool, members: Members
) -> StreamSample | Dropped:
    try:
        with name_warnings(partial(sample_name, shard, group.key)):
            row, label, losses = describe(
                group,
                lambda member: payloads[member.offset],
                limits=DEFAULT_LIMITS,
                needs_caption=needs_caption,
                members=members,
            )
    except BadSample as error:
        return Dropped(shard, group.key, error)
    if isinstance(label, str):
        losses = {**losses, Loss.LABEL_NAME: f"label {excerpt(label)} is a name; `mmdata index` numbers names"}
    image = payloads[row.image.offset]
    return StreamSample(shard, row.key, image, row.info, row.captions, row.label, row.image_hash, losses)


@dataclass(frozen=True)
class BufferedSample:
    """A sample in the buffer, with its caption of this epoch.

    Attributes:
        row: number of the sample in the pass, unique over all ranks.
        tokens: number of tokens of the caption, untruncated.
    """

    row: int
    sample: StreamSample
    caption: str
    tokens: int


class BatchSamples:
    """The samples of one batch, in the form that `BatchBuilder` takes (`mmdata.loader.samples.Samples`)."""

    def __init__(self, samples: list[BufferedSample]) -> None:
        self._buffered = samples
        self.keys = [one.sample.key for one in samples]

    def shard(self, i: int) -> str:
        """Name of the shard."""
        return self._buffered[i].sample.shard

    def offset(self, i: int, kind: Literal["image", "caption"]) -> int:
        """-1, unknown: a shard that may be compressed has no offsets to read at."""
        return -1

    def image(self, i: int) -> EncodedImage:
        """The image. Its bytes seed its random numbers, so a crop does not change with the order of the pass."""
        sample = self._buffered[i].sample
        number = sample.image_hash % 2**63
        return EncodedImage(sample.image, sample.info.format, sample.info.orientation, number, checked=True)

    def caption(self, i: int) -> str:
        """The caption chosen for this epoch."""
        return self._buffered[i].caption

    def labels(self) -> NDArray[np.int64]:
        """int64 (n,), -1 for a sample without a label."""
        return np.asarray([one.sample.label for one in self._buffered], np.int64)

    def losses(self) -> list[tuple[str, dict[Loss, str]]]:
        """(shard and key, what was lost) of the samples that lost text members."""
        samples = [one.sample for one in self._buffered if one.sample.losses]
        return [(sample_name(sample.shard, sample.key), sample.losses) for sample in samples]

    def image_hashes(self) -> NDArray[np.int64]:
        """int64 (n,)."""
        return np.asarray([one.sample.image_hash for one in self._buffered], np.int64)

    def caption_hashes(self) -> NDArray[np.int64]:
        """Hashes of the chosen captions, int64 (n,)."""
        return np.asarray([hash64(one.caption.encode()) for one in self._buffered], np.int64)
