"""Conversions into file systems that are too small by more or less: does each end with an error, and go on with room?

    sudo PYTHONPATH=. python docs/benchmarks/full_disks.py [--step 8]

For every size from nothing to what a conversion needs, a tmpfs of that size is mounted, a small corpus is converted
into it, the file system grows, and the same command is run again. Needs the right to mount.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from killed_conversions import SETTINGS, content, make_corpus

from mmdata.convert import convert
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.index.verify import verify

ENOUGH_KIB = 64 * 1024


def mount(folder: Path, kib: int, *, again: bool = False) -> None:
    options = f"size={kib}k" + (",remount" if again else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


def attempt(table: Path, out: Path) -> str:
    """What a conversion ends with: "" for success."""
    try:
        convert(table, out, SETTINGS, engine=threads(2))
    except (OSError, DataError) as error:
        words = "No space left on device"
        return words if words in f"{error} {error.__cause__}" else str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=64, help="KiB from one size to the next")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        table, disk = make_corpus(Path(temporary)), Path(temporary, "disk")
        convert(table, Path(temporary, "calm"), SETTINGS, engine=threads(2))
        expected = content(Path(temporary, "calm"))
        disk.mkdir()
        kib, end = options.step, "none yet"
        while end:
            mount(disk, kib)
            try:
                end = attempt(table, disk / "out")
                ends[end] += 1
                for part in ("train", "val"):
                    if (disk / "out" / part / "__mmdata__/manifest.json").exists():
                        assert verify(disk / "out" / part) == []
                mount(disk, ENOUGH_KIB, again=True)
                assert not attempt(table, disk / "out")
                found = content(disk / "out")
                assert found == expected, sorted(
                    name for name in {*found, *expected} if found.get(name) != expected.get(name)
                )
            finally:
                subprocess.run(["umount", "--lazy", disk], check=True)
            kib += options.step
        print(
            f"sizes up to {kib - options.step:,} KiB: {dict(ends)}; with room, all end with the bytes of the calm one"
        )


if __name__ == "__main__":
    main()
