"""From settings to a plan: the shapes that are chosen, and the counts that they are chosen from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmdata.config import DataConfig
from mmdata.index.caption_lengths import caption_lengths
from mmdata.index.columns import ASPECT_BINS, aspect_bin
from mmdata.plan import (
    Bucket,
    CaptionSources,
    IndexRows,
    NativePolicy,
    ShardCaptions,
)
from mmdata.plan.choose import bucket_policy, caption_histogram, choose_image_shapes, choose_lengths, text_lengths
from mmdata.plan.from_config import build_plan
from mmdata.text.tokenizer import Tokenizer


@pytest.fixture
def make_policy(corpus):
    """`make_policy(**changes)`: the policy of the corpus's settings, some of them changed."""

    def make(**changes: Any):
        data = DataConfig.model_validate({**corpus.settings, **changes})
        return bucket_policy(data, corpus.index, captions_of(corpus))

    return make


def captions_of(corpus, tokens: Any = "index") -> CaptionSources:
    return CaptionSources.in_turn(ShardCaptions(corpus.index, tokens))


def histogram_of(corpus, max_length: int) -> np.ndarray:
    """Captions by length and aspect bin, one by one."""
    histogram = np.zeros((max_length + 1, ASPECT_BINS), np.int64)
    offsets, counts = corpus.index.lists("caption_tokens")
    shapes = IndexRows(corpus.index).shapes(np.arange(len(corpus.index)), 0)
    for row, bin_ in enumerate(aspect_bin(shapes.height, shapes.width).tolist()):
        for tokens in counts[offsets[row] : offsets[row + 1]].tolist():
            histogram[min(tokens, max_length), bin_] += 1
    return histogram


def test_text_lengths_chosen_from_the_manifest_are_those_of_all_captions(corpus):
    data = DataConfig.model_validate(corpus.settings)
    plan = build_plan(data, corpus.index, Tokenizer.load(data.tokenizer, max_length=data.max_length))
    _, counts = corpus.index.lists("caption_tokens")
    best = choose_lengths(np.bincount(np.minimum(counts, data.max_length)), data.text_buckets)
    assert sorted({bucket.length for bucket in plan.policy.buckets}) == best


def test_lengths_counted_for_another_tokenizer_are_those_an_index_would_hold(corpus, monkeypatch):
    data = DataConfig.model_validate(corpus.settings)
    tokenizer = Tokenizer.load(data.tokenizer, max_length=data.max_length)
    assert caption_lengths(corpus.index, tokenizer) == "index"
    monkeypatch.setattr(tokenizer, "fingerprint", "of another tokenizer")
    counted = caption_lengths(corpus.index, tokenizer)
    for found, stored in zip(counted, corpus.index.lists("caption_tokens"), strict=True):
        assert np.array_equal(found, stored)
    assert text_lengths(data, corpus.index, captions_of(corpus, counted)) == text_lengths(
        data, corpus.index, captions_of(corpus)
    )


def test_captions_longer_than_max_length_count_as_cut(corpus):
    data = DataConfig.model_validate({**corpus.settings, "max_length": 10})
    _, counts = corpus.index.lists("caption_tokens")
    best = choose_lengths(np.bincount(np.minimum(counts, 10)), data.text_buckets)
    assert text_lengths(data, corpus.index, captions_of(corpus)) == best
    assert len(best) > 1


@pytest.mark.parametrize("max_length", [500, 20])
def test_caption_histogram_counts_every_caption_by_length_and_displayed_aspect(corpus, max_length: int):
    expected = histogram_of(corpus, max_length)
    assert expected.sum() == corpus.index.captions
    assert np.array_equal(caption_histogram(corpus.index, captions_of(corpus), max_length=max_length), expected)


def test_caption_histogram_of_lengths_counted_anew_is_the_same(corpus, monkeypatch):
    monkeypatch.setattr("mmdata.index.caption_lengths.CHUNK_ROWS", 7)  # chunks that end within shards
    counted = corpus.index.lists("caption_tokens")
    assert np.array_equal(
        caption_histogram(corpus.index, captions_of(corpus, counted), max_length=30), histogram_of(corpus, 30)
    )


def test_image_buckets_auto_are_those_that_crop_least(corpus, make_policy):
    policy = make_policy(image_buckets=2, image_size=64, patch_size=8, text_buckets=[32])
    aspects = histogram_of(corpus, 32).sum(axis=0)
    chosen = choose_image_shapes(aspects, 2, image_size=64, patch_size=8)
    assert len(chosen) == 2
    assert policy.buckets == tuple(Bucket(32, *shape) for shape in chosen)


def test_token_budget_gives_each_bucket_its_rows(make_policy):
    policy = make_policy(text_buckets=[16, 32], token_budget=800, global_batch_size=32, patch_size=8)
    assert [bucket[:4] for bucket in policy.buckets] == [
        bucket[:4] for bucket in make_policy(text_buckets=[16, 32]).buckets
    ]
    # 16 patches of 8 pixels in 32 × 32, 15 in 24 × 40: 800 / (16 + 16) = 25 rows and 800 / (32 + 16) = 16.7
    assert [bucket.rows for bucket in policy.buckets] == [24, 16, 24, 16, 24, 16]


def test_image_patches_make_a_policy_at_native_resolution(make_policy):
    policy = make_policy(image_buckets=None, image_patches=[16, 64], patch_size=8, text_buckets=[32])
    assert isinstance(policy, NativePolicy)
    assert policy.buckets == (Bucket(32, 0, 0, 16), Bucket(32, 0, 0, 64))
