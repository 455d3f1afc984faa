"""Iterations over Loader, Stream and the batch samplers, and `set_epoch` at each place of an epoch: one contract."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from .positions import KINDS, Kind, make_kind, make_settings, reload


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    return make_settings(tmp_path_factory.mktemp("position"), photo)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Kind:
    return make_kind(request.param, settings)


@pytest.fixture(params=["loader", "stream", "stream of passes"])
def threaded(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Kind:
    """One that has threads."""
    return make_kind(request.param, settings)


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


def test_loop_that_counts_to_the_last_step_gets_the_next_epoch(kind: Kind):
    whole = kind.epochs(2)
    made = kind.make()
    assert [kind.give(islice(iter(made), len(epoch))) for epoch in whole] == whole


@pytest.mark.parametrize("leave", ["close the iteration", "close it"])
def test_epoch_that_is_left_early_begins_anew_and_leaves_no_thread(threaded: Kind, leave: str):
    before = threading.enumerate()
    whole = threaded.epochs(1)[0]
    made, iteration = threaded.at(0, 2)
    (iteration if leave == "close the iteration" else made).close()
    left = {*threading.enumerate()} - {*before}
    assert not [thread.name for thread in left if thread.name.startswith("mmdata-")]
    if leave == "close it":
        overtaken(threaded, iteration, "close has moved", rest=[])
    assert threaded.give(made) == whole


def test_closed_at_the_last_batch_lets_the_loop_end(threaded: Kind):
    whole = threaded.epochs(2)
    with threaded.make() as made:
        for number, _ in enumerate(made, start=1):
            if number == len(whole[0]):
                made.close()
        assert number == len(whole[0])
        made.close()
        assert threaded.give(made) == whole[1]


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
    assert whole[0] != whole[1]
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
        assert other.sampler is other
        assert kind.give(other) == whole
        assert made.state_dict()["step"] == 2
    else:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* Make another from the same settings"):
            duplicate(made)
        with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
            duplicate(iteration)
    assert kind.give(iteration) == whole[2:]
