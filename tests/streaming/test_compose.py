"""The buffer: every sample once, shapes that hold their captions, memory that is bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.images import ImageInfo
from mmdata.streaming import composer
from mmdata.streaming.composer import Composer, Pass, StreamStep
from mmdata.streaming.samples import StreamSample
from mmdata.text.tokenizer import Tokenizer

BATCH = 8


def make_samples(count: int, seed: int = 0) -> list[StreamSample]:
    """Samples of random shapes and caption lengths; the image is never looked at."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        info = ImageInfo("JPEG", *map(int, rng.integers(20, 60, 2)), orientation=int(rng.integers(1, 9)))
        caption = "a red dog " * int(rng.integers(1, 30))
        samples.append(
            StreamSample("x.tar", str(i), bytes(10), info, [caption], -1, int(rng.integers(-(2**62), 2**62)))
        )
    return samples


@pytest.fixture
def make_composer(tokenizer, monkeypatch):
    """`make_composer(**changes)`: a composer whose buffer is as small as the buckets allow."""
    monkeypatch.setattr(composer, "BUFFER_ROWS", 1)
    monkeypatch.setattr(composer, "CHUNK_ROWS", 16)
    loaded = Tokenizer.load(tokenizer, max_length=48)

    def make(**changes: object) -> Composer:
        settings = {
            "shards": "x.tar",
            "tokenizer": tokenizer,
            "global_batch_size": BATCH,
            "image_buckets": [(16, 16), (16, 24)],
            "max_length": 48,
            "num_text_buckets": 3,
        }
        return Composer(DataConfig(**(settings | changes)), loaded, rank=0, world_size=1)  # type: ignore[arg-type]

    return make


def keys(steps: list[StreamStep]) -> list[list[str]]:
    return [step.samples.keys for step in steps]


@pytest.mark.parametrize("count", [1, 7, 8, 97, 500])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("text_buckets", ["auto", [12, 24, 48]])
def test_pass_has_every_sample_once_and_one_batch_that_is_not_full(make_composer, count, shuffle, text_buckets):
    made = make_composer(shuffle=shuffle, text_buckets=text_buckets)
    samples = make_samples(count)
    steps = list(Pass(made, epoch=0).steps(samples))
    assert sorted(chain(*keys(steps))) == sorted(sample.key for sample in samples)
    assert [step.step.number for step in steps] == list(range(math.ceil(count / BATCH)))
    assert all((step.step.rows >= 0).all() for step in steps[:-1])
    rows = np.concatenate([step.step.rows for step in steps])
    assert sorted(rows[rows >= 0]) == list(range(count))


@pytest.mark.parametrize("text_buckets", ["auto", [12, 24, 48]])
def test_pass_gives_each_caption_a_bucket_that_holds_it(make_composer, text_buckets):
    made = make_composer(text_buckets=text_buckets)
    steps = list(Pass(made, epoch=0).steps(make_samples(500)))
    for step in steps:
        captions = [step.samples.caption(i) for i in range(len(step.samples.keys))]
        assert max(min(n, 48) for n in made.tokenizer.count(captions)) <= step.step.bucket.length
    assert len({step.step.bucket for step in steps}) == 6


def test_pass_depends_on_samples_settings_and_epoch_alone(make_composer):
    samples = make_samples(300)
    first = keys(list(Pass(make_composer(seed=3), epoch=5).steps(samples)))
    assert keys(list(Pass(make_composer(seed=3), epoch=5).steps(samples))) == first
    assert keys(list(Pass(make_composer(seed=3), epoch=6).steps(samples))) != first
    assert keys(list(Pass(make_composer(seed=4), epoch=5).steps(samples))) != first


@pytest.mark.parametrize("shuffle", [True, False])
def test_pass_never_holds_more_than_its_buffer(make_composer, shuffle):
    made = make_composer(shuffle=shuffle)
    came = 0

    def counted() -> Iterator[StreamSample]:
        nonlocal came
        for sample in make_samples(600):
            came += 1
            yield sample

    handed_out, held = 0, []
    for step in Pass(made, epoch=0).steps(counted()):
        held.append(came - handed_out)
        handed_out += len(step.samples.keys)
    assert made.buffer_rows == 2 * 6 * BATCH
    assert max(held) <= made.buffer_rows + composer.CHUNK_ROWS


def test_pass_begins_when_the_buffer_is_full_of_bytes(make_composer, monkeypatch):
    monkeypatch.setattr(composer, "BUFFER_BYTES", 10 * 40)  # 40 samples
    came = 0

    def counted() -> Iterator[StreamSample]:
        nonlocal came
        for sample in make_samples(600):
            came += 1
            yield sample

    made = make_composer()
    made.buffer_rows = 1000
    first = next(Pass(made, epoch=0).steps(counted()))
    assert len(first.samples.keys) == BATCH
    assert 40 <= came <= 40 + composer.CHUNK_ROWS


def test_composer_keeps_its_text_lengths_for_later_passes_and_longer_captions(make_composer):
    made = make_composer()
    short = [s for s in make_samples(200) if len(s.captions[0]) < 80]
    list(Pass(made, epoch=0).steps(short))
    assert made.policy is not None
    buckets = made.policy.buckets
    assert max(bucket.length for bucket in buckets) == 48
    steps = list(Pass(made, epoch=1).steps(make_samples(200, seed=1)))
    assert {step.step.bucket for step in steps} <= set(buckets)


def test_composer_refuses_what_only_an_index_can_plan(make_composer):
    message = r"data: a stream has no index to plan by, and cannot do image_buckets: auto; leave that out"
    with pytest.raises(ConfigError, match=message):
        make_composer(image_buckets="auto")
    with pytest.raises(ConfigError, match=r"cannot do token_budget; leave that out, or make an index"):
        make_composer(token_budget=10_000)
    with pytest.raises(ConfigError, match=r"cannot do negative_captions; leave that out, or make an index"):
        make_composer(negative_captions="extra.parquet")
    with pytest.raises(ConfigError, match=r"cannot do val\.share; leave that out, or make an index"):
        make_composer(val={"share": 0.1})
    with pytest.raises(ConfigError, match=r"cannot do select, join, fields; leave that out, or make an index"):
        make_composer(select="width > 3", join=[{"table": "s.parquet"}], fields={"score": "join:score"})
    with pytest.raises(ConfigError, match=r"cannot do captions of several sources; leave that out, or make an index"):
        make_composer(captions={"shards": 1.0})


def test_pass_adds_labels_from_the_first_sample_on_that_has_one(make_composer):
    samples = make_samples(24)
    labelled = [StreamSample(**{**vars(s), "label": 5 if i == 12 else -1}) for i, s in enumerate(samples)]
    made = make_composer(shuffle=False, text_buckets=[48], image_buckets=None)
    assert [step.labels for step in Pass(made, epoch=0).steps(labelled)] == [False, True, True]


@pytest.mark.parametrize("shuffle", [True, False])
def test_pass_is_the_same_with_text_lengths_known_beforehand(make_composer, shuffle):
    samples = make_samples(500)
    first, again = make_composer(shuffle=shuffle), make_composer(shuffle=shuffle)
    expected = list(Pass(first, epoch=0).steps(samples))
    assert first.lengths is not None
    again.use_lengths(first.lengths)
    steps = list(Pass(again, epoch=0).steps(samples))
    assert keys(steps) == keys(expected)
    assert [step.step.bucket for step in steps] == [step.step.bucket for step in expected]
    assert [step.in_passes for step in steps] == [(0, step + 1) for step in range(63)]
