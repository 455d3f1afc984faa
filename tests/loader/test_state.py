"""A state is taken by loaders that make the same pixels and tokens; others refuse it, or say what they cannot know."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdata import Loader
from mmdata.errors import ConfigError
from mmdata.text.tokenizer import train_tokenizer

from .conftest import Corpus, placed

SCORES = [{"table": "FOLDER/scores.parquet"}]
OTHER_SCORES = [{"table": "FOLDER/other_scores.parquet"}]
ONE_LENGTH = {"text_buckets": [32]}  # or the lengths of other rows are other buckets, too
FLIPPED = {"augment": {"horizontal_flip_prob": 1.0}}
MIXED = [{"shards": "FOLDER/first"}, {"shards": "FOLDER/second"}]


def captions(first: float, join: list[Any] = SCORES) -> dict[str, Any]:
    return {"join": join, "captions": {"shards": first, "join:recap": 1 - first}}


def weighted(*weights: int) -> dict[str, Any]:
    return {"shards": [{**one, "weight": weight} for one, weight in zip(MIXED, weights, strict=True)]}


def grouped(file: str) -> dict[str, Any]:
    return {"groups": {"source": f"FOLDER/{file}", "size": 2}}


@pytest.fixture(scope="module")
def files(corpus: Corpus, second: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the settings name; what has "same" in its name differs in its name, and in the order of a table."""
    folder, rows = tmp_path_factory.mktemp("files"), list(range(50))
    for name, shards in (("first", corpus.folder / "shards"), ("second", second)):
        (folder / name).symlink_to(shards)

    def write(name: str, order: list[int], *, add: int) -> None:
        columns: dict[str, Any] = {
            "score": [(row + add) % 50 / 50 for row in order],
            "meant": [row % (4 + add) for row in order],
            "recap": [f"recaption {row + add}" for row in order],
        }
        corpus.table(folder / f"{name}.parquet", order, **columns)

    write("scores", rows, add=0)
    write("same_scores", rows[::-1], add=0)
    write("other_scores", rows, add=1)
    corpus.table(folder / "negatives.parquet", captions=[["a dog"]] * 50)
    corpus.table(folder / "same_negatives.parquet", captions=[["a dog"]] * 50)
    corpus.table(folder / "other_negatives.parquet", captions=[["a cat"]] * 50)
    for name, add in (("", 0), ("same_", 0), ("other_", 1)):
        np.save(folder / f"{name}weights.npy", np.arange(50) % 3 + 0.5 + add)
        np.save(folder / f"{name}groups.npy", (np.arange(50) + add) // 2)
        (folder / f"{name}keys.txt").write_text("\n".join(one.key for one in corpus.samples[add::2]))
    return folder


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"seed": 6}, "seed was 5 and is 6; resume with the settings and shards it was saved"),
        ({}, {"global_batch_size": 16}, "global_batch_size was 8 and is 16; resume"),
        ({}, {"shuffle": False}, "shuffle was True and is False; resume"),
        (
            ONE_LENGTH,
            {"text_buckets": [16, 32]},
            r"policy \(text_buckets, .*\) was '32 tokens, .* \(\w{16}\)' and is '16-32 tokens, .* \(\w{16}\)'; resume",
        ),
        (
            {},
            {"image_buckets": [[32, 48]]},
            r"policy \(.*image_buckets.*\) was '.*' and is '.* tokens, 32x48 \(\w{16}\)'",
        ),
        (
            ONE_LENGTH,
            {**ONE_LENGTH, "token_budget": 400},
            r"policy \(.*token_budget\) was '.*' and is '32 tokens, .*, 8 rows \(\w{16}\)'",
        ),
        ({}, {"seed": 6, "shuffle": False}, "seed was 5 and is 6, shuffle was True and is False; resume"),
        # pixels
        ({}, {"transform": "eval"}, r"transform was 'train' and is 'eval', crop_scale was \[0\.3, 0\.9\] and is None"),
        ({}, {"crop_scale": [0.2, 0.3]}, r"crop_scale was \[0\.3, 0\.9\] and is \[0\.2, 0\.3\]"),
        ({}, FLIPPED, r"augment was None and is \{'horizontal_flip_prob': 1\.0\}"),
        (FLIPPED, {}, r"augment was \{'horizontal_flip_prob': 1\.0\} and is None"),
        ({}, {"decode": "exact"}, "decode was 'fast' and is 'exact'; resume with the"),
        # texts
        ({}, {"caption_dropout": 0.2}, r"caption_dropout was None and is 0\.2; resume"),
        ({"caption_dropout": 0.1}, {"caption_dropout": 0.2}, r"caption_dropout was 0\.1 and is 0\.2; resume"),
        ({}, {"caption_template": "a {}"}, "caption_template was None and is 'a {}'"),
        (captions(0.4), captions(0.3), r"captions was 'data.captions shards 0.4, join:recap 0.6 \(.*\)' and is 'data"),
        (captions(0.4), {}, "captions was 'data.captions .* and is None"),
        (captions(0.4), captions(0.4, OTHER_SCORES), r"captions was 'data\.captions shards"),
        (
            {"negative_captions": "FOLDER/negatives.parquet"},
            {"negative_captions": "FOLDER/other_negatives.parquet"},
            r"negative_captions was '\w{16}' and is '\w{16}'",
        ),
        ({"negative_captions": "FOLDER/negatives.parquet"}, {}, r"negative_captions was '\w{16}' and is None"),
        # which rows, and how often
        ({"select": "FOLDER/keys.txt"}, {"select": "FOLDER/other_keys.txt"}, r"selection was 'data.select keys.txt \("),
        ({"select": "FOLDER/keys.txt"}, {}, r"selection was 'data.select keys.txt \(\w+\)' and is None"),
        (
            {"join": SCORES, "select": "score > 0.5"},
            {"join": OTHER_SCORES, "select": "score > 0.5"},
            "selection was",
        ),
        (
            {"val": {"share": 0.3}} | ONE_LENGTH,
            {"val": {"share": 0.2}} | ONE_LENGTH,
            r"selection was 'data\.split train of data\.val\.share 0\.3' and is .*share 0.2'",
        ),
        ({"val": {"share": 0.3}} | ONE_LENGTH, ONE_LENGTH, r"selection was 'data\.split train .* and is None"),
        ({"row_weights": "FOLDER/weights.npy"}, {"row_weights": "FOLDER/other_weights.npy"}, "weights was 'data.row_"),
        ({"row_weights": "FOLDER/weights.npy"}, {}, "weights was 'data.row_weights weights.npy"),
        ({}, {"captions": "every"}, "weights was None and is 'data.captions every"),
        (grouped("groups.npy"), grouped("other_groups.npy"), r"mixture \(.*groups\) was '\w+' and is '\w+'; resume"),
        ({}, grouped("groups.npy"), r"mixture \(.*groups\) was '\w+' and is '\w+'; resume"),
        (weighted(3, 1), weighted(1, 1), r"mixture \(weight .*\) was"),
        # columns
        (
            {"join": SCORES, "fields": {"x": "join:score"}},
            {"join": OTHER_SCORES, "fields": {"x": "join:score"}},
            r"fields was 'data\.fields x join:score \(\w{16}\)' and is 'data\.fields x .* \(\w{16}\)'; resume with",
        ),
        ({"join": SCORES, "caption_hash": "meant"}, {"join": SCORES}, "caption_hash was '"),
        (
            {"join": SCORES, "caption_hash": "meant"},
            {"join": OTHER_SCORES, "caption_hash": "meant"},
            "caption_hash was '",
        ),
    ],
)
def test_state_of_other_batches_is_refused(
    corpus: Corpus, files: Path, before: dict[str, Any], after: dict[str, Any], message: str
):
    with corpus.loader(**placed(before, files)) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
    with (
        corpus.loader(**placed(after, files)) as loader,
        pytest.raises(ConfigError, match=rf"^this loader state belongs to other batches: .*{message}"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"transform": "eval"}, {"transform": "eval", "crop_scale": [0.5, 0.6]}),
        ({}, {"augment": {"horizontal_flip_prob": 0.0, "grayscale_prob": 0.0}}),
        (captions(0.4), captions(0.4, [{"table": "FOLDER/same_scores.parquet"}])),
        (
            {"negative_captions": "FOLDER/negatives.parquet"},
            {"negative_captions": "FOLDER/same_negatives.parquet"},
        ),
        ({"select": "FOLDER/keys.txt"}, {"select": "FOLDER/same_keys.txt"}),
        ({"row_weights": "FOLDER/weights.npy"}, {"row_weights": "FOLDER/same_weights.npy"}),
        (
            {"join": SCORES, "select": "score > 0.5", "fields": {"x": "join:score"}},
            {
                "join": [{"table": "FOLDER/same_scores.parquet"}],
                "select": "score > 0.5",
                "fields": {"x": "join:score"},
            },
        ),
    ],
)
def test_state_of_the_same_batches_is_taken_whatever_a_setting_or_a_file_is_called(
    corpus: Corpus, files: Path, before: dict[str, Any], after: dict[str, Any]
):
    with corpus.loader(**placed(before, files)) as loader:
        state = loader.state_dict()
    with corpus.loader(**placed(after, files)) as loader:
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("setting", "body"),
    [
        ("transform", "def make(image, size, generator):\n    return image.new_zeros(3, *size)\n"),
        ("text_transform", "def make(text, rng):\n    return text + ' again'\n"),
    ],
)
def test_state_of_a_function_whose_file_has_changed_is_taken_and_said(
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    body: str,
):
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("with_a_state", None)
    file = tmp_path / "with_a_state.py"
    file.write_text(f"{body}\nother = make\n")
    settings = {setting: "with_a_state:make", "num_processes": 0}
    state = corpus.loader(**settings).state_dict()
    corpus.loader(**settings).load_state_dict(state)
    assert caplog.records == []
    file.write_text(f"{body}\nother = make  # the same\n")
    sys.modules.pop("with_a_state")
    corpus.loader(**settings).load_state_dict(state)
    said = f"{setting} 'with_a_state:make': its file is not what it was when this loader state was taken; if"
    assert caplog.messages[0].startswith(said)
    with pytest.raises(ConfigError, match=rf"{setting} was '\w+:make' and is '\w+:other'; resume"):
        corpus.loader(**settings | {setting: "with_a_state:other"}).load_state_dict(state)


