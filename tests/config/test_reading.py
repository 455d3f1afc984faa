"""Files of settings and settings on the command line: what is read, and what is said of a file that is no config."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mmdata.config import Config, load_config
from mmdata.config.strict_yaml import parse, read_yaml
from mmdata.convert import load_recipe
from mmdata.errors import ConfigError

SHIPPED = sorted((Path(__file__).parents[2] / "configs").rglob("*.y*ml"))
TEXT = "data: {shards: a, tokenizer: t, global_batch_size: 8}\ntrain:\n  # lr: 1\n"

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(10 * [f'*a{i - 1}'])}]\n" for i in range(1, 9)
)
"""10⁹ values in nine lines."""
MERGED = "m0: &m0 {k: v}\n" + "".join(f"m{i}: &m{i} {{<<: [{', '.join(10 * [f'*m{i - 1}'])}]}}\n" for i in range(1, 9))


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """`file(text) -> Path`: a YAML file."""

    def write(text: str | bytes = TEXT) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_the_shipped_configs_are_found():
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_is_valid_and_begins_with_its_launch_command(path: Path):
    assert isinstance(load_config(path), Config)
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# (mmdata|torchrun|python|make) ", first_line)
    assert path.stem in first_line  # configs/NAME.yaml, or a program of that name


def test_a_shipped_config_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    known = load_config("configs/scenes.yaml")
    monkeypatch.chdir(tmp_path)  # as with an installed copy, outside any checkout
    assert load_config("scenes") == load_config("scenes.yaml") == load_config("configs/scenes.yaml") == known
    (tmp_path / "scenes.yaml").write_text("data: {shards: mine, tokenizer: t, global_batch_size: 8}")
    assert load_config("scenes.yaml").data.shards == "mine"


def test_a_config_that_a_run_has_written_is_read_again(file: Callable[..., Path]):
    data = {"shards": "shards", "tokenizer": "tokenizer", "global_batch_size": 8}
    miner = {"name": "top_k", "k": 3}
    config = parse(Config, {"data": data, "train": {"steps": 3, "miner": miner}}, origin="config")
    assert load_config(file(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_a_config_may_be_json(tmp_path: Path):
    (tmp_path / "c.json").write_text(json.dumps(yaml.safe_load(TEXT)))
    assert load_config(tmp_path / "c.json").data.global_batch_size == 8


@pytest.mark.parametrize("name", ["'a:b'", '"a:b"'])
def test_key_with_a_colon_may_have_an_empty_text(file: Callable[..., Path], name: str):
    assert read_yaml(file(f'data: {{fields: {{{name}: ""}}}}')) == {"data": {"fields": {"a:b": ""}}}


def test_overrides_replace_what_the_file_says(file: Callable[..., Path]):
    overrides = ["data.loading.num_workers=4", "train.lr=1e-3", "train.miner.name=top_k", "data.seed=1"]
    config = load_config(file(), [*overrides, "data.image_buckets=[[2, 3], [4, 5]]", "data.shards=x=y", "data.seed=2"])
    assert (config.data.loading.num_workers, config.data.shards, config.data.seed) == (4, "x=y", 2)
    assert config.data.image_buckets == [(2, 3), (4, 5)]
    assert config.train.lr == 1e-3
    assert config.train.miner is not None
    assert config.train.miner.name == "top_k"


def test_one_override_needs_no_list(file: Callable[..., Path]):
    assert load_config(file(), "data.seed=3").data.seed == 3
    with pytest.raises(ConfigError, match=r"^on the command line: unknown key 'data\.sed'"):
        load_config(file(), "data.sed=3")


@pytest.mark.parametrize("value", ["`clip score` > 0.28", " `clip score` > 0.28 and class_name == 'a: b'"])
def test_override_that_begins_with_a_backquote_is_a_text(file: Callable[..., Path], value: str):
    assert load_config(file(), [f"data.select={value}"]).data.select == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.seed", r"override 'data\.seed': expected key=value, as in data\.seed=VALUE$"),
        ("3", r"override '3': expected key=value$"),
        ("=3", r"override '=3': expected key=value$"),
        ("data..seed=3", r"override 'data\.\.seed=3': expected key=value$"),
        ("data.seed.x=3", r"override 'data\.seed\.x=3': 'seed' is a value, not a section$"),
        ("data.shards.0.weight=3", r"override 'data\.shards\.0\.weight=3': 'shards' is a list, which is given whole$"),
        (
            "data.fields={score:json:score}",
            r".*not valid YAML: .*'score:json:score': YAML needs a space after the colon",
        ),
        ("data.seed=[1", r"override 'data\.seed=\[1': value is not valid YAML: line 1, column 3: "),
        ("data.shards={" + LAUGHS.strip().replace("\n", ", ") + "}", r".*: the alias \*a0: write out what it stands"),
    ],
    ids=lambda word: word[:20],
)
def test_override_that_is_none_is_refused(file: Callable[..., Path], override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_yaml(file("data: {seed: 1, shards: [{shards: a}]}"), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", r"not valid YAML: line 1, column 8: "),
        (b"\xff\xfe\x00", r"byte 0 is not UTF-8; save it as UTF-8$"),
        ("data:\n\tseed: 1", r"not valid YAML: line 2, column 1: a tab; indent with spaces$"),
        (
            "data: !!python/object/apply:os.system [ls]",
            r"not valid YAML: line 1, column 7: could not determine a const",
        ),
        ("data: {seed: 1, seed: 2}", r"not valid YAML: line 1, column 17: key 'seed' stands twice$"),
        ("data: {}\ntrain: {}\ndata: {}", r"not valid YAML: line 3, column 1: key 'data' stands twice$"),
        (LAUGHS, r"not valid YAML: line 2, column 10: the alias \*a0: write out what it stands for$"),
        (MERGED, r"not valid YAML: line 2, column 15: the alias \*m0: write out what it stands for$"),
        ("data: &a [1, *a]", r"not valid YAML: line 1, column 14: the alias \*a: write out what it stands for$"),
        ("data: " + "[" * 20_000, "not valid YAML: lists or sections inside each other, hundreds deep$"),
        ("# data: {}", r"expected the sections data, model, train, as .*; got an empty file; `mmdata init SOURCE"),
        ("- data", r"expected the sections data, model, train, as `data: \{shards: …\}`; got a value of type list"),
        ("a photo", r"expected the sections data, model, train, as `data: \{shards: …\}`; got 'a photo'; `mmdata init"),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_file_that_holds_no_strict_yaml_is_refused(file: Callable[..., Path], text: str | bytes, message: str):
    path = file(text)
    for read in (read_yaml, lambda path: load_recipe(str(path))):
        with pytest.raises(ConfigError, match=rf"^config '{path}': {message}"):
            read(path)


def test_missing_file_is_named_with_what_was_probably_meant(file: Callable[..., Path], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config '.*/none\.yaml': no such file; shipped with mmdata: .*scenes\.yaml"):
        load_config(tmp_path / "none.yaml")
    path = file().rename(tmp_path / "photos.yaml")
    with pytest.raises(ConfigError, match=rf"no such file; did you mean '{path}'\?$"):
        load_config(tmp_path / "photo.yaml")
    with pytest.raises(ConfigError, match=r"^config 'sceens\.yaml': no such file; did you mean 'scenes\.yaml'\?$"):
        load_config("sceens.yaml")
    with pytest.raises(ConfigError, match=r"is a setting; the config comes first, as in `mmdata train CONFIG a=3`$"):
        load_config("a=3")


SOURCE = "; `mmdata init SOURCE` writes one for a table, a folder of images, or shards"


@pytest.mark.parametrize(
    ("path", "kind", "remedy"),
    [
        ("shards/scenes", "a folder of shards", ": `mmdata init shards/scenes` writes one"),  # as a shipped config
        ("shards/scenes/0.tar", "a tar", ": `mmdata init shards/scenes` writes one"),
        ("photos", "a folder", ": `mmdata init photos` writes one"),
        ("c.csv", "a table", ": `mmdata init c.csv` writes one"),
        ("t.py", "a Python file", SOURCE),
        ("n.txt", "a text file", SOURCE),
        ("my run", "the folder of a run", ": that of the run is 'my run/config.yaml'"),
        ("my run/checkpoints", "a folder", ": that of the run is 'my run/config.yaml'"),
    ],
)
def test_path_that_is_something_else_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, remedy: str
):
    monkeypatch.chdir(tmp_path)
    for folder in ("shards/scenes/__mmdata__", "photos", "my run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "my run/config.yaml").write_text("data: {}")
    with tarfile.open("shards/scenes/0.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.jpg"))
    for name, text in (("c.csv", "filepath,caption\n"), ("t.py", "import x\n"), ("n.txt", "two words\n")):
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    expected = "and a config (a YAML file with the sections data, model, train) is expected"
    assert str(caught.value) == f"'{path}' is {kind}, {expected}{remedy}"
