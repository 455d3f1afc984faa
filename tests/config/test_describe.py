"""Every setting is described, and the descriptions reach `mmdata settings`, docs/settings.md and editors."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata.config import DataConfig, LoadingConfig
from mmdata.config.convert import ConvertConfig
from mmdata.config.describe import all_sections, find_sections, json_schema, markdown
from mmdata.config.train import GumbelTopKConfig
from mmdata.errors import ConfigError
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
SMALL = {"shards": "shards/photos", "tokenizer": "tokenizer", "global_batch_size": 8}


def settings_command(*arguments: str) -> Any:
    return run_program([sys.executable, "-m", "mmdata", "settings", *arguments], capture_output=True, text=True)


def test_describe_every_setting_has_a_description():
    bare = [one.name for section in all_sections() for one in section.settings if len(one.meaning.split()) < 2]
    assert bare == [], "write a text below the field: subject, verb, object; units; what null means"
    assert [section.title for section in all_sections() if not section.meaning] == []


def test_describe_names_every_setting_that_a_config_has():
    described = {one.name for section in all_sections() for one in section.settings}
    assert {f"data.{name}" for name in DataConfig.model_fields} <= described
    assert {f"data.loading.{name}" for name in LoadingConfig.model_fields} <= described
    assert {f"train.miner.{name}" for name in GumbelTopKConfig.model_fields if name != "name"} <= described
    assert set(ConvertConfig.model_fields) <= described


@pytest.mark.parametrize(
    ("name", "values", "default", "may_change"),
    [
        ("data.global_batch_size", "integer ≥ 1", "required", False),
        (
            "data.image_buckets",
            "integer ≥ 1, [[integer from 1 to 16384, integer from 1 to 16384], …] or null",
            "default null",
            False,
        ),
        ("data.crop_scale", "[number from 0 to 1, number from 0 to 1]", "default [0.9, 1.0]", False),
        ("data.shards", "path or [{shards: …}, …]", "required", True),
        ("data.shards.N.shards", "path", "required", True),
        ("data.members", "{image, caption or label: text, …}", "", False),
        ("data.loading", "{num_workers: …, num_processes: …, prefetch_batches: …}", "", False),
        ("data.loading.num_workers", "integer ≥ 0 or auto", "default auto", True),
        ("model.logit_scale_init", "number > 0 and ≤ 100 or null", "default null", False),
        ("model.clip", "text, mapping or null", "default null", False),
        ("train.loss", "clip, siglip, multi_positive or triplet", "default clip", False),
        ("train.trackers", "[tensorboard, wandb, trackio or text, …]", "", True),
    ],
)
def test_describe_says_values_and_default_as_a_person_does(name: str, values: str, default: str, may_change: bool):
    (setting,) = [one for section in all_sections() for one in section.settings if one.name == name]
    assert (setting.values, setting.default, setting.may_change) == (values, default, may_change)


def test_describe_finds_a_section_a_setting_and_the_last_part_of_a_name():
    assert [section.title for section in find_sections("data.loading")] == ["data.loading"]
    assert [one.name for section in find_sections("data.seed") for one in section.settings] == ["data.seed"]
    seeds = [one.name for section in find_sections("seed") for one in section.settings]
    assert seeds == ["data.seed", "train.seed"]
    (top_k,) = [section for section in find_sections("train.miner") if section.title == "train.miner, name: top_k"]
    assert [one.name for one in top_k.settings] == ["train.miner.k"]


@pytest.mark.parametrize(
    ("name", "end"),  # test_mistakes.py has more names: they are looked for in the same way
    [
        ("num_worker", "did you mean 'data.loading.num_workers'?"),
        ("dta", "did you mean 'data'?"),
        ("train.eps", "`mmdata settings train` lists this section"),  # and neither steps nor epochs
        ("gpu", "`mmdata settings` lists all"),
    ],
)
def test_describe_unknown_name_names_what_is_near_and_nothing_else(name: str, end: str):
    with pytest.raises(ConfigError, match=f"^no setting or section '{name}'; {re.escape(end)}$"):
        find_sections(name)


def test_settings_page_of_the_docs_is_up_to_date():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: mmdata settings --markdown > docs/settings.md"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_schema_takes_every_shipped_config(path: Path):
    schemas = pytest.importorskip("jsonschema")
    schemas.validate(yaml.safe_load(path.read_text(encoding="utf-8")), json_schema())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {**SMALL, "globl_batch_size": 8}}, "'globl_batch_size' was unexpected"),
        ({"data": {**SMALL, "seed": "one"}}, "'one' is not of type 'integer'"),
        ({"train": {"loss": "clipp"}, "data": SMALL}, "'clipp' is not one of"),
        ({"train": None}, "'data' is a required property"),
    ],
)
def test_schema_refuses_what_an_editor_should_underline(change: dict[str, Any], message: str):
    schemas = pytest.importorskip("jsonschema")
    schemas.Draft202012Validator.check_schema(json_schema())
    with pytest.raises(schemas.ValidationError, match=re.escape(message)):
        schemas.validate(change, json_schema())


def test_schema_takes_a_section_whose_settings_are_all_commented_out():
    schemas = pytest.importorskip("jsonschema")
    schemas.validate({"data": SMALL, "model": None, "train": None}, json_schema())


def test_schema_has_the_descriptions():
    data = json_schema()["$defs"]["DataConfig"]
    assert data["description"] == "What is loaded, and in which batches."
    assert data["properties"]["seed"]["description"].startswith("Seed of everything random in the data: order, crops")


def test_repr_of_a_section_says_what_differs_from_the_defaults():
    data = DataConfig(**SMALL, loading=LoadingConfig(num_workers=2))
    assert repr(data) == (
        "DataConfig(shards='shards/photos', global_batch_size=8, tokenizer='tokenizer', "
        "loading=LoadingConfig(num_workers=2))"
    )


def test_settings_command_prints_sections_settings_and_the_schema():
    everything, one = settings_command(), settings_command("num_workers")
    assert "\n↻ data.loading.num_workers       integer ≥ 0 or auto; default auto\n" in everything.stdout
    assert "  data.loading.num_workers: integer ≥ 0 or auto; default auto; may change when a run" in one.stdout
    assert "Number of threads that make batches." in one.stdout
    assert json.loads(settings_command("--schema").stdout) == json_schema()
    wrong = settings_command("data.lodaing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: no setting or section 'data.lodaing'; did you mean 'data.loading")
    both = settings_command("data", "--schema")
    assert "--markdown and --schema are of all settings: leave NAME out" in both.stderr


NAME = re.compile(
    r"(?<![\w./'\[-])(?:data|model|train)(?:\.[A-Za-z0-9_]+)+(?![\w(/]|\.\w)"  # no path, index or call
)
NO_SETTINGS = {
    *("model.encode_image", "model.json", "model.safetensors", "train.csv", "train.md", "train.parquet"),
    *("data.filter", "data.lr", "data.where"),  # of other programs
}


def written_texts() -> Iterator[tuple[Path, str]]:
    """Texts in which settings are named: all pages without their Python code, and all strings of the programs."""
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "datasets").rglob("*.md")),
    ]:
        yield path, re.sub(r"```(?:python|py)\n.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for folder in ("mmdata", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path, node.value


def test_every_setting_that_docs_messages_and_docstrings_name_exists():
    def plain(name: str) -> str:  # entries of lists, and names that a user chooses
        return re.sub(r"\.(NAME|N|\d+)(?=\.|$)", ".N", name)

    sections = all_sections()
    known = {plain(name) for section in sections for name in (section.name, *(one.name for one in section.settings))}
    mentions = [(path, plain(found[0])) for path, text in written_texts() for found in NAME.finditer(text)]
    assert len(mentions) > 500
    wrong = {(str(path.relative_to(ROOT)), name) for path, name in mentions if name not in known | NO_SETTINGS}
    assert wrong == set()
