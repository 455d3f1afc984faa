"""The Hugging Face hub's API on loopback: the endpoints that `huggingface_hub` calls to make, list, fill and read a
dataset or a model. Commits are whole, follow their parent, and may name only large files that have been uploaded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.programs import PATIENCE_S
from tests.storage.servers import running

NAME = "me/photos"
TOKEN = "hf_testing"


class Hub(ThreadingHTTPServer):
    """`commits` holds the files of each commit, by name; None: the dataset was not made. `objects` are large files.

    `faults` maps "METHOD path" to statuses for the next requests that begin so; a request that begins with `held`
    waits until `release` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commits: list[dict[str, bytes]] | None = None
        self.private = False
        self.kind = "dataset"
        self.objects: dict[str, bytes] = {}
        self.commands: list[str] = []
        self.faults: dict[str, list[int]] = {}
        self.held = ""
        self.holding, self.release = threading.Event(), threading.Event()
        self.lock = threading.Lock()

    @property
    def files(self) -> dict[str, bytes]:
        """Those of the last commit."""
        return self.commits[-1] if self.commits else {}

    def oid(self, number: int) -> str:
        return hashlib.sha1(f"commit {number}".encode()).hexdigest()

    def at(self, revision: str) -> dict[str, bytes]:
        """The files of a commit, or of main."""
        assert self.commits
        named = {self.oid(number): files for number, files in enumerate(self.commits)}
        return named.get(revision, self.files)

    def handle_error(self, request, client_address) -> None:
        """Quiet: clients that are killed leave broken connections."""


def is_large(name: str) -> bool:
    """As the .gitattributes of a dataset say."""
    return name.endswith((".tar", ".arrow", ".safetensors"))


def described(name: str, content: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(content).hexdigest()
    blob = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
    large = {"oid": sha256, "size": len(content), "pointerSize": 130}
    return {"type": "file", "path": name, "size": len(content), "oid": blob} | (
        {"lfs": large} if is_large(name) else {}
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        command = f"{self.command} {path}"
        with self.server.lock:
            self.server.commands.append(command)
            fault = next(
                (left.pop(0) for start, left in self.server.faults.items() if command.startswith(start) and left), 0
            )
        if self.server.held and command.startswith(self.server.held):
            self.server.holding.set()
            self.server.release.wait(PATIENCE_S)
        if fault:
            self._send(fault, {"error": "a fault"})
            return
        for pattern, answer in ROUTES.items():
            if match := re.fullmatch(pattern, command):
                if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "/upload/" not in path:
                    self._send(401, {"error": "Invalid username or password."})
                else:
                    with self.server.lock:
                        answer(self, body, *match.groups())
                return
        self._send(404, {"error": f"no route for {command}"})

    do_GET = do_HEAD = do_PUT = do_POST = _answer

    def _send(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _exists(self) -> bool:
        if self.server.commits is None:
            self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return self.server.commits is not None

    def info(self, body: bytes, revision: str | None) -> None:
        if not self._exists():
            return
        if revision not in (None, "main") and revision not in map(
            self.server.oid, range(len(self.server.commits or []))
        ):
            self._send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return
        sha = self.server.oid(len(self.server.commits or []) - 1)
        self._send(200, {"id": NAME, "sha": sha, "private": self.server.private, "tags": [], "siblings": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        assert (f"{asked['organization']}/{asked['name']}", asked.get("type", "model")) == (NAME, self.server.kind)
        self.server.private = asked.get("visibility") == "private" or asked.get("private", False)
        self.server.commits = [{".gitattributes": b"*.tar filter=lfs\n"}]
        self._send(200, {"url": f"{self.server.url}/datasets/{NAME}", "name": NAME})

    def tree(self, body: bytes, revision: str, folder: str | None) -> None:
        inside = f"{folder}/" if folder else ""
        if self._exists():
            found = sorted(self.server.at(revision).items())
            self._send(200, [described(name, content) for name, content in found if name.startswith(inside)])

    def paths(self, body: bytes, revision: str) -> None:
        names = re.findall(r"paths=([^&]+)", unquote(body.decode()))
        found = self.server.at(revision)
        self._send(200, [described(name, found[name]) for name in names if name in found])

    def preupload(self, body: bytes, revision: str) -> None:
        files = json.loads(body)["files"]
        modes = {True: "lfs", False: "regular"}
        self._send(
            200,
            {
                "files": [
                    {"path": f["path"], "uploadMode": modes[is_large(f["path"])], "shouldIgnore": False} for f in files
                ]
            },
        )

    def batch(self, body: bytes) -> None:
        objects = json.loads(body)["objects"]
        for item in objects:
            if item["oid"] not in self.server.objects:
                item["actions"] = {"upload": {"href": f"{self.server.url}/upload/{item['oid']}"}}
        self._send(200, {"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._send(400, {"error": "the content has another hash"})
            return
        self.server.objects[oid] = body
        self._send(200, {})

    def valid(self, body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def commit(self, body: bytes, revision: str) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        commits = self.server.commits
        assert commits is not None
        if lines[0]["value"].get("parentCommit") != self.server.oid(len(commits) - 1):
            self._send(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(commits[-1])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        commits.append(files)
        oid = self.server.oid(len(commits) - 1)
        self._send(200, {"commitUrl": f"{self.server.url}/datasets/{NAME}/commit/{oid}", "commitOid": oid})

    def resolve(self, body: bytes, revision: str, name: str) -> None:
        content = self.server.at(revision).get(name)
        if content is None:
            self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        if (span := self.headers.get("Range")) and (match := re.fullmatch(r"bytes=(\d+)-(\d+)", span)):
            first, last = int(match[1]), min(int(match[2]), len(content) - 1)
            part = content[first : last + 1]
            self._send(206, part, Content_Range=f"bytes {first}-{last}/{len(content)}")
            return
        self._send(200, content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


API = f"/api/datasets/{NAME}"
ANY = f"/api/(?:datasets|models)/{NAME}"
ROUTES: dict[str, Callable[..., None]] = {
    rf"GET {ANY}(?:/revision/([^/]+))?": _Handler.info,
    r"POST /api/repos/create": _Handler.create,
    rf"GET {ANY}/tree/([^/]+)(?:/(.+))?": _Handler.tree,
    rf"POST {ANY}/paths-info/([^/]+)": _Handler.paths,
    rf"POST {ANY}/preupload/([^/]+)": _Handler.preupload,
    rf"POST (?:/datasets)?/{NAME}\.git/info/lfs/objects/batch": _Handler.batch,
    r"PUT /upload/([0-9a-f]{64})": _Handler.upload,
    r"POST /api/validate-yaml": _Handler.valid,
    rf"POST {ANY}/commit/([^/]+)": _Handler.commit,
    rf"(?:GET|HEAD) (?:/datasets)?/{NAME}/resolve/([^/]+)/(.+)": _Handler.resolve,
}


@contextmanager
def serve_hub() -> Generator[Hub, None, None]:
    """A hub without datasets."""
    with running(Hub()) as server:  # pyright: ignore[reportArgumentType]
        yield server
