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
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.atomic import sync_folder, write_whole
from mmdata.errors import DamagedShard
from mmdata.hashing import fast_hash
from mmdata.images.probe import ImageInfo
from mmdata.index.manifest import Manifest
from mmdata.index.pages import INDEX_END, PAGE_PATTERN
from mmdata.storage.folder import INNER, MANIFEST_NAME, has_manifest
from mmdata.tars.row import Place, Row
from mmdata.tars.scan import Edge, Scan
from mmdata.tars.texts import Loss

STAGING_NAME = ".mmdata-index"
GUESS_NAME = "members.json"
VERSION = 3
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


class Staging:
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
        return ReadTar(_scan_of(content["scan"]), content["sha256"], content["bytes"])

    def save(self, tar: str, identity: dict[str, Any], read: ReadTar) -> None:
        """Keep what was read of a tar; `identity` is all that decided it, as JSON, found before the tar was read."""
        self._path.mkdir(exist_ok=True)
        content = {
            "of": {"version": VERSION, **identity},
            "sha256": read.sha256,
            "bytes": read.bytes,
            "scan": _content_of(read.scan),
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
        self._retire_published({path.name for path in made.iterdir()})
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

    def _retire_published(self, following: set[str]) -> None:
        """Remove the manifest of an index that is replaced, and then its files that do not get a successor."""
        old = self._folder / INNER
        had_manifest = has_manifest(self._folder)
        if had_manifest:
            names = {entry.index for entry in Manifest.read(self._folder)}
            (old / MANIFEST_NAME).unlink()
            for name in names - following:
                (old / name).unlink(missing_ok=True)
        # The run before may have moved pages of the new index already.
        new = Manifest.read(self.new)
        pages = {page.file for page in new.pages}
        for path in old.iterdir():
            if PAGE_PATTERN.fullmatch(path.name) and path.name not in pages:
                path.unlink()
        # Or it was killed in this method, after it had removed the manifest that names the old files: then no page has
        # been moved, and the new names can be read.
        if not had_manifest and pages <= following:
            names = {entry.index for entry in new}
            for path in old.iterdir():
                if path.name.endswith(INDEX_END) and path.name not in names:
                    path.unlink()

    def _place(self, tar: str) -> Path:
        return self._path / f"{tar}.scan"


def _checksum(data: bytes) -> bytes:
    return f"{fast_hash(data) % 2**64:016x}".encode()


def _content_of(scan: Scan) -> dict[str, Any]:
    """A scan as JSON."""
    damage = scan.damage and [scan.damage.what, scan.damage.remedy]
    return {**vars(scan), "rows": [_VALUES(row) for row in scan.rows], "damage": damage}


def _scan_of(content: dict[str, Any]) -> Scan:
    """The inverse of `_content_of`."""
    rows = [_row_of(*values) for values in content["rows"]]
    losses = [(key, {Loss(loss): detail for loss, detail in lost.items()}) for key, lost in content["losses"]]
    edges = [Edge(*edge) for edge in content["edges"]]
    damage = content["damage"] and DamagedShard(*content["damage"])
    rest: dict[str, Any] = {**content, "rows": rows, "losses": losses, "edges": edges, "damage": damage}
    return Scan(**rest)


# A tuple, as `asdict` takes a fifth of the time of reading a tar of small images.
_VALUES = attrgetter(
    *("key", "image.offset", "image.size", "caption.offset", "caption.size", "caption_format"),
    *("info.format", "info.height", "info.width", "info.orientation"),
    *("label", "image_hash", "image_xxh3", "captions"),
)


def _row_of(
    key: str,
    image_offset: int,
    image_size: int,
    caption_offset: int,
    caption_size: int,
    caption_format: int,
    format: str,
    height: int,
    width: int,
    orientation: int,
    *rest: Any,
) -> Row:
    """The inverse of `_VALUES`."""
    image, caption = Place(image_offset, image_size), Place(caption_offset, caption_size)
    return Row(key, image, caption, caption_format, ImageInfo(format, height, width, orientation), *rest)
