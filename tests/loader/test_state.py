"""A state is taken by loaders that make the same pixels and tokens; others refuse it, or say what they cannot know."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata import Loader
from mmdata.errors import ConfigError
from mmdata.text.tokenizer import train_tokenizer

from .conftest import Corpus

AUGMENTED = {"augment": {"horizontal_flip_prob": 1.0}}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"transform": "eval"}, r"transform was 'train' and is 'eval', crop_scale was \[0\.3, 0\.9\] and is None"),
        ({}, {"crop_scale": [0.2, 0.3]}, r"crop_scale was \[0\.3, 0\.9\] and is \[0\.2, 0\.3\]"),
        ({}, AUGMENTED, r"augment was None and is \{'horizontal_flip_prob': 1\.0\}"),
        (AUGMENTED, {}, r"augment was \{'horizontal_flip_prob': 1\.0\} and is None"),
    ],
)
def test_state_of_other_pixels_is_refused(corpus: Corpus, before: dict[str, Any], after: dict[str, Any], message: str):
    was, is_now = corpus.loader(**before), corpus.loader(**after)
    with pytest.raises(ConfigError, match=rf"^this loader state belongs to other batches: {message}; resume "):
        is_now.load_state_dict(json.loads(json.dumps(was.state_dict())))
    first, second = next(iter(was)), next(iter(is_now))
    assert torch.equal(first["rows"], second["rows"])
    assert not torch.equal(first["pixel_values"], second["pixel_values"])


def test_state_of_another_decoding_is_refused(corpus: Corpus):
    with pytest.raises(ConfigError, match=r"other batches: decode was 'fast' and is 'exact'; resume with the"):
        corpus.loader(decode="exact").load_state_dict(corpus.loader().state_dict())


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


def test_state_is_taken_where_a_setting_makes_no_difference(corpus: Corpus):
    plain = corpus.loader(transform="eval")
    corpus.loader(transform="eval", crop_scale=[0.5, 0.6]).load_state_dict(plain.state_dict())
    no_change = {"horizontal_flip_prob": 0.0, "grayscale_prob": 0.0}
    corpus.loader(augment=no_change).load_state_dict(corpus.loader().state_dict())


def test_state_of_a_transform_whose_file_has_changed_is_taken_and_said(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "transforms_with_a_state.py"
    body = "def make(image, size, generator):\n    return image.new_zeros(3, *size)\n\n\nother = make\n"
    file.write_text(body)
    settings = {"transform": "transforms_with_a_state:make", "num_processes": 0}
    state = corpus.loader(**settings).state_dict()
    corpus.loader(**settings).load_state_dict(state)
    assert caplog.records == []
    file.write_text(body.replace("zeros", "ones"))
    sys.modules.pop("transforms_with_a_state")
    corpus.loader(**settings).load_state_dict(state)
    assert (
        caplog.records[0]
        .getMessage()
        .startswith(
            "transform 'transforms_with_a_state:make': its file is not what it was when this loader state was taken; if"
        )
    )
    with pytest.raises(ConfigError, match=r"transform was '\w+:make' and is '\w+:other'; resume"):
        corpus.loader(**settings | {"transform": "transforms_with_a_state:other"}).load_state_dict(state)


def test_state_is_small_whatever_is_in_it(corpus: Corpus):
    augment = {"horizontal_flip_prob": 0.123, "color_jitter": 0.123, "grayscale_prob": 0.123}
    loader = corpus.loader(augment=augment, crop_scale=[0.123, 0.456])
    state = {**loader.state_dict(), "rows_seen": 10**12, "rows_masked": {"corrupt_image": 10**9, "file_changed": 10**9}}
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1024
