"""Sends a large file to S3 in parts. Parts that an upload that was killed has sent are not sent again.

The file is seen when all parts are there. Before that its hash is compared, over the bytes that were read for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from threading import Event
from typing import Any

from mmdata.errors import ConfigError, DataError, Interrupted
from mmdata.push.files import PushedFile
from mmdata.storage.s3 import S3Folder, encoded

PART_BYTES = 64 * 2**20
"""Size of a part; a larger file has larger parts, as there are at most MAX_PARTS."""
MAX_PARTS = 10_000


def upload_in_parts(
    folder: S3Folder, file: PushedFile, *, stop: Event, resume: bool, condition: dict[str, str]
) -> None:
    """Send a file, the parts one after another.

    Args:
        folder: to send it to.
        file: to send.
        stop: ends the upload between two parts.
        resume: go on with an upload that was begun, if there is one.
        condition: for the last request, which makes the file seen.

    Raises:
        DataError: the content is not the one expected, and nothing of it is left there; or a request failed.
        Refused: the condition does not hold.
        Interrupted: `stop` was set.
    """
    ask = partial(folder.ask, name=file.name)
    upload = _unfinished(folder, file.name) if resume else None
    there: dict[int, dict[str, Any]] = {}
    if upload is None:
        begun = ask("create_multipart_upload", ChecksumAlgorithm="SHA256", Metadata={"sha256": file.sha256})
        upload = begun["UploadId"]
    else:
        there = {item["PartNumber"]: item for item in ask("list_parts", UploadId=upload).get("Parts", ())}
    parts: list[dict[str, Any]] = []

    def pieces() -> Iterator[bytes]:
        try:
            yield from file.chunks(max(PART_BYTES, -(-file.bytes // MAX_PARTS)))
        except DataError:  # of the content: after a failed request the parts stay for the next push
            ask("abort_multipart_upload", UploadId=upload)
            raise

    for number, data in enumerate(pieces(), start=1):
        if stop.is_set():
            raise Interrupted(file.name)
        checksum = encoded(hashlib.sha256(data).digest())
        tag = _tag_of_same(there.get(number), data, checksum)
        if tag is None:
            send = partial(ask, "upload_part", body=data, ChecksumAlgorithm="SHA256", ChecksumSHA256=checksum)
            tag = send(UploadId=upload, PartNumber=number)["ETag"]
        parts.append({"PartNumber": number, "ETag": tag, "ChecksumSHA256": checksum})
    complete = partial(ask, "complete_multipart_upload", condition=condition)
    complete(UploadId=upload, MultipartUpload={"Parts": parts})


def _unfinished(folder: S3Folder, name: str) -> str | None:
    """An upload of this file that was begun; None also if these may not be listed."""
    try:
        found = folder.ask("list_multipart_uploads", Prefix=folder.key(name)).get("Uploads", ())
    except (ConfigError, DataError):
        return None
    return next((item["UploadId"] for item in found if item["Key"] == folder.key(name)), None)


def _tag_of_same(part: dict[str, Any] | None, data: bytes, checksum: str) -> str | None:
    """The ETag of a part that is there, if it has this content."""
    if part is None or part["Size"] != len(data):
        return None
    if "ChecksumSHA256" in part:
        return part["ETag"] if part["ChecksumSHA256"] == checksum else None
    is_same = part["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()
    return part["ETag"] if is_same else None
