"""The output folder: one writer at a time, foreign files untouched, published whole.

A conversion is made in a private sub-folder, and is complete once that holds a manifest. After that it is only moved
into place: the next run finishes a move that was killed. Of an incomplete conversion the units that are whole stay, and
the next run goes on with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import cast

from mmdata.convert.settle.differences import Run, differences
from mmdata.convert.units.staging import UNITS_NAME, Staging
from mmdata.errors import DataError
from mmdata.files import LOCK_NAME, Staged, lock, remove
from mmdata.index.manifest import Manifest
from mmdata.index.writer import shard_name
from mmdata.recognize import PRIVATE_NAME
from mmdata.storage.folder import INNER, INNER_NAME, JOINS_NAME, MANIFEST_NAME, QUARANTINE_NAME, ROWS_NAME, has_manifest
from mmdata.version import VERSION

TOKENIZER_NAME = "tokenizer"
"""Name of a trained tokenizer: a link to the folder of this name in `__mmdata__`.

Hugging Face's `datasets` takes JSON files below a folder for data, but neither follows links to folders nor reads
`__mmdata__`.
"""


class Output:
    """A folder that is written within `open_outputs`.

    Attributes:
        folder: where the conversion is published.
        private: hidden sub-folder where the conversion is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.private = folder / PRIVATE_NAME
        self._staged = Staged(folder, self.private, last=INNER + MANIFEST_NAME, names=_names_with_joins)

    @property
    def place(self) -> str:
        """Where the conversion is published, for messages."""
        return str(self.folder)

    def read_manifest(self) -> Manifest:
        """The manifest of the published conversion."""
        return Manifest.read(self.folder)

    def published(self) -> Manifest | None:
        """The manifest that is published now; None if there is none."""
        return _manifest(self.folder)

    def listing(self) -> set[str]:
        """Files that are published: their paths, `__mmdata__` alone with what is in it."""
        return _listing(self.folder)

    def size(self, name: str) -> int:
        """Size of a published file."""
        return (self.folder / name).stat().st_size

    def names(self, manifest: Manifest) -> set[str]:
        """Paths, as in `listing`, of all that a conversion publishes; empty if the manifest is not a conversion's."""
        return _names(manifest)

    def clear_private(self, *, keep: tuple[str, ...] = (UNITS_NAME,)) -> None:
        """Make the hidden folder empty but for units of an unfinished conversion, or for what `keep` begins."""
        (self.private / INNER).mkdir(parents=True, exist_ok=True)
        for path in self.private.iterdir():
            if not path.name.startswith(keep):
                remove(path)
        (self.private / INNER).mkdir()

    def remove_private(self) -> None:
        """Remove the hidden folder."""
        for staging in self._stagings():
            staging.remove()
        shutil.rmtree(self.private, ignore_errors=True)

    def holds_unfinished(self) -> bool:
        """Whether there are units of a conversion that did not end and may be gone on with."""
        return any(one.run() is not None and one.has_any() and not one.was_refused for one in self._stagings())

    def staging(self, run: Run, *, overwrite: bool, shared: bool = False) -> Staging:
        """The units of a conversion, with those that an earlier run has made and not published.

        Args:
            run: what decides the bytes.
            overwrite: whether units of another conversion are removed.
            shared: whether other processes may be making units: nothing is removed then.

        Raises:
            DataError: there are units of another conversion.
        """
        run, digest = identified(run)
        wanted = Staging(self.private / f"{UNITS_NAME}-{digest}")  # the name keeps a process of another run out
        for staging in self._stagings():
            if staging.folder == wanted.folder or (other := staging.run()) is None:
                continue
            if shared or not (overwrite or staging.was_refused or not staging.has_any()):
                raise self.unfinished(other, run)
            staging.remove()
        wanted.begin(run)
        return wanted

    def unfinished(self, other: Run, run: Run) -> DataError:
        """The error of units that belong to another run."""
        return DataError(
            f"output '{self.place}': holds an unfinished conversion ({'; '.join(differences(other, run))}); "
            "run that again, with its files as they were, to go on where it ended; or start anew with --overwrite"
        )

    def _stagings(self) -> list[Staging]:
        return [Staging(path) for path in self.private.glob(f"{UNITS_NAME}-*")]

    def is_complete(self, run: Run) -> bool:
        """Whether the folder already holds this conversion.

        Raises:
            DataError: it holds another conversion, or a damaged one.
        """
        published = self.published()
        if published is None:
            return False
        if changes := differences(cast(Run, (published.accounts or {})["run"]), run):
            raise DataError(
                f"output '{self.place}': holds another conversion ({'; '.join(changes)}); "
                "choose another folder, or replace it with --overwrite"
            )
        damages = [f"'{name}' is missing" for name in sorted(self.names(published) - self.listing())]
        if damages := damages or list(self._wrong_sizes(published)):
            raise DataError(
                f"output '{self.place}': holds this conversion, damaged ({'; '.join(damages[:3])}); "
                "make it anew with --overwrite"
            )
        return True

    def refuse_foreign(self) -> None:
        """Raise DataError if the folder holds a file that no conversion wrote."""
        ours = {LOCK_NAME, PRIVATE_NAME}
        if published := _manifest(self.folder):
            ours |= _names(published)
            if (self.folder / INNER / TOKENIZER_NAME).is_dir():
                ours |= _added(published)
        if complete := _manifest(self.private):  # a killed run may have moved a part of its files into place
            ours |= _names(complete) - _listing(self.private)
        if old := _manifest(self._staged.old):
            ours |= _names(old) | _added(old)
        foreign = sorted(_listing(self.folder) - ours)
        if foreign:
            raise foreign_files(self.place, foreign)

    def publish(self) -> None:
        """Move a complete conversion into place, the manifest last. It may be killed at any point and repeated."""
        self._staged.publish()
        self.remove_private()

    def withdraw_old(self) -> None:
        """Remove the conversion that is replaced. It may be killed at any point and repeated."""
        self._staged.withdraw()

    def _wrong_sizes(self, manifest: Manifest) -> Iterator[str]:
        """Names shards whose size is not the manifest's; only `mmdata verify` hashes them."""
        for entry in manifest:
            if (size := self.size(entry.name)) != entry.bytes:
                yield f"'{entry.name}' has {size} bytes of {entry.bytes}"


