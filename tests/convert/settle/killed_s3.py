"""Run by test_s3: kills conversions before one request after the other, really, and repeats them.

usage: killed_s3.py TABLE URL fresh|overwrite. Prints a JSON object: how many were killed, and what was wrong with
which.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiobotocore.client

from mmdata.convert import ConvertConfig, Report, convert
from mmdata.convert.units.engines import threads
from mmdata.index import Manifest
from mmdata.storage.s3 import S3Folder

STEP = int(os.environ.get("STEP", "11"))
"""Requests between two kills. STEP=1 kills before each, which takes minutes."""
MANIFEST = "__mmdata__/manifest.json"


def make(table: Path, url: str, *, overwrite: bool, **settings: Any) -> Report:
    config = ConvertConfig(**{"shard_rows": 3, "max_bad_share": 0.5, **settings})
    return convert(table, url, config, engine=threads(1), overwrite=overwrite)


def killed_before(number: int, table: Path, url: str, *, overwrite: bool) -> int:
    """Exit status of a forked process that kills itself before its `number`-th request."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = number
    call = aiobotocore.client.AioBaseClient._make_api_call

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, *arguments)

    aiobotocore.client.AioBaseClient._make_api_call = counted
    make(table, url, overwrite=overwrite)
    os._exit(0)


def content(bucket: S3Folder) -> dict[str, str]:
    """The hash of each file, by name."""
    return {name: hashlib.sha256(bucket.get(name).data).hexdigest() for name in bucket.listing()}


def is_whole(bucket: S3Folder) -> bool:
    """Whether each shard that is published, if any, is the manifest's."""
    if bucket.get(MANIFEST) is None:
        return True
    hashes = content(bucket)
    return all(hashes.get(shard.name) == shard.sha256 for shard in Manifest.read(bucket.url))


def main() -> None:
    table, url, overwrite = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "overwrite"
    bucket = S3Folder.of_url(url)
    make(table, url, overwrite=False)
    expected = content(bucket)
    report: dict[str, Any] = {"killed": 0, "wrong": []}
    while True:
        bucket.remove([MANIFEST])
        bucket.remove(bucket.listing())
        if overwrite:
            make(table, url, overwrite=False, shard_rows=2, min_side=5)
        status = killed_before(STEP * report["killed"], table, url, overwrite=overwrite)
        if not is_whole(bucket):
            report["wrong"].append(f"killed {report['killed']}: published and broken")
        if status != -signal.SIGKILL:
            report["wrong"] += [f"ended with {status}"] if status else []
            break
        report["killed"] += 1
        make(table, url, overwrite=overwrite)
        if (found := content(bucket)) != expected:
            report["wrong"].append(f"killed {report['killed']}: {sorted(found)}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
