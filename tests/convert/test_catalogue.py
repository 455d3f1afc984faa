"""One raw corpus with every kind of bad row, image and path; the closing table names each reason with its count.

A file that changes while it is read is in test_paths.py, servers are in fetch/, and COCO's annotations in annotations/.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmdata.errors import Reason
from tests.convert.conftest import left_out
from tests.convert.row import test_images
from tests.convert.test_program import start
from tests.programs import PATIENCE_S

KEPT = "written"
GONE, GIVEN_HASH = "gone.jpg", "0" * 64

CAPTIONS: list[tuple[Any, str]] = [
    (None, "missing_caption"),
    ("", "empty_caption"),
    ("a\0b", KEPT),
    ("\ud800", "bad_caption"),
    ("x" * 10_000_000, "caption_too_long"),
    ("\u202ea \u0007 bell", KEPT),
    (["one", "two"], KEPT),
    (7, "bad_caption"),
    ("two\nlines", KEPT),
]
ELSEWHERE = {
    *("file_changed", "opted_out", "rules_unknown", "host_left_alone", "http_status", "unreachable", "timed_out"),
    *("bad_answer", "damaged_shard", "transform_failed", "text_transform_failed", "missing_field", "bad_field"),
}
"""Reasons that need a program which changes files, a server, a damaged tar, or a loader."""
LINES: list[tuple[bytes, str]] = [
    (b'{"image": "cut', "broken_row"),
    (b'{"image": "x.jpg", "image": "y.jpg", "caption": "twice"}', "broken_row"),
]
"""Lines of JSON."""
CELLS: list[tuple[bytes, str]] = [
    (b'csv0.jpg,"two\nlines"', KEPT),
    (b"csv1.jpg", "broken_row"),
    (b"csv2.jpg,one,two", "broken_row"),
    (b"csv3.jpg,\xff", "bad_caption"),
    (b"csv4.jpg,a\0b", KEPT),
    (b"gone.jpg,nothing there", "missing_image"),
]
"""Lines of CSV, behind a byte order mark."""


def paths(folder: Path, photo: Callable[..., bytes]) -> list[tuple[Any, str]]:
    """Make files, and name them as tables do."""

    def make(name: str, seed: int) -> None:
        (folder / name).write_bytes(photo(20, 30, seed=seed))

    (folder.parent / "secret.jpg").write_bytes(photo(20, 30, seed=900))
    (folder.parent / "elsewhere.jpg").write_bytes(photo(20, 30, seed=906))
    (folder / "link.jpg").symlink_to(folder.parent / "elsewhere.jpg")
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    (folder / "folder.jpg").mkdir()
    os.mkfifo(folder / "fifo.jpg")
    make(unicodedata.normalize("NFC", "café.jpg"), 901)
    make("dotted.name.v2.jpg", 902)
    make("Case.jpg", 903)
    make("case.jpg", 904)
    make("UPPER.JPG", 905)
    return [
        (None, "missing_image"),
        (GONE, "missing_image"),
        ("n" * 300 + ".jpg", "missing_image"),
        ("../secret.jpg", "outside_root"),
        ("/etc/hosts", "outside_root"),
        ("link.jpg", KEPT),
        ("loop.jpg", "not_a_file"),
        ("folder.jpg", "not_a_file"),
        ("fifo.jpg", "not_a_file"),
        ("file:///etc/hosts", "refused_address"),
        ("http://127.0.0.1/a.jpg", "refused_address"),
        (unicodedata.normalize("NFD", "café.jpg"), KEPT),
        ("dotted.name.v2.jpg", KEPT),
        ("Case.jpg", KEPT),
        ("case.jpg", KEPT),
        ("UPPER.JPG", KEPT),
    ]


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return test_images.encode(test_images.picture(20, 31 + orientation), "JPEG", exif=exif)


def images(folder: Path) -> list[tuple[str, str]]:
    """Make an image of every kind."""
    usable = {name: (make(), KEPT) for name, (_, make, _) in test_images.GOOD.items()}
    usable |= {f"orientation {number}": (oriented(number), KEPT) for number in range(1, 9)}
    unusable = {name: (make(), reason) for name, (make, reason) in test_images.BAD.items()}
    cases: list[tuple[str, str]] = []
    seen: set[bytes] = set()
    for name, (data, fate) in (usable | unusable).items():
        if fate == KEPT and data in seen:  # the same picture under another name
            data += name.encode()
        seen.add(data)
        (folder / name).write_bytes(data)
        cases.append((name, fate))
    (folder / "again.jpg").write_bytes((folder / "alpha").read_bytes())
    return [*cases, ("again.jpg", "duplicate_image")]


@pytest.fixture
def raw(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


def table_of_json(raw: Path, photo: Callable[..., bytes]) -> list[str]:
    """Write a table of all cases that JSON can have; what becomes of its rows."""
    rows: list[tuple[dict[str, Any], str]] = []
    for number, (caption, fate) in enumerate(CAPTIONS):
        (raw / f"caption{number}.jpg").write_bytes(photo(20, 30, seed=800 + number))
        rows.append(({"image": f"caption{number}.jpg", "caption": caption}, fate))
    rows += [({"image": path, "caption": "x"}, fate) for path, fate in paths(raw, photo)]
    rows += [({"image": name, "caption": "x"}, fate) for name, fate in images(raw)]
    (raw / "hash.jpg").write_bytes(photo(20, 30, seed=950))
    rows.append(({"image": "hash.jpg", "caption": "x", "sha256": GIVEN_HASH}, "hash_differs"))
    rows.append(({"image": "hash.jpg", "caption": "x", "split": "test"}, "filtered"))
    lines = [json.dumps({"split": "train", **row}).encode() for row, _ in rows]
    (raw / "t.jsonl").write_bytes(b"\n".join([*lines, *(line for line, _ in LINES)]) + b"\n")
    return [fate for _, fate in rows + LINES]


def table_of_csv(raw: Path, photo: Callable[..., bytes]) -> list[str]:
    for number in range(5):
        (raw / f"csv{number}.jpg").write_bytes(photo(20, 30, seed=700 + number))
    lines = [b"\xef\xbb\xbfimage,caption", *(line for line, _ in CELLS)]
    (raw / "t.csv").write_bytes(b"\n".join(lines) + b"\n")
    return [fate for _, fate in CELLS]


def closing_table(stdout: str) -> dict[str, int]:
    found = re.findall(r"^ *(\w+) +([\d,]+)$", stdout, re.MULTILINE)
    return {name: int(count.replace(",", "")) for name, count in found}


@pytest.mark.parametrize(
    ("make", "table", "flags"),
    [(table_of_json, "t.jsonl", ["hash_column=sha256", "--split", "train"]), (table_of_csv, "t.csv", [])],
    ids=["JSON", "CSV"],
)
def test_closing_table_names_each_reason_with_its_count(
    raw: Path, tmp_path: Path, photo: Any, make: Any, table: str, flags: list[str]
) -> None:
    fates = Counter(make(raw, photo))
    program = start(raw / table, tmp_path / "out", "--max-bad-share", "0.9", "--workers", "2", *flags)
    stdout, stderr = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, stderr
    found = closing_table(stdout)
    filtered, duplicates = fates.pop("filtered", 0), fates.pop("duplicate_image", 0)
    written = fates.pop(KEPT)
    assert {name: found.get(name, 0) for name in ("in", KEPT, "merged", "duplicate", "filtered", "quarantined")} == {
        "in": written + filtered + duplicates + fates.total(),
        KEPT: written,
        "merged": 0,
        "duplicate": duplicates,
        "filtered": filtered,
        "quarantined": fates.total(),
    }
    reasons = {str(reason) for reason in Reason}
    assert {name: count for name, count in found.items() if name in reasons - {"filtered", "duplicate_image"}} == fates
    outside = re.search(r"^images: (\d+) paths? leads? out of the corpus's folder", stdout, re.MULTILINE)
    assert int(outside[1] if outside else 0) == fates["outside_root"]
    ledger = Counter(row["reason"] for row in left_out(tmp_path / "out"))
    assert ledger == fates + Counter(duplicate_image=duplicates, filtered=filtered)


def test_corpus_has_every_reason_that_a_table_can_have(raw: Path, photo: Any) -> None:
    assert set(table_of_json(raw, photo)) == {str(reason) for reason in Reason} - ELSEWHERE | {KEPT}
