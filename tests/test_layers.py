"""The layers of the library: who may import whom. Imports are read with ast, also those inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import mmdata
from tests.programs import PATIENCE_S

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mmdata"

GROUND = [
    *("batch", "errors", "files", "hashing", "launcher", "picture", "processes"),
    *("progress", "recognize", "safe_read", "seeding", "system", "version"),
]
TOP = [*GROUND, "config"]
INDEX = [*TOP, "images", "tars", "text", "storage", "index"]
DATA_HALF = [
    *(*INDEX, "tables", "plan", "loader", "samplers", "convert"),
    *("duplicates", "push"),
]

MAY_IMPORT: dict[str, list[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "config": GROUND,
    "images": TOP,
    "tars": [*TOP, "images"],
    "text": [*TOP, "images", "tars"],
    "storage": [*TOP, "tars"],
    "index": [*TOP, "images", "tars", "storage"],
    "tables": INDEX,
    "plan": [*INDEX, "tables"],
    "loader": [*INDEX, "tables", "plan"],
    "samplers": [*TOP, "plan", "loader"],
    "convert": INDEX,
    "duplicates": INDEX,
    "push": INDEX,
    "train": ["batch", "config", "errors", "files", "launcher", "recognize", "system"],
    "trained": [*DATA_HALF, "train"],
    "inspect": [*DATA_HALF, "train", "trained"],
    "integrations": [*DATA_HALF, "train", "trained", "inspect"],
    "cli": [*DATA_HALF, "train", "trained", "inspect", "integrations"],
    "__main__": ["cli"],
}
"""Parts of mmdata and the other parts that each may import."""

BANNED: dict[str, list[str]] = {
    **{part: ["torch.distributed"] for part in DATA_HALF},
    **{part: ["torch", "torchvision", "transformers"] for part in ("tars", "storage", "index")},
    "plan": ["torch", "torchvision", "transformers", "PIL"],
    "train": ["pyarrow", "webdataset", "simplejpeg", "tokenizers", "PIL"],
}
"""Third-party modules that a part must do without."""

FACADE = "__init__"
"""mmdata/__init__.py names things of every layer, and imports none of them before it is asked."""


class Import(NamedTuple):
    """One imported module: `part` is the part of mmdata that imports it."""

    part: str
    module: str
    where: str


def imports_of(package: Path) -> Iterator[Import]:
    """Every import statement in a package, relative ones resolved."""
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in _modules(node, (package.name, *inside)):
                yield Import(inside[0], module, f"{path.relative_to(package.parent)}:{node.lineno}")


def _modules(node: ast.AST, importer: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = ".".join([*importer[: -node.level], node.module or ""]).strip(".") if node.level else str(node.module)
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def crossings(package: Path) -> list[str]:
    """Imports that cross a layer, each with its place."""
    found: list[str] = []
    for part, module, where in imports_of(package):
        if part == FACADE:
            continue
        if part not in MAY_IMPORT:
            found.append(f"{where}: mmdata.{part} belongs to no layer")
            continue
        top, _, rest = module.partition(".")
        if top == "mmdata":
            imported = rest.partition(".")[0]
            if imported != part and imported not in MAY_IMPORT[part]:
                found.append(f"{where}: mmdata.{part} imports mmdata.{imported or FACADE}")
        elif top == "tests" or (top == "datasets" and part != "integrations"):  # there it is Hugging Face's library
            found.append(f"{where}: the library imports {module}")
        found += [
            f"{where}: mmdata.{part} imports {module}"
            for banned in BANNED.get(part, [])
            if module == banned or module.startswith(banned + ".")
        ]
    return found


def test_layers_no_import_crosses_one():
    assert crossings(PACKAGE) == []


def imported_folders(package: Path) -> dict[str, set[str]]:
    """For each folder of a package, the other folders of it that its files import when they are loaded."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        own = ".".join(path.parent.relative_to(package.parent).parts)
        inside = path.relative_to(package.parent).with_suffix("").parts
        modules = [name for node in ast.parse(path.read_text(encoding="utf-8")).body for name in _modules(node, inside)]
        for module in modules:
            folder = module
            while folder and not package.parent.joinpath(*folder.split(".")).is_dir():
                folder = folder.rpartition(".")[0]
            if folder.partition(".")[0] == package.name and folder not in (own, package.name):
                found.setdefault(own, set()).add(folder)
    return found


def test_layers_no_circle_of_folders():
    imported = imported_folders(PACKAGE)
    assert "mmdata.train.losses" in imported["mmdata.train.run"]
    TopologicalSorter(imported).prepare()  # raises a CycleError


