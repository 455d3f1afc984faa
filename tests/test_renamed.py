"""Names that were changed: the old ones work for one release, and say what they are called now."""

from __future__ import annotations

import importlib

import pytest

RENAMED = [
    ("mmdata.loader", "Worker", "BatchMaker"),
    ("mmdata.train.miners", "SkipHottest", "DropHardest"),
    ("mmdata.train.miners", "Teacher", "TeacherMask"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_renamed_old_name_is_the_new_one_and_warns(module: str, old: str, new: str):
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"^{module}\.{old} is now called {module}\.{new}; the old name goes"):
        assert getattr(home, old) is getattr(home, new)


def test_renamed_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'mmdata\.loader' has no attribute 'Lodaer'$"):
        importlib.import_module("mmdata.loader").Lodaer  # noqa: B018
