"""Where the files of a folder lie: in `__mmdata__`, beside the tars."""

from __future__ import annotations

import os

import pytest

from mmdata.errors import DataError
from mmdata.index import Index


def test_the_inner_folder_is_not_taken_for_the_folder(shards):
    with pytest.raises(DataError, match=r"__mmdata__': what mmdata keeps about the shards in '.*shards': give that f"):
        Index.open(shards / "__mmdata__")


def test_only_tars_are_visible_to_those_who_skip_special_folders(shards):
    assert sorted(name for name in os.listdir(shards) if not name.startswith(("__", "."))) == [
        f"{i:06d}.tar" for i in range(3)
    ]
