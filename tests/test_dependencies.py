"""Declared is what is imported: pyproject.toml, environment.yml and the imports say one thing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mmdata import cli
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError
from mmdata.storage.urls import FileSystem
from tests.test_layers import PACKAGE, ROOT, run_python

EXTRA_FILES = {
    "mmdata.convert.fetch": {"convert"},
    "mmdata.inspect.charts": {"report"},
    "mmdata.inspect.corpus": {"report"},
    "mmdata.inspect.report": {"report"},
    "mmdata.integrations": {"huggingface", "lightning", "grain"},
}
"""Modules, and folders of them, that need an extra to be imported; all others import its libraries in functions."""

IMPORTED_BY_OTHERS = {"botocore", "gcsfs", "s3fs", "onnx", "onnxscript", "pillow-heif", "tensorboard", "wandb"}
"""By fsspec, torch.onnx and torch.utils.tensorboard; and those whose names stand in a table, in `mmdata.images.pillow`
and `mmdata.train.log.trackers`."""

OF_OTHERS = {"triton", "torchvision"}
"""Come with torch where there is one, and with a user's transform of torchvision's tensors, which alone needs it."""


def declared() -> dict[str, set[str]]:
    """The distributions of each extra, as pyproject.toml lists them; those of `mmdata` itself under ""."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    extras = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    assert base
    assert extras
    found = {"": names_in(base[1])}
    for extra, listed in re.findall(r"^(\w+) = \[(.*?)\]", extras[1], re.MULTILINE | re.DOTALL):
        found[extra] = names_in(listed)
    return {extra: names for extra, names in found.items() if extra not in ("all", "dev")}


def names_in(listed: str) -> set[str]:
    """`"fsspec>=2024.6",` → fsspec"""
    return {normal(name) for name in re.findall(r'"([A-Za-z0-9_.-]+)', listed)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def distributions() -> dict[str, set[str]]:
    """The distributions that have each top module; found in the files of all of them, which takes seconds."""
    return {module: {normal(name) for name in names} for module, names in packages_distributions().items()}


def distributions_of(module: str) -> set[str]:
    return distributions().get(module, {module})


@cache
def third_party() -> list[tuple[str, str, bool]]:
    """Module, place and whether it is imported when the file is, of each import of a library."""
    return list(_third_party())


def _third_party() -> Iterator[tuple[str, str, bool]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        inner = {id(one) for node in ast.walk(tree) for one in parts_that_wait(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
                modules = [one.value for one in node.args if isinstance(one, ast.Constant)]
            else:
                continue
            for top in {module.partition(".")[0] for module in modules} - {"mmdata", *sys.stdlib_module_names}:
                yield top, name, id(node) not in inner


def parts_that_wait(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside a function, or only for type checkers."""
    is_guard = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    if is_guard or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from ast.walk(node)


def extras_of(name: str) -> set[str]:
    return set().union(*(extras for part, extras in EXTRA_FILES.items() if f"{name}.".startswith(f"{part}.")))


def test_dependencies_each_import_is_declared_and_extras_are_imported_in_functions():
    of_extra = declared()
    wrong = []
    for module, name, at_once in third_party():
        names = distributions_of(module)
        extras = {extra for extra, listed in of_extra.items() if names & listed}
        if not extras and module not in OF_OTHERS:
            wrong.append(f"{name} imports {module}, which pyproject.toml does not declare")
        elif at_once and module not in OF_OTHERS and "" not in extras and not extras & extras_of(name):
            wrong.append(f"{name} imports {module} of the extra {extras} at its head")
    assert wrong == []


def test_dependencies_each_declared_library_is_imported():
    imported = set().union(*(distributions_of(module) for module, _, _ in third_party()))
    unused = set().union(*declared().values()) - imported - IMPORTED_BY_OTHERS
    assert unused == set()


def test_dependencies_all_has_each_extra_and_dev_has_all():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'all = ["mmdata[{",".join(sorted(set(declared()) - {""}))}]"]' in text
    assert 'dev = [\n    "mmdata[all]",' in text
    assert "- -e .[dev]" in (ROOT / "environment.yml").read_text(encoding="utf-8")


def blocked() -> list[str]:
    """Top modules of the extras, and of what only tests use."""
    wanted = set().union(*(names for extra, names in declared().items() if extra)) - declared()[""]
    wanted |= {"datasets", "open-clip-torch", "timm", "torchvision", "webdataset"}
    return sorted(module for module, names in distributions().items() if names & wanted)


def test_dependencies_all_else_imports_without_the_extras():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem not in ("__main__", "kernels")]  # Triton
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    code = f"""
    import importlib, sys
    sys.modules.update(dict.fromkeys({blocked()}))
    failed = []
    for name in {modules}:
        try:
            importlib.import_module(name)
        except ImportError:
            failed.append(name)
    print(failed)
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert [name for name in ast.literal_eval(done.stdout) if not extras_of(name)] == []


def test_images_behind_urls_need_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "protego", None)
    for name in ("fetcher", "hosts", "opt_outs", "request"):
        monkeypatch.delitem(sys.modules, f"mmdata.convert.fetch.{name}", raising=False)
    (tmp_path / "table.csv").write_text("url,caption\nhttps://a.example/b.jpg,one\n")
    with pytest.raises(
        ImportError, match=r"^convert fetches images behind URLs with .*pip install 'mmdata\[convert\]'$"
    ):
        convert(tmp_path / "table.csv", tmp_path / "shards", ConvertConfig(contact="me@lab.example"), engine=threads(1))


def test_urls_need_an_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"^'https://a\.example/b': .*`pip install 'mmdata\[remote\]'` brings http"):
        FileSystem("https://a.example/b")


def test_the_report_needs_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "mmdata.inspect.report", raising=False)
    assert cli.main(["report", str(tmp_path)]) == 2  # before the folder is looked at: it has no shards
    assert capsys.readouterr().err == "error: the report needs Jinja and MarkupSafe: pip install 'mmdata[report]'\n"
