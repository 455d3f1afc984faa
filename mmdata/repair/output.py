"""The folder of a repair: foreign files are refused, and its tars are published whole, the ledger last.

All is written into a hidden sub-folder. It is complete once that holds the ledger; after that files are only moved, and
the next run finishes a move that was killed. What an incomplete run has left is removed by the next one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mmdata.atomic import LOCK_NAME, lock, sync_folder
from mmdata.errors import DataError
from mmdata.storage.folder import INNER_NAME

STAGING_NAME = ".mmdata-repair"
LEDGER_NAME = "repaired.jsonl"

Run = dict[str, Any]
"""What decides the result of a repair; the first line of the ledger."""


class RepairOutput:
    """A folder that only this process writes, within `open_output`.

    Attributes:
        folder: where the tars are published.
        staging: hidden sub-folder where they are written.
        ledger, staged_ledger: paths of the ledger, published and before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.staging = folder / STAGING_NAME
        self.ledger = folder / INNER_NAME / LEDGER_NAME
        self.staged_ledger = self.staging / LEDGER_NAME

    def published(self, run: Run) -> dict[str, Any] | None:
        """The accounts of the same repair, if the folder holds it; None if it holds none.

        Raises:
            DataError: it holds another repair, or a tar of this one is gone.
        """
        if not self.ledger.is_file():
            return None
        first, last = _ends(self.ledger)
        if first.get("run") != run:
            raise DataError(
                f"output '{self.folder}': holds another repair, of other tars or settings; choose an empty folder"
            )
        written: list[str] = last["accounts"]["written"]
        if gone := [name for name in written if not (self.folder / name).is_file()]:
            raise DataError(
                f"output '{self.folder}': {len(gone)} of its {len(written)} repaired tars are gone, such as "
                f"'{gone[0]}'; put them back, or remove the folder and repair again"
            )
        return last["accounts"]

    def refuse_foreign(self) -> None:
        """Raise DataError if the folder holds a file that no repair wrote."""
        if not self.folder.exists():
            return
        ours = {LOCK_NAME, STAGING_NAME}
        for ledger in (self.ledger, self.staged_ledger):
            if ledger.is_file():
                ours |= {INNER_NAME, *_ends(ledger)[1]["accounts"]["written"]}
        foreign = sorted(set(os.listdir(self.folder)) - ours)
        if self.ledger.is_file() and "tokenizer" in foreign:
            foreign.remove("tokenizer")
        if foreign:
            raise DataError(
                f"output '{self.folder}': holds {len(foreign)} file(s) that are not a repair's "
                f"({', '.join(foreign[:3])}); nothing is overwritten: choose an empty folder"
            )

    def recover(self) -> None:
        """Publish what a killed run has completed, or remove what it has not."""
        if self.staged_ledger.is_file():
            self.publish()
        elif self.staging.exists():
            shutil.rmtree(self.staging)

    def complete(self, unfinished: Path) -> None:
        """Declare the staged tars complete: `unfinished` is their ledger, which is synced."""
        sync_folder(self.staging)
        os.rename(unfinished, self.staged_ledger)
        sync_folder(self.staging)

    def publish(self) -> None:
        """Move complete tars into place, the ledger last. It may be killed at any point and repeated."""
        for name in sorted(set(os.listdir(self.staging)) - {LEDGER_NAME}):
            os.rename(self.staging / name, self.folder / name)
        self.ledger.parent.mkdir(exist_ok=True)
        sync_folder(self.folder)
        os.rename(self.staged_ledger, self.ledger)
        sync_folder(self.ledger.parent)
        shutil.rmtree(self.staging)


@contextmanager
def open_output(folder: Path, sources: Sequence[Path]) -> Generator[RepairOutput]:
    """Hold a folder as its only writer; what a killed run left in it is published or removed.

    Raises:
        DataError: a tar lies in the folder, it holds foreign files, or another process writes it.
        OSError: it cannot be written.
    """
    output = RepairOutput(folder)
    if any(os.path.realpath(source.parent) == os.path.realpath(folder) for source in sources):
        raise DataError(f"output '{folder}': the folder of the damaged tars, which are only read; choose another one")
    output.refuse_foreign()
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        output.refuse_foreign()
        output.recover()
        try:
            yield output
        except BaseException:
            if not output.staged_ledger.is_file():
                with suppress(OSError):
                    shutil.rmtree(output.staging)
            raise


def _ends(ledger: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last line of a ledger, which is whole: it was renamed when it was."""
    first = last = b"{}"
    with ledger.open("rb") as lines:
        for number, line in enumerate(lines):
            first, last = (line, line) if number == 0 else (first, line)
    try:
        found = json.loads(first), json.loads(last)
        _ = found[1]["accounts"]["written"]
        return found
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"'{ledger}': not the ledger of a repair; choose an empty folder for the repaired tars"
        ) from None
