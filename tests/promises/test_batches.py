"""The global batches depend on index, settings and seed alone: not on ranks, workers, or where a run was stopped."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter, deque
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

import pytest
import torch
import yaml

import mmdata

from .conftest import BAD_ROWS, GOOD, Batch, Corpus, assert_same, global_batches, loaders, run_mmdata

EPOCHS = 2
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, 1 thread": (1, {"num_workers": 1, "num_processes": 0}),
    "1 rank, 4 threads": (1, {"num_workers": 4, "num_processes": 0, "prefetch_batches": 5}),
    "1 rank, 2 processes": (1, {"num_workers": 3, "num_processes": 2}),
    "2 ranks, 0 workers": (2, {"num_workers": 0}),
    "2 ranks, 1 process each": (2, {"num_workers": 2, "num_processes": 1}),
    "4 ranks, 3 threads": (4, {"num_workers": 3, "num_processes": 0, "prefetch_batches": 1}),
}


TARGETS = {
    "boxes": "json:boxes",
    "box_labels": "json:boxes.category",
    "box_classes": ["cat", "dog"],
    "box_texts": "json:boxes.phrase",
    "box_buckets": 2,
}


@pytest.fixture(scope="module", params=[None, TARGETS], ids=["captions", "boxes"])
def corpus(corpus: Corpus, request: pytest.FixtureRequest) -> Corpus:
    """The corpus of all promises, also with the boxes of its images."""
    return replace(corpus, targets=request.param)


@pytest.fixture(scope="module")
def epochs(corpus: Corpus) -> list[list[Batch]]:
    """The batches of two epochs, made by the caller's own thread."""
    (loader,) = loaders(corpus.settings())
    return [global_batches([loader]) for _ in range(EPOCHS)]


@pytest.mark.parametrize("way", WAYS)
def test_global_batches_are_the_same_on_any_ranks_and_workers(corpus: Corpus, epochs: list[list[Batch]], way: str):
    world_size, loading = WAYS[way]
    ranks = loaders(corpus.settings(loading=loading), world_size)
    try:
        for expected in epochs:
            assert [len(loader) for loader in ranks] == [len(expected)] * world_size
            assert_same(global_batches(ranks), expected)
    finally:
        for loader in ranks:
            loader.close()


def test_epochs_differ_and_an_epoch_is_a_function_of_its_number_and_the_seed(corpus: Corpus, epochs: list[list[Batch]]):
    rows = [[batch["rows"].tolist() for batch in batches] for batches in epochs]
    assert rows[0] != rows[1]
    (loader,) = loaders(corpus.settings())
    loader.set_epoch(1)
    assert_same(global_batches([loader]), epochs[1])
    (other,) = loaders(corpus.settings(seed=6))
    assert [batch["rows"].tolist() for batch in other] != rows[0]


