"""Reads the samples of a shard in the order of the tar: the rows that `mmdata index` finds, and their bytes.

The readers of the index walk the tar and group its members, because Python's tarfile, and webdataset on it, end without
an error if the tar is cut between members or a header is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, DamagedShard, excerpt
from mmdata.hashing import hash64
from mmdata.images import ImageInfo
from mmdata.images.decoder_warnings import name_warnings, sample_name
from mmdata.images.pixels import EncodedImage
from mmdata.images.probe import DEFAULT_LIMITS
from mmdata.storage.fetch import display_name
from mmdata.streaming.forward_file import open_shard
from mmdata.tars import Member, read_members
from mmdata.tars.forward_file import ForwardFile
from mmdata.tars.members import USUAL, Members
from mmdata.tars.samples import MAX_IMAGE_BYTES, Group, SampleReader, describe
from mmdata.tars.tar import split_name
from mmdata.tars.texts import Loss


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
    payloads: dict[int, bytes] = {}  # by offset, of the samples that are in work
    with open_shard(shard) as file:
        reader = SampleReader(_members(file, name, payloads), name=name)
        groups = iter(reader)
        while True:
            try:
                group = next(groups, None)
            except DamagedShard as error:
                before, _ = reader.at_damage(error)
                if before is not None:
                    yield _sample(name, before, payloads, needs_caption=needs_caption, members=members)
                raise
            if group is None:
                return
            yield _sample(name, group, payloads, needs_caption=needs_caption, members=members)
            for member in group.members.values():
                del payloads[member.offset]


def _members(file: ForwardFile, name: str, payloads: dict[int, bytes]) -> Iterator[Member]:
    """The members that belong to samples, after their payloads were read: a stream cannot go back to them."""
    for member in read_members(cast(BinaryIO, file), name=name):
        split = split_name(member.name)
        if split is None:
            continue
        data = b""  # of a member larger than MAX_IMAGE_BYTES, which `describe` refuses by its size
        if member.size <= MAX_IMAGE_BYTES:
            file.seek(member.offset)
            data = file.read(member.size)
            if len(data) < member.size:
                raise DamagedShard(
                    f"shard '{name}', byte {member.start}: member '{member.name}' has {member.size} bytes, and the "
                    f"stream ends after {len(data)} of them: cut",
                    "fetch or convert the shard again",
                    (split[0], member.start),
                )
        payloads[member.offset] = data
        yield member


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
    image = payloads[row.image_offset]
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
    """The samples of one batch, in the form that `UnfinishedBatch` takes (`mmdata.loader.reader.Samples`)."""

    def __init__(self, samples: list[BufferedSample]) -> None:
        self._buffered = samples
        self.keys = [one.sample.key for one in samples]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The images' hashes, which key the samples' random numbers in any order of the pass: int64 (n,)."""
        return np.asarray([one.sample.image_hash % 2**63 for one in self._buffered], np.int64)

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

    def chosen_captions(self) -> None:
        """Not known: a stream has no row of which another array could be read."""
