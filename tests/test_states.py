"""States of Loader, Stream and the batch samplers: one contract.

The cases are those of the tests of torchdata's StatefulDataLoader: states before the first batch, after k and at the
end, another number of workers, double loads, states from elsewhere. Several iterators: test_position.py.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import mmdata
from mmdata.errors import ConfigError

from .positions import KINDS, LENGTHS, Kind, make_kind, make_settings, reload


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    return make_settings(tmp_path_factory.mktemp("position"), photo)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Kind:
    return make_kind(request.param, settings)


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


def test_epoch_whose_end_was_restored_is_given_again_once_another_was_asked_for(kind: Kind):
    whole = kind.epochs(1)[0]
    state = kind.at(0, len(whole))[0].state_dict()
    resumed = kind.make()
    resumed.load_state_dict(reload(state))
    for epoch in (0, 1, 0):
        resumed.set_epoch(epoch)
    assert kind.give(resumed) == whole


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
        ({"plan": None}, "'plan' must say what its batches depend on: got None"),
        ({"plan": 3}, "'plan' must say what its batches depend on: got 3"),
        ({"plan": {}}, "belongs to other batches"),
    ],
)
@pytest.mark.sweep(keep=14)
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
            with pytest.raises(ConfigError, match=r"or start anew|this is no state of a stream"):
                made.load_state_dict(other.state_dict())
