"""Paths that data gives are not trusted."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from mmdata import safe_read
from mmdata.index import Index


@pytest.mark.parametrize(
    "path",
    ["../secret.jpg", "sub/../../secret.jpg", "linked/../../secret.jpg", "elsewhere/../secret.jpg", "/etc/hosts"],
)
def test_path_out_of_the_root_is_quarantined(outcome: Any, corpus: Path, path: str) -> None:
    (corpus.parent / "elsewhere").mkdir()
    secret = corpus.parent / "secret.jpg"
    secret.write_bytes((corpus / "a.jpg").read_bytes() + b"secret")
    (corpus / "sub").mkdir()
    (corpus / "linked").symlink_to(corpus.parent)
    path = path.replace("elsewhere", str(corpus / "../elsewhere"))
    assert outcome({"image": path, "caption": "x"}) == (
        "outside_root",
        f"'{path}' leads out of the corpus's folder",
    )


@pytest.mark.parametrize(
    "path", ["inside.jpg", "link.jpg", "linked/d.jpg", "sub/../d.jpg", "linked/../d.jpg", "ABSOLUTE"]
)
def test_path_that_stays_in_the_root_is_accepted(outcome: Any, corpus: Path, photo: Any, path: str) -> None:
    """Links in the corpus are the user's own, wherever they lead; ".." undoes what is written before it."""
    elsewhere = corpus.parent / "elsewhere"
    elsewhere.mkdir()
    for folder in (corpus, elsewhere):
        (folder / "d.jpg").write_bytes(photo(20, 30, seed=5))
    (corpus / "inside.jpg").symlink_to(corpus / "d.jpg")
    (corpus / "link.jpg").symlink_to(elsewhere / "d.jpg")
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "sub").mkdir()
    path = str(corpus / "d.jpg") if path == "ABSOLUTE" else path
    assert outcome({"image": path, "caption": "x"}) == ("", "")


def test_link_to_itself_is_quarantined(outcome: Any, corpus: Path) -> None:
    (corpus / "loop.jpg").symlink_to(corpus / "loop.jpg")
    assert outcome({"image": "loop.jpg", "caption": "x"}) == (
        "not_a_file",
        "'loop.jpg' is a link that leads back to itself",
    )


@pytest.mark.parametrize("path", ["fifo", "folder"])
def test_what_is_not_a_file_is_never_opened(outcome: Any, corpus: Path, path: str) -> None:
    os.mkfifo(corpus / "fifo")
    (corpus / "folder").mkdir()
    assert outcome({"image": path, "caption": "x"}) == (
        "not_a_file",
        f"'{path}' is no regular file, and was not opened",
    )


@pytest.mark.parametrize("path", ["nul\0.jpg", "x" * 300, "a.jpg/b.jpg", "\ud800.jpg"])
def test_impossible_path_is_a_missing_image(outcome: Any, path: str) -> None:
    assert outcome({"image": path, "caption": "x"})[0] == "missing_image"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accented_name_is_found_in_either_spelling(outcome: Any, corpus: Path, photo: Any, form: Any) -> None:
    (corpus / unicodedata.normalize(form, "café.jpg")).write_bytes(photo(20, 30, seed=5))
    other = unicodedata.normalize("NFD" if form == "NFC" else "NFC", "café.jpg")
    assert outcome({"image": other, "caption": "x"}) == ("", "")


def test_keys_are_row_numbers_whatever_the_names_are(corpus: Path, tmp_path: Path, photo: Any, make: Any) -> None:
    names = ["v1.2.final.jpg", "Ünïcode 图.jpg", "A.JPG", "gone.jpg", "n" * 240 + ".jpg"]
    for seed, name in enumerate(names):
        if name != "gone.jpg":
            (corpus / name).write_bytes(photo(20, 30, seed=seed))
    (corpus / "t.csv").write_text("image,caption\n" + "".join(f"{name},x\n" for name in [*names, "a.jpg"]))
    make(corpus / "t.csv")
    index = Index.open(tmp_path / "out")
    assert list(index.keys(range(len(index)))) == ["000000000", "000000001", "000000002", "000000004", "000000005"]  # type: ignore[arg-type]


def test_file_that_changes_once_is_read_again(
    outcome: Any, corpus: Path, photo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = _change_while_reading(corpus / "d.jpg", photo, monkeypatch, times=1)
    assert outcome({"image": "d.jpg", "caption": "x"}) == ("", "")
    assert changes == []


def test_file_that_keeps_changing_is_quarantined(
    outcome: Any, corpus: Path, photo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change_while_reading(corpus / "d.jpg", photo, monkeypatch, times=3)
    assert outcome({"image": "d.jpg", "caption": "x"}) == (
        "file_changed",
        "'d.jpg' changed while it was read, 3 times",
    )


def test_file_that_vanishes_is_a_missing_image(
    outcome: Any, corpus: Path, photo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus / "d.jpg").write_bytes(photo(20, 30, seed=50))
    locate = safe_read.locate

    def vanishing(root: str, path: str) -> str:
        real = locate(root, path)
        if path == "d.jpg":
            os.unlink(real)
        return real

    monkeypatch.setattr(safe_read, "locate", vanishing)
    assert outcome({"image": "d.jpg", "caption": "x"}) == ("missing_image", "'d.jpg': No such file or directory")


def _change_while_reading(path: Path, photo: Any, monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[bytes]:
    """The file at `path` is replaced between being looked at and being read, `times` times."""
    path.write_bytes(photo(20, 30, seed=50))
    changes = [photo(20, 30, seed=51 + i) + bytes(i) for i in range(times)]
    open_inside = safe_read._open

    def changing(real: str, *rest: Any) -> Any:
        if real == str(path) and changes:
            path.write_bytes(changes.pop() + b"tail")
        return open_inside(real, *rest)

    monkeypatch.setattr(safe_read, "_open", changing)
    return changes
