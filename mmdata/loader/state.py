"""Where a loader's state says that it was, if the state belongs to this plan."""

from __future__ import annotations

from typing import Any

from mmdata.errors import ConfigError
from mmdata.loader.worker import Worker
from mmdata.plan import Plan

Identity = dict[str, str | int | bool | None]
"""What batches depend on, by name: JSON."""


def identity_of(plan: Plan, worker: Worker) -> Identity:
    """What the batches of a plan depend on: its identity, and that of the worker's extra captions."""
    return {**plan.identity(), "extra_captions": worker.extra and worker.extra.fingerprint}


def position_of(state: dict[str, Any], identity: Identity, plan: Plan) -> tuple[int, int]:
    """(epoch, step) of a state; `identity` is that of the batches.

    Raises:
        ConfigError: the state belongs to another plan; what differs is named. Or a number in it is missing, or is none
            that `Loader.state_dict` gives.
    """
    saved = {"extra_captions": None, **(state.get("plan") or {})}
    if untold := [key for key in identity if key not in saved]:
        raise ConfigError(
            f"this loader state does not say {', '.join(untold)} of its plan: this version's loader did not "
            "write it; resume with the one that did, or start anew"
        )
    if changed := [key for key in identity if saved[key] != identity[key]]:
        listed = ", ".join(f"{key} was {saved[key]!r} and is {identity[key]!r}" for key in changed)
        raise ConfigError(
            f"this loader state belongs to another plan: {listed}; resume with the settings and shards "
            "it was saved with, or start anew"
        )
    epoch = check_count(state, "epoch", of="loader")
    return epoch, check_count(state, "step", of="loader", at_most=plan.num_steps(epoch))


def check_count(state: dict[str, Any], name: str, *, of: str, at_most: int | None = None) -> int:
    """A whole number of a state; raises a ConfigError that says whose (`of`), where it is none that it can be."""
    value = state.get(name)
    if type(value) is not int or value < 0 or (at_most is not None and value > at_most):
        most = "" if at_most is None else f", at most {at_most}"
        raise ConfigError(
            f"{of} state: '{name}' must be a whole number from 0 on{most}: got {value!r}; "
            "give the dictionary that state_dict() returned, or start anew"
        )
    return value
