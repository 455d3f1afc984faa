"""Small corpora with something wrong in them, and what became of their rows."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmdata.convert import ConvertConfig, Report, convert
from mmdata.convert.units.engines import threads

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
