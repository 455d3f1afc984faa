"""`data.order`: exactly this sequence of rows, over ranks, workers and a resume; and what is left of each shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mmdata import Loader
from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.plan import Bucket, OrderedPlan, Shapes
from tests.flat_settings import grouped

from .conftest import Corpus, rows_of
from .worker_processes import worker_processes

ORDER = np.concatenate([np.arange(40, 10, -1), [7, 7, 7, 3], np.arange(11, 20)])


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    np.save(tmp_path / "order.npy", ORDER)
    return {"order": str(tmp_path / "order.npy"), "shuffle": False}


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_each_epoch_has_the_rows_in_order(corpus: Corpus, order: dict[str, Any], num_processes: int):
    with corpus.loader(**order, num_processes=num_processes) as loader:
        assert len(loader) == -(-len(ORDER) // 8)
        batches = list(loader)
        assert rows_of(loader) == ORDER.tolist()  # of epoch 1
    assert [row for batch in batches for row in batch["rows"].tolist() if row >= 0] == ORDER.tolist()
    sevens = [batch["pixel_values"][i] for batch in batches for i in np.flatnonzero(batch["rows"].numpy() == 7)]
    assert len(sevens) == 3
    assert not np.array_equal(sevens[0].numpy(), sevens[1].numpy())  # another crop each time
    assert "caption_hash" in batches[0]  # no row is a negative of itself


def test_a_loader_takes_an_order_in_memory(corpus: Corpus):
    with corpus.loader() as made, Loader(made.plan, made.builder, rank=0, world_size=1, order=ORDER) as loader:
        assert isinstance(loader.plan, OrderedPlan)
        assert rows_of(loader) == ORDER.tolist()
        state = loader.state_dict()
        with pytest.raises(ConfigError, match=r"other batches: .*order was '[0-9a-f]{16}' and is None"):
            made.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"other batches: .*order was"):
            Loader(made.plan, made.builder, rank=0, world_size=1, order=ORDER[::-1]).load_state_dict(state)
        with pytest.raises(ValueError, match="order and source exclude each other"):
            Loader(made.plan, made.builder, rank=0, world_size=1, order=ORDER, source=made._source)


class ShortOrLong:
    """A policy of one's own, which a worker process can import."""

    buckets = (Bucket(16, 32, 32), Bucket(32, 32, 32))

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        return (shapes.length > 16).astype(np.int64)


@pytest.mark.parametrize("given", [{"order": ORDER}, {"policy": ShortOrLong()}, {"order": [7, 7, 12] * 8}])
@pytest.mark.sweep(keep=1)
def test_from_config_takes_order_and_policy_to_threads_and_worker_processes(
    corpus: Corpus, same: Callable[..., bool], given: dict[str, Any]
):
    def make(**changes: Any) -> Loader:
        settings = grouped(**{**corpus.settings, "leftover": "merge" if "order" in given else "pad", **changes})
        return Loader.from_config(settings, rank=0, world_size=1, **given)

    with make() as threads, make(num_processes=2) as processes, make() as resumed:
        assert threads.plan.seed == corpus.settings["seed"]
        expected, batches = list(threads), iter(processes)
        found = [next(batches), next(batches)]
        assert len(worker_processes()) == 2
        resumed.load_state_dict(processes.state_dict())
        found += resumed
    assert len(found) == len(expected)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    if "order" in given:
        assert [row for batch in found for row in batch["rows"].tolist() if row >= 0] == list(given["order"])
    else:
        assert {batch["input_ids"].shape[1] for batch in found} == {16, 32}


def test_an_order_in_memory_is_refused_where_a_file_is(corpus: Corpus):
    with pytest.raises(ConfigError, match=r"config section data: .*order does not go with num_lanes above 1"):
        Loader.from_config(grouped(**corpus.settings, num_lanes=2), rank=0, world_size=1, order=ORDER)
    with pytest.raises(ValueError, match="order: entry 1 is row 50, and the rows are 0 to 49"):
        Loader.from_config(grouped(**corpus.settings), rank=0, world_size=1, order=[1, 50])


