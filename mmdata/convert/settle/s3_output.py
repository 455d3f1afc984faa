"""An output folder on S3. There are no locks there: each step may be done twice, and the manifest, put last, decides.

One run at a time owns the folder: the one whose `run.json` is in the hidden folder, put under the condition that there
was none. Shards that are whole tars of units stay there with the units until every row is accounted for; others are
made on this disk, and wait there too. Then all are copied into place on the server's side, and the manifest last.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from mmdata.config.convert import ConvertConfig
from mmdata.convert.settle.accounts import CannotPublish
from mmdata.convert.settle.differences import Run
from mmdata.convert.settle.output import TOKENIZER_NAME, Output, digest_of, foreign_files, identified
from mmdata.convert.units.s3_staging import THREADS, S3Staging, remove_units, units_are_gone
from mmdata.convert.units.staging import RUN_NAME, UNITS_NAME, MissingUnits
from mmdata.errors import ConfigError, DataError
from mmdata.hashing import file_sha256
from mmdata.index.manifest import Manifest
from mmdata.processes import map_concurrently
from mmdata.recognize import PRIVATE_NAME
from mmdata.storage.attempts import Absent
from mmdata.storage.folder import INNER, INNER_NAME, JOINS_NAME, MANIFEST_NAME
from mmdata.storage.s3 import MOST_BYTES, S3Folder
from mmdata.storage.urls import S3_CONNECTIONS

MANIFEST = INNER + MANIFEST_NAME
TOUCHED = "touched.json"
"""Names, in the hidden folder, of what a run may have put into place or removed before its manifest is in place."""
BEGINS = 8
"""Times that a run tries to own a folder which others give up or take."""


class S3Output(Output):
    """A folder of a bucket that one run owns. What is not a shard is made in a folder of this disk first.

    Args:
        folder: on this disk, made here.
        bucket: where the conversion is published.
        first: of the folders of a conversion, the one that has its units; None if this is it.
    """

    def __init__(self, folder: Path, bucket: S3Folder, first: S3Output | None = None) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True)
        self._bucket = bucket
        self._hidden = bucket.under(PRIVATE_NAME)
        self._first = first or self
        self._staging: S3Staging
        self._sizes: dict[str, int | None] = {}

    @property
    def place(self) -> str:
        """See `Output.place`."""
        return self._bucket.url

    def read_manifest(self) -> Manifest:
        """See `Output.read_manifest`."""
        return Manifest.read(self._bucket.url)

    def published(self) -> Manifest | None:
        """See `Output.published`."""
        return None if self._bucket.get(MANIFEST) is None else self.read_manifest()

    def listing(self) -> set[str]:
        """See `Output.listing`. Whole other corpora below the folder are not listed."""
        files = {**self._bucket.listing(sub_folders=False), **self._bucket.listing(INNER)}
        self._sizes = {name: file.bytes for name, file in files.items()} | dict.fromkeys(self._bucket.sub_folders())
        return {_top(name) for name in self._sizes} - {"", INNER_NAME, INNER, INNER + JOINS_NAME}

    def size(self, name: str) -> int:
        """See `Output.size`; at the time of the last `listing`."""
        size = self._sizes[name]
        assert size is not None
        return size

    def names(self, manifest: Manifest) -> set[str]:
        """See `Output.names`. There are no links on S3."""
        return super().names(manifest) - {TOKENIZER_NAME}

    def refuse_foreign(self) -> None:
        """See `Output.refuse_foreign`."""
        listing = self.listing()  # first: a run that publishes now has noted each name before it
        ours = {PRIVATE_NAME} | self._touched() | self._published_names()
        if foreign := sorted(listing - ours):
            raise foreign_files(self.place, foreign)

    def staging(self, run: Run, *, overwrite: bool, shared: bool = False) -> S3Staging:
        """See `Output.staging`. The folder belongs to this run from then on, or it is an error.

        Raises:
            ConfigError: the store knows no conditions.
        """
        run, digest = identified(run)
        staging = S3Staging(self.private / f"{UNITS_NAME}-{digest}", self._hidden, digest)
        data = json.dumps(run, sort_keys=True).encode()
        for _ in range(BEGINS):
            if self._hidden.put_new(RUN_NAME, data):
                self._hidden.check_conditions(RUN_NAME, data)
            elif (found := self._hidden.get(RUN_NAME)) is None:
                continue  # that run ended just now
            elif found.data != data and not self._take_over(
                json.loads(found.data), found.tag, run, overwrite and not shared
            ):
                continue
            staging.begin(run)
            self._staging = staging
            return staging
        raise DataError(f"output '{self.place}': other conversions begin here and end; run this again when they have")

    def withdraw_old(self) -> None:
        """See `Output.withdraw_old`. What is touched from here on is noted first, for a run that is killed."""
        found = self._bucket.get(MANIFEST)
        if found is not None and found.data == self._made():
            return  # its files are written over, with the same bytes
        wanted = {*self._shards(), *self._files(), MANIFEST}
        touched = self._touched() | self._published_names() | set(map(_top, wanted))
        data = json.dumps(sorted(touched)).encode()
        self._hidden.put(TOUCHED, data, hashlib.sha256(data).hexdigest())
        self._bucket.remove([MANIFEST] if found is not None else [])
        self.listing()
        self._bucket.remove(name for name in self._sizes if _top(name) in touched and name not in wanted)

    def publish(self) -> None:
        """See `Output.publish`. Several processes that publish the same may do so at once.

        Raises:
            MissingUnits: the units were removed.
            DataError: another conversion was published meanwhile.
        """
        data = self._made()

        def copy(shard: tuple[str, str]) -> None:
            self._bucket.copy(self._first._hidden, shard[1], shard[0])

        try:
            shards = self._shards().items()
            for _ in map_concurrently(copy, shards, threads=S3_CONNECTIONS, end=lambda: None):
                pass
        except (Absent, MissingUnits) as error:
            if self._is_published(data):
                return  # and who did it has removed the units
            raise units_are_gone(self.place) from error

        def send(name: str) -> None:
            path = self.private / name
            self._bucket.put(name, path, file_sha256(path))

        for _ in map_concurrently(send, self._files(), threads=THREADS, end=lambda: None):
            pass
        if not self._bucket.put_new(MANIFEST, data) and not self._is_published(data):
            raise DataError(
                f"output '{self.place}': another conversion was published here meanwhile; let one run end, then "
                "convert again with --overwrite"
            )

    def remove_private(self) -> None:
        """See `Output.remove_private`. What belongs to another run stays."""
        shutil.rmtree(self.private, ignore_errors=True)
        if (found := self._hidden.get(RUN_NAME)) is not None and (published := self.published()) is not None:
            run = json.loads(found.data)
            run.pop("mmdata")
            if run != (published.accounts or {}).get("run"):
                return
        remove_units(self._hidden, "")

    def _take_over(self, other: Run, tag: str, run: Run, overwrite: bool) -> bool:
        """Put this run in the place of another that has no units, or is to be replaced; False if it has changed.

        Raises:
            DataError: it has units.
        """
        theirs = S3Staging(self.private, self._hidden, digest_of(other))
        if not overwrite and theirs.has_any():
            raise self.unfinished(other, run)
        if not self._hidden.put_new(RUN_NAME, json.dumps(run, sort_keys=True).encode(), instead_of=tag):
            return False
        remove_units(self._hidden, f"{theirs.units}/")
        return True

    def _shards(self) -> dict[str, str]:
        """Where in the bucket of the units the shards are, by name.

        Raises:
            MissingUnits: the folder belongs to another run by now, whose shards would be written over.
        """
        staging = self._first._staging
        if (run := staging.run()) is None or digest_of(run) != staging.digest:
            raise units_are_gone(self.place)
        return {tar.name: name for tar, name in staging.shards.items() if tar.parent == self.private}

    def _made(self) -> bytes:
        """The manifest that is to be published."""
        return (self.private / MANIFEST).read_bytes()

    def _files(self) -> list[str]:
        """What is published besides shards and manifest, all of it on this disk."""
        paths = (path for path in sorted((self.private / INNER).rglob("*")) if path.is_file())
        names = (path.relative_to(self.private).as_posix() for path in paths)
        return [name for name in names if name != MANIFEST and not PurePosixPath(name).name.startswith(".")]

    def _is_published(self, data: bytes) -> bool:
        found = self._bucket.get(MANIFEST)
        return found is not None and found.data == data

    def _published_names(self) -> set[str]:
        published = self.published()
        return set() if published is None else self.names(published)

    def _touched(self) -> set[str]:
        found = self._hidden.get(TOUCHED)
        return set() if found is None else set(json.loads(found.data))


@contextmanager
def open_s3_outputs(url: str, config: ConvertConfig, parts: Sequence[str]) -> Generator[list[Output]]:
    """A folder on S3, or its sub-folders `parts`. What is made on this disk lies in a folder of TMPDIR meanwhile.

    Args:
        url: s3://BUCKET/PREFIX.
        config: the largest shard.
        parts: names of sub-folders.

    Raises:
        DataError: a folder holds foreign files.
        ConfigError: another URL; no such bucket, no permission; or shards that are too large for it.
    """
    bucket = S3Folder.of_url(url)
    if config.shard_bytes > MOST_BYTES:
        raise ConfigError(
            f"shard_bytes {config.shard_bytes}: an output on S3 has shards of at most {MOST_BYTES:,} bytes"
        )
    if parts:
        names = {_top(name) for name in (*bucket.listing(sub_folders=False), *bucket.sub_folders())}
        if foreign := sorted(names - {"", *parts}):
            raise foreign_files(bucket.url, foreign)
    folder = Path(tempfile.mkdtemp(prefix="mmdata-convert-"))
    keep = False
    try:
        top, *others = parts or ("",)
        first = S3Output(folder / (top or "out"), bucket.under(top))
        outputs = [first, *(S3Output(folder / part, bucket.under(part), first) for part in others)]
        for output in outputs:
            output.refuse_foreign()
        yield list[Output](outputs)
    except CannotPublish:
        keep = True  # the message names lists of rows in it
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _top(name: str) -> str:
    """A name as in `Output.listing`: of the file or folder at the top, or in `__mmdata__`, that has this one in it."""
    if name.startswith(INNER):
        return INNER + name.removeprefix(INNER).split("/")[0]
    return name.split("/")[0]
