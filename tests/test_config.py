"""Settings: what is accepted, and what each mistake is told."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata.config import Config, DataConfig, load_config
from mmdata.config.corpus import SourceConfig, ValConfig, sources
from mmdata.config.data import evaluation_data
from mmdata.config.loading import LoadingConfig
from mmdata.config.settings import changeable_settings
from mmdata.config.strict_yaml import parse, read_yaml
from mmdata.errors import ConfigError

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").rglob("*.y*ml"))

DATA = {"shards": "shards", "tokenizer": "tokenizer", "global_batch_size": 8}


@pytest.fixture
def file(tmp_path: Path):
    """`file(text) -> Path`: a YAML file."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# What is shipped


def test_config_some_are_shipped():
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_config_shipped_file_is_valid(path: Path):
    assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_config_shipped_file_begins_with_its_launch_command(path: Path):
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# (mmdata|torchrun|python|make) ", first_line)
    assert path.stem in first_line  # configs/NAME.yaml, or a program of that name


def test_config_that_a_run_has_written_is_read_again(file):
    config = parse(Config, {"data": DATA, "train": {"steps": 3}}, origin="config")
    assert load_config(file(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_config_takes_paths_as_their_text():
    paths = {"shards": Path("a/b"), "val": {"shards": Path("c")}, "tokenizer": Path("d")}
    config = parse(Config, {"data": {**DATA, **paths}, "train": {"output": Path("e")}}, origin="c")
    assert (config.data.shards, config.data.val.shards, config.data.tokenizer) == ("a/b", "c", "d")
    assert config.train.output == "e"
    with pytest.raises(ConfigError, match=r"'shards': expected path or \[\{shards: …\}, …\]; got 3"):
        parse(DataConfig, {**DATA, "shards": 3}, origin="c")


def test_config_defaults_are_those_of_the_design():
    config = parse(Config, {"data": DATA}, origin="c")
    assert config.data.image_size == 224
    assert config.data.max_length == 77
    assert config.data.text_buckets == 8
    assert (config.data.transform, config.data.shuffle, config.data.seed) == ("train", True, 0)
    assert config.model.name == "tiny"
    assert config.train.loss == "clip"


# Reading


def test_config_file_is_read_with_overrides(file):
    path = file("data: {shards: a, tokenizer: t, global_batch_size: 8}\ntrain:\n  # lr: 1\n")
    config = load_config(
        path, ["data.loading.num_workers=4", "train.lr=1e-3", "train.miner.name=top_k", "data.shards=x=y"]
    )
    assert config.data.loading.num_workers == 4
    assert config.train.lr == 1e-3
    assert config.train.miner is not None
    assert config.train.miner.k == 64
    assert config.data.shards == "x=y"


def test_config_override_value_is_yaml(file):
    path = file("data: {}")
    overrides = ["data.image_buckets=[[2, 3], [4, 5]]", "data.order=null", "data.shuffle=false"]
    assert read_yaml(path, overrides) == {"data": {"image_buckets": [[2, 3], [4, 5]], "order": None, "shuffle": False}}


def test_config_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config '.*/none\.yaml': no such file; shipped with mmdata: .*scenes\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_config_missing_file_is_suggested_only_where_one_is_near(file, tmp_path: Path):
    path = file("data: {}").rename(tmp_path / "photos.yaml")
    with pytest.raises(ConfigError, match=rf"no such file; did you mean '{path}'\?$"):
        load_config(tmp_path / "photo.yaml")
    with pytest.raises(ConfigError, match=r"^config 'sceens\.yaml': no such file; did you mean 'scenes\.yaml'\?$"):
        load_config("sceens.yaml")
    with pytest.raises(ConfigError, match=r"is a setting; the config comes first, as in `mmdata train CONFIG a=3`$"):
        load_config("a=3")


def test_config_that_is_something_else_is_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("shards/scenes/__mmdata__", "photos", "my run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "my run/config.yaml").write_text("data: {}")
    with tarfile.open("shards/scenes/0.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.jpg"))
    for name, text in (("c.csv", "filepath,caption\n"), ("t.py", "import x\n"), ("n.txt", "two words\n")):
        (tmp_path / name).write_text(text)
    expected = "and a config (a YAML file with the sections data, model, train) is expected"
    told = {
        # a shipped config has the name of this folder
        "shards/scenes": "is a folder of shards, {}: `mmdata init shards/scenes` writes one",
        "shards/scenes/0.tar": "is a tar, {}: `mmdata init shards/scenes` writes one",
        "photos": "is a folder, {}: `mmdata init photos` writes one",
        "c.csv": "is a table, {}: `mmdata init c.csv` writes one",
        "t.py": "is a Python file, {}; `mmdata init SOURCE` writes one for a table, a folder of images, or shards",
        "n.txt": "is a text file, {}; `mmdata init SOURCE` writes one for a table, a folder of images, or shards",
        "my run": "is the folder of a run, {}: that of the run is 'my run/config.yaml'",
        "my run/checkpoints": "is a folder, {}: that of the run is 'my run/config.yaml'",
    }
    for path, message in told.items():
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"'{path}' {message.format(expected)}"


def test_config_may_be_json(tmp_path: Path):
    (tmp_path / "c.json").write_text(json.dumps({"data": DATA}))
    assert load_config(tmp_path / "c.json").data.global_batch_size == DATA["global_batch_size"]


def test_config_shipped_with_mmdata_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    known = load_config("configs/scenes.yaml")
    monkeypatch.chdir(tmp_path)  # as with an installed copy, outside any checkout
    assert load_config("scenes") == load_config("scenes.yaml") == load_config("configs/scenes.yaml") == known
    (tmp_path / "scenes.yaml").write_text("data: {shards: mine, tokenizer: t, global_batch_size: 8}")
    assert load_config("scenes.yaml").data.shards == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", r"config '.*c\.yaml': not valid YAML, line 1, column 8: "),
        (b"\xff\xfe\x00", r"config '.*c\.yaml': not valid YAML: 'utf-8' codec can't decode byte 0xff in position 0"),
        ("data:\n\tseed: 1", r"not valid YAML, line 2, column 1: found character '\\t' that cannot start any token$"),
        (
            "data: !!python/object/apply:os.system [ls]",
            r"not valid YAML, line 1, column 7: could not determine a constructor for the tag",
        ),
        ("data: {seed: 1, seed: 2}", r"not valid YAML, line 1, column 17: key 'seed' stands twice$"),
        ("data: {}\ntrain: {}\ndata: {}", r"not valid YAML, line 3, column 1: key 'data' stands twice$"),
        (
            "",
            r"config '.*': expected the sections data, model, train, as .*; got an empty file; `mmdata init",
        ),
        ("# data: {}", r"config '.*': expected the sections data, model, train, as .*; got an empty file"),
        ("- data", r"expected the sections data, model, train, as `data: \{shards: …\}`; got a value of type list"),
        ("a photo", r"expected the sections data, model, train, as `data: \{shards: …\}`; got 'a photo'; `mmdata init"),
    ],
)
def test_config_file_that_is_not_a_mapping_is_refused(file, text: str | bytes, message: str):
    with pytest.raises(ConfigError, match=message):
        read_yaml(file(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.seed", r"override 'data\.seed': expected key=value, as in data\.seed=VALUE"),
        ("=3", r"override '=3': expected key=value"),
        ("data..seed=3", r"override 'data\.\.seed=3': expected key=value"),
        ("data.seed.x=3", r"override 'data\.seed\.x=3': 'seed' is a value, not a section"),
        (
            "data.shards.0.weight=3",
            r"override 'data\.shards\.0\.weight=3': 'shards' is a list, which is given whole$",
        ),
        ("data.seed=[1", r"override 'data\.seed=\[1': value is not valid YAML: "),
    ],
)
def test_config_override_that_is_none_is_refused(file, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_yaml(file("data: {seed: 1, shards: [{shards: a}]}"), [override])


# Validation


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "c.yaml: 'data' is required and missing"),
        (
            {"data": {"shards": "x"}},
            "c.yaml: 'data.global_batch_size' is required and missing",
        ),
        ({"dat": {}}, "c.yaml: 'data' is required and missing; unknown key 'dat'; did you mean 'data'?"),
        (
            {"data": {**DATA, "num_worker": 1}},
            "c.yaml: unknown key 'data.num_worker'; did you mean 'data.loading.num_workers'?",
        ),
        (
            {"data": DATA, "train": {"miner": {"name": "top_k", "kk": 3}}},
            "c.yaml: unknown key 'train.miner.kk'; `mmdata settings train.miner` lists the settings of this section",
        ),
        (
            {"data": DATA, "train": {"miner": {"name": "semi_hard", "k": 3}}},
            "c.yaml: unknown key 'train.miner.k'; `mmdata settings train.miner` lists the settings of this section",
        ),
        (
            {"data": DATA, "train": {"miner": {"name": "hardest"}}},
            "c.yaml: 'train.miner': Input tag 'hardest' found using 'name' does not match any of the expected tags: "
            "'all', 'top_k', 'ratio', 'semi_hard', 'distance_weighted', 'gumbel_top_k', 'same_group', 'user'; "
            "got {'name': 'hardest'}",
        ),
        (
            {"data": DATA, "train": {"miner": {"k": 3}}},
            "c.yaml: 'train.miner': expected {name: all, distance_weighted, gumbel_top_k, ratio, same_group, "
            "semi_hard, top_k, user} or null; got {'k': 3}",
        ),
        (
            {"data": DATA, "train": {"miner": {"name": "same_group"}}},
            "c.yaml: 'train.miner.size' is required and missing",
        ),
        (
            {"data": DATA, "train": {"miner": {"name": "ratio", "share": 2}}},
            "c.yaml: 'train.miner.share': Input should be less than or equal to 1; got 2",
        ),
        (
            {"data": DATA, "train": {"miner": "top_k"}},
            "c.yaml: 'train.miner': expected {name: all, distance_weighted, gumbel_top_k, ratio, same_group, "
            "semi_hard, top_k, user} or null; got 'top_k'",
        ),
        (
            {"data": {**DATA, "batch_size": 8}},
            "c.yaml: unknown key 'data.batch_size'; did you mean 'data.global_batch_size'?",
        ),
        (
            {"data": {**DATA, "groups": "g.npy"}},
            "c.yaml: 'data.groups': expected {source: …, size: …, candidates: …} or null; got 'g.npy'",
        ),
        (
            {"data": {**DATA, "filter": "width > 3"}},
            "c.yaml: unknown key 'data.filter'; did you mean 'data.select'?",
        ),
        ({"data": DATA, "models": {}}, "c.yaml: unknown key 'models'; did you mean 'model'?"),
        (
            {"data": {**DATA, "prefetch_batches": 3}},
            "c.yaml: unknown key 'data.prefetch_batches'; did you mean 'data.loading.prefetch_batches'?",
        ),
        (
            {"data": {**DATA, "loading": {"seed": 3}}},
            "c.yaml: unknown key 'data.loading.seed'; did you mean 'data.seed'?",
        ),
        (
            {"data": DATA, "train": {"cache_gb": 3}},
            "c.yaml: unknown key 'train.cache_gb'; did you mean 'data.loading.cache_gb'?",
        ),
        (
            {"data": {**DATA, "loading": {"num_proceses": 0}}},
            "c.yaml: unknown key 'data.loading.num_proceses'; did you mean 'data.loading.num_processes'?",
        ),
        # A suggestion only where one is near, and what open_clip and transformers call a setting.
        (
            {"data": {**DATA, "xyzzy": 1}},
            "c.yaml: unknown key 'data.xyzzy'; `mmdata settings data` lists the settings of this section",
        ),
        (
            {"data": DATA, "train": {"loading": {}, "zzz": 1}},
            "c.yaml: unknown key 'train.loading'; did you mean 'data.loading'?; "
            "unknown key 'train.zzz'; `mmdata settings train` lists the settings of this section",
        ),
        ({"data": DATA, "foo": {}}, "c.yaml: unknown key 'foo'; `mmdata settings` lists all"),
        (
            {"data": DATA, "train": {"learning_rate": 1, "num_worker": 2}},
            "c.yaml: unknown key 'train.learning_rate'; did you mean 'train.lr'?; "
            "unknown key 'train.num_worker'; did you mean 'data.loading.num_workers'?",
        ),
        (
            {**DATA, "model": {"nam": "tiny"}},
            "c.yaml: 'data' is required and missing; unknown key 'model.nam'; did you mean 'model.name'?; "
            "unknown key 'shards'; did you mean 'data.shards'?; unknown key 'tokenizer'; did you mean "
            "'data.tokenizer'?; unknown key 'global_batch_size'; did you mean 'data.global_batch_size'?",
        ),
        (
            {"data": DATA, "model": {"name": "ViT-B-16"}, "train": {"miner": {"name": "topk"}}},
            "c.yaml: 'model.name': Input should be 'micro', 'tiny', 'small', 'base', 'vit_b_32', 'vit_b_16', "
            "'vit_l_14' or 'pretrained'; "
            "got 'ViT-B-16'; did you mean 'vit_b_16'?; 'train.miner': Input tag 'topk' found using 'name' does not "
            "match any of the expected tags: 'all', 'top_k', 'ratio', 'semi_hard', 'distance_weighted', "
            "'gumbel_top_k', 'same_group', 'user'; got {'name': 'topk'}; did you mean 'top_k'?",
        ),
    ],
)
def test_config_wrong_key_names_the_right_one(content: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        parse(Config, content, origin="c.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("loading", {"num_workers": "many"}, "'data.loading.num_workers': expected integer ≥ 0 or auto; got 'many'"),
        ("loading", {"num_workers": True}, "'data.loading.num_workers': expected integer ≥ 0 or auto; got True"),
        ("loading", 3, "'data.loading': expected {num_workers: …, num_processes: …, prefetch_batches: …}; got 3"),
        (
            "captions",
            "all",
            "'data.captions': expected one, every or {NAME: number from 0 to 1, …}; got 'all'",
        ),
        ("join", "scores.csv", "'data.join': expected [{table: …, shards: …, name: …}, …]; got 'scores.csv'"),
        (
            "join",
            ["scores.csv"],
            "'data.join': expected [{table: …, shards: …, name: …}, …]; got 'scores.csv', in entry 0",
        ),
        ("seed", True, "'data.seed': Input should be a valid integer; got True"),
        ("image_buckets", [[8, True]], "'data.image_buckets.0.1': Input should be a valid integer; got True"),
        (
            "loading",
            {"num_workers": -1},
            "'data.loading.num_workers': Input should be greater than or equal to 0; got -1",
        ),
        ("global_batch_size", 0, "'data.global_batch_size': Input should be greater than or equal to 1; got 0"),
        ("global_batch_size", 8.5, "'data.global_batch_size': Input should be a valid integer; got 8.5"),
        ("global_batch_size", 8.0, "'data.global_batch_size': Input should be a valid integer; got 8.0"),
        (
            "global_batch_size",
            "8",
            "'data.global_batch_size': Input should be a valid integer; got '8'",
        ),
        ("shuffle", "maybe", "'data.shuffle': expected true or false; got 'maybe'"),
        (
            "image_buckets",
            [32, 32],
            "'data.image_buckets': expected integer ≥ 1, [[integer from 1 to 16384, integer from 1 to 16384], …] or "
            "null; got 32, in entry 0",
        ),
        ("image_buckets", [[100000, 32]], "'data.image_buckets.0.0': Input should be less than or equal to 16384"),
        (
            "loading",
            {"max_bad_share": 1.5},
            "'data.loading.max_bad_share': Input should be less than or equal to 1; got 1.5",
        ),
        ("crop_scale", [0.9, 0.5], "'data': crop_scale must be (min, max) with 0 < min <= max: got (0.9, 0.5)"),
        ("crop_scale", [0, 0.5], "'data': crop_scale must be (min, max) with 0 < min <= max: got (0.0, 0.5)"),
        ("image_buckets", [], "'data.image_buckets': List should have at least 1 item"),
        ("image_buckets", [[224]], "'data.image_buckets.0.1' is required and missing"),
        ("image_buckets", [[8, 9], [8, 9]], "'data': image_buckets must differ from each other: got [[8, 9], [8, 9]]"),
        ("image_patches", [], "'data.image_patches': List should have at least 1 item"),
        ("image_patches", [256, 64], "'data': image_patches must rise: got [256, 64]"),
        ("image_patches", [64, 64], "'data': image_patches must rise: got [64, 64]"),
        ("text_buckets", [], "'data.text_buckets': List should have at least 1 item"),
        ("text_buckets", [30, 20, 77], "'data': text_buckets must rise: got [30, 20, 77]"),
        ("text_buckets", [20, 20, 77], "'data': text_buckets must rise: got [20, 20, 77]"),
        ("text_buckets", [20, 30], "'data': the last of text_buckets must be max_length (77): got 30"),
        ("text_buckets", 0, "'data.text_buckets': Input should be greater than or equal to 1; got 0"),
    ],
)
def test_config_wrong_value_is_told_what_is_expected(key: str, value: object, message: str):
    with pytest.raises(ConfigError) as caught:
        parse(Config, {"data": {**DATA, key: value}}, origin="c.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("c.yaml: ")
    assert "'shards'" not in str(caught.value)  # the value at fault, not the whole section


def test_config_image_shapes_and_native_resolution_exclude_each_other():
    data = {**DATA, "image_patches": [64], "image_buckets": [[224, 224]]}
    with pytest.raises(ConfigError, match=r"c: 'data': image_patches and image_buckets exclude each other: give one"):
        parse(Config, {"data": data}, origin="c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_buckets": 3, "patch_size": 14, "image_size": 384},
            "image_size (384) must be a multiple of patch_size (14) where image_buckets is a number: the shapes that "
            "are chosen consist of whole patches",
        ),
        (
            {"token_budget": 8192, "num_lanes": 16, "global_batch_size": 8},
            "with token_budget, the rows of each batch are a multiple of 16 for num_lanes 16: set global_batch_size to "
            "16 or more, got 8",
        ),
    ],
)
def test_config_shapes_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        parse(Config, {"data": {**DATA, **changes}}, origin="c")
    assert str(caught.value) == f"c: 'data': {message}"


