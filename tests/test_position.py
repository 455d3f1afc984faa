"""One contract of position and state for Loader, Stream and the batch samplers.

The cases are those of the tests of torchdata's StatefulDataLoader: states before the first batch, after k and at the
end, several iterators, another number of workers, double loads, states from elsewhere; and `set_epoch` among them.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import mmdata
from mmdata.errors import ConfigError
from mmdata.shards import ImageInfo, Sample, ShardWriter
from mmdata.transform.text import train_tokenizer

ROWS, STEPS = 15, 4  # of an epoch, in batches of 4
LENGTHS = [3, 9, 1, 4, 9, 2, 6, 5, 3, 5, 7, 2, 8, 4, 1]


@dataclass(frozen=True)
class Kind:
    """One of the things that have a position: `make(num_workers=…, seed=…)` makes one."""

    name: str
    make: Callable[..., Any]

    def give(self, batches: Any) -> list[Any]:
        """What batches hold, to be compared: rows, or keys with the sums of their pixels."""
        if self.name.endswith("sampler"):
            return list(batches)
        return [(b["keys"], b["pixel_values"].long().flatten(1).sum(1).tolist()) for b in batches]

    def epochs(self, count: int, **changes: Any) -> list[list[Any]]:
        """The first epochs of one that nobody disturbs."""
        made = self.make(**changes)
        return [self.give(made) for _ in range(count)]

    def at(self, epoch: int, step: int) -> Any:
        """One that has yielded so many batches of an epoch, and the iteration that yielded them."""
        made = self.make()
        for _ in range(epoch):
            list(made)
        iteration = iter(made)
        assert len([*islice(iteration, step)]) == step
        return made, iteration


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    """The section `data` on 15 rows in two shards, with random crops."""
    folder: Path = tmp_path_factory.mktemp("position")
    captions = ["a red dog" + " and a cat" * (i % 4) for i in range(ROWS)]
    train_tokenizer(captions, folder / "tokenizer", vocab_size=300, max_length=32)
    with ShardWriter(folder / "shards", shard_rows=8) as writer:
        for i, caption in enumerate(captions):
            writer.write(Sample(f"{i:02d}", photo(24, 24, seed=i), ImageInfo("JPEG", 24, 24, 1), [caption]))
    data = {"shards": str(folder / "shards"), "tokenizer": str(folder / "tokenizer"), "global_batch_size": 4}
    return data | {"image_size": 16, "max_length": 32, "text_buckets": [32], "crop_scale": [0.3, 0.9]}


@pytest.fixture(params=["loader", "stream", "stream of passes", "bucket sampler", "two-stream sampler"])
def kind(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Kind:
    def loader(**changes: Any) -> Any:
        return mmdata.Loader.from_config(settings | changes)

    def stream(**changes: Any) -> Any:
        return mmdata.stream(None, settings | changes, steps_per_epoch=STEPS + 1)  # epochs and passes end apart

    def passes(**changes: Any) -> Any:
        return mmdata.stream(None, settings | changes)

    def bucket(*, num_workers: int = 0, **changes: Any) -> Any:
        return mmdata.BucketBatchSampler(LENGTHS, 4, bounds=[4, 9], **changes)

    def two_stream(*, num_workers: int = 0, **changes: Any) -> Any:
        return mmdata.TwoStreamBatchSampler(range(ROWS), [20, 21, 22], 6, 2, **changes)

    make = dict(zip(["loader", "stream", "stream of passes", "bucket sampler"], [loader, stream, passes, bucket]))
    return Kind(request.param, make.get(request.param, two_stream))


def reload(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes out of a file."""
    return json.loads(json.dumps(state))


# States


def test_state_before_the_first_batch_gives_the_whole_epoch_each_time(kind: Kind):
    whole = kind.epochs(2)
    made = kind.make()
    before = made.state_dict()
    iteration = iter(made)
    assert made.state_dict() == before, "an iteration begins when it is asked for its first batch"
    assert [kind.give(iteration), kind.give(made)] == whole
    for _ in range(2):
        made.load_state_dict(reload(before))
        assert made.state_dict() == before
        assert [kind.give(made), kind.give(made)] == whole


def test_state_after_any_batch_gives_the_rest_and_the_next_epoch(kind: Kind):
    whole = kind.epochs(3)
    for step in range(len(whole[1]) + 1):
        made, iteration = kind.at(1, step)
        resumed = kind.make()
        resumed.load_state_dict(reload(made.state_dict()))
        assert resumed.state_dict() == made.state_dict()
        resumed.set_epoch(1)  # as trainers do
        rest = kind.give(resumed)
        assert rest == kind.give(iteration) == whole[1][step:]
        assert kind.give(resumed) == whole[2]
        assert (resumed.state_dict()["epoch"], resumed.state_dict()["step"]) == (3, 0)


