"""A small corpus, its shards, the commands and a web server: all that the promises need. Nothing of mmdata's inside.

The corpus has 60 good photos in three shapes and formats, each with one to three captions, and rows with a fault.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmdata
from tests.programs import PATIENCE_S, Program, run_program

MMDATA = [sys.executable, "-m", "mmdata"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
GOOD = 60
SHAPES = [(48, 48), (40, 64), (64, 40)]
FORMATS = ["jpg", "png", "webp"]
WORDS = ["a", "red", "blue", "small", "large", "dog", "cat", "tree", "on", "under", "near", "the", "sunny", "street"]
FAULTS = {
    "missing_image": {"image": "images/gone.jpg", "captions": ["gone"]},
    "corrupt_image": {"image": "images/cut.jpg", "captions": ["cut"]},
    "not_an_image": {"image": "images/page.jpg", "captions": ["a page"]},
    "empty_file": {"image": "images/empty.jpg", "captions": ["nothing"]},
    "outside_root": {"image": "../secret.jpg", "captions": ["not here"]},
    "empty_caption": {"image": "images/0001.png", "captions": [""]},
}
"""Rows that cannot be used, by their reason."""
BAD_ROWS = [3, 20, 41]
"""Rows of the index whose images `Corpus.damaged` has damaged."""


def photo(height: int, width: int, *, seed: int, format: str = "jpg") -> bytes:
    """An image file: a smooth random picture."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[format])
    return buffer.getvalue()


def run_mmdata(*words: object, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*MMDATA, *map(str, words)]
    patience: dict[str, Any] = {"timeout": PATIENCE_S, "env": {**ENVIRONMENT, **environment}}
    done = run_program(command, capture_output=True, text=True, **patience)
    assert done.returncode == 0 or not check, done.stderr
    return done


def kill_when(happened: Callable[[], bool], words: list[object], **environment: str) -> int:
    """Start a command in a session of its own, and kill all of it when something has happened; its exit status."""
    nothing, command = subprocess.DEVNULL, [*MMDATA, *map(str, words)]
    settings = {"env": {**ENVIRONMENT, **environment}, "stdout": nothing, "stderr": nothing, "start_new_session": True}
    program, until = Program(command, **settings), time.monotonic() + PATIENCE_S
    try:
        while program.poll() is None and time.monotonic() < until and not happened():
            time.sleep(0.002)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    return program.wait(PATIENCE_S)


