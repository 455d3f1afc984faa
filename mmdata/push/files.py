"""Which files of a folder of shards are pushed. What differs in size from the manifest, or is missing, is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmdata.errors import DataError, counted
from mmdata.hashing import file_sha256
from mmdata.index.manifest import Manifest
from mmdata.index.staging import TOKENIZER_NAME
from mmdata.index.verify import verify
from mmdata.safe_read import read_regular
from mmdata.storage.folder import (
    INNER,
    INNER_NAME,
    MANIFEST_NAME,
    QUARANTINE_NAME,
    Location,
    has_manifest,
    local_folder,
)

SHOWN = 3
"""Faults that a message names; the others are counted."""


@dataclass(frozen=True)
class PushedFile:
    """A file, as it must be when it has been pushed.

    Attributes:
        name: relative to the folder behind the URL, with "/".
        bytes, sha256: of its content; of shards what the manifest says.
        source: its path, or its content.
    """

    name: str
    bytes: int
    sha256: str
    source: Path | bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> PushedFile:
        """A file with this content."""
        return cls(name, len(content), hashlib.sha256(content).hexdigest(), content)

    def chunks(self, size: int) -> Iterator[bytes]:
        """The content in pieces of `size` bytes, the last one shorter; an empty file has one, which is empty.

        Raises:
            DataError: after the last piece, if the content is not the one that was to be pushed.
        """
        digest = hashlib.sha256()
        if isinstance(self.source, bytes):
            pieces = (self.source[start : start + size] for start in range(0, max(1, self.bytes), size))
        else:
            pieces = _pieces(self.source, size)
        for piece in pieces:
            digest.update(piece)
            yield piece
        self.check(digest.hexdigest())

    def read(self) -> bytes:
        """The whole content.

        Raises:
            DataError: it is not the one that was to be pushed.
        """
        return b"".join(self.chunks(max(1, self.bytes)))

    def check(self, sha256: str) -> None:
        """Raise DataError if this is not the hash that the content must have."""
        if sha256 != self.sha256:
            raise DataError(
                f"'{self.source if isinstance(self.source, Path) else self.name}': its SHA-256 is not the one that the "
                "manifest names, or it changed during the push: nothing that names it was published; `mmdata verify` "
                "says what is wrong"
            )


@dataclass(frozen=True)
class PushedFolder:
    """A folder with a manifest.

    Attributes:
        name: of the sub-folder, such as "train"; "" for the folder that is pushed.
        files: all but manifest.json: shards, the ledger, the files of the tokenizer, and the index files.
        top: manifest.json.
    """

    name: str
    manifest: Manifest
    files: list[PushedFile]
    top: PushedFile

    @property
    def prefix(self) -> str:
        """What the names of its files begin with: "train/", or ""."""
        return f"{self.name}/" if self.name else ""

    @property
    def split(self) -> str:
        """The name of the split as `datasets` and the hub call it: "validation" for "val", "train" for the whole."""
        return {"": "train", "val": "validation"}.get(self.name, self.name)


def read_parts(folder: Location) -> list[PushedFolder]:
    """The folder itself if it has a manifest, or its sub-folders that have one, by name; no shard is read.

    Raises:
        DataError: there is none; its tars lie elsewhere; or sizes, sums, accounts or the list of tars do not fit.
        ConfigError: `folder` is a URL.
    """
    local = local_folder(folder)
    if has_manifest(local) or not local.is_dir():
        return [_part(local, "")]
    names = sorted(path.name for path in local.iterdir() if not path.name.startswith((".", "_")) and path.is_dir())
    parts = [_part(local, name) for name in names if has_manifest(local / name)]
    return parts or [_part(local, "")]  # which says what is there instead


def _part(root: Path, name: str) -> PushedFolder:
    folder = root / name
    manifest = Manifest.read(folder)
    if manifest.location != ".":
        raise DataError(
            f"'{folder}': an index of tars that lie elsewhere; a push sends a folder with its own tars: copy them "
            f"there with `mmdata convert`, or index them where they lie"
        )
    faults = [str(problem) for problem in verify(folder, shards=())]
    before, faults_of_files = f"{name}/" if name else "", list[str]()
    files = list(_files(folder, before, manifest, faults_of_files))
    if faults := faults + faults_of_files:
        more = f" and {counted(len(faults) - SHOWN, 'more fault')}" if len(faults) > SHOWN else ""
        raise DataError(
            f"'{folder}': is not what its manifest says, and was not pushed: {'; '.join(faults[:SHOWN])}{more}; "
            "`mmdata verify` says where"
        )
    content = read_regular(folder / INNER / MANIFEST_NAME, "manifest")
    return PushedFolder(name, manifest, files, PushedFile.of(f"{before}{INNER}{MANIFEST_NAME}", content))


def _files(folder: Path, before: str, manifest: Manifest, faults: list[str]) -> Iterator[PushedFile]:
    """The files of a part but manifest.json; what is wrong with them is added to `faults`."""
    for number in range(manifest.num_shards):
        shard = manifest.listed(number)
        if (found := _size(folder / shard.name, shard.bytes, faults)) is not None:
            yield PushedFile(before + shard.name, found, shard.sha256, folder / shard.name)
    others = [folder / INNER / QUARANTINE_NAME, *sorted((folder / INNER / TOKENIZER_NAME).rglob("*"))]
    for path in others:
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            yield PushedFile(before + name, path.stat().st_size, file_sha256(path), path)
    for name, file in zip(manifest.files, manifest.index_files, strict=True):
        path = folder / INNER / name
        if (found := _size(path, file.bytes, faults)) is not None:
            yield PushedFile(before + INNER + name, found, file_sha256(path), path)


def _size(path: Path, expected: int | None, faults: list[str]) -> int | None:
    """The size of a regular file; None, and a fault, if there is none or it is not the expected one."""
    if not path.is_file():
        faults.append(f"'{path}' is missing" if not path.exists() else f"'{path}' is not a regular file")
        return None
    size = path.stat().st_size
    if expected is not None and size != expected:
        faults.append(f"'{path}' has {size} bytes of {expected}")
        return None
    return size


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(size)
        while piece := file.read(size):
            yield piece


def belongs_to(name: str, prefix: str) -> bool:
    """Whether a file behind the URL is one that a push of the part with this prefix could have sent."""
    if not name.startswith(prefix):
        return False
    inside = name.removeprefix(prefix)
    return inside.startswith(f"{INNER_NAME}/") or ("/" not in inside and inside.endswith(".tar"))