@pytest.mark.parametrize(
    "changes",
    [
        {"image_buckets": 3},
        {"token_budget": 8192, "num_lanes": 4},
        {"token_budget": 8192, "num_lanes": 3, "global_batch_size": 96},
        {"image_patches": [64, 256], "token_budget": 8192},
    ],
)
def test_config_shapes_that_fit_together_are_taken(changes: dict[str, Any]):
    assert parse(DataConfig, {**DATA, **changes}, origin="c").model_dump(include=set(changes)) == changes


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", float("inf"), "'train.lr': Input should be a finite number; got inf"),
        ("weight_decay", float("nan"), "'train.weight_decay': Input should be a finite number; got nan"),
        ("grad_clip_norm", ".inf", "'train.grad_clip_norm': Input should be a valid number"),
        ("betas", [0.9, 1.0], "'train.betas.1': Input should be less than 1; got 1.0"),
        ("warmup_steps", False, "'train.warmup_steps': Input should be a valid integer; got False"),
    ],
)
def test_config_wrong_number_of_training_is_refused(key: str, value: object, message: str):
    with pytest.raises(ConfigError) as caught:
        parse(Config, {"data": DATA, "train": {key: value}}, origin="c.yaml")
    assert str(caught.value).startswith(f"c.yaml: {message}")


