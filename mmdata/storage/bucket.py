"""A folder in a bucket of S3, to write to: files are put whole, and under the condition that none is there, if asked.

botocore repeats requests that failed; what it does not repeat, bodies that were cut while they were read, is repeated
here. An answer that was lost may have been a success, so whoever puts under a condition compares what is there.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmdata.atomic import naming
from mmdata.errors import ConfigError, DataError
from mmdata.storage.concurrently import map_concurrently
from mmdata.storage.fetch import ATTEMPTS, CHUNK_BYTES, MAX_WAIT_S, WAIT_S, cause_of
from mmdata.storage.s3_client import code_of, encoded, explained, failed, is_missing, new_client, status_of

CONNECTIONS = 32
"""Requests of one process at once."""
REMOVERS = 8
"""Files that are removed at once."""
MOST_BYTES = 5 * 10**9
"""Largest file that one request puts or copies."""

T = TypeVar("T")

_KEPT = "what was made is not made again"
_URL = re.compile(r"s3://([^/?#]+)/?([^?#]*)")


class Tagged(NamedTuple):
    """The content of a file, and what S3 calls this content."""

    data: bytes
    tag: str


class Bucket:
    """A folder in a bucket. It can be sent to any process; safe to share between threads.

    Args:
        name: of the bucket, which must exist.
        folder: path in the bucket, without "/" at the ends; "" for the whole bucket.

    Raises:
        ConfigError: botocore is missing.
    """

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.folder = folder
        self._clients: list[Any] = []  # one, once it is needed; shared with folders in this one
        if find_spec("botocore") is None:
            raise ConfigError(f"'{self.url}': needs botocore; `pip install mmdata[remote]` brings it")

    @classmethod
    def of_url(cls, url: str) -> Bucket:
        """The folder that a URL names.

        Raises:
            ConfigError: not a URL of S3.
        """
        if (match := _URL.fullmatch(url)) is None:
            raise ConfigError(f"'{url}': a folder on this disk or s3://BUCKET/PREFIX is needed here")
        return cls(match[1], match[2].strip("/"))

    def under(self, name: str) -> Bucket:
        """A folder in this one."""
        inner = Bucket(self.name, f"{self.folder}/{name}".strip("/"))
        inner._clients = self._clients
        return inner

    @property
    def url(self) -> str:
        """Without a "/" at the end."""
        return f"s3://{self.name}/{self.folder}".rstrip("/")

    def key(self, name: str) -> str:
        """Path in the bucket of a file of this folder."""
        return f"{self.folder}/{name}".lstrip("/")

    @property
    def _client(self) -> Any:
        if not self._clients:
            self._clients.append(new_client(CONNECTIONS))
        return self._clients[0]

    def __reduce__(self) -> tuple[type[Bucket], tuple[str, str]]:
        return Bucket, (self.name, self.folder)  # each process makes a client of its own

    def listing(self, prefix: str = "") -> dict[str, int]:
        """Size of each file whose name begins so, those in sub-folders included."""
        found: dict[str, int] = {}
        for page in self._pages(prefix):
            found |= {self._name(item["Key"]): int(item["Size"]) for item in page.get("Contents", ())}
        return found

    def top(self) -> dict[str, int | None]:
        """Size of each file that is in no sub-folder; None for each sub-folder, its name with "/"."""
        found: dict[str, int | None] = {}
        for page in self._pages("", Delimiter="/"):
            found |= {self._name(item["Key"]): int(item["Size"]) for item in page.get("Contents", ())}
            found |= {self._name(item["Prefix"]): None for item in page.get("CommonPrefixes", ())}
        return found

    def get(self, name: str) -> Tagged | None:
        """The content of a small file; None if there is none."""
        try:
            return self._read(name, lambda answer: Tagged(b"".join(_chunks(answer)), answer["ETag"]))
        except FileNotFoundError:
            return None

    def download(self, name: str, path: Path, sha256: str) -> None:
        """Fetch a file into a new one.

        Raises:
            FileNotFoundError: there is none.
            DataError: it has other content.
        """

        def store(answer: dict[str, Any]) -> str:
            digest = hashlib.sha256()
            with naming(path), path.open("wb") as file:
                for chunk in _chunks(answer):
                    file.write(chunk)
                    digest.update(chunk)
            return digest.hexdigest()

        if self._read(name, store) != sha256:
            path.unlink()
            raise DataError(f"'{self._url_of(name)}': not what was written there; convert anew with --overwrite")

    def put(self, name: str, content: bytes | Path, sha256: str) -> None:
        """Write a file, in the place of one that may be there."""
        self._put(name, content, sha256)

    def put_new(self, name: str, data: bytes, *, instead_of: str | None = None) -> bool:
        """Write a small file if there is none, or if there is this one still.

        Args:
            name: of the file.
            data: its content.
            instead_of: tag of the content to replace; None if there must be none.

        Returns:
            False if there is another one. It may be of this very call, whose answer was lost: compare.

        Raises:
            ConfigError: the store knows no conditions.
        """
        condition = {"IfNoneMatch": "*"} if instead_of is None else {"IfMatch": instead_of}
        put = partial(self._put, name, data, hashlib.sha256(data).hexdigest(), **condition)
        for attempt in range(ATTEMPTS):
            try:
                put()
            except _Refused as refused:
                if refused.status == 409 and attempt < ATTEMPTS - 1:  # another request for it is under way
                    _wait(attempt)
                    continue
                if refused.status in (400, 501):
                    raise self._no_conditions(str(refused)) from refused
                return False
            return True
        raise AssertionError

    def check_conditions(self, name: str, data: bytes) -> None:
        """Raise ConfigError if the store takes a condition and does not heed it; `data` is the content of a file."""
        if self.put_new(name, data):
            self.remove([name])
            raise self._no_conditions("it wrote over a file under the condition that there is none")

    def copy(self, source: Bucket, name: str, target: str) -> None:
        """Copy a file of another folder into this one, on the server's side.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with self._explained(source.url + "/" + name):
            try:
                self._client.copy_object(
                    **self._place(target), CopySource={"Bucket": source.name, "Key": source.key(name)}
                )
            except Exception as error:
                if is_missing(error):
                    raise FileNotFoundError(f"{source.url}/{name}") from error
                raise

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in any order."""

        def remove(name: str) -> None:
            with self._explained(self._url_of(name)):
                self._client.delete_object(**self._place(name))

        for _ in map_concurrently(remove, names, threads=REMOVERS, end=lambda: None):
            pass

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        with self._explained(self.url):
            yield from self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=self.key(prefix) if self.folder else prefix, **options
            )

    def _put(self, name: str, content: bytes | Path, sha256: str, **condition: str) -> None:
        settings = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": encoded(bytes.fromhex(sha256))}
        put = partial(self._client.put_object, **self._place(name), **settings, Metadata={"sha256": sha256})
        with self._explained(self._url_of(name)):
            try:
                if isinstance(content, bytes):
                    put(Body=content, **condition)
                else:
                    with content.open("rb") as file:
                        put(Body=file, **condition)
            except Exception as error:
                status = status_of(error)
                if condition and status in (400, 404, 409, 412, 501) and code_of(error) != "NoSuchBucket":
                    raise _Refused(status, cause_of(error)) from error
                raise

    def _read(self, name: str, consume: Callable[[dict[str, Any]], T]) -> T:
        """What `consume` makes of a file; the file is asked for again when its body ends early."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError
        from urllib3.exceptions import HTTPError

        for attempt in count():
            with self._explained(self._url_of(name)):
                try:
                    answer = self._client.get_object(**self._place(name))
                except Exception as error:
                    if is_missing(error):
                        raise FileNotFoundError(self._url_of(name)) from error
                    raise
            try:
                return consume(answer)
            except (HTTPClientError, IncompleteReadError, HTTPError) as error:
                if attempt == ATTEMPTS - 1:
                    raise failed(self._url_of(name), error, kept=_KEPT) from error
                _wait(attempt)
        raise AssertionError

    def _explained(self, place: str) -> AbstractContextManager[None]:
        """Raise errors of botocore as our own."""
        return explained(place, self.name, kept=_KEPT)

    def _no_conditions(self, cause: str) -> ConfigError:
        return ConfigError(
            f"'{self.url}': this store cannot write a file only if there is none ({cause}); convert into a folder on a "
            "disk, and send it with `mmdata push`"
        )

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self.folder}/") if self.folder else key

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self.name, "Key": self.key(name)}

    def _url_of(self, name: str) -> str:
        return f"s3://{self.name}/{self.key(name)}"


class _Refused(Exception):
    """An answer that says that the condition of a request does not hold, or is not known."""

    def __init__(self, status: int, cause: str) -> None:
        super().__init__(cause)
        self.status = status


def _chunks(answer: dict[str, Any]) -> Iterator[bytes]:
    """The body of an answer, to its last byte."""
    while chunk := answer["Body"].read(CHUNK_BYTES):
        yield chunk


def _wait(attempt: int) -> None:
    time.sleep(min(MAX_WAIT_S, WAIT_S * 2**attempt))