def test_state_after_epochs_gives_those_that_follow(kind: Kind):
    whole = kind.epochs(4)
    made = kind.make()
    assert [kind.give(made), kind.give(made)] == whole[:2]
    resumed = kind.make()
    resumed.load_state_dict(reload(made.state_dict()))
    assert [kind.give(resumed), kind.give(resumed)] == whole[2:]


def test_state_in_the_last_step_and_after_it_gives_the_next_epoch(kind: Kind):
    whole = kind.epochs(2)
    made, iteration = kind.at(0, len(whole[0]))
    states = [made.state_dict()]
    assert kind.give(iteration) == []
    states.append(made.state_dict())
    for state in states[kind.name == "stream of passes" :]:  # a pass ends where its iterator does
        resumed = kind.make()
        resumed.load_state_dict(reload(state))
        assert kind.give(resumed) == whole[1]


def test_state_may_be_loaded_with_another_number_of_workers(kind: Kind):
    whole = kind.epochs(2)
    made, _ = kind.at(0, 2)
    for num_workers in (0, 3):
        resumed = kind.make(num_workers=num_workers)
        resumed.load_state_dict(reload(made.state_dict()))
        assert [kind.give(resumed), kind.give(resumed)] == [whole[0][2:], whole[1]]


def test_state_that_was_loaded_last_counts(kind: Kind):
    whole = kind.epochs(2)
    made, _ = kind.at(1, 2)
    late, early = made.state_dict(), kind.at(0, 1)[0].state_dict()
    for states in ([early, late], [late, early], [late, late], [early, late, early]):
        for state in states:
            made.load_state_dict(reload(state))
        assert made.state_dict() == states[-1]
        assert kind.give(made) == whole[states[-1]["epoch"]][states[-1]["step"] :]


def test_state_of_one_that_was_itself_resumed_goes_on(kind: Kind):
    whole = kind.epochs(2)
    state = kind.at(1, 1)[0].state_dict()
    for step in (1, 2, 3):
        made = kind.make()
        made.load_state_dict(reload(state))
        assert made.state_dict()["step"] == step
        iteration = iter(made)
        assert kind.give(islice(iteration, 1)) == whole[1][step : step + 1]
        state = made.state_dict()
    assert kind.give(iteration) == whole[1][4:]


def test_epoch_broken_off_after_a_resume_begins_anew(kind: Kind):
    whole = kind.epochs(2)
    resumed = kind.make()
    resumed.load_state_dict(reload(kind.at(1, 2)[0].state_dict()))
    assert kind.give(islice(resumed, 1)) == whole[1][2:3]
    assert kind.give(resumed) == whole[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "state: it must be the dictionary that state_dict() returned: got NoneType; give that dictionary"),
        ([1], "got list; give that dictionary, or start anew"),
        ("epoch 1", "got str; give that dictionary"),
        ({"epoch": 2**70}, "'epoch' must be a whole number from 0 on, at most 1048575: got 1180591620717411303424"),
        ({"epoch": -1}, "'epoch' must be a whole number from 0 on, at most 1048575: got -1"),
        ({"epoch": True}, "'epoch' must be a whole number"),
        ({"epoch": None}, "'epoch' must be a whole number"),
        ({"step": -1}, "'step' must be a whole number"),
        ({"step": 1.0}, "'step' must be a whole number"),
        ({"step": "1"}, "'step' must be a whole number"),
        ({"plan": None, "stream": None}, ""),
        ({"plan": 3, "stream": 3}, ""),
        ({"plan": [], "stream": {}}, ""),
    ],
)
def test_state_from_elsewhere_is_refused_and_changes_nothing(kind: Kind, change: Any, message: str):
    whole = kind.epochs(1)[0]
    made, iteration = kind.at(0, 1)
    before = made.state_dict()
    with pytest.raises(ConfigError) as caught:
        made.load_state_dict(before | change if isinstance(change, dict) else change)
    assert message in str(caught.value)
    assert made.state_dict() == before
    assert kind.give(iteration) == whole[1:], "the iteration that was under way goes on"


def test_state_of_another_kind_or_of_other_settings_is_refused(kind: Kind, settings: dict[str, Any]):
    others = [kind.make(seed=7), mmdata.BucketBatchSampler(LENGTHS, 5), mmdata.Loader.from_config(settings)]
    others.append(mmdata.stream(None, settings, steps_per_epoch=9))
    made = kind.make()
    for other in others[: 3 if kind.name == "stream" else 4]:
        if type(other) is not type(made) or other is others[0]:
            with pytest.raises(ConfigError, match="or start anew|this is no state of a stream"):
                made.load_state_dict(other.state_dict())


# Iterations


