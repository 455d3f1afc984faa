"""Random numbers by counter: what is drawn depends on (seed, epoch, purpose, position), never on what was drawn before.

Only the raw output of Philox is used, which NumPy keeps stable over its versions (NEP 19 does not promise that for
`Generator.permutation` and its kin), so a plan is the same with any NumPy.
"""

from __future__ import annotations

import threading
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What numbers are drawn for; streams of different purposes are independent."""

    SHARD_ORDER = 0
    ROW_ORDER = 1
    BATCH_ORDER = 2
    ROW_TRANSFORM = 3
    LANES = 4
    UNIT_ORDER = 5
    AUGMENTATION = 7
    TEXT_TRANSFORM = 8
    CAPTION_DROPOUT = 9
    GROUP_SHARE = 10


def random_raw(count: int, *, seed: int, epoch: int, purpose: Purpose, position: int = 0) -> NDArray[np.uint64]:
    """`count` uniform 64-bit integers.

    Args:
        count: how many.
        seed: of the run.
        epoch: from 0.
        purpose: what they are for.
        position: which of the things of that purpose, e.g. the row number.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (Philox4x64-10).
    """
    # A list with a number above 2**63 in it would become an array of floats.
    key = np.array([seed % 2**64, epoch], np.uint64)
    counter = np.array([0, 0, position, int(purpose)], np.uint64)
    philox = _generators.philox
    philox.state = {
        "bit_generator": "Philox",
        "state": {"counter": counter, "key": key},
        "buffer": _EMPTY,
        "buffer_pos": 4,  # nothing is left of an earlier block
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.atleast_1d(philox.random_raw(count)).astype(np.uint64, copy=False)


def uniforms(count: int, *, seed: int, epoch: int, purpose: Purpose, position: int = 0) -> list[float]:
    """`count` numbers in [0, 1), of 53 random bits each."""
    raw = random_raw(count, seed=seed, epoch=epoch, purpose=purpose, position=position)
    return ((raw >> np.uint64(11)) * 2.0**-53).tolist()


def permutation(count: int, *, seed: int, epoch: int, purpose: Purpose, position: int = 0) -> NDArray[np.int64]:
    """A uniformly random order of 0 … count-1: the ranks of as many random 64-bit keys."""
    keys = random_raw(count, seed=seed, epoch=epoch, purpose=purpose, position=position)
    order = np.argsort(keys)  # four times as fast as a stable sort, and the same but where keys are equal
    ranked = keys[order]
    return np.argsort(keys, kind="stable") if (ranked[1:] == ranked[:-1]).any() else order


def mix(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A fixed pseudo-random 64-bit number for each integer (the finalizer of SplitMix64; Steele et al. 2014)."""
    mixed = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class _Generators(threading.local):
    """Each thread's generator, used for all streams: to make one takes three times as long as to set its state."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)


_generators = _Generators()

_EMPTY = np.zeros(4, np.uint64)