def publish_all(outputs: Sequence[Output]) -> None:
    """Publish complete conversions. Old ones are withdrawn from all folders first.

    If the process is killed in between, no folder holds the old val beside the new train, whose images may overlap.
    """
    for output in outputs:
        output.withdraw_old()
    for output in outputs:
        output.publish()
    for output in outputs:
        output.remove_private()


def are_complete(outputs: Sequence[Output], run: Run, *, overwrite: bool) -> bool:
    """Whether all folders already hold this conversion, so that nothing is left to do.

    Raises:
        DataError: one holds another conversion, or a damaged one, and `overwrite` is False.
    """
    if overwrite:
        return False
    complete = [output.is_complete(run) for output in outputs]  # all are asked: the second may hold another conversion
    return all(complete)


def identified(run: Run) -> tuple[Run, str]:
    """A run with the version of mmdata, and a name for it: equal for equal runs."""
    run = {**run, "mmdata": {"version": VERSION, "pillow": version("pillow")}}
    return run, digest_of(run)


def digest_of(run: Run) -> str:
    """The name of such a run."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def open_outputs(
    folder: Path, parts: Sequence[str] = (), *, shared: bool = False, overwrite: bool = False
) -> Generator[list[Output]]:
    """Hold a folder, or its sub-folders `parts`, as their only writer, or one of several.

    The folders are made if missing, and what a killed run left is published or removed.

    Args:
        folder: of the output.
        parts: names of sub-folders.
        shared: whether processes that say so too may hold the folder meanwhile. What a killed run left stays.
        overwrite: whether an unfinished conversion without `parts` may be removed for one with them.

    Raises:
        DataError: a folder holds foreign files, cannot be written, or another process writes it.
    """
    outputs = [Output(folder / part) for part in parts] or [Output(folder)]
    with ExitStack() as held:
        if parts:
            _hold_parent(folder, parts, held, shared=shared, overwrite=overwrite)
        for output in outputs:
            _hold(output, held, shared=shared)
        if not shared:
            _recover(outputs)
        yield outputs


def _hold_parent(folder: Path, parts: Sequence[str], held: ExitStack, *, shared: bool, overwrite: bool) -> None:
    """Hold the folder of the parts, which may hold nothing else but what a conversion that failed has left."""
    if folder.is_dir() and (foreign := sorted(set(os.listdir(folder)) - {*parts, LOCK_NAME, PRIVATE_NAME})):
        raise foreign_files(str(folder), foreign)
    _lock(folder, held, shared=shared)
    failed = Output(folder)
    if failed.holds_unfinished() and not overwrite:
        raise DataError(
            f"output '{folder}': holds an unfinished conversion without --val-share; run that again, which goes on "
            "where it ended, or start anew with --overwrite"
        )
    if failed.private.exists() and not shared:
        failed.remove_private()


def _hold(output: Output, held: ExitStack, *, shared: bool) -> None:
    folder = output.folder
    if folder.is_dir() and not (folder / LOCK_NAME).exists():
        output.refuse_foreign()  # before even a lock file is put into a foreign folder
    _lock(folder, held, shared=shared)
    output.refuse_foreign()


def _lock(folder: Path, held: ExitStack, *, shared: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK_NAME).touch()
    except OSError as error:
        raise DataError(
            f"output '{folder}': cannot be written ({error.strerror}); choose a folder that can be"
        ) from error
    held.enter_context(lock(folder, shared=shared))


def _recover(outputs: Sequence[Output]) -> None:
    """Publish the complete conversion of a killed run, or remove its incomplete one."""
    # The parts are completed in order, and published in order after that: the last one decides.
    complete = has_manifest(outputs[-1].private)
    if complete:
        publish_all([output for output in outputs if has_manifest(output.private)])
    for output in outputs:
        if any(output.private.glob(f"{UNITS_NAME}-*")):
            output.clear_private()  # the units are for the next run
        elif output.private.exists():
            shutil.rmtree(output.private)


def foreign_files(place: str, names: Sequence[str]) -> DataError:
    """The error of an output that holds files which no conversion wrote."""
    return DataError(
        f"output '{place}': holds {len(names)} file(s) that are not a conversion's "
        f"({', '.join(names[:3])}); nothing is deleted: choose an empty folder"
    )


def _manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None."""
    return Manifest.read(folder) if has_manifest(folder) else None


