"""The samples of an iterable, such as a `webdataset.WebDataset`, as tars in memory, which a stream reads as any tar."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Event
from typing import Any

from mmdata.config import DataConfig
from mmdata.errors import ConfigError, excerpt
from mmdata.tars.tar import END, header, padding, split_name

BUFFER_ROWS = 4096
"""Samples of a window, at least."""
BUFFER_BYTES = 2**29
"""Bytes of samples from which on a window takes no further sample."""
TAR_BYTES = 2**26
"""Bytes of samples in a tar, about."""
NUM_TARS = 2**20
"""Tars of PASSES passes together."""
PASSES = 4
"""Passes whose tars have numbers of their own; the first ones use them again."""


class SampleBuffers:
    """Gathers samples into tars in memory, in the order in which they come.

    A key may come again, as it does from an endless iterable: a tar ends before it.

    Args:
        samples: iterated once a pass. Each is a mapping from `__key__` to its key, and from extensions to bytes.
        num_rows: samples of a window; batches are made of the samples of a window, and those left over of the last.
    """

    is_lasting = False
    num_tars = NUM_TARS
    num_threads = 1

    def __init__(self, samples: Iterable[Any], num_rows: int) -> None:
        self.num_rows = num_rows
        self.drops: list[Callable[[int], None]] = []  # called with the number of a tar that is let go
        self._samples = samples
        self._files: dict[int, int] = {}  # descriptor by number of the tar

    def of_pass(self, number: int) -> Iterator[int]:
        """See `TarFiles`; a tar is there when its number is given."""
        of_each = NUM_TARS // PASSES
        # Batches of the pass before may still be in work.
        for tar in [tar for tar in self._files if tar // of_each != (number - 1) % PASSES]:
            self.let_go(tar)
        samples = map(_members, self._samples)
        waiting = next(samples, None)
        for tar in range(number % PASSES * of_each, (number % PASSES + 1) * of_each):
            if waiting is None:
                return
            file, size, keys = _new_file(), 0, set[str]()
            while waiting is not None and size < TAR_BYTES and len(keys) < self.num_rows and waiting[0] not in keys:
                key, members = waiting
                keys.add(key)
                for extension, data in members:
                    head, fill = _header(key, extension, len(data)), padding(len(data))
                    size += len(head) + len(data) + len(fill)
                    _write(file, head + data + fill)
                waiting = next(samples, None)
            _write(file, END)
            self._files[tar] = file
            yield tar

    def window(self, data: DataConfig) -> tuple[int, int, int]:
        """See `TarFiles`."""
        return self.num_rows, self.num_rows, BUFFER_BYTES

    def name(self, tar: int) -> str:
        """See `TarFiles`."""
        return "samples of the iterable"

    def open(self, tar: int, stop: Event) -> int:
        """See `TarFiles`."""
        return os.dup(self._files[tar])

    def is_cached(self, tar: int) -> bool:
        """See `TarFiles`."""
        return False

    def let_go(self, tar: int) -> None:
        """See `TarFiles`; frees the memory."""
        if (file := self._files.pop(tar, None)) is not None:
            os.close(file)
            for drop in self.drops:
                drop(tar)

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


def _members(sample: Any) -> tuple[str, list[tuple[str, bytes]]]:
    """Key and members of a sample.

    Raises:
        ConfigError: no sample of WebDataset, or one that is decoded.
    """
    if not isinstance(sample, Mapping) or not isinstance(sample.get("__key__"), str):
        raise ConfigError(
            "stream: an iterable must give samples as WebDataset does, dictionaries with __key__ and bytes by "
            f"extension (jpg, txt, json, …): got {type(sample).__name__}; leave out .to_tuple() and .batched()"
        )
    members: list[tuple[str, bytes]] = []
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        if not isinstance(value, (bytes, str)):
            raise ConfigError(
                f"stream: sample '{sample['__key__']}': '{name}' is of type {type(value).__name__}, and a stream takes "
                "the bytes of files, and decodes them itself: leave out .decode()"
            )
        if split_name(f"{sample['__key__']}.{name}") != (sample["__key__"], name.lower()):
            raise ConfigError(
                f"stream: sample '{sample['__key__']}': a key may hold no dot in its last part, nor begin with __: "
                "WebDataset cuts it there"
            )
        members.append((name, value.encode() if isinstance(value, str) else value))
    return sample["__key__"], members


def _header(key: str, extension: str, size: int) -> bytes:
    try:
        return header(f"{key}.{extension}", size)
    except ValueError as error:
        raise ConfigError(
            f"stream: sample {excerpt(key)}: '{extension}' of {size:,} bytes cannot be a file of a tar ({error}): give "
            "it a __key__ of at most 90 bytes, and less than 8 GiB"
        ) from None


def _new_file() -> int:
    """A descriptor of an empty file in memory, or on a disk where the system has none in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmdata", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
