from __future__ import annotations

import numpy as np

from mmdata.config import DataConfig
from mmdata.loader.planning import build_plan, caption_lengths, text_lengths, token_histogram
from mmdata.plan import choose_lengths
from mmdata.transform.text import Tokenizer


def test_text_lengths_chosen_from_the_manifest_are_those_of_all_captions(corpus):
    data = DataConfig.model_validate(corpus.settings)
    plan = build_plan(data, corpus.index, Tokenizer.load(data.tokenizer, max_length=data.max_length))
    _, counts = corpus.index.lists("caption_tokens")
    best = choose_lengths(np.bincount(np.minimum(counts, data.max_length)), data.num_text_buckets)
    assert sorted({bucket.length for bucket in plan.policy.buckets}) == best


def test_lengths_counted_for_another_tokenizer_are_those_an_index_would_hold(corpus, monkeypatch):
    data = DataConfig.model_validate(corpus.settings)
    tokenizer = Tokenizer.load(data.tokenizer, max_length=data.max_length)
    assert caption_lengths(corpus.index, tokenizer) == "index"
    monkeypatch.setattr(tokenizer, "fingerprint", "of another tokenizer")
    counted = caption_lengths(corpus.index, tokenizer)
    for found, stored in zip(counted, corpus.index.lists("caption_tokens"), strict=True):
        assert np.array_equal(found, stored)
    assert np.array_equal(token_histogram(corpus.index, counted), token_histogram(corpus.index, "index"))


def test_captions_longer_than_max_length_count_as_cut(corpus):
    data = DataConfig.model_validate({**corpus.settings, "max_length": 5})
    assert text_lengths(data, np.array([0, 0, 0, 7, 0, 1, 0, 9])) == [3, 5]
