"""The output folder: one writer, nothing foreign touched, published whole.

A conversion is complete once its private folder holds a manifest. From then on it is only moved into place, and a run
that was killed while moving is finished by the next one; before, the next one starts over.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from mmdata.atomic import LOCK_NAME, lock, sync_folder
from mmdata.errors import DataError
from mmdata.shards.folder import BESIDE, INNER, INNER_NAME, MANIFEST_NAME, QUARANTINE_NAME, manifest_prefix
from mmdata.shards.manifest import Manifest
from mmdata.shards.writer import published_names

PRIVATE_NAME = ".mmdata-convert"
OLD_NAME = "old"
TOKENIZER_NAME = "tokenizer"
"""A tokenizer trained on the captions: a link to a folder of this name in `__mmdata__`.

`datasets` takes JSON files below a folder for data, and neither follows links to folders nor looks into `__mmdata__`.
"""

Run = dict[str, Any]
"""What decides a conversion's bytes: {"source": …, "settings": …}; kept in the manifest's accounts as "run"."""


class Output:
    """A folder that this process alone writes, until `open_output` is left.

    Attributes:
        folder: where the conversion is published.
        private: hidden folder in it, where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.private = folder / PRIVATE_NAME

    def is_complete(self, run: Run, *, overwrite: bool) -> bool:
        """Whether the folder already holds this conversion, so that nothing is to be done.

        Raises:
            DataError: it holds another conversion, or a damaged one, and not `overwrite`.
        """
        there = _manifest(self.folder)
        if there is None or overwrite:
            return False
        if changes := _differences(cast(Run, (there.accounts or {})["run"]), run):
            raise DataError(
                f"output '{self.folder}': holds another conversion ({'; '.join(changes)}); "
                "choose another folder, or replace it with --overwrite"
            )
        damages = [f"'{name}' is missing" for name in sorted(_names(there) - _listing(self.folder))]
        if damages := damages or list(_wrong_sizes(there, self.folder)):
            raise DataError(
                f"output '{self.folder}': holds this conversion, damaged ({'; '.join(damages[:3])}); "
                "make it anew with --overwrite"
            )
        return True

    def refuse_foreign(self) -> None:
        """Raise DataError where the folder holds anything that a conversion did not put there."""
        ours = {LOCK_NAME, PRIVATE_NAME}
        if there := _manifest(self.folder):
            ours |= _names(there)
        if complete := _manifest(self.private):  # and perhaps killed while it was moved into place
            ours |= _names(complete) - _listing(self.private)
        if old := _manifest(self.private / OLD_NAME):
            ours |= _names(old)
        foreign = sorted(_listing(self.folder) - ours)
        if foreign:
            raise DataError(
                f"output '{self.folder}': holds {len(foreign)} file(s) that are not a conversion's "
                f"({', '.join(foreign[:3])}); nothing is deleted: choose an empty folder"
            )

    def recover(self) -> None:
        """Finish what an earlier run had completed, clear what it had not."""
        if manifest_prefix(self.private) is not None:
            self.publish()
        elif self.private.exists():
            shutil.rmtree(self.private)

    def publish(self) -> None:
        """Move a completed conversion into place, the manifest last. May be killed and repeated at any point."""
        self._withdraw_old()
        prefix = manifest_prefix(self.private) or BESIDE  # an earlier version's, if that was killed while moving
        manifest, inner = prefix + MANIFEST_NAME, self.folder / prefix
        inner.mkdir(exist_ok=True)
        for name in sorted(_listing(self.private) - {manifest, OLD_NAME}):
            if not name.startswith("."):  # what the writer keeps for itself
                os.rename(self.private / name, self.folder / name)
        sync_folder(inner)
        sync_folder(self.folder)
        os.rename(self.private / manifest, self.folder / manifest)
        sync_folder(inner)
        shutil.rmtree(self.private)

    def _withdraw_old(self) -> None:
        # The old manifest is moved, not deleted, before the files it names: a kill in between must not orphan them.
        # So are its pages, of the names of which the new one has some too.
        old = self.private / OLD_NAME
        if (prefix := manifest_prefix(self.folder)) is not None:
            (old / prefix).mkdir(parents=True, exist_ok=True)
            os.rename(self.folder / prefix / MANIFEST_NAME, old / prefix / MANIFEST_NAME)
            sync_folder(old / prefix)
            sync_folder(self.folder / prefix)
        if manifest := _manifest(old):
            for page in manifest.pages:
                name = manifest.prefix + page.file
                if (self.folder / name).exists():
                    os.rename(self.folder / name, old / name)
            sync_folder(old / manifest.prefix)
            top = manifest.prefix + MANIFEST_NAME
            for name in _names(manifest) - {top}:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            sync_folder(self.folder / manifest.prefix)
            sync_folder(self.folder)
            (old / top).unlink()
            sync_folder(old / manifest.prefix)


@contextmanager
def open_output(folder: Path) -> Generator[Output]:
    """Hold `folder` as its only writer, made if missing, with what a killed run left set right.

    Raises:
        DataError: it holds foreign files, it cannot be written, or another process writes there.
    """
    output = Output(folder)
    if folder.is_dir() and not (folder / LOCK_NAME).exists():
        output.refuse_foreign()  # before so much as a lock is put into someone's folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK_NAME).touch()
    except OSError as error:
        raise DataError(
            f"output '{folder}': cannot be written ({error.strerror}); choose a folder that can be"
        ) from error
    with lock(folder):
        output.refuse_foreign()
        output.recover()
        yield output


def _manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, if it has one."""
    return None if manifest_prefix(folder) is None else Manifest.read(folder)


def _wrong_sizes(manifest: Manifest, folder: Path) -> Iterator[str]:
    """Shards whose size is not the manifest's; `mmdata verify` reads them whole."""
    for entry in manifest:
        if (size := (folder / entry.name).stat().st_size) != entry.bytes:
            yield f"'{entry.name}' has {size} bytes of {entry.bytes}"


def _listing(folder: Path) -> set[str]:
    """What lies in a folder, and what in its `__mmdata__`: paths relative to the folder."""
    names = set(os.listdir(folder))
    if INNER_NAME in names and (folder / INNER).is_dir():
        names |= {INNER + name for name in os.listdir(folder / INNER)}
        names.remove(INNER_NAME)
    return names


def _names(manifest: Manifest) -> set[str]:
    """All that a conversion publishes, as `_listing` names it; nothing where the manifest is not a conversion's."""
    run = (manifest.accounts or {}).get("run")
    if run is None:
        return set()
    # Not from its pages, which may lie elsewhere already where a run was killed while moving.
    names = {*published_names(manifest), manifest.prefix + MANIFEST_NAME, manifest.prefix + QUARANTINE_NAME}
    if run["settings"]["train_tokenizer"]:
        names.add(TOKENIZER_NAME)
        if manifest.prefix != BESIDE:  # there it is the folder itself
            names.add(manifest.prefix + TOKENIZER_NAME)
    return names


def _differences(there: Run, here: Run) -> list[str]:
    """What changed from one run to another, as "settings.min_side: was 2, is 32"."""
    old, new = _flat(there), _flat(here)
    return [
        f"{name}: was {json.dumps(old.get(name))}, is {json.dumps(new.get(name))}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _flat(run: Run) -> dict[str, Any]:
    flat = {f"{part}.{name}": value for part, values in run.items() for name, value in values.items()}
    for file in flat.pop("source.files", []):
        flat[f"source.files.{file['name']}"] = file["sha256"][:16]
    return flat
