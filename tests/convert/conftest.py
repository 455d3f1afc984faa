"""Small corpora with something wrong in them, and what became of their rows."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmdata.convert import ConvertConfig, Report, convert, convert_part
from mmdata.convert.units.engines import Engine, Progress, threads
from mmdata.convert.units.staging import Receipt
from mmdata.convert.units.unit import Job, Unit
from mmdata.index import Index
from tests.programs import Program

GOOD = 3
"""Good rows that every corpus of `outcome` has beside the one in question."""


@pytest.fixture
def corpus(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """A folder with a.jpg, b.jpg and c.jpg."""
    root = tmp_path / "corpus"
    root.mkdir()
    for seed, name in enumerate("abc"):
        (root / f"{name}.jpg").write_bytes(photo(20, 30, seed=100 + seed))
    return root


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def good_rows() -> list[dict[str, Any]]:
    return [{"image": f"{name}.jpg", "caption": f"photo {name}"} for name in "abc"]


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def captions(out: Path) -> list[list[str]]:
    """The captions of each sample of a folder of shards."""
    index = Index.open(out)
    return [index[row].captions for row in range(len(index))]


def shards(folder: Path) -> dict[str, bytes]:
    """The tars of a folder and the files of its index, by name."""
    return {name: data for name, data in content(folder).items() if name.endswith((".tar", ".arrow"))}


def members(*folders: Path) -> dict[str, bytes]:
    """All members of all tars, which Python's own reader reads; no name comes twice."""
    found: dict[str, bytes] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.tar"))):
        with tarfile.open(path) as tar:
            for member in tar:
                assert member.name not in found
                found[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return found


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def left_out(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "__mmdata__/quarantine.jsonl").read_text().splitlines()]


def tolerant(**settings: Any) -> ConvertConfig:
    return ConvertConfig(**{"max_bad_share": 0.9, **settings})


def make_parts(source: Path, out: Any, config: ConvertConfig, parts: int = 2, engine: Engine | None = None) -> None:
    """Make all parts of a conversion, which `convert(…, finish=True)` publishes."""
    for part in range(1, parts + 1):
        convert_part(source, out, config, part=(part, parts), engine=engine or threads(1))


def start(*arguments: Any) -> subprocess.Popen[str]:
    """`mmdata convert` as a program."""
    command = [sys.executable, "-m", "mmdata", "convert", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


class Killed(BaseException):
    """Ends a conversion as a signal does."""


def killing(rows: int) -> Engine:
    """An engine that is ended after some rows."""

    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        left = rows
        for event in threads(1)(job, units):
            if isinstance(event, Progress):
                left -= 1
                if left < 0:
                    raise Killed
            yield event

    return run


def noting(made: list[int]) -> Engine:
    """An engine that notes the numbers of the units that it has made."""

    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        for event in threads(1)(job, units):
            made.extend([event.unit] if isinstance(event, Receipt) else [])
            yield event

    return run


@pytest.fixture
def pictures(photo: Callable[..., bytes]) -> list[bytes]:
    """Thirteen different JPEGs."""
    return [photo(20, 30, seed=300 + number) for number in range(13)]


@pytest.fixture
def outcome(corpus: Path, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """`outcome(row, **settings)`: (reason, detail) of a table's row after three good ones; ("", "") when written."""

    def run(row: dict[str, Any], **settings: Any) -> tuple[str, str]:
        table = jsonl(corpus / "table.jsonl", [*good_rows(), row])
        report = convert(table, tmp_path / "out", tolerant(**settings), engine=threads(1))
        assert report.accounts["rows"] == GOOD + 1
        bad = left_out(tmp_path / "out")
        assert report.accounts["written"] == GOOD + 1 - len(bad) == report.manifest.rows
        return (bad[0]["reason"], bad[0]["detail"]) if bad else ("", "")

    return run


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Report]:
    """`make(source, **settings)`: convert into tmp_path/out, however many rows are bad."""

    def run(source: Path, **settings: Any) -> Report:
        return convert(source, tmp_path / "out", tolerant(**settings), engine=threads(1))

    return run