def content(folder: Path) -> dict[str, bytes]:
    """All files of a conversion by name, without the list of timings and the lock."""
    kept = (path for path in folder.rglob("*") if path.name not in ("timings.parquet", ".mmdata.lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(kept) if path.is_file()}


def left_out(folder: Path) -> list[dict[str, Any]]:
    """The rows that a conversion left out, each with its path and reason."""
    return [json.loads(line) for line in (folder / "__mmdata__/quarantine.jsonl").read_text().splitlines()]


def counts(printed: str) -> dict[str, int]:
    """The table of rows that a conversion prints."""
    return {name: int(number) for name, number in re.findall(r"^ *(\w+) +(\d+)$", printed, re.MULTILINE)}


def images_in(tar: Path) -> list[tarfile.TarInfo]:
    """The images of a tar, in order, with the places of their bytes."""
    with tarfile.open(tar) as members:
        return [member for member in members if member.name.endswith(tuple(FORMATS))]


@dataclass(frozen=True)
class Corpus:
    """A table with photos, what the conversion of it printed, its shards, and the same with three damaged images.

    `targets` are a setting of batches.
    """

    table: Path
    printed: str
    shards: Path
    damaged: Path
    targets: dict[str, Any] | None = None

    def settings(self, *, loading: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """A section `data` over the damaged shards: several shapes and text lengths, random crops, 8 steps an epoch."""
        return {
            "shards": str(self.damaged),
            "tokenizer": str(self.shards / "tokenizer"),
            "global_batch_size": 8,
            "image_buckets": [[32, 32], [24, 40], [40, 24]],
            "text_buckets": 3,
            "crop_scale": [0.3, 0.9],
            "seed": 5,
            "targets": self.targets,
            "loading": {"num_workers": 0, "max_bad_share": 0.5, **(loading or {})},
            **changes,
        }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The corpus, converted by one worker."""
    folder = tmp_path_factory.mktemp("promises")
    rng, images, table = np.random.default_rng(7), folder / "raw/images", folder / "raw/captions.jsonl"
    images.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number in range(GOOD):
        name = f"{number:04d}.{FORMATS[number % 3]}"
        height, width = SHAPES[int(rng.integers(3))]
        (images / name).write_bytes(photo(height, width, seed=number, format=FORMATS[number % 3]))
        lengths = [int(length) for length in rng.integers(3, 20, rng.integers(1, 4))]
        captions = [f"picture {number} " + " ".join(rng.choice(WORDS, length)) for length in lengths]
        boxes = [
            {"bbox": [4 * k, 3 * k, 12 + k, 9], "category": "dog" if k % 2 else "cat", "phrase": f"a cat {number}"}
            for k in range(number % 5)
        ]
        rows.append({"image": f"images/{name}", "captions": captions, "boxes": boxes})
    (images / "cut.jpg").write_bytes((images / "0000.jpg").read_bytes()[:-100])
    (images / "page.jpg").write_bytes(b"<html>not found</html>")
    (images / "empty.jpg").write_bytes(b"")
    again = {"image": "images/0001.png", "captions": ["another caption of it"]}
    table.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *FAULTS.values(), again]) + "{broken\n")
    flags = ["keep=[boxes]", "--train-tokenizer", 300, "--shard-rows", 16, "--max-bad-share", 0.2]
    printed = run_mmdata("convert", table, folder / "shards", *flags, "--workers", 1).stdout
    damaged = shutil.copytree(folder / "shards", folder / "damaged", symlinks=True)
    places = [(tar, member) for tar in sorted(damaged.glob("*.tar")) for member in images_in(tar)]
    for tar, member in (places[row] for row in BAD_ROWS):
        with tar.open("r+b") as file:
            file.seek(member.offset_data + member.size // 2)
            file.write(b"\0" * 20)
    return Corpus(table, printed, folder / "shards", damaged)


Batch = dict[str, Any]


def joined(parts: list[Batch]) -> Batch:
    """The batches of all ranks as one; each of them has the same shape."""
    assert len({tuple(part["pixel_values"].shape) for part in parts}) == 1
    assert len({tuple(part["input_ids"].shape) for part in parts}) == 1
    together: Batch = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        together[name] = torch.cat(values) if isinstance(value, torch.Tensor) else list(chain(*values))
    return together


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    """The same batches: equal entries, bit for bit."""
    assert len(found) == len(expected)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in one.items():
            is_tensor = isinstance(value, torch.Tensor)
            same = value.dtype == other[name].dtype and torch.equal(value, other[name]) if is_tensor else None
            assert same or value == other[name], f"step {step}: {name}"


def loaders(data: dict[str, Any], world_size: int = 1) -> list[mmdata.Loader]:
    """A loader for each rank."""
    return [mmdata.Loader.from_config(data, rank=rank, world_size=world_size) for rank in range(world_size)]


def global_batches(ranks: list[mmdata.Loader]) -> list[Batch]:
    """The rest of the ranks' current epoch; every rank has as many steps."""
    steps = zip(*ranks, strict=True)
    return [joined(list(parts)) for parts in steps]


class Site(ThreadingHTTPServer):
    """HTTP over a folder, with ranges. `answers` replaces paths by functions that answer; `sent` counts their bytes."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers: dict[str, Callable[[_Handler], None]] = {}
        self.sent: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet: clients that have enough, or are killed, leave broken connections."""


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked[path] += 1
        answer, file = self.server.answers.get(path), Path(self.translate_path(path))
        if answer is not None:
            answer(self)
        elif not file.is_file():
            self.reply(404, b"none")
        else:
            self.reply_with(file.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""))

    def reply_with(self, data: bytes, part: re.Match[str] | None) -> None:
        """Send a file, or the part of it that is asked for."""
        if part is None:
            self.reply(200, data)
            return
        first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
        self.reply(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")

    do_HEAD = do_GET

    def start(self, status: int, **headers: str) -> None:
        """Send the head of an answer, after which the connection ends."""
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        """Send an answer whose Content-Length is that of the body, unless `headers` say another."""
        self.start(status, **{"Content_Length": str(len(body)), **headers})
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Site]]:
    """`serve(folder)`: a site of it, until the test ends."""
    sites: list[Site] = []

    def start(folder: Path) -> Site:
        sites.append(Site(folder))
        threading.Thread(target=sites[-1].serve_forever, daemon=True).start()
        return sites[-1]

    yield start
    for site in sites:
        site.shutdown()
        site.server_close()
