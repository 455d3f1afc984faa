"""A table of which no image is found: the message says where it looked, and what would find the images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("1.jpg", "'{root}/1.jpg' does not exist: '{pics}/1.jpg' does, so name the folder with --images {pics}"),
        (
            "old/a/1.jpg",
            "'{root}/old/a/1.jpg' does not exist: '{pics}/1.jpg' does, so write 'pics/' in place of 'old",
        ),
        ("old/1.jpg", "'{pics}/1.jpg' does, so write 'pics/a/' in place of 'old/' in the table"),
        ("gone.jpg", "'{root}/gone.jpg' does not exist: name the folder that they are relative to with --images"),
        ("/away/a/1.jpg", "; '/away/a/1.jpg' does not exist: '{pics}/1.jpg' does, so write 'pics/' in place of"),
        ("/away/gone.jpg", "; '/away/gone.jpg' does not exist: give the table paths that exist on this machine"),
    ],
)
def test_a_table_without_any_image_is_told_where_they_are(tmp_path: Path, photo, path: str, said: str):
    (tmp_path / "pics/a").mkdir(parents=True)
    (tmp_path / "pics/b").mkdir()
    (tmp_path / "pics/a/1.jpg").write_bytes(photo(20, 30))
    (tmp_path / "pics/b/1.jpg").write_bytes(photo(20, 30))
    (tmp_path / "list.csv").write_text(f"image,caption\n{path},one\n")
    with pytest.raises(DataError, match=re.escape(said.format(root=tmp_path, pics=tmp_path / "pics/a"))):
        convert(tmp_path / "list.csv", tmp_path / "out", ConvertConfig(images="."))