def test_layers_a_class_name_means_one_class():
    files: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert len(files) > 300
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_layers_facade_imports_nothing_of_the_library_when_loaded():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    loaded = [name for node in tree.body if node not in guarded for name in _modules(node, ("mmdata", "__init__"))]
    assert loaded
    assert [name for name in loaded if name.startswith("mmdata")] == []


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("tars/tar.py", "import mmdata.plan", "mmdata.tars imports mmdata.plan"),
        ("plan/plan.py", "def f():\n    from torch import Tensor", "mmdata.plan imports torch.Tensor"),
        ("plan/rows.py", "from mmdata import loader", "mmdata.plan imports mmdata.loader"),
        ("text/tokenizer.py", "from ..convert import convert", "mmdata.text imports mmdata.convert"),
        ("loader/builder.py", "from mmdata.train import losses", "mmdata.loader imports mmdata.train"),
        ("loader/loader.py", "import torch.distributed as d", "mmdata.loader imports torch.distributed"),
        ("convert/rows.py", "from torch import distributed", "mmdata.convert imports torch.distributed"),
        ("train/run/trainer.py", "from mmdata.loader import Loader", "mmdata.train imports mmdata.loader"),
        ("train/run/trainer.py", "if True:\n    from PIL import Image", "mmdata.train imports PIL.Image"),
        ("config/config.py", "import mmdata.tars.tar", "mmdata.config imports mmdata.tars"),
        ("batch.py", "from datasets import scenes", "the library imports datasets.scenes"),
        ("trained/pairs.py", "import mmdata.inspect", "mmdata.trained imports mmdata.inspect"),
        ("handlers.py", "import os", "mmdata.handlers belongs to no layer"),
    ],
)
def test_layers_check_finds_a_planted_crossing(tmp_path: Path, file: str, line: str, message: str):
    planted = tmp_path / "mmdata" / file
    planted.parent.mkdir(parents=True)
    original = PACKAGE / file
    planted.write_text((original.read_text() if original.exists() else "") + f"\n{line}\n")
    found = crossings(tmp_path / "mmdata")
    assert len(found) == 1
    assert found[0].startswith(f"mmdata/{file}:")
    assert found[0].endswith(message)


def test_layers_datasets_folder_is_not_a_package():
    # It would shadow the Hugging Face package of that name.
    assert list((ROOT / "datasets").rglob("__init__.py")) == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, in the root of the checkout."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
"""


def test_layers_train_imports_without_the_libraries_of_the_data_half():
    # The GPU half runs where only torch and transformers are installed: on ready batches of any origin.
    blocked = ["webdataset", "pyarrow", "simplejpeg", "tokenizers", "PIL", "torchvision"]
    needs_transformers = ("pretrained", "transformers_towers")
    files = [path for path in sorted((PACKAGE / "train").rglob("*.py")) if path.stem not in needs_transformers]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert {"mmdata.train.run.trainer", "mmdata.train.ranks.sharding", "mmdata.train.run.step"} < set(modules)
    code = BLOCK.format(blocked=blocked) + (
        f"import importlib\nfor name in {modules}: importlib.import_module(name)\n"
        "from mmdata.train import DualEncoder, losses, miners\n"
        "from mmdata.config import ModelConfig\n"
        "DualEncoder.from_config(ModelConfig(name='tiny'), vocab_size=300)\n"
        "data_half = ('images', 'tars', 'text', 'storage', 'index', 'tables', 'plan', 'loader', 'stream')\n"
        "print([name for name in sys.modules if name.startswith(tuple(f'mmdata.{part}' for part in data_half))])\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_layers_plan_is_imported_without_torch_and_images():
    banned = ["torch", "torchvision", "transformers"]
    done = run_python(f"import mmdata.plan.from_config, sys; print(sorted({{*{banned}}} & set(sys.modules)))")
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_layers_library_loads_names_when_asked_and_its_index_without_torch():
    code = """
    import sys, mmdata
    assert not {'torch', 'numpy', 'pyarrow', 'PIL'} & set(sys.modules)
    assert mmdata.Index.__module__ == 'mmdata.index.index'
    assert 'torch' not in sys.modules
    try:
        mmdata.Lodaer
    except AttributeError as error:
        print(error)
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("module 'mmdata' has no attribute 'Lodaer'; it has Batch, BucketBatchSampler, ")


def test_layers_every_public_name_exists_and_they_are_sorted():
    assert mmdata.__all__ == sorted(mmdata.__all__)
    for name in mmdata.__all__:
        assert getattr(mmdata, name).__name__ == name


def test_layers_dir_lists_the_public_names_for_tab_completion():
    from mmdata import train

    assert set(mmdata.__all__) < set(dir(mmdata))
    for name in dir(mmdata):
        assert getattr(mmdata, name) is not None
    assert mmdata.__version__ == version("mmdata")
    assert dir(train) == sorted(train.__all__)
    for name in train.__all__:
        assert getattr(train, name) is not None
    assert train.ContrastiveLoss.__module__ == "mmdata.train.run.objective"
