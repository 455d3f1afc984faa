"""Tables behind URLs of http, s3 and hf, from servers on loopback: the shards are those of the same files on a disk."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

import datasets
import mmdata.storage.attempts as attempts_module
import mmdata.storage.remote as remote_module
from mmdata.convert import ConvertConfig, Report, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError
from tests.convert.conftest import content
from tests.programs import run_program
from tests.storage.servers import serve, serve_s3

PARTS = {"train-00000-of-00002": [0, 1], "train-00001-of-00002": [2], "test-00000-of-00001": [3]}
"""Files of a dataset and the numbers of their rows."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between requests, and small ones."""
    monkeypatch.setattr(attempts_module, "WAIT_S", 0.01)
    monkeypatch.setattr("tests.storage.servers.SLOW_S", 0.01)
    monkeypatch.setattr(remote_module, "RANGE_BYTES", 3000)
    monkeypatch.setattr(remote_module, "READ_BYTES", 3000)


@pytest.fixture
def remote(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """A folder as of the hub: three rows of train in two files, one of test, and a page."""
    root = tmp_path / "remote"
    (root / "data").mkdir(parents=True)
    rows = {"image": [{"bytes": photo(20, 30, seed=n), "path": None} for n in range(4)], "caption": list("abcd")}
    features = datasets.Features(image=datasets.Image(), caption=datasets.Value("string"))
    table = datasets.Dataset.from_dict(rows, features=features)
    for name, numbers in {
        "train-00000-of-00002": [0, 1],
        "train-00001-of-00002": [2],
        "test-00000-of-00001": [3],
    }.items():
        table.select(numbers).to_parquet(str(root / f"data/{name}.parquet"))
    (root / "README.md").write_text("---\n---\n")
    (root / ".gitattributes").write_text("")
    (root / "dataset_infos.json").write_text("{}")
    return root


def made(source: Any, out: Path, **settings: Any) -> Report:
    config = ConvertConfig(**{"max_bad_share": 0.5, **settings})
    return convert(source, out, config, engine=threads(1))


def test_table_over_http_gives_the_shards_of_the_file(remote: Path, tmp_path: Path) -> None:
    made(remote / "data/train-00000-of-00002.parquet", tmp_path / "local")
    with serve(remote, fault_every=2) as server:
        url = f"{server.url}/data/train-00000-of-00002.parquet?signature=secret"
        assert not made(url, tmp_path / "out").was_complete
        assert made(url, tmp_path / "out").was_complete
        assert "reset" in server.faults
    assert content(tmp_path / "out") == content(tmp_path / "local")


def test_table_that_is_packed_and_its_images_may_both_be_behind_urls(
    tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    (tmp_path / "www").mkdir()
    (tmp_path / "www/1.jpg").write_bytes(photo(20, 30))
    with serve(tmp_path / "www") as server:
        (tmp_path / "www/t.tsv.gz").write_bytes(gzip.compress(f"caption\turl\na dog\t{server.url}/1.jpg\n".encode()))
        assert made(f"{server.url}/t.tsv.gz", tmp_path / "out", allow_private_addresses=True).accounts["written"] == 1


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Generator[Path]:
    """s3://bucket with hub/ (Parquet), saved/ (save_to_disk), texts/ (a CSV of paths) and tars/."""
    root = tmp_path_factory.mktemp("bucket")
    rows = {"image": [{"bytes": photo(20, 30, seed=n), "path": None} for n in range(4)], "caption": list("abcd")}
    features = datasets.Features(image=datasets.Image(), caption=datasets.Value("string"))
    table = datasets.Dataset.from_dict(rows, features=features)
    for name, numbers in {
        "train-00000-of-00002": [0, 1],
        "train-00001-of-00002": [2],
        "test-00000-of-00001": [3],
    }.items():
        table.select(numbers).to_parquet(str(root / f"hub/data/{name}.parquet"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(root / "saved"))
    table.save_to_disk(str(root / "one"), num_shards=2)
    (root / "texts").mkdir()
    (root / "texts/t.csv").write_text("image,caption\na.jpg,x\n")
    (root / "tars").mkdir()
    (root / "tars/000000.tar").write_bytes(bytes(10240))
    with serve_s3(root, fault_every=5):
        yield root


@pytest.mark.parametrize(
    ("place", "settings", "written"),
    [
        ("hub", {"split": "train"}, 3),
        ("hub/", {"split": "test"}, 1),
        ("hub", {"table": "data/train-*.parquet"}, 3),
        ("hub/data/test-00000-of-00001.parquet", {}, 1),
        ("saved", {"split": "train"}, 4),
        ("one", {}, 4),
    ],
)
@pytest.mark.sweep(keep=3)
def test_folder_in_s3_gives_the_shards_of_the_folder(
    bucket: Path, tmp_path: Path, place: str, settings: dict[str, Any], written: int
) -> None:
    made(bucket / place, tmp_path / "local", **settings)
    report = made(f"s3://bucket/{place}", tmp_path / "out", **settings)
    assert report.accounts["written"] == written
    assert content(tmp_path / "out") == content(tmp_path / "local")


@pytest.mark.parametrize(
    ("url", "settings", "error", "message"),
    [
        (
            "s3://bucket/hub",
            {},
            DataError,
            "source 's3://bucket/hub': has 2 parts, .*: test, train; choose one",
        ),
        ("s3://bucket/hub", {"split": "dev"}, ConfigError, "no such part in 's3://bucket/hub'; there are: test, train"),
        ("s3://bucket/hub", {"table": "x*"}, DataError, r"no table 'x\*' in it; there are: data/test-00000"),
        ("s3://bucket/nothing", {}, DataError, "'s3://bucket/nothing': no such file; upload it, or correct the URL"),
        (
            "s3://bucket/tars",
            {},
            ConfigError,
            "'s3://bucket/tars': tars behind a URL; `mmdata index 's3://bucket/tars'",
        ),
        (
            "s3://bucket/texts",
            {},
            ConfigError,
            r"'s3://bucket/texts': its images are paths \('a.jpg'\), and of a source",
        ),
        (
            "ftp://host/t.csv",
            {},
            ConfigError,
            "'ftp://host/t.csv': tables are fetched from URLs of http, https, s3",
        ),
        ("http://127.0.0.1:9/a/", {}, ConfigError, "not the URL of a table, and a folder cannot be listed over HTTP"),
        ("http://127.0.0.1:9/a.tar", {}, ConfigError, "tars behind a URL; `mmdata index 'http://127.0.0.1:9/a.tar'"),
    ],
)
def test_what_cannot_be_fetched_is_an_error(
    bucket: Path, tmp_path: Path, url: str, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        made(url, tmp_path / "out", **settings)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".mmdata.lock"]


def test_images_of_a_remote_table_may_be_on_this_machine(bucket: Path, corpus: Path, tmp_path: Path) -> None:
    report = made("s3://bucket/texts/t.csv", tmp_path / "out", images=str(corpus))
    assert report.accounts["written"] == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (404, r"'http://127.0.0.1:\d+/t.csv': no such file; upload it, or correct the URL$"),
        (403, r"t.csv': access denied \(Failed: status 403.*; give the credentials"),
        (
            500,
            r"t.csv': cannot be fetched, 2 attempts .*: Failed: status 500.*; is the server up, and the netw",
        ),
    ],
)
def test_answer_that_is_no_table_is_an_error(
    remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, message: str
) -> None:
    monkeypatch.setattr(attempts_module, "ATTEMPTS", 2)
    with serve(remote) as server:
        server.answers["/t.csv"] = answer
        with pytest.raises((DataError, ConfigError), match=message):
            made(f"{server.url}/t.csv", tmp_path / "out")


def test_tables_without_room_are_refused_before_they_come(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(
        DataError, match=r"its tables have [\d,]+ bytes, and the disk of '.*' has room for 1,000; choose"
    ):
        made("s3://bucket/hub", tmp_path / "out", split="train")


FROM_THE_HUB = """
import sys
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError
convert("hf://datasets/me/photos", sys.argv[1] + "/folder", ConvertConfig(split="train"))
convert("hf://datasets/me/photos/data/test-00000-of-00001.parquet", sys.argv[1] + "/file")
convert("hf://datasets/me/photos@main/", sys.argv[1] + "/revision", ConvertConfig(split="train"))
try:
    convert("hf://datasets/me/nothing", sys.argv[1] + "/none")
except DataError as error:
    print(error)
"""


def test_dataset_of_the_hub_gives_the_shards_of_its_folder(remote: Path, tmp_path: Path) -> None:
    made(remote, tmp_path / "local/folder", split="train")
    made(remote / "data/test-00000-of-00001.parquet", tmp_path / "local/file")
    with hub(remote) as (url, asked):  # HF_ENDPOINT is read when huggingface_hub is imported
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", FROM_THE_HUB, str(tmp_path / "hub")]
        done = run_program(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'hf://datasets/me/nothing': no such file; upload it, or correct the URL" in done.stdout
    for name in ("folder", "file"):
        assert content(tmp_path / "hub" / name) == content(tmp_path / "local" / name)
    assert content(tmp_path / "hub/revision") == content(tmp_path / "hub/folder")
    fetched = dict.fromkeys(path.rpartition("/")[2] for path in asked if "/resolve/" in path)
    assert list(fetched) == [f"{name}.parquet" for name in PARTS]  # of the folder those of train, and no page


@contextmanager
def hub(root: Path) -> Generator[tuple[str, list[str]]]:
    """The URL of a server that answers as the hub does for the dataset me/photos, and the paths that were asked for."""
    entries = {
        str(path.relative_to(root)): {
            "type": "directory" if path.is_dir() else "file",
            "path": str(path.relative_to(root)),
            "oid": f"{number:040x}",
            "size": 0 if path.is_dir() else path.stat().st_size,
        }
        for number, path in enumerate(sorted(root.rglob("*")))
    }
    api, files, asked = "/api/datasets/me/photos", "/datasets/me/photos/resolve/main/", list[str]()

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            if path.startswith(files) and path.removeprefix(files) in entries:
                self.give_file(root / path.removeprefix(files))
            elif path.startswith(f"{api}/tree/main"):
                below = path.removeprefix(f"{api}/tree/main").strip("/")
                deep = "recursive=true" in self.path.lower()
                names = [name for name in entries if name.startswith(f"{below}/" if below else "")]
                self.give([entries[n] for n in names if deep or "/" not in n.removeprefix(below).strip("/")])
            elif path in (api, f"{api}/revision/main"):
                self.give({"id": "me/photos", "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
            else:
                self.give({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            asked.append(self.path)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            paths = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            if not self.path.startswith(api):
                self.give({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            else:
                self.give([entries[path] for path in paths if path in entries])

        def give_file(self, path: Path) -> None:
            data = path.read_bytes()
            headers = {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Accept-Ranges": "bytes"}
            if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, end = int(match[1]), min(int(match[2]) + 1, len(data))
                self.send(206, data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})
            else:
                self.send(200, data, headers)

        def give(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

        def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
