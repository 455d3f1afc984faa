"""What each mistake in a setting is told: the key, what is expected, what was given, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from mmdata.config import Config, load_config
from mmdata.config.settings import Settings
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError

DATA = {"shards": "shards", "tokenizer": "tokenizer", "global_batch_size": 8}
MINERS = "{name: all, gumbel_top_k, same_group, semi_hard, top_k, user} or null"
SHAPES = "integer ≥ 1, [[integer from 1 to 16384, integer from 1 to 16384], …] or null"


def told(content: dict[str, Any]) -> str:
    """What is said of the settings of a config."""
    with pytest.raises(ConfigError) as caught:
        parse(Config, content, origin="c.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "'data' is required and missing"),
        ({"data": {"shards": "x"}}, "'data.global_batch_size' is required and missing"),
        ({"dat": {}}, "'data' is required and missing; unknown key 'dat'; did you mean 'data'?"),
        ({"data": 3}, "'data': expected {shards: …, global_batch_size: …}; got 3"),
        ({"data": DATA, "foo": {}}, "unknown key 'foo'; `mmdata settings` lists all"),
        (
            {"data": DATA, "train": {"loading": {}, "zzz": 1}},
            "unknown key 'train.loading'; did you mean 'data.loading'?; unknown key 'train.zzz'; `mmdata settings "
            "train` lists this section",
        ),
        (
            {"data": {**DATA, **{f"batchsize{i}": i for i in range(30)}}},
            "unknown key 'data.batchsize0'; `mmdata settings data` lists this section; "
            + "; ".join(f"unknown key 'data.batchsize{i}'" for i in range(1, 5))
            + "; and 25 more",
        ),
    ],
)
def test_missing_and_unknown_keys_are_named(content: dict[str, Any], message: str):
    assert told(content) == f"c.yaml: {message}"


@pytest.mark.parametrize(
    ("miner", "message"),
    [
        (
            {"name": "topk"},
            f"'train.miner': expected {MINERS}; got {{'name': 'topk'}}; did you mean 'top_k'?; for a miner of your own "
            "{name: user, target: 'module:function'}",
        ),
        ({"k": 3}, f"'train.miner': expected {MINERS}; got {{'k': 3}}"),
        ("hardest", f"'train.miner': expected {MINERS}; got 'hardest'"),
        ("top_k", f"'train.miner': expected {MINERS}; got 'top_k'; a mapping is expected, as {{name: top_k}}"),
        ({"name": "same_group"}, "'train.miner.size' is required and missing"),
        ({"name": "top_k", "k": 0}, "'train.miner.k': expected integer ≥ 1; got 0"),
        (
            {"name": "semi_hard", "k": 3},  # as other miners have
            "unknown key 'train.miner.k'; `mmdata settings train.miner` lists this section",
        ),
    ],
)
def test_a_section_of_several_kinds_is_told_by_the_kind_that_was_meant(miner: object, message: str):
    assert told({"data": DATA, "train": {"miner": miner}}) == f"c.yaml: {message}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", True, "'data.seed': expected integer; got True"),
        ("global_batch_size", 8.0, "'data.global_batch_size': expected integer ≥ 1; got 8.0"),
        ("global_batch_size", "8", "'data.global_batch_size': expected integer ≥ 1; got '8'"),
        ("global_batch_size", 0, "'data.global_batch_size': expected integer ≥ 1; got 0"),
        ("shuffle", "maybe", "'data.shuffle': expected true or false; got 'maybe'"),
        ("decode", "fats", "'data.decode': expected fast or exact; got 'fats'; did you mean 'fast'?"),
        ("shards", 3, "'data.shards': expected path or [{shards: …}, …]; got 3"),
        ("loading", 3, "'data.loading': expected {num_workers: …, num_processes: …, prefetch_batches: …}; got 3"),
        ("loading", {"num_workers": True}, "'data.loading.num_workers': expected integer ≥ 0 or auto; got True"),
        ("loading", {"max_bad_share": 1.5}, "'data.loading.max_bad_share': expected number from 0 to 1; got 1.5"),
        ("captions", "all", "'data.captions': expected one, every or {NAME: number from 0 to 1, …}; got 'all'"),
        ("join", ["a.csv"], "'data.join': expected [{table: …, shards: …, name: …}, …]; got 'a.csv', in entry 0"),
        ("crop_scale", [0.9], "'data.crop_scale': expected [number from 0 to 1, number from 0 to 1]; got [0.9]"),
        ("image_buckets", [[8, 9], [8, True]], f"'data.image_buckets': expected {SHAPES}; got True, in entry 1.1"),
        ("image_buckets", [[100000, 32]], f"'data.image_buckets': expected {SHAPES}; got 100000, in entry 0.0"),
        ("image_buckets", [], f"'data.image_buckets': expected {SHAPES}; got []"),
        ("image_patches", [], "'data.image_patches': expected [integer ≥ 1, …] or null; got []"),
        ("text_buckets", 0, "'data.text_buckets': expected integer ≥ 1 or [integer ≥ 1, …]; got 0"),
    ],
)
def test_wrong_value_is_told_what_is_expected(key: str, value: object, message: str):
    assert told({"data": {**DATA, key: value}}) == f"c.yaml: {message}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", float("inf"), "'train.lr': expected number > 0; got inf, which is not finite"),
        ("weight_decay", float("nan"), "'train.weight_decay': expected number ≥ 0; got nan, which is not finite"),
        ("betas", [0.9, 1.0], "'train.betas': expected [number ≥ 0 and < 1, number ≥ 0 and < 1]; got 1.0, in entry 1"),
        ("warmup_steps", False, "'train.warmup_steps': expected integer ≥ 0; got False"),
    ],
)
def test_wrong_number_of_training_is_told_what_is_expected(key: str, value: object, message: str):
    assert told({"data": DATA, "train": {key: value}}) == f"c.yaml: {message}"


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "'data.shards': expected path or [{shards: …}, …]; got []"),
        (["a"], "'data.shards': expected path or [{shards: …}, …]; got 'a', in entry 0"),
        ([{"shards": "a"}, {"weight": 1}], "'data.shards.1.shards' is required and missing"),
        (
            [{"shards": "a", "weight": 0.7}],
            "'data.shards.0.weight': expected integer ≥ 1 or null; got 0.7; weights are whole numbers, as 7 and 3 for "
            "70 % and 30 %",
        ),
        ([{"shards": "a", "repeat": 2000}], "'data.shards.0.repeat': expected number > 0 and ≤ 1000 or null; got 2000"),
        ([{"shards": "a", "wieght": 1}], "unknown key 'data.shards.0.wieght'; did you mean 'data.shards.0.weight'?"),
    ],
)
def test_mistake_in_a_mixture_names_its_place(shards: object, message: str):
    assert told({"data": {**DATA, "shards": shards}}) == f"c.yaml: {message}"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        # A name with a slip, or of another section.
        ("data.sede", "'data.seed'"),
        ("model.nam", "'model.name'"),
        ("data.num_worker", "'data.loading.num_workers'"),
        ("train.cache_gb", "'data.loading.cache_gb'"),
        ("data.micro_batch", "'train.micro_batch_size'"),
        ("train.scheduler", "'train.schedule'"),
        ("train.beta1", "'train.betas'"),
        # What other programs call a setting.
        ("data.batch_size", "'data.global_batch_size'"),
        ("train.train_batch_size", "'data.global_batch_size'"),
        ("data.filter", "'data.select'"),
        ("train.learning_rate", "'train.lr'"),
        ("train.clip_grad_norm", "'train.grad_clip_norm'"),
        ("data.num_steps", "'train.steps'"),
        ("train.warmup_epochs", "'train.warmup_steps'"),
        ("train.save_every_steps", "'train.checkpoint_every_steps'"),
        ("model.lock_image", "'model.freeze'"),
        ("data.hue", "'data.augment.color_jitter'"),
        ("train.grad_checkpointing", "'model.gradient_checkpointing'"),
        # Names with letters, or a word, in common with a setting that means something else.
        ("data.image_lr", None),
        ("data.image_mean", None),
        ("train.num_negatives", None),
        ("train.epsilon", None),
        ("data.gpus", None),
        ("data.world_size", None),
        ("data.label_column", None),
        ("model.root", None),
    ],
)
def test_a_setting_is_suggested_for_what_it_means(key: str, meant: str | None):
    section, name = key.split(".")
    content: dict[str, Any] = {"data": {**DATA}, "model": {}, "train": {}}
    content[section][name] = 1
    end = f"did you mean {meant}?" if meant else f"`mmdata settings {section}` lists this section"
    assert told(content) == f"c.yaml: unknown key '{key}'; {end}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.loading.num_worker=4",
            "unknown key 'data.loading.num_worker'; did you mean 'data.loading.num_workers'?",
        ),
        ("trian.lr=3", "unknown key 'trian'; did you mean 'train'?"),
        ("train.mine.size=3", "unknown key 'train.mine'; did you mean 'train.miner'?"),
        ("train.lr=fast", "'train.lr': expected number > 0; got 'fast'"),
        ("data.augment.color_jitter=true", "'data.augment.color_jitter': expected number from 0 to 2; got True"),
        (
            "data.select=true",
            "'data.select': expected text or null; got True; give a condition, or a file of keys or a mask",
        ),
    ],
)
def test_mistakes_of_file_and_command_line_are_reported_each_with_its_place(
    tmp_path: Path, override: str, message: str
):
    path = tmp_path / "c.yaml"
    path.write_text("data: {shards: a, tokenizer: b, global_batch_size: 8}\n")
    with pytest.raises(ConfigError, match=f"^on the command line: {re.escape(message)}$"):
        load_config(path, ["data.seed=1", override])
    path.write_text(path.read_text().replace("}", ", sede: 1}"))
    in_file = f"{path}: unknown key 'data.sede'; did you mean 'data.seed'?"
    with pytest.raises(ConfigError, match=f"^{re.escape(in_file)}; on the command line: {re.escape(message)}$"):
        load_config(path, [override])


def all_settings(kind: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from all_settings(inner)


def test_no_setting_takes_a_boolean_as_a_number():
    numbers = [
        field for kind in all_settings() for field in kind.model_fields.values() if "float" in repr(field.annotation)
    ]
    assert len(numbers) > 20
    for field in numbers:
        adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
        for value in (True, [True, True], {"shards": True}):
            with pytest.raises(ValidationError):
                adapter.validate_python(value)