def test_config_epochs_and_steps_exclude_each_other():
    with pytest.raises(ConfigError, match=r"^c: 'train': epochs \(1\) and steps \(2\) exclude each other: give one$"):
        parse(Config, {"data": DATA, "train": {"epochs": 1, "steps": 2}}, origin="c")


def test_config_cannot_be_changed_later():
    config = parse(DataConfig, DATA, origin="c")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


# Mixtures

B = {"shards": "b"}
BUDGET = {"token_budget": 99}
WHOLE = "weights are whole numbers, as 7 and 3 for 70 % and 30 % of a batch"


@pytest.mark.parametrize(
    ("rows", "changes", "multiple"),
    [
        *((2**power, {}, max(min(2**power, 8), 2 ** (power - 5))) for power in (0, 2, 5, 8, 12)),
        (768, {}, 48),
        (96, {}, 24),
        (1000, {}, 80),
        (1021, {}, 16),
        (24, {}, 8),
        (768, {"num_lanes": 3}, 48),
        (16, {"num_lanes": 3}, 12),
        (768, {"groups": {"size": 3}}, 48),
        (576, {"groups": {"candidates": 2}}, 144),
        (512, {"groups": {"size": 4}, "num_lanes": 2}, 16),
    ],
)
def test_rows_of_a_token_budget_are_a_multiple_for_lanes_groups_and_ranks(
    rows: int, changes: dict[str, Any], multiple: int
):
    assert data_of("a", global_batch_size=rows, token_budget=4096, **changes).row_multiple == multiple