def test_newer_iteration_overtakes_the_older_one(kind: Kind):
    whole = kind.epochs(2)
    made, older = kind.at(0, 2)
    newer = iter(made)
    assert kind.give(islice(newer, 1)) == whole[0][:1]
    overtaken(kind, older, "a newer iteration has moved", rest=whole[0][2:])
    assert made.state_dict()["step"] == 1
    assert [kind.give(newer), kind.give(made)] == [whole[0][1:], whole[1]]


def test_two_at_the_same_time_do_not_touch_each_other(kind: Kind):
    whole = kind.epochs(1)[0]
    pairs = list(zip(kind.make(), kind.make(), strict=True))
    assert kind.give(one for one, _ in pairs) == kind.give(other for _, other in pairs) == whole


def test_state_loaded_while_an_iteration_is_under_way_overtakes_it(kind: Kind):
    whole = kind.epochs(2)
    for step, state in ((1, kind.at(1, 2)[0].state_dict()), (2, kind.at(0, 0)[0].state_dict())):
        made, older = kind.at(0, step)
        made.load_state_dict(reload(state))
        assert made.state_dict() == state
        overtaken(kind, older, "load_state_dict has moved", rest=whole[0][step:])
        assert made.state_dict() == state, "the old iteration counts no more"
        assert kind.give(made) == whole[state["epoch"]][state["step"] :]


def overtaken(kind: Kind, iteration: Any, message: str, *, rest: list[Any]) -> None:
    """Loader and Stream raise; a sampler gives the rest, for the DataLoader that reads it ahead."""
    if kind.name.endswith("sampler"):
        assert kind.give(iteration) == rest
        return
    with pytest.raises(RuntimeError, match=f"this iteration over the (loader|stream) has ended early: {message}"):
        next(iteration)
    with pytest.raises(StopIteration):
        next(iteration)


# set_epoch


def test_set_epoch_in_the_last_step_of_each_epoch_gives_the_one_it_names(kind: Kind):
    whole = kind.epochs(4)
    made = kind.make()
    for epoch in range(4):
        seen: list[Any] = []
        for batch in made:
            seen += kind.give([batch])
            if len(seen) == len(whole[epoch]):
                made.set_epoch(epoch + 1)
                assert (made.state_dict()["epoch"], made.state_dict()["step"]) == (epoch + 1, 0)
        assert seen == whole[epoch]
        assert (made.state_dict()["epoch"], made.state_dict()["step"]) == (epoch + 1, 0)


def test_set_epoch_of_the_current_epoch_in_its_middle_changes_nothing(kind: Kind):
    whole = kind.epochs(2)
    made, iteration = kind.at(0, 2)
    before = made.state_dict()
    made.set_epoch(0)
    assert made.state_dict() == before
    assert [kind.give(iteration), kind.give(made)] == [whole[0][2:], whole[1]]


def test_set_epoch_of_the_current_epoch_after_its_end_gives_it_again(kind: Kind):
    whole = kind.epochs(2)
    made = kind.make()
    for _ in range(2):
        assert kind.give(made) == whole[0]
        made.set_epoch(0)
    made, _ = kind.at(1, 0)
    made.set_epoch(1)
    assert kind.give(made) == whole[1]


def test_set_epoch_of_another_epoch_in_mid_iteration_overtakes_it(kind: Kind):
    whole = kind.epochs(2)
    made, older = kind.at(1, 2)
    made.set_epoch(0)
    state = made.state_dict()
    assert (state["epoch"], state["step"]) == (0, 0)
    overtaken(kind, older, "set_epoch has moved the .*'s position to epoch 0, step 0; iterate", rest=whole[1][2:])
    assert made.state_dict() == state
    assert [kind.give(made), kind.give(made)] == whole


def test_set_epoch_goes_where_it_is_told_last(kind: Kind):
    whole = kind.epochs(2)
    made = kind.make()
    for epoch in (5, 1, 0):
        made.set_epoch(epoch)
    assert [kind.give(made), kind.give(made)] == whole
    for epoch in (-1, 2**20, 2**70):
        with pytest.raises(ValueError, match=f"epoch must be (0 or more|at most 1048575): got {epoch}"):
            made.set_epoch(epoch)
    made.set_epoch(2**20 - 1)
    assert len(kind.give(made)) == len(whole[0])


# Copies


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copy_has_a_position_of_its_own_or_is_refused(kind: Kind, duplicate: Callable[[Any], Any]):
    whole = kind.epochs(1)[0]
    made, iteration = kind.at(0, 2)
    if kind.name.endswith("sampler"):
        other = duplicate(made)
        assert kind.give(other) == whole
        assert made.state_dict()["step"] == 2
    else:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* Make another from the same settings"):
            duplicate(made)
        with pytest.raises(TypeError, match=r"an iteration over a \w+ cannot be .* load it into another (loader|stream)"):
            duplicate(iteration)
    assert kind.give(iteration) == whole[2:]
