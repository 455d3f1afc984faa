"""A rank's place in a state of a stream: what a large corpus reaches is read back, what cannot be is refused."""

from __future__ import annotations

import pytest

from mmdata.errors import ConfigError
from mmdata.streaming.position import Place, RankState


@pytest.mark.parametrize("place", [Place(0, 3_000_000), Place(2**20 - 1, 0)])
def test_state_of_a_pass_of_millions_of_batches_is_read_back(place: Place):
    saved = RankState(place, [8, 16], place)
    assert RankState.unpack(saved.pack()) == saved


@pytest.mark.parametrize("place", [Place(2**20, 0), Place(0, 2**70)])
def test_state_of_places_that_cannot_be_is_refused(place: Place):
    for saved in (RankState(place, None), RankState(Place(0), None, place)):
        with pytest.raises(ConfigError, match="a rank's place must be whole numbers from 0 on"):
            RankState.unpack(saved.pack())
