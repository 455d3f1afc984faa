"""Run by test_s3: kills conversions before one request after the other, really, and repeats them.

usage: killed_s3.py TABLE URL. Prints a JSON object: how many were killed, and what was wrong with which.
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
from mmdata.storage.s3 import S3Folder

STEP = int(os.environ.get("STEP", "11"))
"""Requests between two kills. STEP=1 kills before each, which takes minutes."""
MANIFEST = "__mmdata__/manifest.json"


def make(table: Path, url: str) -> Report:
    return convert(table, url, ConvertConfig(shard_rows=3, max_bad_share=0.5), engine=threads(1))


def killed_before(number: int, table: Path, url: str) -> int:
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
    make(table, url)
    os._exit(0)


def content(bucket: S3Folder) -> dict[str, str]:
    """The hash of each file, by name."""
    return {name: hashlib.sha256(bucket.get(name).data).hexdigest() for name in bucket.listing()}


def main() -> None:
    table, url = Path(sys.argv[1]), sys.argv[2]
    bucket = S3Folder.of_url(url)
    make(table, url)
    expected = content(bucket)
    report: dict[str, Any] = {"killed": 0, "wrong": []}
    while True:
        bucket.remove([MANIFEST])
        bucket.remove(bucket.listing())
        status = killed_before(STEP * report["killed"], table, url)
        if status != -signal.SIGKILL:
            report["wrong"] += [f"ended with {status}"] if status else []
            break
        report["killed"] += 1
        make(table, url)
        if (found := content(bucket)) != expected:
            report["wrong"].append(f"killed {report['killed']}: {sorted(found)}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
