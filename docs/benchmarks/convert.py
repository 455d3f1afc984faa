"""Photos on a disk, to shards: `mmdata convert`, the bare work, and other converters in turn, on the same cores.

    PYTHONPATH=. python docs/benchmarks/convert.py --photos photos.tar [--copies 256] [--rounds 3]
        [--mds PYTHON] [--litdata PYTHON] [--only NAME ...]

The photos of a tar are copied into a folder under new names, each with eight bytes behind its end, so that no two are
equal. Every arm reads them all from the page cache and writes to the same disk, in a process of its own; the time is
that of the call, which for mmdata has the start of its processes and every fsync in it. `--mds` and `--litdata` are
interpreters of environments with mosaicml-streaming and with litdata.

    decode      decodes every photo with libjpeg-turbo in two processes; writes nothing
    resize      decodes, shrinks to 256 (Lanczos) and encodes with Pillow in two processes; writes nothing
    tarwriter   one loop over webdataset's TarWriter, which hashes (SHA-256) and reads headers
    mds         one loop over MosaicML's MDSWriter, which hashes (sha256) and reads headers
    litdata     litData's optimize with two workers, which reads headers
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from time import perf_counter

ARMS = {
    "decode": """
import simplejpeg
def work(path):
    return simplejpeg.decode_jpeg(open(path, "rb").read()).shape
""",
    "resize": """
import io
from PIL import Image
def work(path):
    with Image.open(path) as image:
        image = image.convert("RGB")
        scale = 256 / min(image.size)
        if scale < 1:
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=95, subsampling=0)
        return len(file.getvalue())
""",
    "tarwriter": """
import hashlib, io
from PIL import Image
from webdataset import TarWriter
def run(paths, out):
    for start in range(0, len(paths), 2048):
        with TarWriter(f"{out}/{start // 2048:06d}.tar") as tar:
            for path in paths[start : start + 2048]:
                data = open(path, "rb").read()
                with Image.open(io.BytesIO(data)) as image:
                    size = image.size
                meta = {"sha256": hashlib.sha256(data).hexdigest(), "width": size[0], "height": size[1]}
                tar.write({"__key__": path.stem, "jpg": data, "txt": f"photo {path.stem}", "json": meta})
""",
    "mds": """
import io
from PIL import Image
from streaming import MDSWriter
def run(paths, out):
    columns = {"key": "str", "jpg": "bytes", "txt": "str", "width": "int", "height": "int"}
    with MDSWriter(out=out, columns=columns, hashes=["sha256"], size_limit=2048 * 90_000) as writer:
        for path in paths:
            data = open(path, "rb").read()
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
            caption = f"photo {path.stem}"
            writer.write({"key": path.stem, "jpg": data, "txt": caption, "width": width, "height": height})
""",
    "litdata": """
import io
from PIL import Image
from litdata import optimize
def sample(path):
    data = open(path, "rb").read()
    with Image.open(io.BytesIO(data)) as image:
        size = image.size
    return {"key": path.stem, "jpg": data, "txt": f"photo {path.stem}", "size": size}
def run(paths, out):
    optimize(fn=sample, inputs=paths, output_dir=out, chunk_bytes="180MB", num_workers=2)
""",
    "mmdata": """
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import local
def run(paths, out, workers=2, **settings):
    table = paths[0].parent / "captions.csv"
    report = convert(table, out, ConvertConfig(shard_rows=2048, **settings), engine=local(workers))
    assert report.accounts["written"] == len(paths), report.accounts
""",
}
TWO_PROCESSES = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
def run(paths, out):
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        list(pool.map(work, paths, chunksize=64))
"""
RUN = """
if __name__ == "__main__":
    import os, sys
    from pathlib import Path
    from time import perf_counter
    paths = sorted(Path(sys.argv[1]).glob("*.jpg"))
    began, before = perf_counter(), os.times()
    run(paths, sys.argv[2], {options})
    seconds, after = perf_counter() - began, os.times()
    print("seconds", seconds, sum(after[:4]) - sum(before[:4]))
"""
MINE = {
    "full": "",
    "full, 1 worker": "workers=1",
    "header": "check='header'",
    "header, 1 worker": "check='header', workers=1",
    "resize 256": "resize=256",
}
"""Options of mmdata's arms."""


def copy_photos(tar: Path, folder: Path, copies: int) -> tuple[int, int]:
    """Fill a folder; the number of photos and their bytes."""
    with tarfile.open(tar) as file:
        photos = [file.extractfile(member).read() for member in file if member.name.endswith(".jpg")]  # type: ignore[union-attr]
    count = size = 0
    lines = ["filepath,caption\n"]
    for _ in range(copies):
        for photo in photos:
            data = photo + count.to_bytes(8, "little")
            (folder / f"{count:07d}.jpg").write_bytes(data)
            lines.append(f"{count:07d}.jpg,photo {count}\n")
            count, size = count + 1, size + len(data)
    (folder / "captions.csv").write_text("".join(lines))
    return count, size


def script_of(name: str) -> str:
    """The program of an arm."""
    if name in MINE:
        return ARMS["mmdata"] + RUN.format(options=MINE[name])
    return ARMS[name] + (TWO_PROCESSES if name in ("decode", "resize") else "") + RUN.format(options="")


def file_of(name: str) -> str:
    """File name of the program of an arm. It shadows no module that the program imports."""
    return f"arm-{name}.py".replace(" ", "-")


def measure(python: str, script: Path, photos: Path, out: Path) -> tuple[float, float]:
    """Seconds of a run, and CPU seconds of all its processes."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    began = perf_counter()
    done = subprocess.run([python, script, photos, out], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} failed after {perf_counter() - began:.0f} s:\n{done.stderr[-3000:]}")
    seconds, cpu = done.stdout.rpartition("seconds ")[2].split()
    return float(seconds), float(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mds")
    parser.add_argument("--litdata")
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    pythons = dict.fromkeys(["decode", "resize", "tarwriter", *MINE], sys.executable)
    pythons |= {name: path for name in ("mds", "litdata") if (path := getattr(options, name))}
    pythons = {name: python for name, python in pythons.items() if not options.only or name in options.only}
    rates: dict[str, list[float]] = {name: [] for name in pythons}
    cpus: dict[str, list[float]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as temporary:
        photos = Path(temporary, "photos")
        photos.mkdir()
        count, size = copy_photos(options.photos, photos, options.copies)
        print(f"{count:,} photos of {size / count / 1000:.0f} kB on {os.cpu_count()} cores, {options.rounds} rounds")
        for name in pythons:
            Path(temporary, file_of(name)).write_text(script_of(name))
        for _ in range(options.rounds):
            for name, python in pythons.items():
                script = Path(temporary, file_of(name))
                seconds, cpu = measure(python, script, photos, Path(temporary, "out"))
                rates[name].append(count / seconds)
                cpus[name].append(1000 * cpu / count)
    for name, found in rates.items():
        spread = f"{min(found):,.0f} to {max(found):,.0f}"
        middle, cpu = statistics.median(found), statistics.median(cpus[name])
        print(f"{name:18} {middle:8,.0f} photos/s ({spread}), {cpu:.2f} ms CPU")
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