def test_a_policy_inside_a_function_goes_to_threads_alone(corpus: Corpus):
    class Inside(ShortOrLong):
        pass

    settings = {**corpus.settings, "leftover": "pad"}
    with pytest.raises(ConfigError, match=r"^policy 'tests\.loader\.test_order:.*Inside': data\.loading\.num_proc"):
        Loader.from_config(grouped(**settings, num_processes=1), rank=0, world_size=1, policy=Inside())
    with Loader.from_config(grouped(**settings), rank=0, world_size=1, policy=Inside()) as loader:
        assert len(list(loader)) == len(loader)


def test_an_order_in_memory_takes_the_place_of_what_its_plan_says(corpus: Corpus):
    for changes in ({"leftover": "drop"}, {"row_weights": "width"}, {"num_lanes": 2}):
        with corpus.loader(**changes, global_batch_size=2) as made:
            assert rows_of(Loader(made.plan, made.builder, rank=0, world_size=1, order=ORDER)) == ORDER.tolist()


def test_an_order_in_the_settings_is_a_file(corpus: Corpus):
    with pytest.raises(ConfigError, match=r"'order': expected path or null; got array"):
        Loader.from_config({**corpus.settings, "order": ORDER, "shuffle": False})


@pytest.mark.parametrize(
    ("array", "changes", "message"),
    [
        (np.array([1, 50]), {}, r"data.order '.*': entry 1 is row 50, and the rows are 0 to 49; 1 of 2 entries are"),
        (np.zeros((2, 2), np.int64), {}, r"data.order: '.*' is an array of int64 and shape \(2, 2\)"),
        (
            np.arange(50),
            {"select": "key < '00031'"},
            r"19 of its rows are not selected, such as row 31",
        ),
        (
            np.arange(3),
            {},
            r"data.global_batch_size 8: no batch can have more than 3 rows, so none",
        ),
        (ORDER, {"shuffle": True}, r"order does not go with shuffle: set shuffle to false$"),
        (ORDER, {"groups": {"size": 2}}, "order does not go with groups"),
        (ORDER, {"row_weights": "width"}, "order does not go with row_weights: leave one of them out"),
        (ORDER, {"captions": "every"}, "order does not go with captions every: leave one of them out"),
        (ORDER, {"num_lanes": 2}, "order does not go with num_lanes above 1"),
        (ORDER, {"token_budget": 4000}, "order does not go with token_budget"),
        (ORDER, {"leftover": "drop"}, "order does not go with a leftover other than merge"),
        (ORDER, {"shards": [{"shards": "a", "repeat": 2.0}]}, "order does not go with a weight or repeat of shards"),
    ],
)
def test_what_is_no_order_is_refused(corpus: Corpus, tmp_path: Path, array: Any, changes: dict[str, Any], message: str):
    np.save(tmp_path / "order.npy", array)
    given = {"order": str(tmp_path / "order.npy"), "shuffle": False, **changes}
    with pytest.raises((ConfigError, ValueError), match=message):
        corpus.loader(**given)


def test_a_file_that_is_missing_is_named(corpus: Corpus, order: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"data.order: '.*none.npy'"):
        corpus.loader(**{**order, "order": "none.npy"})


def test_what_is_left_of_each_shape_is_padded_or_dropped(corpus: Corpus):
    with corpus.loader() as loader:
        policy, rows = loader.plan.policy, loader.plan.rows
        own = Counter(policy.assign(rows.shapes(np.arange(50), 0)).tolist())
    with corpus.loader(leftover="pad") as loader:
        assert len(loader) == sum(-(-count // 8) for count in own.values())
        assert sorted(rows_of(loader)) == list(range(50))
    with corpus.loader(leftover="drop", global_batch_size=2) as loader:
        assert len(loader) == sum(count // 2 for count in own.values())
        assert all(batch["valid"].all() for batch in loader)


def test_a_drop_of_everything_is_refused(corpus: Corpus):
    with pytest.raises(ConfigError, match=r"data.leftover drop: none of the \d+ batch shapes fills a batch of 50 rows"):
        corpus.loader(leftover="drop", global_batch_size=50)


def test_weights_do_not_go_with_what_is_left(corpus: Corpus):
    mixed = [{"shards": "a", "weight": 1}, {"shards": "b", "weight": 1}]
    with pytest.raises(
        ValueError, match="weights of shards does not go with a leftover other than merge: set leftover to merge"
    ):
        DataConfig.model_validate({**corpus.settings, "shards": mixed, "leftover": "pad"})
