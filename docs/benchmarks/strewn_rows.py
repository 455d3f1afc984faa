"""An epoch of a few rows strewn over tars behind a URL: requests, bytes and seconds, in ranges and with whole tars.

PYTHONPATH=. python docs/benchmarks/index_tars.py /tmp/tars 100000
PYTHONPATH=. python docs/benchmarks/strewn_rows.py /tmp/tars --share 0.01 --wait-ms 20

The server is on this machine and waits before each answer, as a far one would.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

import mmdata
from mmdata.index import ShardStore, build_index
from mmdata.storage import ShardCache


class Files(ThreadingHTTPServer):
    """Serves ranges of a folder's files after a wait, and counts."""

    def __init__(self, folder: Path, wait_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.wait_s = folder, wait_s
        self.requests = self.sent = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Files  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:  # the name that http.server calls
        path = self.server.folder / self.path.strip("/")
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        assert found
        first, last = int(found[1]), min(int(found[2] or size), size - 1)
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(last + 1 - first)
        time.sleep(self.server.wait_s)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        with self.server.lock:
            self.server.requests += 1
            self.server.sent += len(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def epoch(server: Files, index: Path, rows: Path, cache: Path) -> str:
    """Load all selected rows once, with an empty cache."""
    requests, sent, started = server.requests, server.sent, time.perf_counter()
    loading = {"cache_dir": str(cache), "num_workers": 2}
    data = {"shards": str(index), "global_batch_size": 128, "select": {"file": str(rows)}, "loading": loading}
    with mmdata.Loader.from_config(data) as loader:
        count = sum(int(batch["valid"].sum()) for batch in loader)
    seconds, requests, sent = time.perf_counter() - started, server.requests - requests, server.sent - sent
    return f"{count:,} rows, {requests:,} requests, {sent / 1e6:,.1f} MB, {seconds:.1f} s"


def main() -> None:
    """Index, and load the selection in ranges and whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tars", type=Path)
    parser.add_argument("--share", type=float, default=0.01, help="of the rows, drawn at random")
    parser.add_argument("--wait-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    names = sorted(path.name for path in given.tars.glob("*.tar"))
    server = Files(given.tars, given.wait_ms / 1e3)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as home:
        build_index(
            [f"http://127.0.0.1:{server.server_port}/{name}" for name in names],
            out=Path(home) / "index",
            cache=ShardCache(Path(home) / "none"),
        )
        print(f"indexed {len(names)} tars: {server.requests} requests, {server.sent / 1e6:,.1f} MB")
        count = len(mmdata.Index.open(Path(home) / "index"))
        rows = Path(home) / "rows.npy"
        np.save(rows, np.random.default_rng(0).random(count) < given.share)
        keep_to = ShardStore.keep_to
        for number in range(given.rounds):
            for name, method in (("in ranges", keep_to), ("whole tars", lambda *_: None)):
                ShardStore.keep_to = method  # type: ignore[method-assign]
                cache = Path(home) / f"cache-{number}"
                print(f"{name}: {epoch(server, Path(home) / 'index', rows, cache)}", flush=True)
                shutil.rmtree(cache)


if __name__ == "__main__":
    main()
