"""Grain's own iterators and checkpoints hold our index and our batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmdata
from mmdata.errors import ConfigError

grain = pytest.importorskip("grain", reason="grain is not installed: pip install 'mmdata[grain]'")

from mmdata.integrations.grain import LoaderDataset  # noqa: E402

STEPS = 3  # of an epoch of the fixture `data`


def after(dataset: Any, taken: int, *, into: Any) -> list[Any]:
    """What another dataset, `into`, gives from the state after some elements; the state goes through JSON."""
    first, resumed = iter(dataset), iter(into)
    for _ in range(taken):
        next(first)
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    return list(resumed)


@pytest.mark.parametrize("taken", [0, 4, 6])
def test_map_dataset_of_an_index_has_exact_state(data: dict[str, Any], taken: int):
    def samples() -> Any:
        source = grain.MapDataset.source(mmdata.Index.open(data["shards"])).shuffle(seed=1).repeat(2)
        return source.map(lambda sample: (sample.row, sample.captions[0])).batch(8).to_iter_dataset()

    whole = [rows.tolist() for rows, _ in samples()]
    assert sorted(row for rows in whole for row in rows) == sorted(2 * list(range(22)))
    assert [rows.tolist() for rows, _ in after(samples(), taken, into=samples())] == whole[taken:]


@pytest.mark.parametrize("taken", range(2 * STEPS + 1))
@pytest.mark.sweep(keep=3)
def test_loader_dataset_resumes_at_any_batch(data: dict[str, Any], taken: int):
    loader = mmdata.Loader.from_config(data)
    whole = [batch for _ in range(2) for batch in loader]
    datasets = [LoaderDataset(mmdata.Loader.from_config(data), num_epochs=2) for _ in range(2)]
    found = after(datasets[0], taken, into=datasets[1])
    assert len(found) == 2 * STEPS - taken
    for batch, expected in zip(found, whole[taken:], strict=True):
        assert isinstance(batch["pixel_values"], np.ndarray)
        assert batch["keys"] == expected["keys"]
        np.testing.assert_array_equal(batch["pixel_values"], expected["pixel_values"].numpy())


def test_loader_dataset_of_a_stream_resumes(data: dict[str, Any]):
    def streamed() -> Any:
        stream = mmdata.stream(None, data, steps_per_epoch=2)
        return LoaderDataset(stream, num_epochs=2).map(lambda batch: batch["keys"])

    whole = list(streamed())
    assert len(whole) == 4
    assert after(streamed(), 2, into=streamed()) == whole[2:]


def test_loader_dataset_without_end_begins_each_iterator_with_epoch_0(data: dict[str, Any]):
    dataset = LoaderDataset(mmdata.Loader.from_config(data), num_epochs=None).map(lambda batch: batch["keys"])
    loader = mmdata.Loader.from_config(data)
    expected = [batch["keys"] for _ in range(3) for batch in loader]
    for _ in range(2):
        iterator = iter(dataset)
        assert [next(iterator) for _ in expected] == expected


def test_loader_dataset_that_was_used_begins_and_resumes_as_a_new_one(data: dict[str, Any]):
    dataset, other = (LoaderDataset(mmdata.Loader.from_config(data)) for _ in range(2))
    whole = [batch["keys"] for batch in other]
    next(iter(dataset))
    assert [batch["keys"] for batch in after(dataset, 0, into=other)] == whole


def test_loader_dataset_resumes_behind_a_prefetch_of_grain(data: dict[str, Any], tmp_path: Path):
    def prefetched() -> Any:
        rows = LoaderDataset(mmdata.Loader.from_config(data)).map(lambda batch: batch["rows"].tolist())
        return grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=2)

    whole = list(prefetched())
    first, handler = iter(prefetched()), grain.checkpoint.CheckpointHandler()
    next(first)
    handler.save(tmp_path, first)
    first.close()
    assert list(handler.restore(tmp_path, iter(prefetched()))) == whole[1:]


def test_loader_dataset_refuses_a_state_of_other_batches(data: dict[str, Any]):
    state = iter(LoaderDataset(mmdata.Loader.from_config(data))).get_state()
    other = LoaderDataset(mmdata.Loader.from_config({**data, "seed": 1}))
    with pytest.raises(ConfigError, match=r"belongs to other batches: seed was 0 and is 1"):
        iter(other).set_state(state)
