"""Memory of a conversion of very many rows: the first process and each of its workers, at 10⁵ and at 10⁶ rows.

    PYTHONPATH=. python docs/benchmarks/convert_memory.py [--rows 100000 1000000] [--captions 1]

The corpus is a Parquet table of JPEGs of 32 × 32 pixels, all different, so that the rows are many and the bytes few.
With `--captions 5` each image comes in five rows with a caption each, which are merged. Anonymous memory, which is the
process's own, and all that is resident, files that are mapped included, are looked at ten times a second.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import processes

GROUP = 10_000


def make_table(path: Path, rows: int, captions: int) -> None:
    """Write the corpus."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(file, "JPEG", quality=60)
    photo = file.getvalue()
    schema = pa.schema([("image", pa.binary()), ("caption", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, GROUP):
            numbers = range(start, min(start + GROUP, rows))
            images = [photo + (number // captions).to_bytes(8, "little") for number in numbers]
            writer.write_table(pa.table([images, [f"caption {number}" for number in numbers]], schema=schema))


class Watch:
    """Looks at the memory of this process and of those that it has started.

    Attributes:
        own, workers: most bytes of anonymous memory, and most resident bytes.
    """

    def __init__(self) -> None:
        self.own = [0, 0]
        self.workers = [0, 0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            for folder in Path("/proc").iterdir():
                with suppress(OSError, ValueError, KeyError):  # it has ended
                    process = int(folder.name)
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if process == os.getpid() or parent == os.getpid():
                        self._note(folder, self.own if process == os.getpid() else self.workers)

    def _note(self, folder: Path, most: list[int]) -> None:
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        for place, name in enumerate(("RssAnon", "VmRSS")):
            most[place] = max(most[place], int(lines[name].split()[0]) * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--captions", type=int, default=1)
    options = parser.parse_args()
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder, "t.parquet")
            make_table(table, rows, options.captions)
            began = time.monotonic()
            if os.fork() == 0:
                with Watch() as watch:
                    report = convert(table, Path(folder, "out"), ConvertConfig(check="header"), engine=processes(2))
                assert report.accounts["written"] == rows // options.captions
                own, workers = ([size / 1e6 for size in most] for most in (watch.own, watch.workers))
                print(
                    f"{rows:,} rows in {time.monotonic() - began:.0f} s: first process {own[0]:.0f} MB of its own, "
                    f"{own[1]:.0f} resident; a worker {workers[0]:.0f} and {workers[1]:.0f}",
                    flush=True,
                )
                os._exit(0)
            os.wait()
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()


if __name__ == "__main__":
    main()
