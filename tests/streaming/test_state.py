"""A rank's position in a state of a stream: what a large corpus reaches is read back, what cannot be is refused."""

from __future__ import annotations

import pytest

from mmdata.errors import ConfigError
from mmdata.streaming.position import PassPosition
from mmdata.streaming.state import RankState


@pytest.mark.parametrize("position", [PassPosition(0, 3_000_000), PassPosition(2**20 - 1, 0)])
def test_state_of_a_pass_of_millions_of_batches_is_read_back(position: PassPosition):
    saved = RankState(position, [8, 16], position)
    assert RankState.unpack(saved.pack()) == saved


@pytest.mark.parametrize("position", [PassPosition(2**20, 0), PassPosition(0, 2**70)])
def test_state_of_positions_that_cannot_be_is_refused(position: PassPosition):
    for saved in (RankState(position, None), RankState(PassPosition(0), None, position)):
        with pytest.raises(ConfigError, match="a rank's position must be whole numbers from 0 on"):
            RankState.unpack(saved.pack())
