"""Which files of a folder of shards are pushed. What differs in size from the manifest, or is missing, is refused."""

from __future__ import annotations

import hashlib
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

    def read(self) -> bytes:
        """The whole content.

        Raises:
            DataError: it is not the one that was to be pushed.
        """
        content = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
        self.check(hashlib.sha256(content).hexdigest())
        return content

    def check(self, sha256: str) -> None:
        """Raise DataError if this is not the hash that the content must have."""
        if sha256 != self.sha256:
            raise wrong_content(self.source if isinstance(self.source, Path) else self.name)


@dataclass(frozen=True)
class StoredFile:
    """A file that is behind the URL.

    Attributes:
        bytes: its size.
        version: what the place calls this content: an ETag of S3, a blob of git.
        sha256: of the content, where the list of files says it.
    """

    bytes: int
    version: str
    sha256: str | None = None


@dataclass(frozen=True)
class PushedFolder:
    """A folder with a manifest.

    Attributes:
        name: of the sub-folder, such as "train"; "" for the folder that is pushed.
        shards: the tars.
        others: the ledger, the files of the tokenizer, and the index files.
        top: manifest.json.
    """

    name: str
    manifest: Manifest
    shards: list[PushedFile]
    others: list[PushedFile]
    top: PushedFile

    @property
    def prefix(self) -> str:
        """What the names of its files begin with: "train/", or ""."""
        return f"{self.name}/" if self.name else ""

    @property
    def split(self) -> str:
        """The name of the split as `datasets` and the hub call it: "validation" for "val", "train" for the whole."""
        return {"": "train", "val": "validation"}.get(self.name, self.name)

    def owns(self, name: str) -> bool:
        """Whether a file behind the URL is one that a push of this folder could have sent."""
        inside = name.removeprefix(self.prefix)
        is_ours = inside.startswith(INNER) or ("/" not in inside and inside.endswith(".tar"))
        return is_ours and name.startswith(self.prefix)


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
    faults = [str(problem) for problem in verify(folder, shards=())]  # of index files and accounts
    before = f"{name}/" if name else ""
    shards = list[PushedFile]()
    for shard in map(manifest.listed, range(manifest.num_shards)):
        path = folder / shard.name
        shards.append(PushedFile(before + shard.name, shard.bytes, shard.sha256, path))
        if not path.is_file():
            faults.append(f"'{path}' is {'not a regular file' if path.exists() else 'missing'}")
        elif (size := path.stat().st_size) != shard.bytes:
            faults.append(f"'{path}' has {size} bytes of {shard.bytes}")
    if faults:
        more = f" and {counted(len(faults) - SHOWN, 'more fault')}" if len(faults) > SHOWN else ""
        raise DataError(
            f"'{folder}': is not what its manifest says, and was not pushed: {'; '.join(faults[:SHOWN])}{more}; "
            "`mmdata verify` says where"
        )
    inner = folder / INNER
    optional = [inner / QUARANTINE_NAME, *sorted((inner / TOKENIZER_NAME).rglob("*"))]
    others = [
        PushedFile(before + path.relative_to(folder).as_posix(), path.stat().st_size, file_sha256(path), path)
        for path in (*filter(Path.is_file, optional), *map(inner.joinpath, manifest.files))
    ]
    top = PushedFile.of(f"{before}{INNER}{MANIFEST_NAME}", read_regular(inner / MANIFEST_NAME, "manifest"))
    return PushedFolder(name, manifest, shards, others, top)


def dataset_name(url: str) -> str:
    """The last word of a URL, without the branch."""
    return url.rpartition("/")[2].partition("@")[0]


def wrong_content(name: object) -> DataError:
    """The error of a file with another hash than it must have."""
    return DataError(
        f"'{name}': its SHA-256 is not the one that the manifest names, or it changed during the push: nothing that "
        "names it was published; `mmdata verify` says what is wrong"
    )
