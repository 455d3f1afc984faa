"""A folder in a bucket of S3. Each file is written under a condition, so that two pushes do not mix their files.

A file of up to PART_BYTES is one request; a larger one goes up in parts, and is seen when all of them are there and the
hash is the one expected. The hash is kept beside each file, as its checksum or in its metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Event

from mmdata.errors import DataError
from mmdata.processes import map_concurrently
from mmdata.push.files import PushedFile
from mmdata.push.s3_parts import PART_BYTES, upload_in_parts
from mmdata.push.store import Sent, StoredFile
from mmdata.storage.attempts import Absent
from mmdata.storage.folder import INNER
from mmdata.storage.s3 import Listed, Refused, S3Folder, condition_on, encoded


class S3Store:
    """A folder in a bucket; see `Store`. Safe to share between threads.

    Args:
        folder: in a bucket that exists.
        threads: files that are sent at the same time; each takes up to PART_BYTES of memory.
    """

    base = ""

    def __init__(self, folder: S3Folder, *, threads: int = 4) -> None:
        self._folder = folder
        self._threads = threads

    @property
    def url(self) -> str:
        """See `Store`."""
        return self._folder.url

    @property
    def page(self) -> str:
        """See `Store`."""
        return self.url

    def listing(self, prefixes: Sequence[str]) -> dict[str, StoredFile]:
        """See `Store`. Other folders below the URL are not listed: they may be other corpora, of millions of files.

        Raises:
            ConfigError: no such bucket, or it may not be listed.
        """
        found: dict[str, Listed] = {}
        for prefix in {"", *prefixes}:
            found |= self._folder.listing(prefix, sub_folders=False)
        for prefix in prefixes:
            found |= self._folder.listing(prefix + INNER)
        return {name: StoredFile(file.bytes, file.tag) for name, file in found.items()}

    def is_same(self, file: PushedFile, stored: StoredFile) -> bool:
        """See `Store`. Without a hash beside it, a file is known by its MD5, if it went up in one part."""
        return self._has(file)

    def _has(self, file: PushedFile) -> bool:
        try:
            head = self._folder.ask("head_object", file.name, ChecksumMode="ENABLED")
        except Absent:
            return False
        tag = head["ETag"].strip('"')
        in_parts = "-" in tag  # then tag and checksum are those of the hashes of the parts
        if head["ContentLength"] != file.bytes:
            return False
        if "ChecksumSHA256" in head and not in_parts:
            return head["ChecksumSHA256"] == encoded(bytes.fromhex(file.sha256))
        if kept := head.get("Metadata", {}).get("sha256"):
            return kept == file.sha256
        return not in_parts and tag == _md5(file)

    def read(self, name: str) -> bytes:
        """See `Store`."""
        found = self._folder.get(name)
        return b"" if found is None else found.data

    def begin(self) -> None:
        """See `Store`; buckets are not made."""

    def remove(self, names: Iterable[str]) -> None:
        """See `Store`."""
        self._folder.remove(names)

    def send(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile], sent: Sent) -> None:
        """See `Store`.

        Raises:
            DataError: content differs, or another push writes there; or all attempts of a request failed.
            ConfigError: credentials are missing or not accepted.
        """
        stop = Event()

        def send_one(file: PushedFile) -> PushedFile:
            self._send(file, replaced.get(file.name), stop)
            return file

        for file in map_concurrently(send_one, files, threads=self._threads, end=stop.set, ahead=2):
            sent(file)

    def publish(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile]) -> None:
        """See `Store`."""
        for file in files:
            self._send(file, replaced.get(file.name), Event())

    def _send(self, file: PushedFile, old: StoredFile | None, stop: Event) -> None:
        if file.bytes <= PART_BYTES:
            put = partial(self._folder.put, file.name, file.read(), file.sha256)
            self._under_condition(lambda condition: put(condition=condition), file, old)
            return
        for resume in (True, False):
            upload = partial(upload_in_parts, self._folder, file, stop=stop, resume=resume)
            self._under_condition(lambda condition, upload=upload: upload(condition=condition), file, old)
            if not resume or self._has(file):
                return
            # The unfinished upload was one of another content: its metadata, which cannot be asked, went with it.
            self.remove([file.name])
            old = None

    def _under_condition(
        self, write: Callable[[dict[str, str]], object], file: PushedFile, old: StoredFile | None
    ) -> None:
        """Write a file unless another one has come under its name since the listing; equal content is no conflict."""
        try:
            write(condition_on(None if old is None else old.version))
        except Refused as refused:
            if refused.status in (400, 501):  # a store that knows no conditions
                if old is None and file.name in self._folder.listing(file.name, sub_folders=False):
                    raise self._conflict(file) from refused
                write({})
            elif not self._has(file):
                raise self._conflict(file) from refused

    def _conflict(self, file: PushedFile) -> DataError:
        return DataError(
            f"'{self._folder.url_of(file.name)}': another push wrote or removed this file since this one began; let "
            "one push end, then run this again"
        )


def _md5(file: PushedFile) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in file.chunks(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
