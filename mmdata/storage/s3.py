"""A folder in a bucket of S3, to write to: files are put whole, and under the condition that none is there, if asked.

botocore repeats requests that failed; what it does not repeat, bodies that were cut while they were read, is repeated
here. An answer that was lost may have been a success, so whoever puts under a condition compares what is there.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from mmdata.errors import ConfigError, DataError
from mmdata.files import naming
from mmdata.storage.attempts import ATTEMPTS, GIVE_CREDENTIALS, MAX_WAIT_S, WAIT_S, cause_of, is_denied, status_of
from mmdata.storage.concurrently import map_concurrently

CONNECT_S = 10
"""Longest wait for a connection."""
CONNECTIONS = 32
"""Requests of one process at once."""
REMOVERS = 8
"""Files that are removed at once."""
MOST_BYTES = 5 * 10**9
"""Largest file that one request puts or copies."""
READ_BYTES = 8 * 2**20
"""Bytes of a file that are in memory while it is fetched."""

T = TypeVar("T")

_URL = re.compile(r"s3://([^/?#]+)/?([^?#]*)")


class Tagged(NamedTuple):
    """The content of a file, and what S3 calls this content."""

    data: bytes
    tag: str


class Listed(NamedTuple):
    """Size of a file in a listing, and what S3 calls its content."""

    bytes: int
    tag: str


class Refused(Exception):
    """An answer that says that the condition of a request does not hold, or is not known.

    Attributes:
        status: of HTTP; 400 and 501 where the store knows no conditions.
    """

    def __init__(self, status: int, cause: str) -> None:
        super().__init__(cause)
        self.status = status


class S3Folder:
    """A folder in a bucket. It can be sent to any process; safe to share between threads.

    Args:
        bucket: its name; it must exist.
        folder: path in the bucket, without "/" at the ends; "" for the whole bucket.

    Raises:
        ConfigError: botocore is missing. All methods: no such bucket, or credentials are missing or not accepted.
        DataError: all methods: the server, or the way to it, failed each time.
    """

    def __init__(self, bucket: str, folder: str) -> None:
        self.bucket = bucket
        self.folder = folder
        self._clients: list[Any] = []  # one, once it is needed; shared with folders in this one
        if find_spec("botocore") is None:
            raise ConfigError(f"'{self.url}': needs botocore; `pip install mmdata[remote]` brings it")

    @classmethod
    def of_url(cls, url: str) -> S3Folder:
        """The folder that a URL names.

        Raises:
            ConfigError: not a URL of S3.
        """
        if (match := _URL.fullmatch(url)) is None:
            raise ConfigError(f"'{url}': a folder on this disk or s3://BUCKET/PREFIX is needed here")
        return cls(match[1], match[2].strip("/"))

    def under(self, name: str) -> S3Folder:
        """A folder in this one."""
        inner = S3Folder(self.bucket, f"{self.folder}/{name}".strip("/"))
        inner._clients = self._clients
        return inner

    @property
    def url(self) -> str:
        """Without a "/" at the end."""
        return f"s3://{self.bucket}/{self.folder}".rstrip("/")

    def url_of(self, name: str) -> str:
        """URL of a file in this folder."""
        return f"s3://{self.bucket}/{self.key(name)}"

    def key(self, name: str) -> str:
        """Path in the bucket of a file in this folder."""
        return f"{self.folder}/{name}".lstrip("/")

    def where(self, name: str) -> dict[str, str]:
        """Arguments of botocore that name a file in this folder."""
        return {"Bucket": self.bucket, "Key": self.key(name)}

    @property
    def client(self) -> Any:
        """The client of botocore, whose errors `explaining` turns into ours."""
        if not self._clients:
            self._clients.append(_new_client())
        return self._clients[0]

    def __reduce__(self) -> tuple[type[S3Folder], tuple[str, str]]:
        return S3Folder, (self.bucket, self.folder)  # each process makes a client of its own

    def listing(self, prefix: str = "", *, sub_folders: bool = True) -> dict[str, Listed]:
        """The files whose name begins so, with or without those in sub-folders."""
        found: dict[str, Listed] = {}
        for page in self._pages(prefix, **({} if sub_folders else {"Delimiter": "/"})):
            found |= {self._name(one["Key"]): Listed(int(one["Size"]), one["ETag"]) for one in page.get("Contents", ())}
        return found

    def sub_folders(self) -> set[str]:
        """Names of the sub-folders, each with "/"."""
        pages = self._pages("", Delimiter="/")
        return {self._name(one["Prefix"]) for page in pages for one in page.get("CommonPrefixes", ())}

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
            raise DataError(f"'{self.url_of(name)}': not what was written there; convert anew with --overwrite")

    def put(self, name: str, content: bytes | Path, sha256: str, *, condition: dict[str, str] | None = None) -> None:
        """Write a file, in the place of one that may be there.

        Raises:
            Refused: there is a condition (see `condition_on`), which does not hold.
        """
        settings = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": encoded(bytes.fromhex(sha256))}
        settings |= {**self.where(name), **(condition or {})}
        with self.refusing(name) if condition else self.explaining(name):
            if isinstance(content, bytes):
                self.client.put_object(Body=content, Metadata={"sha256": sha256}, **settings)
            else:
                with content.open("rb") as file:
                    self.client.put_object(Body=file, Metadata={"sha256": sha256}, **settings)

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
        for attempt in range(ATTEMPTS):
            try:
                self.put(name, data, hashlib.sha256(data).hexdigest(), condition=condition_on(instead_of))
            except Refused as refused:
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

    def copy(self, source: S3Folder, name: str, target: str) -> None:
        """Copy a file of another folder into this one, on the server's side.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with source.explaining(name), source.missing(name):
            self.client.copy_object(**self.where(target), CopySource=source.where(name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in any order."""

        def remove(name: str) -> None:
            with self.explaining(name):
                self.client.delete_object(**self.where(name))

        for _ in map_concurrently(remove, names, threads=REMOVERS, end=lambda: None):
            pass

    @contextmanager
    def explaining(self, name: str | None = None) -> Generator[None, None, None]:
        """Raise errors of botocore as our own; `name` is that of the file that is asked for, if it is one."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            url, place = f"s3://{self.bucket}", self.url if name is None else self.url_of(name)
            if code_of(error) == "NoSuchBucket":
                message = f"'{url}': no such bucket; make it with `aws s3 mb {url}`, or correct the URL"
                raise ConfigError(message) from error
            if is_denied(error):
                raise ConfigError(f"'{place}': access denied ({cause_of(error)}); {GIVE_CREDENTIALS}") from error
            raise _failed(place, error) from error

    @contextmanager
    def refusing(self, name: str) -> Generator[None, None, None]:
        """As `explaining`, for a request under a condition: Refused if the condition does not hold or is not known."""
        with self.explaining(name):
            try:
                yield
            except Exception as error:
                status = status_of(error)
                if status in (400, 404, 409, 412, 501) and code_of(error) != "NoSuchBucket":
                    raise Refused(status, cause_of(error)) from error
                raise

    @contextmanager
    def missing(self, name: str) -> Generator[None, None, None]:
        """Raise FileNotFoundError if there is no such file in the bucket."""
        try:
            yield
        except Exception as error:
            if status_of(error) == 404 and code_of(error) != "NoSuchBucket":
                raise FileNotFoundError(self.url_of(name)) from error
            raise

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        with self.explaining():
            pages = self.client.get_paginator("list_objects_v2")
            yield from pages.paginate(Bucket=self.bucket, Prefix=self.key(prefix) if self.folder else prefix, **options)

    def _read(self, name: str, consume: Callable[[dict[str, Any]], T]) -> T:
        """What `consume` makes of a file; the file is asked for again when its body ends early."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError
        from urllib3.exceptions import HTTPError

        for attempt in count():
            with self.explaining(name), self.missing(name):
                answer = self.client.get_object(**self.where(name))
            try:
                return consume(answer)
            except (HTTPClientError, IncompleteReadError, HTTPError) as error:
                if attempt == ATTEMPTS - 1:
                    raise _failed(self.url_of(name), error) from error
                _wait(attempt)
        raise AssertionError

    def _no_conditions(self, cause: str) -> ConfigError:
        return ConfigError(
            f"'{self.url}': this store cannot write a file only if there is none ({cause}); convert into a folder on a "
            "disk, and send it with `mmdata push`"
        )

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self.folder}/") if self.folder else key


def condition_on(tag: str | None) -> dict[str, str]:
    """The condition that there is no file, or one with this tag."""
    return {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}


def encoded(digest: bytes) -> str:
    """A hash as S3 writes it."""
    return base64.b64encode(digest).decode()


def code_of(error: Exception) -> str:
    """The code of an error of S3, or ""; other errors have a `response` of another kind, or None."""
    found = getattr(error, "response", None)
    return str(cast("dict[str, Any]", found).get("Error", {}).get("Code", "")) if isinstance(found, dict) else ""


def _new_client() -> Any:
    # botocore comes with s3fs, which reads; boto3 does not. Its own retries know the errors that S3 wants repeated.
    import botocore.session
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        connect_timeout=CONNECT_S,
        max_pool_connections=CONNECTIONS,
        request_checksum_calculation="when_required",  # ours is given; stores of others know no trailing ones
        response_checksum_validation="when_required",
    )
    return botocore.session.get_session().create_client("s3", config=config)


def _failed(place: str, error: Exception) -> DataError:
    return DataError(
        f"'{place}': failed, the last attempt: {cause_of(error)}; run this again when the server can be reached: what "
        "is there is not sent again"
    )


def _chunks(answer: dict[str, Any]) -> Iterator[bytes]:
    """The body of an answer, to its last byte."""
    while chunk := answer["Body"].read(READ_BYTES):
        yield chunk


def _wait(attempt: int) -> None:
    time.sleep(min(MAX_WAIT_S, WAIT_S * 2**attempt))
