"""The output folder: one writer, nothing foreign touched, published whole.

A conversion is complete once its private folder holds a manifest. From then on it is only moved into place, and a run
that was killed while moving is finished by the next one; before, the next one starts over.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from mmdata.atomic import LOCK_NAME, lock, sync_folder
from mmdata.errors import DataError
from mmdata.shards.manifest import MANIFEST_NAME, Manifest
from mmdata.shards.writer import shard_names

PRIVATE_NAME = ".mmdata-convert"
OLD_NAME = "old"
QUARANTINE_NAME = "quarantine.jsonl"
TOKENIZER_NAME = "tokenizer"

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
            DataError: it holds another conversion and not `overwrite`.
        """
        there = self._published()
        if there is None or overwrite:
            return False
        missing = sorted(_names(there) - set(os.listdir(self.folder)))
        changes = _differences(cast(Run, (there.accounts or {})["run"]), run)
        changes += [f"'{name}' is missing" for name in missing]
        if changes:
            raise DataError(
                f"output '{self.folder}': holds another conversion ({'; '.join(changes)}); "
                "choose another folder, or replace it with --overwrite"
            )
        return True

    def refuse_foreign(self) -> None:
        """Raise DataError where the folder holds anything that a conversion did not put there."""
        ours = {LOCK_NAME, PRIVATE_NAME}
        if there := self._published():
            ours |= _names(there)
        if (self.private / MANIFEST_NAME).exists():  # completed, and perhaps killed while it was moved into place
            ours |= _names(Manifest.read(self.private)) - set(os.listdir(self.private))
        if (self.private / OLD_NAME / MANIFEST_NAME).exists():
            ours |= _names(Manifest.read(self.private / OLD_NAME))
        foreign = sorted(set(os.listdir(self.folder)) - ours)
        if foreign:
            raise DataError(
                f"output '{self.folder}': holds {len(foreign)} file(s) that are not a conversion's "
                f"({', '.join(foreign[:3])}); nothing is deleted: choose an empty folder"
            )

    def _published(self) -> Manifest | None:
        return Manifest.read(self.folder) if (self.folder / MANIFEST_NAME).exists() else None

    def recover(self) -> None:
        """Finish what an earlier run had completed, clear what it had not."""
        if (self.private / MANIFEST_NAME).exists():
            self.publish()
        elif self.private.exists():
            shutil.rmtree(self.private)

    def publish(self) -> None:
        """Move a completed conversion into place, the manifest last. May be killed and repeated at any point."""
        self._withdraw_old()
        for name in sorted(set(os.listdir(self.private)) - {MANIFEST_NAME, OLD_NAME}):
            if not name.startswith("."):  # what the writer keeps for itself
                os.rename(self.private / name, self.folder / name)
        sync_folder(self.folder)
        os.rename(self.private / MANIFEST_NAME, self.folder / MANIFEST_NAME)
        sync_folder(self.folder)
        shutil.rmtree(self.private)

    def _withdraw_old(self) -> None:
        # The old manifest is moved, not deleted, before the files it names: a kill in between must not orphan them.
        # So are its pages, of the names of which the new one has some too.
        old = self.private / OLD_NAME
        if (self.folder / MANIFEST_NAME).exists():
            old.mkdir(exist_ok=True)
            os.rename(self.folder / MANIFEST_NAME, old / MANIFEST_NAME)
            sync_folder(old)
            sync_folder(self.folder)
        if (old / MANIFEST_NAME).exists():
            manifest = Manifest.read(old)
            for page in manifest.pages:
                if (self.folder / page.file).exists():
                    os.rename(self.folder / page.file, old / page.file)
            sync_folder(old)
            for name in _names(manifest) - {MANIFEST_NAME}:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            sync_folder(self.folder)
            (old / MANIFEST_NAME).unlink()
            sync_folder(old)


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


def _names(manifest: Manifest) -> set[str]:
    """All that a conversion publishes; nothing where the manifest is not a conversion's."""
    run = (manifest.accounts or {}).get("run")
    if run is None:
        return set()
    # Not from its pages, which may lie elsewhere already where a run was killed while moving.
    names = {name for number in range(manifest.num_shards) for name in shard_names(number)}
    names |= {page.file for page in manifest.pages}
    trained = {TOKENIZER_NAME} if run["settings"]["train_tokenizer"] else set[str]()
    return names | trained | {MANIFEST_NAME, QUARANTINE_NAME}


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