def test_state_of_another_tokenizer_is_refused_where_lengths_do_not_tell(corpus: Corpus, tmp_path: Path):
    train_tokenizer(["zebra crossing at noon"] * 3, tmp_path / "other", vocab_size=310)
    one_length = {"text_buckets": [32]}  # the plan then does not ask how long the captions are
    was, is_now = corpus.loader(**one_length), corpus.loader(**one_length, tokenizer=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"other batches: tokenizer was '\w{16}-\d+' and is '\w{16}-\d+'; re"):
        is_now.load_state_dict(was.state_dict())


def test_state_of_another_seed_of_the_transform_alone_is_refused(corpus: Corpus):
    loader = corpus.loader()
    state = loader.state_dict()
    loader.builder.spec.transform.seed = 6
    with pytest.raises(ConfigError, match=r"other batches: transform_seed was None and is 6; resume"):
        Loader(loader.plan, loader.builder).load_state_dict(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 0, "prefetch_batches": 5, "cache_gb": 1.0, "max_bad_share": 0.5},
        {"num_processes": 2},
    ],
)
def test_state_is_taken_where_only_the_work_is_done_otherwise(
    corpus: Corpus, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
):
    corpus.loader(**changes).load_state_dict(corpus.loader().state_dict())
    assert caplog.records == []


def test_state_is_small_whatever_is_in_it(corpus: Corpus):
    augment = {"horizontal_flip_prob": 0.123, "color_jitter": 0.123, "grayscale_prob": 0.123}
    loader = corpus.loader(augment=augment, crop_scale=[0.123, 0.456])
    state = {**loader.state_dict(), "rows_seen": 10**12, "rows_masked": {"corrupt_image": 10**9, "file_changed": 10**9}}
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1024
