"""The promises know no inside: what this folder imports, and the names of mmdata that it uses, are public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mmdata

FOLDER = Path(__file__).parent
HELPERS = {"tests.programs"}
"""Parts of the tests that a promise may import; they import nothing of mmdata."""
TOP = {*mmdata.__all__, "__all__", "train"}
"""Names of `mmdata`. Of its modules the promises need mmdata.train alone, by the names that the documentation has."""
TRAIN = {"DualEncoder", "losses", "miners", "train_step"}
"""Names of `mmdata.train`."""


def of_mmdata(tree: ast.Module) -> Iterator[str]:
    """Names of mmdata that a file uses, with their modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("mmdata."))
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("mmdata"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("mmdata", "mmdata.train"):
            yield ast.unparse(node)


def of_tests(tree: ast.Module) -> Iterator[str]:
    """Modules of other folders of tests that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests"))
        elif isinstance(node, ast.ImportFrom) and (node.level > 1 or (node.module or "").startswith("tests")):
            yield "." * node.level + (node.module or "")


def test_promises_and_their_helpers_import_public_names_alone():
    public = {f"mmdata.{name}" for name in TOP} | {f"mmdata.train.{name}" for name in TRAIN}
    paths = sorted(FOLDER.rglob("*.py"))
    assert len(paths) > 5
    for path in paths:
        tree = ast.parse(path.read_text())
        assert set(of_mmdata(tree)) <= public, path.name
        assert set(of_tests(tree)) <= HELPERS, path.name
    for name in HELPERS:
        tree = ast.parse(FOLDER.parents[1].joinpath(*name.split(".")).with_suffix(".py").read_text())
        assert [*of_mmdata(tree), *of_tests(tree)] == []


def test_promises_ask_for_no_private_attribute():
    for path in FOLDER.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert {name for name in names if name.startswith("_") and not name.startswith("__")} == set(), path.name