@pytest.mark.parametrize("groups", [None, {"size": 3}, {"size": 4}])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 8, 12, 24, 40, 64])
def test_rows_that_the_message_about_ranks_names_are_shared_by_them(world_size: int, groups: dict[str, int] | None):
    shared = world_size * (groups["size"] if groups else 1)
    for times in (32, 64, 512):
        data = data_of("a", global_batch_size=times * shared, token_budget=4096, groups=groups)
        assert data.row_multiple % shared == 0
        assert data.row_multiple <= times * shared // 4


def data_of(shards: object, **changes: object) -> DataConfig:
    return parse(DataConfig, {**DATA, "shards": shards, **changes}, origin="c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"val": {"shards": "v", "share": 0.01}},
            r"'data\.val': shards \('v'\) and share \(0\.01\) exclude each other: give one",
        ),
        (
            {"val": {"share": 0.1, "select": "width > 3"}},
            r"'data\.val': select chooses rows of val\.shards, which is not set; data\.select chooses those of a share",
        ),
        ({"val": {"share": 0}}, r"'data\.val\.share': Input should be greater than 0"),
        ({"val": {"share": 1}}, r"'data\.val\.share': Input should be less than 1"),
        ({"split": "val"}, r"split val is a share of the rows, and val\.share is not set$"),
        (
            {"split": "val", "val": {"shards": "v"}},
            r"split val is a share of the rows, and val\.share is not set; to load 'v', set shards to it$",
        ),
    ],
)
def test_config_val_that_says_nothing_clear_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(Config, {"data": {**DATA, **changes}}, origin="c")


