"""A unit is there whole or not at all, also where a process that was thought dead still makes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mmdata.convert.units.staging import Receipt, Staging

RECEIPT = Receipt(unit=0, start=0, rows=5, quarantined=1)
remove = shutil.rmtree


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    made = Staging(tmp_path / "units")
    made.begin({"version": 1})
    return made


def attempt(staging: Staging) -> Path:
    """A unit that is made, and not committed."""
    folder = staging.new_attempt(0)
    (folder / "0-000000.tar").write_bytes(b"tar")
    return folder


def removing(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Call a function when the removal of a folder has removed its files, and not the folder yet."""

    def slowly(folder: Path, ignore_errors: bool = False) -> None:
        for path in Path(folder).iterdir():
            if path.is_file() and path.name != "receipt.json":
                path.unlink()
        meanwhile()
        remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", slowly)


def test_attempt_that_is_being_removed_is_never_committed(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = attempt(staging)

    def commit() -> None:
        with pytest.raises(FileNotFoundError):
            staging.commit(folder, RECEIPT)

    removing(monkeypatch, commit)
    staging.remove_attempts()
    assert staging.receipt(0) is None
    assert [path.name for path in staging.folder.iterdir()] == ["run.json"]


def test_attempt_that_was_committed_before_its_removal_stays_whole(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = attempt(staging)
    rename = Path.rename

    def late(path: Path, to: Path) -> Path:
        monkeypatch.undo()
        staging.commit(folder, RECEIPT)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", late)
    staging.remove_attempts()
    assert staging.receipt(0) == RECEIPT
    assert (staging.unit(0) / "0-000000.tar").read_bytes() == b"tar"


def test_unit_whose_removal_is_killed_is_not_there(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    staging.commit(attempt(staging), RECEIPT)
    staging.refuse((0.1, 1.0))

    def killed() -> None:
        raise KeyboardInterrupt

    removing(monkeypatch, killed)
    with pytest.raises(KeyboardInterrupt):
        staging.retry((0.1, 1.0))
    monkeypatch.undo()
    again = Staging(staging.folder)
    again.begin({"version": 1})
    again.remove_attempts()
    assert again.receipt(0) is None
    assert sorted(path.name for path in again.folder.iterdir()) == ["refused.json", "run.json"]
