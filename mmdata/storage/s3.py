"""A folder in a bucket of S3, to write to: files are put whole, and under the condition that none is there, if asked.

Requests are those of the client of s3fs, which also reads, and are repeated as `attempts` says. An answer that was lost
may have been a success, so whoever puts under a condition compares what is there.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from mmdata.errors import ConfigError, DataError
from mmdata.processes import map_concurrently
from mmdata.storage.attempts import Absent, cause_of, code_of, repeated, status_of
from mmdata.storage.remote import RemoteFile
from mmdata.storage.urls import FileSystem, awaited

REMOVERS = 8
"""Files that are removed at once."""
MOST_BYTES = 5 * 10**9
"""Largest file that one request puts or copies."""
PART_BYTES = 64 * 2**20
"""Size of a part of `S3Folder.put_in_parts`; a larger file has larger parts, as there are at most MAX_PARTS."""
MAX_PARTS = 10_000

_URL = re.compile(r"s3://([^/?#]+)/?([^?#]*)")


class Tagged(NamedTuple):
    """The content of a file, and what S3 calls this content."""

    data: bytes
    tag: str


class Listed(NamedTuple):
    """Size of a file in a listing, and what S3 calls its content."""

    bytes: int
    tag: str


class Refused(DataError):
    """An answer that says that the condition of a request does not hold, or is not known.

    Attributes:
        status: of HTTP; 400 and 501 where the store knows no conditions.
    """

    def __init__(self, status: int, cause: str) -> None:
        super().__init__(cause)
        self.status = status


class WrongContent(DataError):
    """A file on this disk has other content than it must have."""


class S3Folder:
    """A folder in a bucket. It can be sent to any process; safe to share between threads.

    Args:
        bucket: its name; it must exist.
        folder: path in the bucket, without "/" at the ends; "" for the whole bucket.
        files: of S3.

    Raises:
        ConfigError: s3fs is missing. All methods: no such bucket, or credentials are missing or not accepted.
        DataError: all methods: the server, or the way to it, failed each time.
    """

    def __init__(self, bucket: str, folder: str, files: FileSystem | None = None) -> None:
        self.bucket = bucket
        self.folder = folder
        self._files = files or FileSystem(self.url)

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
        return S3Folder(self.bucket, f"{self.folder}/{name}".strip("/"), self._files)

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

    def ask(
        self,
        method: str,
        name: str | None = None,
        *,
        body: bytes | Path | None = None,
        condition: dict[str, str] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """The answer to a request, all pages of it, with the bytes of its body.

        Args:
            method: of botocore's client.
            name: of the file in this folder that is asked for, if it is one.
            body: bytes to send, or a file with them.
            condition: see `condition_on`.
            settings: of the method.

        Raises:
            Absent: there is no such file.
            Refused: there is a condition, which does not hold.
        """
        settings |= {"Bucket": self.bucket, **(condition or {})}
        if name is not None:
            settings["Key"] = self.key(name)
        # Opened here: what is wrong with a file of this machine is no answer of the server.
        with body.open("rb") if isinstance(body, Path) else nullcontext(body) as content:
            settings |= {} if content is None else {"Body": content}
            once = partial(self._ask_once, method, settings, is_conditional=bool(condition))
            return repeated(once, self.url if name is None else self.url_of(name))

    def _ask_once(self, method: str, settings: dict[str, Any], *, is_conditional: bool) -> dict[str, Any]:
        if not isinstance(content := settings.get("Body", b""), bytes):
            content.seek(0)  # an attempt before may have sent a part
        try:
            return awaited(_request(self._files.get(), method, settings))
        except Exception as error:
            if code_of(error) == "NoSuchBucket":
                url = f"s3://{self.bucket}"
                message = f"'{url}': no such bucket; make it with `aws s3 mb {url}`, or correct the URL"
                raise ConfigError(message) from error
            status = status_of(error)
            if is_conditional and status in (400, 404, 412, 501) and code_of(error) != "RequestTimeout":
                raise Refused(status, cause_of(error)) from error
            raise

    def listing(self, prefix: str = "", *, sub_folders: bool = True) -> dict[str, Listed]:
        """The files whose name begins so, with or without those in sub-folders."""
        found = self._list(prefix, "" if sub_folders else "/").get("Contents", ())
        return {self._name(one["Key"]): Listed(int(one["Size"]), one["ETag"]) for one in found}

    def sub_folders(self) -> set[str]:
        """Names of the sub-folders, each with "/"."""
        return {self._name(one["Prefix"]) for one in self._list("", "/").get("CommonPrefixes", ())}

    def get(self, name: str) -> Tagged | None:
        """The content of a small file; None if there is none."""
        try:
            answer = self.ask("get_object", name)
        except Absent:
            return None
        return Tagged(answer["Body"], answer["ETag"])

    def download(self, name: str, path: Path, size: int, sha256: str) -> None:
        """Fetch a file of this size and hash into a new one.

        Raises:
            Absent: there is none.
            DataError: it has other content.
        """
        if RemoteFile(self._files, self.url_of(name), Event(), size=size).save(path) != sha256:
            path.unlink()
            raise DataError(
                f"'{self.url_of(name)}': not what was written there; remove it, and run the same command again"
            )

    def put(self, name: str, content: bytes | Path, sha256: str, *, condition: dict[str, str] | None = None) -> None:
        """Write a file, in the place of one that may be there.

        Raises:
            Refused: there is a condition (see `condition_on`), which does not hold.
        """
        settings: dict[str, Any] = {"ChecksumSHA256": encoded(bytes.fromhex(sha256)), "Metadata": {"sha256": sha256}}
        self.ask("put_object", name, body=content, condition=condition, ChecksumAlgorithm="SHA256", **settings)

    def put_in_parts(
        self, name: str, path: Path, sha256: str, *, condition: dict[str, str] | None = None, resume: bool = True
    ) -> None:
        """Write a large file, which is seen when all parts are there. What a killed upload has sent is not sent again.

        Args:
            name: of the file.
            path: of its content.
            sha256: of its content, which is compared with what was read.
            condition: see `put`.
            resume: go on with an upload of the file that was begun.

        Raises:
            DataError: the content has another hash; nothing of it is left there.
            Refused: see `put`.
        """
        ask = partial(self.ask, name=name)
        upload, there = self._unfinished_upload(name) if resume else None, dict[int, dict[str, Any]]()
        is_resumed = upload is not None
        if upload is None:
            begun = ask("create_multipart_upload", ChecksumAlgorithm="SHA256", Metadata={"sha256": sha256})
            upload = begun["UploadId"]
        else:
            there = {part["PartNumber"]: part for part in ask("list_parts", UploadId=upload).get("Parts", ())}
        digest, parts = hashlib.sha256(), list[dict[str, Any]]()
        size = max(PART_BYTES, -(-path.stat().st_size // MAX_PARTS))
        with path.open("rb") as file:
            for number, data in enumerate(iter(partial(file.read, size), b""), start=1):
                digest.update(data)
                part: dict[str, Any] = {"PartNumber": number}
                part["ChecksumSHA256"] = encoded(hashlib.sha256(data).digest())
                answer = there.get(number)
                if answer is None or not _is_same(answer, data, part["ChecksumSHA256"]):
                    answer = ask("upload_part", body=data, UploadId=upload, ChecksumAlgorithm="SHA256", **part)
                parts.append({**part, "ETag": answer["ETag"]})
        if digest.hexdigest() != sha256:
            ask("abort_multipart_upload", UploadId=upload)
            raise WrongContent(f"'{path}': has another SHA-256 than {sha256}")
        ask("complete_multipart_upload", condition=condition, UploadId=upload, MultipartUpload={"Parts": parts})
        if is_resumed and ask("head_object")["Metadata"].get("sha256") != sha256:
            # That upload was begun with another content, whose hash is with the file now, and cannot be changed.
            self.remove([name])
            self.put_in_parts(name, path, sha256, condition=condition_on(None) if condition else None, resume=False)

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
        try:
            self.put(name, data, hashlib.sha256(data).hexdigest(), condition=condition_on(instead_of))
        except Refused as refused:
            if refused.status in (400, 501):
                raise self._no_conditions(str(refused)) from refused
            return False
        return True

    def check_conditions(self, name: str, data: bytes) -> None:
        """Raise ConfigError if the store takes a condition and does not heed it; `data` is the content of a file."""
        if self.put_new(name, data):
            self.remove([name])
            raise self._no_conditions("it wrote over a file under the condition that there is none")

    def copy(self, source: S3Folder, name: str, target: str) -> None:
        """Copy a file of another folder into this one, on the server's side.

        Raises:
            Absent: there is no such file.
        """
        self.ask("copy_object", target, CopySource={"Bucket": source.bucket, "Key": source.key(name)})

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in any order."""
        for _ in map_concurrently(partial(self.ask, "delete_object"), names, threads=REMOVERS, end=lambda: None):
            pass

    def _unfinished_upload(self, name: str) -> str | None:
        """An upload of this file in parts that was begun; None also if these may not be listed."""
        try:
            found = self.ask("list_multipart_uploads", Prefix=self.key(name)).get("Uploads", ())
        except (ConfigError, DataError):
            return None
        return next((item["UploadId"] for item in found if item["Key"] == self.key(name)), None)

    def _list(self, prefix: str, delimiter: str) -> dict[str, Any]:
        return self.ask("list_objects_v2", Prefix=self.key(prefix), Delimiter=delimiter)

    def _no_conditions(self, cause: str) -> ConfigError:
        return ConfigError(
            f"'{self.url}': this store cannot write a file only if there is none ({cause}); convert into a folder on a "
            "disk, and send it with `mmdata push`"
        )

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self.folder}/") if self.folder else key


async def _request(files: Any, method: str, settings: dict[str, Any]) -> dict[str, Any]:
    await files.set_session()
    client = await files.get_s3(settings["Bucket"])
    if client.can_paginate(method):
        return await client.get_paginator(method).paginate(**settings).build_full_result()
    answer = await getattr(client, method)(**settings)
    return {**answer, "Body": await answer["Body"].read()} if "Body" in answer else answer


def condition_on(tag: str | None) -> dict[str, str]:
    """The condition that there is no file, or one with this tag."""
    return {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}


def encoded(digest: bytes) -> str:
    """A hash as S3 writes it."""
    return base64.b64encode(digest).decode()


def _is_same(part: dict[str, Any], data: bytes, checksum: str) -> bool:
    """Whether a part that is there has this content."""
    if "ChecksumSHA256" in part:
        return part["ChecksumSHA256"] == checksum
    return part["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()