def test_config_val_is_off_by_default_and_by_null():
    for changes in ({}, {"val": None}):
        assert not data_of("a", **changes).val
    assert data_of("a", val={"shards": "v"}).val == ValConfig(shards="v")
    data = evaluation_data(data_of("a", val={"share": 0.25}, seed=3))
    assert (data.shards, data.split, data.transform, data.shuffle) == ("a", "val", "eval", False)


def test_config_mixture_is_given_as_an_override(file):
    path = file("data: {shards: x, tokenizer: t, global_batch_size: 8}")
    override = "data.shards=[{shards: a, weight: 3}, {shards: b, weight: 1}]"
    data = load_config(path, [override]).data
    assert data.shards == [SourceConfig(shards="a", weight=3), SourceConfig(shards="b", weight=1)]
    assert sources(data) == data.shards


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ("a", [("a", None, 1.0)]),
        ([{"shards": "a"}], [("a", None, 1.0)]),
        ([{"shards": "a", "weight": 3}], [("a", None, 1.0)]),
        ([{"shards": "a", "repeat": 2}], [("a", None, 2.0)]),
        ([{"shards": Path("a")}, {"shards": "b"}], [("a", None, 1.0), ("b", None, 1.0)]),
        ([{"shards": "a"}, {"shards": "b", "repeat": 3}], [("a", None, 1.0), ("b", None, 3.0)]),
        ([{"shards": "a", "repeat": 0.5}, {"shards": "b", "repeat": 3}], [("a", None, 0.5), ("b", None, 3.0)]),
        ([{"shards": "a", "weight": 30}, {"shards": "b", "weight": 10}], [("a", 30, None), ("b", 10, None)]),
    ],
)
def test_config_sources_all_have_a_weight_or_all_a_repeat(shards: object, expected: list[tuple[str, int, float]]):
    assert [(source.shards, source.weight, source.repeat) for source in sources(data_of(shards))] == expected


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([{"shards": "a", "weight": 3}, {"shards": "b"}], "'a' has weight 3; 'b' has neither"),
        ([{"shards": "a", "weight": 3}, {"shards": "b", "repeat": 2}], "'a' has weight 3; 'b' has repeat 2"),
        ([{"shards": "a", "weight": 3, "repeat": 2}], "'a' has weight 3 and repeat 2"),
    ],
)  # fmt: skip
def test_config_mixture_of_weights_and_repeats_is_refused(shards: object, message: str):
    start = "c: give each dataset a weight and none a repeat, or none of them a weight: "
    with pytest.raises(ConfigError, match=f"^{re.escape(start)}.*{re.escape(message)}$"):
        data_of(shards)