def test_each_row_comes_once_an_epoch_and_what_is_masked_is_listed(corpus: Corpus):
    index = mmdata.Index.open(corpus.damaged)
    ranks = loaders(corpus.settings(), 2)
    for _ in range(EPOCHS):
        batches = global_batches(ranks)
        assert len(batches) == len(ranks[0]) == -(-GOOD // 8)
        rows = torch.cat([batch["rows"] for batch in batches])
        valid = torch.cat([batch["valid"] for batch in batches])
        keys = [key for batch in batches for key in batch["keys"]]
        places = {int(row): place for place, row in enumerate(rows) if row >= 0}
        assert sorted(rows[rows >= 0].tolist()) == list(range(GOOD)) == sorted(places)
        assert {row for row, place in places.items() if not valid[place]} == set(BAD_ROWS)
        assert {row: keys[place] for row, place in places.items()} == {row: index[row].key for row in places}
        assert not valid[rows < 0].any()
        captions = [caption for batch in batches for caption in batch["captions"]]
        assert all(captions[place] in index[row].captions for row, place in places.items() if valid[place])
    masked = [entry for loader in ranks for entry in loader.ledger]
    assert Counter(entry.key for entry in masked) == {index[row].key: EPOCHS for row in BAD_ROWS}
    assert {entry.shard for entry in masked} == {index[row].shard for row in BAD_ROWS}
    assert {str(entry.reason) for entry in masked} <= {"file_changed", "corrupt_image"}


def test_masked_row_has_no_pixels_and_no_other_row_changes(corpus: Corpus, epochs: list[list[Batch]]):
    (whole,) = loaders(corpus.settings(shards=str(corpus.shards)))
    for found, expected in zip(epochs[0], global_batches([whole]), strict=True):
        assert found["keys"] == expected["keys"]
        assert (found["pixel_values"][~found["valid"]] == 0).all()
        for name in ("pixel_values", "input_ids", "attention_mask", "image_hash", "caption_hash"):
            assert torch.equal(found[name][found["valid"]], expected[name][found["valid"]]), name


def test_shapes_and_steps_are_those_that_the_plan_says(corpus: Corpus, epochs: list[list[Batch]], tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": corpus.settings()}))
    printed = run_mmdata("plan", config, COLUMNS="200").stdout
    planned: Counter[tuple[int, ...]] = Counter()
    for line in printed.splitlines():
        if re.search(r"\d × \d", line):
            length, height, width, *boxes = map(int, re.findall(r"\d+", line))
            boxes, rows, steps = boxes[:3] if corpus.targets else (0, *boxes[:2])
            planned[rows, height, width, length, boxes] += steps
    shapes = (
        (*batch["pixel_values"].shape, batch["input_ids"].shape[1], batch["boxes"].shape[1] if corpus.targets else 0)
        for batch in epochs[0]
    )
    assert planned == Counter((rows, *shape) for rows, _, *shape in shapes)
    assert len(planned) > 1


def test_rest_is_the_same_wherever_a_run_is_stopped_and_resumed(corpus: Corpus, epochs: list[list[Batch]]):
    draw, whole = random.Random(29), list(chain(*epochs))
    ways = [(before, after, draw.randrange(len(whole))) for before in (1, 2, 4) for after in (1, 2, 4)]
    for before, after, stop in [*ways, (1, 2, 0), (2, 1, len(epochs[0]))]:
        ranks = loaders(corpus.settings(loading={"num_workers": draw.randrange(3)}), before)
        for loader in ranks:
            deque(islice(chain.from_iterable(repeat(loader)), stop), maxlen=0)
        state = ranks[0].merge_states([loader.state_dict() for loader in ranks])
        state = through_torch(state) if draw.random() < 0.5 else json.loads(json.dumps(state))
        resumed = loaders(corpus.settings(loading={"num_workers": draw.randrange(3)}), after)
        for loader in resumed:
            loader.load_state_dict(state)
        rest = global_batches(resumed)
        while len(rest) < len(whole) - stop:
            rest += global_batches(resumed)
        assert_same(rest, whole[stop:])
        for loader in (*ranks, *resumed):
            loader.close()


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    """The state after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_state_of_other_batches_is_refused_by_name(corpus: Corpus):
    (loader,) = loaders(corpus.settings())
    state = loader.state_dict()
    for name, value in (("seed", 6), ("global_batch_size", 12)):
        (other,) = loaders(corpus.settings(**{name: value}))
        with pytest.raises(ValueError, match=name):
            other.load_state_dict(state)


@pytest.mark.parametrize("kind", ["bucket", "two streams"])
def test_samplers_give_each_row_once_over_all_ranks_and_resume_on_others(kind: str):
    def sampler(rank: int, world_size: int) -> Any:
        ranks = {"rank": rank, "world_size": world_size}
        if kind == "bucket":
            return mmdata.BucketBatchSampler([3 + row % 7 for row in range(48)], 8 // world_size, bounds=3, **ranks)
        sizes = {"batch_size": 8 // world_size, "secondary_batch_size": 2 // world_size}
        return mmdata.TwoStreamBatchSampler(range(48), range(48, 60), **sizes, **ranks)

    def batches(samplers: list[Any]) -> list[list[int]]:
        return [sorted(chain(*parts)) for parts in zip(*samplers, strict=True)]

    whole = batches([sampler(0, 1)])
    halves = [sampler(rank, 2) for rank in range(2)]
    assert batches(halves) == whole
    rows = Counter(row for batch in whole for row in batch)
    assert {row: rows[row] for row in range(48)} == dict.fromkeys(range(48), 1)
    resumed = [sampler(rank, 2) for rank in range(2)]
    for one in resumed:
        one.load_state_dict(sampler(0, 1).state_at(0, 3))
    assert batches(resumed) == whole[3:]
