"""Settings that depend on each other, mixtures, and the settings of an evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mmdata.config import Config, DataConfig, LoadingConfig, TrainConfig
from mmdata.config.corpus import SourceConfig, ValConfig, sources
from mmdata.config.data import evaluation_data
from mmdata.config.settings import changeable_settings
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError

DATA = {"shards": "shards", "tokenizer": "tokenizer", "global_batch_size": 8}
A, B = {"shards": "a"}, {"shards": "b"}
AUGMENT = {"color_jitter": 0.1, "horizontal_flip_prob": 0.5}
BOTH = "shards: give each dataset a weight and none a repeat, or none of them a weight"
REPEAT = "give each dataset a repeat in place of its weight"
NO_SHARE = "split val is a share of the rows, and val.share is not set"


def data_of(shards: object = "shards", **changes: object) -> DataConfig:
    return parse(DataConfig, {**DATA, "shards": shards, **changes}, origin="c")


def test_paths_are_taken_as_their_text():
    paths = {"shards": Path("a/b"), "val": {"shards": Path("c")}, "tokenizer": Path("d")}
    config = parse(Config, {"data": {**DATA, **paths}, "train": {"output": Path("e")}}, origin="c")
    assert (config.data.shards, config.data.val.shards, config.data.tokenizer) == ("a/b", "c", "d")
    assert config.train.output == "e"


def test_settings_cannot_be_changed_later_and_a_copy_is_checked():
    data = data_of("a")
    with pytest.raises(ValueError, match="frozen"):
        data.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"^loading is a section: give a LoadingConfig, not a dictionary$"):
        data.model_copy(update={"loading": {"num_workers": 0}})
    with pytest.raises(ValueError, match=r"^DataConfig has no setting num_worker$"):
        data.model_copy(update={"num_worker": 4})


def test_a_resumed_run_may_change_all_of_loading_and_what_is_marked():
    changeable = set(changeable_settings(Config))
    loading = [f"data.loading.{name}" for name in LoadingConfig.model_fields]
    places = ["shards", "shards.shards", "val.shards", "val.classes", "join.table", "join.shards"]
    assert {name for name in changeable if name.startswith("data.")} == {*loading, *(f"data.{name}" for name in places)}
    assert {"train.micro_batch_size", "model.gradient_checkpointing"} <= changeable
    assert "train.lr" not in changeable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_scale": [0.9, 0.5]}, "crop_scale must be (min, max) with 0 < min <= max: got (0.9, 0.5)"),
        ({"crop_scale": [0, 0.5]}, "crop_scale must be (min, max) with 0 < min <= max: got (0.0, 0.5)"),
        (
            {"shorter_side": 223},
            "shorter_side (223) must be at least 224, the shorter side of the largest image shape: else each image "
            "would be made smaller than its crop, and enlarged again",
        ),
        ({"image_buckets": [[90, 60], [64, 80]], "shorter_side": 63}, "shorter_side (63) must be at least 64, the sho"),
        ({"image_patches": [64, 260], "shorter_side": 255}, "shorter_side (255) must be at least 256, the shorter "),
        (
            {"loading": {"cache_pixels_gb": 1}},
            "loading.cache_pixels_gb keeps images of data.shorter_side, which is not set: set it, to 256 for an "
            "image_size of 224, or leave cache_pixels_gb out",
        ),
        ({"image_buckets": [[8, 9], [8, 9]]}, "image_buckets must differ from each other: got [[8, 9], [8, 9]]"),
        ({"image_patches": [256, 64]}, "image_patches must rise: got [256, 64]"),
        ({"image_patches": [64, 64]}, "image_patches must rise: got [64, 64]"),
        (
            {"image_patches": [64], "image_buckets": [[224, 224]]},
            "image_patches and image_buckets exclude each other: give one",
        ),
        (
            {"image_buckets": 3, "patch_size": 14, "image_size": 384},
            "image_size (384) must be a multiple of patch_size (14) where image_buckets is a number: the shapes that "
            "are chosen consist of whole patches",
        ),
        ({"text_buckets": [30, 20, 77]}, "text_buckets must rise: got [30, 20, 77]"),
        ({"text_buckets": [20, 20, 77]}, "text_buckets must rise: got [20, 20, 77]"),
        ({"text_buckets": [20, 30]}, "the last of text_buckets must be max_length (77): got 30"),
        (
            {"token_budget": 8192, "num_lanes": 16, "global_batch_size": 8},
            "with token_budget, the rows of each batch are a multiple of 16 for num_lanes 16: set global_batch_size to "
            "16 or more, got 8",
        ),
        (
            {"augment": AUGMENT, "transform": "eval"},
            "augment changes the crops of transform train, and transform is 'eval': leave augment out "
            "(data.augment=null)",
        ),
        ({"groups": {}}, "'groups': give either size (rows of a group together) or candidates (a row and others of"),
        ({"groups": {"size": 2, "candidates": 3}}, "'groups': give either size (rows of a group together) or candid"),
        (
            {"groups": {"candidates": 2, "share": 0.5}},
            "'groups': share needs groups of a size: candidates follow every row",
        ),
        ({"val": {"shards": "v", "share": 0.01}}, "'val': shards ('v') and share (0.01) exclude each other: give one"),
        (
            {"val": {"share": 0.1, "select": "width > 3"}},
            "'val': select chooses rows of val.shards, which is not set; data.select chooses those of a share",
        ),
        ({"val": {"share": 0}}, "'val.share': expected number > 0 and < 1 or null; got 0"),
        ({"split": "val"}, NO_SHARE),
        ({"split": "val", "val": {"shards": "v"}}, f"{NO_SHARE}; to load 'v', set shards to it"),
        ({"shards": [{**A, "weight": 3}, B]}, BOTH),
        ({"shards": [{**A, "weight": 3}, {**B, "repeat": 2}]}, BOTH),
        ({"shards": [{**A, "weight": 3, "repeat": 2}]}, BOTH),
        (
            {"shards": [{**A, "weight": 30}, {**B, "weight": 12}], "global_batch_size": 10},
            "global_batch_size 10 cannot hold the weights 30 : 12 to the row: it must be a multiple of 7; 7 is",
        ),
        (
            {"shards": [{**A, "weight": 3}, {**B, "weight": 1}], "global_batch_size": 10},
            "global_batch_size 10 cannot hold the weights 3 : 1 to the row: it must be a multiple of 4; 8 is",
        ),
        (
            {"shards": [{**A, "weight": 1}, {**B, "weight": 1}], "token_budget": 99},
            f"weights of shards does not go with token_budget: {REPEAT}",
        ),
        (
            {"shards": [{**A, "weight": 1}, {**B, "weight": 1}], "groups": {"size": 2}},
            f"weights of shards does not go with groups: {REPEAT}",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"^c: {re.escape(message)}"):
        data_of(**changes)


def test_epochs_and_steps_exclude_each_other():
    said = r"^c: epochs \(1\) and steps \(2\) exclude each other: .*, as in train\.epochs=null$"
    with pytest.raises(ConfigError, match=said):
        parse(TrainConfig, {"epochs": 1, "steps": 2}, origin="c")


@pytest.mark.parametrize(
    "changes",
    [
        {"image_buckets": 3},
        {"token_budget": 8192, "num_lanes": 4},
        {"token_budget": 8192, "num_lanes": 3, "global_batch_size": 96},
        {"image_patches": [64, 256], "token_budget": 8192},
    ],
)
def test_shapes_that_fit_together_are_taken(changes: dict[str, Any]):
    assert data_of(**changes).model_dump(include=set(changes)) == changes


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
    assert data_of(global_batch_size=rows, token_budget=4096, **changes).row_multiple == multiple


@pytest.mark.parametrize("groups", [None, {"size": 3}, {"size": 4}])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 8, 12, 24, 40, 64])
def test_rows_that_the_message_about_ranks_names_are_shared_by_them(world_size: int, groups: dict[str, int] | None):
    shared = world_size * (groups["size"] if groups else 1)
    for times in (32, 64, 512):
        data = data_of(global_batch_size=times * shared, token_budget=4096, groups=groups)
        assert data.row_multiple % shared == 0
        assert data.row_multiple <= times * shared // 4


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ("a", [("a", None, 1.0)]),
        ([{"shards": "a", "weight": 3}], [("a", None, 1.0)]),
        ([{"shards": "a", "repeat": 2}], [("a", None, 2.0)]),
        ([{"shards": Path("a")}, B], [("a", None, 1.0), ("b", None, 1.0)]),
        ([A, {**B, "repeat": 3}], [("a", None, 1.0), ("b", None, 3.0)]),
        ([{**A, "weight": 30}, {**B, "weight": 10}], [("a", 30, None), ("b", 10, None)]),
    ],
)
def test_sources_all_have_a_weight_or_all_a_repeat(shards: object, expected: list[tuple[str, int, float]]):
    found = sources(data_of(shards, global_batch_size=12))
    assert [(source.shards, source.weight, source.repeat) for source in found] == expected
    assert all(isinstance(source, SourceConfig) for source in found)


def test_val_is_off_by_default_and_by_null():
    for changes in ({}, {"val": None}):
        assert not data_of(**changes).val
    assert data_of(val={"shards": "v"}).val == ValConfig(shards="v")


def test_an_evaluation_is_plain_whatever_training_mixes():
    mixture = [{**A, "repeat": 1}, {**B, "repeat": 2}]
    training = {"groups": {"size": 2}, "token_budget": 4096, "augment": AUGMENT}
    plain = evaluation_data(data_of(mixture, val={"shards": "v"}, **training))
    assert plain == data_of("v", val={"shards": "v"}, transform="eval", shuffle=False, loading={"num_processes": 0})
    data = evaluation_data(data_of("a", val={"share": 0.25}, seed=3))
    assert (data.shards, data.split, data.transform, data.shuffle) == ("a", "val", "eval", False)


@pytest.mark.parametrize("name", ["laion", "laion/", "./laion", f"{Path.cwd()}/laion", f"file://{Path.cwd()}/laion"])
def test_an_evaluation_on_the_same_folder_joins_what_its_select_needs(name: str):
    training = {"join": [{"table": "c.parquet"}], "select": "split == 'train'"}
    chosen = evaluation_data(data_of("laion", val={"shards": name, "select": "split == 'val'"}, **training))
    assert [one.table for one in chosen.join] == ["c.parquet"]
    assert evaluation_data(data_of("laion", val={"shards": name}, **training)).join == []
    other = evaluation_data(data_of("laion2", val={"shards": name, "select": "width > 3"}, **training))
    assert other.join == []


KEYPOINTS = {"boxes": "json:boxes", "keypoints": "json:keypoints"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"transform": "eval", "targets": {"boxes": "json:boxes", "keep_boxes": True}},
            "targets.keep_boxes changes the random crops of transform train, and transform is 'eval': leave keep_boxes "
            "out",
        ),
        *(
            (
                {"transform": "own:transform", "targets": {**KEYPOINTS, name: value}},
                f"targets.{name} is for the transforms train and eval, and a transform of your own, 'own:transform', "
                f"moves and leaves out boxes itself: leave {name} out",
            )
            for name, value in {"keypoint_swaps": [], "min_visible": 0.5}.items()
        ),
        (
            {"augment": AUGMENT, "targets": KEYPOINTS},
            "targets.keypoint_swaps is not set, and augment.horizontal_flip_prob mirrors images, where a left eye "
            "becomes a right one: list the pairs of key points that a flip exchanges, as [[1, 2], [3, 4]], or [] for "
            "none",
        ),
    ],
)
def test_targets_that_a_transform_cannot_follow_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        data_of(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"augment": AUGMENT, "targets": {**KEYPOINTS, "keypoint_swaps": []}},
        {"augment": AUGMENT, "targets": {"boxes": "json:boxes", "keep_boxes": True}},
        {"augment": {"color_jitter": 0.1}, "targets": KEYPOINTS},
        {"transform": "own:transform", "targets": {**KEYPOINTS, "min_visible": 0.25}},
    ],
)
def test_targets_that_a_transform_can_follow_are_taken(changes: dict[str, Any]):
    assert data_of(**changes).targets is not None