def _names_with_joins(folder: Path) -> set[str]:
    manifest = Manifest.read(folder)
    return {*_names(manifest), *_added(manifest), INNER + JOINS_NAME} - {INNER + MANIFEST_NAME}


def _added(manifest: Manifest) -> set[str]:
    """Paths of a tokenizer that `mmdata index` may have trained on the captions since; it goes with the index."""
    return {TOKENIZER_NAME, INNER + TOKENIZER_NAME} if manifest.tokenizer is not None else set()


def _listing(folder: Path) -> set[str]:
    """Files of a folder and of its `__mmdata__`: paths relative to the folder."""
    names = set(os.listdir(folder))
    if INNER_NAME in names and (folder / INNER).is_dir():
        # Joins go with the index, and are removed with it.
        names |= {INNER + name for name in os.listdir(folder / INNER) if name != JOINS_NAME}
        names.remove(INNER_NAME)
    return names


def _names(manifest: Manifest) -> set[str]:
    """Paths, as in `_listing`, of all that a conversion publishes; empty if the manifest is not a conversion's."""
    run = (manifest.accounts or {}).get("run")
    if run is None:
        return set()
    # Not from its index files: a run that was killed while moving files may have moved them.
    names = {*map(shard_name, range(manifest.num_shards)), *(INNER + name for name in manifest.files)}
    names |= {INNER + name for name in (MANIFEST_NAME, QUARANTINE_NAME, ROWS_NAME)}
    if run["settings"]["train_tokenizer"]:
        names.add(TOKENIZER_NAME)
        names.add(INNER + TOKENIZER_NAME)
    return names
