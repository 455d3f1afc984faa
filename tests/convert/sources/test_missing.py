"""A table of which no image is found: the message says where it looked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "old/1.jpg",
            "; the table's paths are relative to '{root}', and '{root}/old/1.jpg' does not exist: name the folder that "
            "they are relative to with --images FOLDER",
        ),
        (
            "/away/1.jpg",
            "; '/away/1.jpg' does not exist: give the table paths that exist on this machine, absolute ones or",
        ),
    ],
)
def test_a_table_without_any_image_is_told_where_they_were_looked_for(tmp_path: Path, path: str, said: str):
    (tmp_path / "list.csv").write_text(f"image,caption\n{path},one\n")
    with pytest.raises(DataError, match=re.escape(said.format(root=tmp_path))):
        convert(tmp_path / "list.csv", tmp_path / "out", ConvertConfig(images="."))