@pytest.mark.parametrize(
    ("weights", "rows", "changes", "what", "remedy"),
    [
        ([3, 1], 10, {}, "global_batch_size 10 cannot hold the weights 3 : 1 to the row", "a multiple of 4; 8 is"),
        ([30, 12], 10, {}, "global_batch_size 10 cannot hold the weights 30 : 12 to the row", "a multiple of 7; 7 is"),
        ([2, 2, 5], 8, {}, "global_batch_size 8 cannot hold the weights 2 : 2 : 5 to the row", "a multiple of 9; 9 is"),
    ],
)
def test_config_weights_that_make_no_whole_rows_are_refused(
    weights: list[int], rows: int, changes: dict[str, Any], what: str, remedy: str
):
    shards = [{"shards": name, "weight": weight} for name, weight in zip("abc", weights, strict=False)]
    with pytest.raises(ConfigError, match=f"^c: {re.escape(what)}: it must be {re.escape(remedy)}$"):
        data_of(shards, global_batch_size=rows, **changes)


@pytest.mark.parametrize("changes", [BUDGET, {"groups": {"size": 2}}])
def test_config_weights_need_batches_of_one_size_without_groups(changes: dict[str, Any]):
    remedy = "with token_budget or groups, give each dataset a repeat"
    with pytest.raises(ConfigError, match=f"^c: weights are shares of batches of one size without groups: {remedy}$"):
        data_of([{"shards": "a", "weight": 1}, {"shards": "b", "weight": 1}], **changes)


