"""What a conversion takes a row and a shard, for reckoning with corpora that nobody here can hold.

    PYTHONPATH=. python docs/benchmarks/convert_constants.py [--rows 200000] [--of 5000000000]

Bytes on the disk and CPU of a conversion of very small images, a part first and then its finish; CPU of sorting keys
that lie in as many files as those of `--of` rows would; CPU of passing over the rows of a table; and the requests to S3
of a unit, counted at a server of its protocol. CPU is of this process alone, in which all is done.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from time import process_time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from convert_memory import make_table

from mmdata.convert import ConvertConfig, convert, convert_part
from mmdata.convert.cut import Units
from mmdata.convert.row.examine import Examiner
from mmdata.convert.settle.merges import Merges
from mmdata.convert.settle.repeats import Repeats
from mmdata.convert.sources.open import open_source
from mmdata.convert.sources.rows import KEY_BYTES
from mmdata.convert.units.engines import threads
from mmdata.index import Manifest
from tests.storage.servers import serve_s3

UNIT_ROWS = 10_000


@contextmanager
def timed(name: str, rows: int) -> Generator[None]:
    began = process_time()
    yield
    print(f"{name}: {(process_time() - began) / rows * 1e6:.2f} µs of CPU a row", flush=True)


def bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def convert_small(folder: Path, rows: int) -> None:
    """Bytes and CPU of a conversion."""
    table, out, inner = folder / "t.parquet", folder / "out", folder / "out/__mmdata__"
    make_table(table, rows, 1)
    config = ConvertConfig(check="header", shard_rows=UNIT_ROWS)
    convert_part(table, out, config, part=(1, 1), engine=threads(1))
    print(f"records, until the end: {bytes_of(out.rglob('records.arrow')) / rows:.0f} bytes a row")
    with timed("putting units together", rows):
        convert(table, out, config, finish=True, engine=threads(1))
    print(f"index: {bytes_of(inner.glob('index-*.arrow')) / rows:.0f} bytes a row")
    print(f"list of rows: {bytes_of(inner.glob('rows/*')) / rows:.1f} bytes a row")
    shards = Manifest.read(out).num_shards
    print(f"pages of the manifest: {bytes_of(inner.glob('manifest-*.arrow')) / shards:.0f} bytes a shard")
    images = pc.sum(pc.binary_length(pq.read_table(table, columns=["image"])["image"])).as_py()
    print(f"tars: {(bytes_of(out.glob('*.tar')) - images) / rows:.0f} bytes a row beside the images")


def sort_keys(folder: Path, rows: int, of: int) -> None:
    """CPU of the keys of some rows of many."""
    random_numbers = np.random.default_rng(0)
    keys = [random_numbers.bytes(KEY_BYTES * UNIT_ROWS) for _ in range(rows // UNIT_ROWS)]
    for at_most in (rows, of):
        with Repeats(folder, at_most) as repeats, timed(f"sorting keys, in the files of {at_most:,} rows", rows):
            for number, data in enumerate(keys):
                repeats.add(data, np.arange(UNIT_ROWS) + number * UNIT_ROWS)
            repeats.sort()


def pass_over(folder: Path, rows: int) -> None:
    """CPU of the rows that a part does not make."""
    urls = [f"https://host{number % 5003}.example.org/pictures/{number:012d}.jpg" for number in range(rows)]
    captions = [f"a photo of thing number {number} and its neighbours" for number in range(rows)]
    lines = (f"{url},{caption}\n" for url, caption in zip(urls, captions, strict=True))
    (folder / "t.csv").write_text("url,caption\n" + "".join(lines))
    pq.write_table(pa.table({"url": urls, "caption": captions}), folder / "one group.parquet")
    pq.write_table(
        pa.table({"url": urls, "caption": captions}), folder / "small groups.parquet", row_group_size=UNIT_ROWS
    )
    for name in ("t.csv", "one group.parquet", "small groups.parquet"):
        source = open_source(folder / name, ConvertConfig())
        examiner = Examiner.from_config(source, ConvertConfig())
        with Merges(folder) as merges:
            with timed(f"{name}: comparing paths", rows):
                merges.find(lambda what, source=source: source.rows(), examiner, by_content=False, num_rows=rows)
            for each in (1, 4):
                made = rows // each
                with timed(f"{name}: reading the rows of one unit in {each}, a row of these", made):
                    units = list(Units(source, UNIT_ROWS, merges, lambda unit, each=each: unit.number % each == 0))
                del units


def count_requests(folder: Path) -> None:
    """Requests to S3 of a conversion of few units, and of more."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    found: list[Counter[str]] = []
    (folder / "empty").mkdir()
    with serve_s3(folder / "empty") as server:
        for units in (10, 30):
            make_table(table := folder / f"{units}.parquet", units * 5, 1)
            server.commands.clear()
            convert(table, f"s3://bucket/{units}", ConvertConfig(shard_rows=5), engine=threads(1))
            found.append(Counter("LIST" if "list-type" in line else line.split()[0] for line in server.commands))
    few, many = found
    print("requests to S3 a unit:", {kind: (many[kind] - few[kind]) / 20 for kind in sorted(many)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--of", type=int, default=5 * 10**9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        convert_small(folder, options.rows)
        sort_keys(folder, 10 * options.rows, options.of)
        pass_over(folder, options.rows)
        count_requests(folder)


if __name__ == "__main__":
    main()
