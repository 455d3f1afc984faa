"""What a push needs of the place it sends to, and which place a URL is. A place gives each file whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mmdata.errors import ConfigError
from mmdata.push.files import PushedFile
from mmdata.storage.urls import display_name

_HUB = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@([^/@]+))?/?")

COMPARERS = 32
"""Threads that ask whether a file is there already."""

Sent = Callable[[PushedFile], None]


@dataclass(frozen=True)
class StoredFile:
    """A file that is behind the URL.

    Attributes:
        bytes: its size.
        version: what the place calls this content: an ETag of S3, a blob of git.
        sha256: of the content, where the list of files says it.
    """

    bytes: int
    version: str
    sha256: str | None = None


class Store(Protocol):
    """A place that files are pushed to. Names are relative to its URL."""

    @property
    def url(self) -> str:
        """For readers of mmdata, without a "/" at the end."""
        ...

    @property
    def page(self) -> str:
        """For people: where the folder is seen."""
        ...

    @property
    def base(self) -> str:
        """What the URL of each file begins with for those who know HTTP alone; "" if they cannot read it."""
        ...

    def listing(self, prefixes: Sequence[str]) -> dict[str, StoredFile]:
        """The files in folders with these prefixes and in their `__mmdata__`; none if the place is not there yet."""
        ...

    def is_same(self, file: PushedFile, stored: StoredFile) -> bool:
        """Whether what is stored under the name of a file has its content, as far as the place can tell."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        ...

    def begin(self) -> None:
        """Make the place if it is not there and can be made."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files: no reader sees them any more when a file of the next `send` can be seen."""
        ...

    def send(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile], sent: Sent) -> None:
        """Send files in any order, concurrently; `sent` is called with each that needs no sending any more.

        Args:
            files: with distinct names.
            replaced: what is there under the names of some of them. Whatever else is found under a name was written
                by another push, and is an error unless it has the same content.
        """
        ...

    def publish(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile]) -> None:
        """Send the last files, in this order; returns when all that was sent can be read."""
        ...


def open_store(url: str, *, private: bool = False, threads: int = 4) -> Store:
    """The place that a URL names; nothing is asked of it yet.

    Args:
        url: s3://BUCKET/PREFIX or hf://datasets/OWNER/NAME[@BRANCH].
        private: a dataset of the hub that is made is private.
        threads: files that are sent at the same time.

    Raises:
        ConfigError: another URL, no threads; or the packages for the place are missing.
    """
    if threads < 1:
        raise ConfigError(f"--threads {threads}: a push needs at least 1")
    if match := _HUB.fullmatch(url):
        from mmdata.push.hub import HubStore

        return HubStore(match[1], match[2], private=private, threads=threads)
    if url.startswith("s3://") and url != "s3://":
        if private:
            raise ConfigError("--private is for hf://; who may read a bucket is a setting of the bucket")
        from mmdata.push.s3 import S3Store
        from mmdata.storage.s3 import S3Folder

        return S3Store(S3Folder.of_url(url), threads=threads)
    raise ConfigError(
        f"'{display_name(url)}': a push goes to s3://BUCKET/PREFIX or hf://datasets/OWNER/NAME; for another place, "
        "copy the folder there, manifest.json last"
    )
