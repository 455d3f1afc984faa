"""Kills conversions at random moments, and runs them again until they end: are the bytes those of a calm run?

    PYTHONPATH=. python docs/benchmarks/killed_conversions.py [--kills 200] [--seed 0]

A conversion of 600 small images in 30 units is made by two processes. It is started, killed after a random time with
SIGKILL (the first process, or one of the two that it has started), and started again in the same folder, until it ends;
then the next one begins. After every kill the folder is read: it has no manifest, or all that its manifest names. At
the end of each conversion every file is compared with that of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import processes
from mmdata.index.verify import verify

SETTINGS = ConvertConfig(shard_rows=20, val_share=0.2, max_bad_share=0.2)


def make_corpus(folder: Path) -> Path:
    """A table of 600 rows: images, copies of images, and rows without an image."""
    random_numbers = np.random.default_rng(0)
    lines = ["image,caption\n"]
    for number in range(600):
        if number % 13 == 5:
            lines.append(f"gone{number}.jpg,missing {number}\n")
            continue
        if number % 7 != 3:
            pixels = random_numbers.integers(0, 256, (48, 64, 3), np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            (folder / f"{number}.jpg").write_bytes(file.getvalue())
            lines.append(f"{number}.jpg,photo {number}\n")
        else:
            lines.append(f"{number - 1 if (folder / f'{number - 1}.jpg').exists() else 0}.jpg,again {number}\n")
    (folder / "t.csv").write_text("".join(lines))
    return folder / "t.csv"


def content(folder: Path) -> dict[str, bytes]:
    """All files by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def children_of(process: int) -> list[int]:
    """Process ids of the children of a process."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(folder.name))
    return found


def start(table: Path, out: Path, stderr: Path) -> int:
    """A process that converts; its id."""
    process = os.fork()
    if process == 0:
        with stderr.open("w") as file:
            os.dup2(file.fileno(), 2)
        code = 1
        try:
            convert(table, out, SETTINGS, engine=processes(2))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        table = make_corpus(Path(temporary))
        began = time.monotonic()
        convert(table, Path(temporary, "calm"), SETTINGS, engine=processes(2))
        usual_s = time.monotonic() - began
        expected = content(Path(temporary, "calm"))
        out = Path(temporary, "out")
        killed = {"the first process": 0, "one of the others": 0}
        ended = 0
        while sum(killed.values()) < options.kills or out.exists():
            process = start(table, out, Path(temporary, "stderr"))
            calm = sum(killed.values()) >= options.kills
            time.sleep(0 if calm else chance.uniform(0, 1.1 * usual_s))
            whom = chance.choice(list(killed))
            ended_by_itself, status = os.waitpid(process, 0 if calm else os.WNOHANG)
            if not ended_by_itself:
                others = children_of(process)
                victim = process if whom == "the first process" or not others else chance.choice(others)
                os.kill(victim, signal.SIGKILL)
                killed["the first process" if victim == process else "one of the others"] += 1
                status = os.waitpid(process, 0)[1]
            if status not in (0, signal.SIGKILL):
                raise SystemExit(f"after {killed}, a conversion failed:\n{Path(temporary, 'stderr').read_text()}")
            for folder in (out / "train", out / "val"):
                if (folder / "__mmdata__/manifest.json").exists():
                    assert verify(folder) == []
            if status == 0:
                found = content(out)
                differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
                if differing:
                    raise SystemExit(f"after {killed}, these files differ: {differing}")
                ended += 1
                shutil.rmtree(out)
        print(f"{killed}; {ended} conversions ended, all with the bytes of the calm one (it took {usual_s:.1f} s)")


if __name__ == "__main__":
    main()
