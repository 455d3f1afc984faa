"""`mmdata plan`: what it says of an epoch is what the loader gives."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mmdata.cli.data.plan import plan_of
from mmdata.errors import ConfigError
from mmdata.index import build_index
from tests.joins import join_first
from tests.loader.member_tars import json_of, write_tar
from tests.programs import run_program
from tests.shard_writer import ShardWriter


def plan(folder: Path, settings: dict[str, Any], *options: str) -> str:
    (folder / "c.yaml").write_text(yaml.safe_dump({"data": settings}))
    command = [sys.executable, "-m", "mmdata", "plan", str(folder / "c.yaml"), *options]
    done = run_program(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_program_says_what_the_loader_gives(corpus, tmp_path: Path):
    said = plan(tmp_path, corpus.settings, "--world-size", "2")
    batches = list(corpus.loader())
    assert f"50 rows in {len(batches)} steps" in said
    masked = sum(int((batch["rows"] < 0).sum()) for batch in batches)
    assert f"masked: {masked} places that no row fills" in said
    steps = Counter((*batch["pixel_values"].shape[2:], batch["input_ids"].shape[1]) for batch in batches)
    for (height, width, length), count in steps.items():
        assert re.search(rf"{length} │ {height} × {width} │ +8 │ +{count} │", said)
    assert "in a uniform shuffle (1 is best)\n" in said
    assert "duplicates: 0 rows meet their own image or caption in a batch\n" in said
    assert "reading: each of 2 ranks" in said


def test_plan_program_says_nothing_of_shuffling_an_order(corpus, tmp_path: Path):
    np.save(tmp_path / "order.npy", np.arange(12))
    said = plan(tmp_path, {**corpus.settings, "order": str(tmp_path / "order.npy"), "shuffle": False})
    assert "masked: 4 places that no row fills\n" in said
    assert "shuffle:" not in said


def test_plan_program_says_what_the_configs_model_does_not_take(corpus, tmp_path: Path):
    problem = "the model does not take this: images of 24 x 40 and 40 x 24 pixels: sides must be multiples of the model"
    assert problem not in plan(tmp_path, corpus.settings)
    assert f"{problem}'s patch size 16; set" in plan(tmp_path, corpus.settings, "model.name=vit_b_16")


def test_plan_program_says_how_many_captions_are_cut(corpus, tmp_path: Path):
    captions = ["a", "a dog", "a small red dog sits under a tree in the street by the house"]
    few = [replace(corpus.samples[i], captions=[caption]) for i, caption in enumerate(captions)]
    corpus.write_beside(tmp_path / "few", few)
    settings = {**corpus.settings, "shards": str(tmp_path / "few"), "global_batch_size": 2}
    assert "captions are longer" not in plan(tmp_path, {**settings, "max_length": 77})
    said = plan(tmp_path, {**settings, "max_length": 8})
    assert "cut: 1 captions are longer than max_length (8 tokens) and are cut to it\n" in said


def test_plan_program_takes_settings_before_and_after_options(corpus, tmp_path: Path):
    one = plan(tmp_path, corpus.settings, "data.text_buckets=[32]", "--epoch", "1", "data.global_batch_size=10")
    assert "epoch 1: 50 rows in 5 steps" in one


def test_plan_program_says_what_each_dataset_gives(corpus, tmp_path: Path):
    few = [replace(sample, key=f"few{sample.key}") for sample in corpus.samples[:5]]
    corpus.write_beside(tmp_path / "few", few)
    shards = [{"shards": corpus.settings["shards"]}, {"shards": str(tmp_path / "few"), "repeat": 10}]
    said = plan(tmp_path, {**corpus.settings, "shards": shards, "text_buckets": [32], "global_batch_size": 20})
    assert "100 rows in 5 steps" in said
    assert re.search(r"dataset '\S+/shards': 50 rows, 50.0% of the epoch; 1.00 passes over its 50\n", said)
    assert re.search(r"dataset '\S+/few': 50 rows, 50.0% of the epoch; 10.00 passes over its 5\n", said)
    assert "in a uniform shuffle (the shares of the datasets move it away from 1)\n" in said
    assert re.search(r"duplicates: [1-9]\d* rows meet .*; train.mask_false_negatives=true makes them no neg", said)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"size": 5}, "groups: 25 of 50 rows stand in whole groups of 5\n"),  # of groups of 8, 2 and 20: 5, 0, 20
        ({"candidates": 7}, "groups: 28 of 50 rows have all 7 candidates\n"),  # those of 8 and of 20
    ],
)
def test_plan_program_says_how_many_rows_have_their_group(corpus, tmp_path: Path, groups: dict[str, int], told: str):
    np.save(tmp_path / "g.npy", np.repeat([0, 1, 2, -1], [8, 2, 20, 20]))
    settings = {**corpus.settings, "groups": {"source": str(tmp_path / "g.npy"), **groups}}
    settings |= {"global_batch_size": 40}
    assert told in plan(tmp_path, settings)
    assert told.replace("groups: ", "groups: at most ") in plan(tmp_path, {**settings, "shuffle_window_rows": 49})


def test_plan_program_says_when_a_run_has_groups_of_its_own(corpus, tmp_path: Path):
    said = plan(tmp_path, {**corpus.settings, "groups": {"source": "run", "size": 4, "every_epochs": 2}})
    told = "groups: none here. The run makes them from its own features; its epochs from 2 on have them, 4 rows in each"
    assert told in said
    assert "stand in whole groups" not in said


def test_plan_program_counts_duplicates_by_the_column_of_the_hash(corpus, tmp_path: Path):
    table = corpus.table(tmp_path / "meant.parquet", meant=[0] * 50)
    settings = {**corpus.settings, "join": [{"table": table}], "caption_hash": "meant"}
    join_first(settings)
    said = plan(tmp_path, settings)
    batches = re.search(r"50 rows in (\d+) steps", said)
    assert batches is not None
    told = f"duplicates: {50 - int(batches[1])} rows meet their own image or caption in a batch; "
    assert f"{told}train.mask_false_negatives=true makes them no negatives\n" in said
    said = plan(tmp_path, settings, "train.mask_false_negatives=true")
    assert f"{told}train.mask_false_negatives is set: they are no negatives\n" in said


def test_plan_program_leaves_out_shapes_without_a_batch(corpus, tmp_path: Path):
    said = plan(tmp_path, {**corpus.settings, "text_buckets": [1, 32], "image_buckets": None, "image_size": 32})
    assert "shapes: 1 as above; 1 more of the settings have no batch in this epoch\n" in said
    assert not re.search(r"│ +0 │", said)


def test_plan_program_takes_a_folder_of_shards_and_says_what_it_assumes(corpus):
    shards = corpus.settings["shards"]
    done = run_program(
        [sys.executable, "-m", "mmdata", "plan", shards, "data.image_size=32"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "50 rows in 1 step " in done.stdout
    counted_by = corpus.index.tokenizer
    assert (
        "no config is given; assumed: data.global_batch_size=50, "
        f"data.tokenizer=the one that counted the index ({counted_by}), data.max_length=77\n"
    ) in done.stdout
    planned = plan_of(shards, ["data.global_batch_size=8", "data.max_length=32"])
    with corpus.loader(text_buckets=8, image_buckets=None, seed=0) as loader:
        expected = [step.rows.tolist() for step in loader.plan.steps(0)]
    assert [step.rows.tolist() for step in planned.plan.steps(0)] == expected
    named = plan_of(shards, [f"data.tokenizer={corpus.settings['tokenizer']}"])
    assert [line.partition("=")[0] for line in named.assumed] == [
        "data.global_batch_size",
        "data.image_size",
        "data.max_length",
    ]


def test_plan_of_shards_without_caption_lengths_asks_for_a_tokenizer(corpus, tmp_path: Path):
    with ShardWriter(tmp_path / "uncounted") as writer:
        writer.write(corpus.samples[0])
    with pytest.raises(ConfigError, match=r"no tokenizer has counted their captions.*data\.tokenizer=NAME_OR_FOLDER"):
        plan_of(str(tmp_path / "uncounted"), [])
    with pytest.raises(
        ConfigError,
        match=r"override 'data\.global_batch_size': expected key=value",
    ):
        plan_of(corpus.settings["shards"], ["data.global_batch_size"])
    with pytest.raises(ConfigError, match=r"on the command line: unknown key 'data\.batch'"):
        plan_of(corpus.settings["shards"], ["data.batch=3"])


def test_plan_program_takes_a_condition_in_backquotes_from_the_command_line(corpus, tmp_path: Path):
    table = corpus.table(tmp_path / "scores.parquet", **{"clip score": [row / 50 for row in range(50)]})
    settings = {**corpus.settings, "join": [{"table": table}]}
    join_first({**settings, "select": "`clip score` > 0.39"})
    said = plan(tmp_path, settings, "data.select=`clip score` > 0.39")
    assert "data.select `clip score` > 0.39 (" in said
    assert ": 30 of 50 rows" in said


def test_plan_program_of_shards_warns_once(corpus, tmp_path: Path):
    (tmp_path / "keys.txt").write_text("\n".join([*(sample.key for sample in corpus.samples[:20]), "none"]))
    command = [
        *(sys.executable, "-m", "mmdata", "plan"),
        corpus.settings["shards"],
        f"data.select={tmp_path / 'keys.txt'}",
    ]
    done = run_program(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("21 keys, and 20 rows have one of them") == 1


def test_plan_program_says_for_how_many_boxes_there_is_room(tmp_path: Path, photo: Any):
    samples = {
        f"{row}": {"jpg": photo(24, 24, seed=row), "json": json_of({"boxes": [[1, 2, 3, 4]] * (1 + row % 3)})}
        for row in range(12)
    }
    write_tar(tmp_path / "shards" / "a.tar", {key: {**one, "cls": b"1"} for key, one in samples.items()})
    build_index(tmp_path / "shards")
    settings = {"shards": str(tmp_path / "shards"), "global_batch_size": 4, "image_size": 32}
    said = plan(tmp_path, {**settings, "targets": {"boxes": "json:boxes", "box_buckets": 3}})
    assert re.search(r"image ┃ +boxes ┃ +batch ┃", said)
    for boxes in (1, 2, 3):
        assert re.search(rf"32 × 32 │ +{boxes} │ +4 │ +1 │ +4 │", said)
    assert "boxes" not in plan(tmp_path, settings)
