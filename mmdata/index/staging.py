"""What an index in progress has read of each tar, kept on disk, so that a run that ended early is not repeated.

A staged scan is used again only for a tar of the same size and modification time, or of the same URL, read with the
same settings. The folder also holds the finished index before it is published: a run that was killed while files were
moved is finished by the next one.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.atomic import sync_folder, write_whole
from mmdata.hashing import fast_hash
from mmdata.index.manifest import Manifest
from mmdata.index.pages import INDEX_FILE
from mmdata.storage.folder import INNER, MANIFEST_NAME, has_manifest
from mmdata.tars.scan import Scan

STAGING_NAME = ".mmdata-index"
GUESS_NAME = "members.json"
VERSION = 6
"""Of the staged files; raise it when a reader of samples changes what it finds."""
TOKENIZER_NAME = "tokenizer"
"""Name of a trained tokenizer: a link to the folder of this name in `__mmdata__`, as a conversion makes it."""


class ReadTar(NamedTuple):
    """What was read of a tar.

    Attributes:
        scan: its samples.
        sha256, bytes: of the whole file.
    """

    scan: Scan
    sha256: str
    bytes: int


class IndexStaging:
    """The hidden folder of an index in progress.

    Args:
        folder: where the index will be published.

    Attributes:
        new: folder in which the finished index is made before it is published.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / STAGING_NAME
        self.new = self._path / "new"

    def load(self, tar: str, identity: dict[str, Any]) -> ReadTar | None:
        """What was read of a tar; None if nothing was, if what is kept is damaged, or if it is of another identity."""
        try:
            checksum, _, data = self._place(tar).read_bytes().partition(b"\n")
            if checksum != _checksum(data):
                return None
            content = json.loads(data)
        except (OSError, ValueError):
            return None
        if content["of"] != {"version": VERSION, **identity}:
            return None
        return ReadTar(Scan.from_json(content["scan"]), content["sha256"], content["bytes"])

    def save(self, tar: str, identity: dict[str, Any], read: ReadTar) -> None:
        """Keep what was read of a tar; `identity` is all that decided it, as JSON, found before the tar was read."""
        self._path.mkdir(exist_ok=True)
        content = {
            "of": {"version": VERSION, **identity},
            "sha256": read.sha256,
            "bytes": read.bytes,
            "scan": read.scan.to_json(),
        }
        data = json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode()
        try:
            write_whole(self._place(tar), _checksum(data) + b"\n" + data)
        except OSError:
            with suppress(OSError):  # holds what was kept of other tars
                self._path.rmdir()
            raise

    def load_guess(self, of: dict[str, Any]) -> dict[str, list[str]] | None:
        """The members that an earlier run guessed of the same tars; None if there was none."""
        try:
            content = json.loads((self._path / GUESS_NAME).read_bytes())
            return content["members"] if content["of"] == of else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save_guess(self, of: dict[str, Any], members: dict[str, list[str]]) -> None:
        """Keep the members that were guessed, as `Members.content` gives them; `of` names the tars, as JSON."""
        self._path.mkdir(exist_ok=True)
        write_whole(self._path / GUESS_NAME, json.dumps({"of": of, "members": members}).encode())

    def make_new(self) -> Path:
        """An empty folder for the finished index."""
        if self.new.exists():
            shutil.rmtree(self.new)
        self.new.mkdir(parents=True)
        return self.new

    def finish_killed_run(self) -> bool:
        """Publish the finished index that a killed run left behind; whether there was one."""
        if not has_manifest(self.new):
            return False
        self.publish()
        return True

    def publish(self) -> None:
        """Move the finished index into the folder, manifest.json last, and remove this folder.

        An index that is replaced loses its manifest.json first. So at any moment the folder has the manifest of the old
        index, none, or that of the new one, never one whose files are another's.
        """
        made, inner = self.new / INNER, self._folder / INNER
        inner.mkdir(exist_ok=True)
        self._retire_published()
        for path in sorted(made.iterdir()):
            if path.name != MANIFEST_NAME:
                if (inner / path.name).is_dir():
                    shutil.rmtree(inner / path.name)
                os.replace(path, inner / path.name)
        sync_folder(inner)
        if (inner / TOKENIZER_NAME).is_dir() and not os.path.lexists(self._folder / TOKENIZER_NAME):
            (self._folder / TOKENIZER_NAME).symlink_to(INNER + TOKENIZER_NAME)
        os.replace(made / MANIFEST_NAME, inner / MANIFEST_NAME)
        sync_folder(inner)
        self.remove()

    def remove(self) -> None:
        """Remove this folder."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._path)

    def _retire_published(self) -> None:
        """Remove the manifest of an index that is replaced, and then its files that do not get a successor."""
        inner, following = self._folder / INNER, Manifest.read(self.new).files
        (inner / MANIFEST_NAME).unlink(missing_ok=True)
        for path in inner.iterdir():
            if INDEX_FILE.fullmatch(path.name) and path.name not in following:
                path.unlink()

    def _place(self, tar: str) -> Path:
        return self._path / f"{tar}.scan"


def _checksum(data: bytes) -> bytes:
    return f"{fast_hash(data) % 2**64:016x}".encode()