@pytest.mark.parametrize("groups", [{}, {"size": 2, "candidates": 3}])
def test_config_groups_have_a_size_or_candidates(groups: dict[str, int]):
    with pytest.raises(ConfigError, match=r"'groups': give either size .* or candidates"):
        data_of("a", groups=groups)


def test_config_a_share_of_groups_needs_their_size():
    assert data_of("a", groups={"size": 4, "share": 0.5}).groups is not None
    with pytest.raises(ConfigError, match="'groups': share needs groups of a size: candidates follow every row"):
        data_of("a", groups={"candidates": 2, "share": 0.5})


def test_config_weights_that_make_whole_rows_are_taken():
    assert data_of([{"shards": "a", "weight": 30}, {"shards": "b", "weight": 10}], global_batch_size=12)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "'shards': List should have at least 1 item after validation, not 0; got []"),
        (["a"], "'shards': expected path or [{shards: …}, …]; got 'a', in entry 0"),
        ([{"shards": "a"}, {"weight": 1}], "'shards.1.shards' is required and missing"),
        ([{"shards": "a"}, {**B, "weight": []}], "'shards.1.weight': Input should be a valid integer; got []"),
        ([{"shards": "a", "weight": 0}], "'shards.0.weight': Input should be greater than or equal to 1; got 0"),
        ([{"shards": "a", "weight": 0.7}], f"'shards.0.weight': {WHOLE}: got 0.7"),
        ([{"shards": "a", "repeat": 0}], "'shards.0.repeat': Input should be greater than 0; got 0"),
        ([{"shards": "a", "repeat": 2000}], "'shards.0.repeat': Input should be less than or equal to 1000; got 2000"),
        ([{"shards": "a", "wieght": 1}], "unknown key 'shards.0.wieght'; did you mean 'shards.0.weight'?"),
    ],
)  # fmt: skip
def test_config_error_in_a_mixture_names_its_place(shards: object, message: str):
    with pytest.raises(ConfigError) as caught:
        data_of(shards)
    assert str(caught.value).endswith(message)
    if shards:  # nothing is said of the forms that were not meant
        assert str(caught.value) == f"c: {message}"


def test_config_evaluation_is_plain_whatever_training_mixes():
    mixture = [{"shards": "a", "repeat": 1}, {"shards": "b", "repeat": 2}]
    training = {"groups": {"size": 2}, "token_budget": 4096}
    plain = evaluation_data(data_of(mixture, val={"shards": "v"}, **training))
    assert plain == data_of("v", val={"shards": "v"}, transform="eval", shuffle=False, loading={"num_processes": 0})


