"""Whether a checkpoint is of the run that is to be resumed: its settings, its length, its learning rates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from mmdata.config import Config, TrainConfig
from mmdata.config.corpus import FILES
from mmdata.config.settings import changeable_settings
from mmdata.errors import ConfigError
from mmdata.train.run.optimizer import learning_rate

# micro_batch_size, parallel and compile change results up to rounding; a compiled tower draws other dropout. A moved
# corpus is still the same corpus: the loader compares its manifest. In a mixture the folder of each dataset may change
# (data.shards.0.shards and so on, without the position), but not its weight or repeat.
MAY_CHANGE = frozenset(changeable_settings(Config))
"""Settings that may differ between the run that wrote a checkpoint and the run that resumes it."""

LENGTH = ("epochs", "steps", "schedule", "cooldown_steps")
"""Settings of a run's length and schedule in the section train; `check_same_run` says when they may differ."""

_POSITION = re.compile(r"\.\d+(?=\.)")
"""Of a section in a list of them: ".0" in data.shards.0.weight."""


def check_same_run(
    state: dict[str, Any],
    settings: dict[str, Any],
    config: TrainConfig,
    total_steps: int,
    *,
    origin: str,
    other_shards: str = "",
) -> None:
    """Refuse to resume under settings that would change what is computed.

    Length and schedule may change if the updates that were made had the learning rates that they would have now: a
    run of constant rate can be extended, and end in a cooldown.

    Args:
        state: the checkpoint.
        settings: of this run, nested by section.
        config: the section train of these settings.
        total_steps: of this run.
        origin: the checkpoint, for the message.
        other_shards: that the run was trained on other shards, in words; "" if it was not.

    Raises:
        ConfigError: names what differs, with both values; other shards first.
    """
    run = Path(origin).parent.parent
    changed = changed_settings(state["settings"], settings)
    if other_shards:
        # A config that was made for the new shards has other settings too: they follow from the shards.
        also = f". The settings differ too: {'; '.join(changed)}" if changed else ""
        raise ConfigError(
            f"cannot resume from {origin}: {other_shards}{also}. To train on these shards, give another train.output, "
            f"or delete '{run}'; to go on with the run, put back the shards that it was trained on"
        )
    if changed:
        raise ConfigError(
            f"cannot resume from {origin}: {'; '.join(changed)}. Restore the values, or give another train.output to "
            "start anew"
        )
    now = {name: getattr(config, name) for name in LENGTH}
    was = {name: state["settings"].get("train", {}).get(name, value) for name, value in now.items()}
    changes = [f"train.{name} was {was[name]}, is {value}" for name, value in now.items() if was[name] != value]
    step, old_steps = int(state["step"]), int(state["total_steps"])
    if not changes and old_steps != total_steps:
        raise ConfigError(
            f"cannot resume from {origin}: the run had {old_steps} steps, now it has {total_steps}; "
            "restore the data, or give another train.output to start anew"
        )
    if total_steps < step:
        raise ConfigError(
            f"cannot resume from {origin}: {'; '.join(changes)}. That makes {total_steps} steps, and the run has made "
            f"{step}: give it more"
        )
    # All updates are compared, about a microsecond each: the lines of two schedules may cross.
    made = config.model_copy(update={"schedule": was["schedule"], "cooldown_steps": was["cooldown_steps"]})
    if any(learning_rate(i, made, old_steps) != learning_rate(i, config, total_steps) for i in range(step)):
        raise ConfigError(
            f"cannot resume from {origin}: {'; '.join(changes)}. With that the {step} updates that were made would "
            f"have had other learning rates: {made.schedule} to step {old_steps}. To train on from the weights, begin "
            f"a run: model.init_from={run} train.output=ANOTHER_FOLDER. A run with train.schedule=constant can be "
            "extended at any time"
        )


def changed_settings(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The settings that differ between a run and a checkpoint of it, and may not, each with both values.

    Args:
        saved: settings in the checkpoint, nested by section.
        current: settings of this run.
    """
    before, now = _flat(saved), _flat(current)
    may_differ = MAY_CHANGE | {f"train.{name}" for name in LENGTH}
    changed: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        one, other = before.get(key), now.get(key)
        # A file that selects may lie elsewhere. Another condition has other rows, also to evaluate on.
        moved = key.endswith(".select") and str(one).lower().endswith(FILES) and str(other).lower().endswith(FILES)
        if one != other and not moved and (key.endswith(".select") or _POSITION.sub("", key) not in may_differ):
            changed.append(f"{key} was {one!r}, is {other!r}")
    return changed


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"data": {"shards": [{"weight": 3}]}} -> {"data.shards.0.weight": 3}; a list of values is a value."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, list) and isinstance(next(iter(cast("list[Any]", value)), None), dict):
            value = {str(position): item for position, item in enumerate(cast("list[Any]", value))}
        if isinstance(value, dict):
            flat |= _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
    return flat
