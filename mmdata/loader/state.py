"""Where a loader's state says that it was, if the state belongs to this plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdata.errors import ConfigError
from mmdata.loader.worker import Worker
from mmdata.plan import Plan
from mmdata.plan.position import check_count, check_epoch, check_state

Identity = dict[str, str | int | bool | None]
"""What batches depend on, by name: JSON."""


def identity_of(plan: Plan, worker: Worker) -> Identity:
    """What the batches of a plan depend on: its identity, and that of the worker's extra captions."""
    return {**plan.identity(), "extra_captions": worker.extra and worker.extra.fingerprint}


def position_of(state: Mapping[str, Any], identity: Identity, plan: Plan) -> tuple[int, int]:
    """(epoch, step) of a state; `identity` is that of the batches.

    Raises:
        ConfigError: the state belongs to another plan; what differs is named. Or a number in it is missing, or is none
            that `Loader.state_dict` gives.
    """
    plan_of_state = check_state(state, of="loader").get("plan")
    saved = {"extra_captions": None, **(plan_of_state if isinstance(plan_of_state, Mapping) else {})}
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
    epoch = check_epoch(state, of="loader")
    return epoch, check_count(state, "step", of="loader", at_most=plan.num_steps(epoch))