@pytest.mark.parametrize("name", ["laion", "laion/", "./laion"])
def test_config_evaluation_on_the_same_folder_joins_what_its_select_needs(name: str):
    training = {"join": [{"table": "c.parquet"}], "select": "split == 'train'"}
    chosen = evaluation_data(data_of("laion", val={"shards": name, "select": "split == 'val'"}, **training))
    assert [one.table for one in chosen.join] == ["c.parquet"]
    assert evaluation_data(data_of("laion", val={"shards": name}, **training)).join == []
    other = evaluation_data(data_of("laion2", val={"shards": name, "select": "width > 3"}, **training))
    assert other.join == []


def test_config_copy_takes_no_dictionary_for_a_section():
    with pytest.raises(ValueError, match=r"^loading is a section: give a LoadingConfig, not a dictionary$"):
        data_of("a").model_copy(update={"loading": {"num_workers": 0}})
    with pytest.raises(ValueError, match=r"^DataConfig has no setting num_worker$"):
        data_of("a").model_copy(update={"num_worker": 4})


def test_config_a_resumed_run_may_change_all_of_loading_and_what_is_marked():
    data = [name for name in changeable_settings(Config) if name.startswith("data.")]
    loading = [f"data.loading.{name}" for name in LoadingConfig.model_fields]
    places = ["shards", "shards.shards", "val.shards", "join.table", "join.shards"]
    places += ["select", "shards.select", "val.select"]
    assert sorted(data) == sorted([*loading, *(f"data.{name}" for name in places)])
    assert "train.micro_batch_size" in changeable_settings(Config)
    assert "model.gradient_checkpointing" in changeable_settings(Config)
    assert "train.lr" not in changeable_settings(Config)


AUGMENT = {"color_jitter": 0.1, "horizontal_flip_prob": 0.5}


def test_config_augment_is_for_training_crops_alone():
    with pytest.raises(ConfigError) as caught:
        data_of("a", augment=AUGMENT, transform="eval")
    assert str(caught.value) == (
        "c: augment changes the crops of transform train, and transform is 'eval': leave augment out "
        "(data.augment=null)"
    )
    with pytest.raises(ConfigError, match=r"unknown key 'augment.flip'; `mmdata settings augment` lists the settings"):
        data_of("a", augment={"flip": 0.5})


def test_config_evaluation_is_not_augmented():
    assert evaluation_data(data_of("a", val={"shards": "v"}, augment=AUGMENT)).augment is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.batch_size", "data.global_batch_size"),
        ("train.train_batch_size", "data.global_batch_size"),
        ("model.batch_size", "data.global_batch_size"),
        ("data.micro_batch", "train.micro_batch_size"),
        ("train.image_lr", None),
        ("train.clip_grad_norm", "train.grad_clip_norm"),
        ("train.num_steps", "train.steps"),
        ("data.num_steps", "train.steps"),
        ("train.warmup_epochs", "train.warmup_steps"),
        ("train.save_every_steps", "train.checkpoint_every_steps"),
        ("train.beta1", "train.betas"),
        ("train.scheduler", "train.schedule"),
        ("train.grad_checkpointing", "model.gradient_checkpointing"),
        ("data.max_len", "data.max_length"),
        ("data.sede", "data.seed"),
        # Names with letters, or a word, in common with a setting that means something else.
        ("data.image_lr", None),
        ("data.image_mean", None),
        ("train.mean", None),
        ("train.num_negatives", None),
        ("train.epsilon", None),
        ("data.mean", None),
        ("data.gpus", None),
        ("data.world_size", None),
        ("data.label_column", None),
        ("model.root", None),
        ("model.flip", None),
    ],
)
def test_a_setting_is_suggested_for_what_it_means(tmp_path: Path, key: str, meant: str | None):
    section, name = key.split(".")
    content: dict[str, Any] = {"data": {**DATA}, "model": {"name": "tiny"}, "train": {}}
    content[section][name] = 1
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(content))
    end = f"did you mean '{meant}'?" if meant else f"`mmdata settings {section}` lists the settings of this section"
    with pytest.raises(ConfigError, match=re.escape(f"unknown key '{key}'; {end}")):
        load_config(path)
