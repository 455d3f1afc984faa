"""A folder in a bucket of S3. Each file is written under a condition, so that two pushes do not mix their files.

A file of up to PART_BYTES is one request; a larger one goes up in parts, and is seen when all of them are there and the
hash is the one expected. The hash is kept beside each file, as its checksum or in its metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from importlib.util import find_spec
from threading import Event
from typing import Any

from mmdata.errors import ConfigError, DataError
from mmdata.push.files import PushedFile
from mmdata.push.s3_parts import PART_BYTES, upload_in_parts
from mmdata.push.store import COMPARERS, Sent, Stored
from mmdata.storage.concurrently import map_concurrently
from mmdata.storage.folder import INNER
from mmdata.storage.s3_client import code_of, encoded, explained, new_client, status_of

_KEPT = "what was sent is not sent again"


class S3Store:
    """A folder in a bucket; see `Store`. Safe to share between threads.

    Args:
        bucket: its name; it must exist.
        folder: path in the bucket, without "/" at the ends; "" for the whole bucket.
        threads: files that are sent at the same time; each takes up to PART_BYTES of memory.

    Raises:
        ConfigError: botocore is missing.
    """

    base = ""

    def __init__(self, bucket: str, folder: str, *, threads: int = 4) -> None:
        self._bucket = bucket
        self._folder = f"{folder}/" if folder else ""
        self._threads = threads
        if find_spec("botocore") is None:
            raise ConfigError(f"'{self.url}': needs botocore; `pip install mmdata[remote]` brings it")

    @property
    def url(self) -> str:
        """See `Store`."""
        return f"s3://{self._bucket}/{self._folder}".rstrip("/")

    @property
    def page(self) -> str:
        """See `Store`."""
        return self.url

    @cached_property
    def _client(self) -> Any:
        return new_client(max(COMPARERS, self._threads))

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._folder + name}

    def listing(self, prefixes: Sequence[str]) -> dict[str, Stored]:
        """See `Store`. Other folders below the URL are not listed: they may be other corpora, of millions of files.

        Raises:
            ConfigError: no such bucket, or it may not be listed.
        """
        found: dict[str, Stored] = {}
        for prefix in {"", *prefixes}:
            found |= self._list(prefix, Delimiter="/")
            if prefix in prefixes:
                found |= self._list(prefix + INNER)
        return found

    def _list(self, prefix: str, **options: str) -> dict[str, Stored]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._explained(self.url):
            return {
                item["Key"].removeprefix(self._folder): Stored(int(item["Size"]), item["ETag"])
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._folder + prefix, **options)
                for item in page.get("Contents", ())
            }

    def is_same(self, file: PushedFile, stored: Stored) -> bool:
        """See `Store`. Without a hash beside it, a file is known by its MD5, if it went up in one part."""
        return self._has(file)

    def _has(self, file: PushedFile) -> bool:
        with self._explained(self._url_of(file.name)):
            try:
                head = self._client.head_object(**self._place(file.name), ChecksumMode="ENABLED")
            except Exception as error:
                if status_of(error) == 404:
                    return False
                raise
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
        with self._explained(self._url_of(name)):
            return self._client.get_object(**self._place(name))["Body"].read()

    def begin(self) -> None:
        """See `Store`; buckets are not made."""

    def remove(self, names: Iterable[str]) -> None:
        """See `Store`."""
        for name in names:
            with self._explained(self._url_of(name)):
                self._client.delete_object(**self._place(name))

    def send(self, files: Sequence[PushedFile], replaced: Mapping[str, Stored], sent: Sent) -> None:
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

    def publish(self, files: Sequence[PushedFile], replaced: Mapping[str, Stored]) -> None:
        """See `Store`."""
        for file in files:
            self._send(file, replaced.get(file.name), Event())

    def _send(self, file: PushedFile, old: Stored | None, stop: Event) -> None:
        place = self._place(file.name)
        with self._explained(self._url_of(file.name)):
            if file.bytes <= PART_BYTES:
                write = partial(
                    self._client.put_object,
                    **place,
                    Body=file.read(),
                    ChecksumAlgorithm="SHA256",
                    ChecksumSHA256=encoded(bytes.fromhex(file.sha256)),
                    Metadata={"sha256": file.sha256},
                )
                self._under_condition(write, file, old)
                return
            for resume in (True, False):
                upload = partial(upload_in_parts, self._client, place, file, stop=stop, resume=resume)
                self._under_condition(upload, file, old)
                if not resume or self._has(file):
                    return
                # The unfinished upload was one of another content: its metadata, which cannot be asked, went with it.
                self.remove([file.name])
                old = None

    def _under_condition(self, write: Callable[..., object], file: PushedFile, old: Stored | None) -> None:
        """Write a file unless another one has come under its name since the listing; equal content is no conflict."""
        condition = {"IfNoneMatch": "*"} if old is None else {"IfMatch": old.version}
        try:
            write(**condition)
        except Exception as error:
            if status_of(error) == 501:  # a store that knows no conditions
                if old is None and file.name in self._list(file.name):
                    raise self._conflict(file) from error
                write()
            elif code_of(error) == "NoSuchBucket" or status_of(error) not in (404, 409, 412):
                raise
            elif not self._has(file):
                raise self._conflict(file) from error

    def _conflict(self, file: PushedFile) -> DataError:
        return DataError(
            f"'{self._url_of(file.name)}': another push wrote or removed this file since this one began; let one push "
            "end, then run this again"
        )

    def _url_of(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._folder}{name}"

    def _explained(self, place: str) -> AbstractContextManager[None]:
        """Raise errors of botocore as our own."""
        return explained(place, self._bucket, kept=_KEPT)


def _md5(file: PushedFile) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in file.chunks(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
