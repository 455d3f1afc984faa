"""A loader's identity, and the position in a state whose identity is the same."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmdata.errors import ConfigError, excerpt
from mmdata.loader.builder import BatchSpec
from mmdata.loader.position import check_count, check_epoch, check_state
from mmdata.plan import Plan

logger = logging.getLogger("mmdata")

Identity = dict[str, Any]
"""What batches depend on, by name: JSON."""

OF_PIXELS_AND_TOKENS = {
    *("transform", "crop_scale", "decode", "augment", "transform_source", "transform_seed", "tokenizer", "patch_size"),
    *("text_transform", "text_transform_source", "caption_template", "caption_dropout"),
}
"""Entries that change what is in a row of a batch, and not which rows a batch has."""
OF_ROWS = re.compile(r"^data\.(?:select|shards|join|row_weights|captions|fields)\b.* \(([0-9a-f]{16})\)$", re.DOTALL)
"""A value that ends in a digest of what it names: a file may have another name and the same content."""


def identity_of(plan: Plan, spec: BatchSpec) -> Identity:
    """What batches depend on: their rows, and the pixels and tokens of these.

    It leaves out what may change when a run is resumed: `data.loading`, the number of ranks, and hashes in the batch.
    """
    transform = spec.transform
    own_seed = transform.identity()["transform"] != "eval" and transform.seed != plan.seed
    return {
        "weights": None,
        "order": None,
        "leftover": "merge",
        **plan.identity(),
        "negative_captions": spec.negatives and spec.negatives.fingerprint,
        "captions": spec.captions and spec.captions.name,
        "caption_hash": getattr(plan.rows, "equals_fingerprint", None),
        **transform.identity(),
        **spec.text_transform.identity(),
        "transform_seed": transform.seed if own_seed else None,
        "tokenizer": spec.tokenizer and spec.tokenizer.identity,
    }


def differences(saved: Mapping[str, Any], identity: Identity, *, of: str) -> list[str]:
    """The names of the entries in which the identity of a state differs from this one.

    Only logs a change in the file of a user's transform or text_transform, which may be a comment.

    Args:
        saved: identity in the state.
        identity: of the loader or stream.
        of: "loader" or "stream", for the log.
    """
    for name, entries in (("transform", "pixels"), ("text_transform", "texts")):
        before, now = saved.get(f"{name}_source"), identity.get(f"{name}_source")
        if saved.get(name) == identity.get(name) and None not in (before, now) and before != now:
            logger.warning(
                "%s '%s': its file is not what it was when this %s state was taken; if more than comments have "
                "changed, %s are not those of an undisturbed run",
                name,
                identity[name],
                of,
                entries,
            )
    compared = [name for name in identity if not name.endswith("transform_source")]
    return [name for name in compared if _compared(saved.get(name)) != _compared(identity[name])]


def _compared(value: Any) -> Any:
    found = OF_ROWS.search(value) if isinstance(value, str) else None
    return found[1] if found else value


def other_shards(state: Mapping[str, Any], identity: Identity, shards: Sequence[str]) -> str:
    """In words, that a state was taken with other shards; "" if it was not, or does not say.

    Args:
        state: of a loader.
        identity: of the loader that is to go on from it.
        shards: the folders of that loader.
    """
    plan = state.get("plan")
    saved = plan.get("rows") if isinstance(plan, Mapping) else None
    if not isinstance(saved, str) or saved.count("-") != 2:
        return ""
    # INDEX-LENGTHS-ROWS, see IndexRows: only the index is of the shards.
    (before, _, rows_before), (now, _, rows_now) = saved.split("-"), str(identity["rows"]).split("-")
    if before == now:
        return ""
    listed = ", ".join(f"'{one}'" for one in shards[:3]) + (", …" if len(shards) > 3 else "")
    return (
        f"data.shards {listed}: other shards than before: their index was {before} ({int(rows_before):,} "
        f"rows), and is {now} ({int(rows_now):,} rows)"
    )


def position_of(state: Mapping[str, Any], identity: Identity, plan: Plan) -> tuple[int, int]:
    """(epoch, step) of a state; `identity` is that of the loader.

    Raises:
        ConfigError: the state belongs to other batches, and the error names what differs; or a number in the state is
            missing or impossible.
    """
    saved = check_state(state, of="loader").get("plan")
    if not isinstance(saved, Mapping):
        raise ConfigError(
            f"loader state: 'plan' must say what its batches depend on: got {excerpt(saved)}; give the dictionary that "
            "state_dict() returned, or start anew"
        )
    if changed := differences(saved, identity, of="loader"):
        listed = ", ".join(f"{key} was {saved.get(key)!r} and is {identity[key]!r}" for key in changed)
        others = {"other fields": {"fields"}, "other pixels or tokens": {"fields", *OF_PIXELS_AND_TOKENS}}
        other = next((words for words, names in others.items() if set(changed) <= names), "another plan")
        raise ConfigError(
            f"this loader state belongs to {other}: {listed}; resume with the settings and shards "
            "it was saved with, or start anew"
        )
    epoch = check_epoch(state, of="loader")
    return epoch, check_count(state, "step", of="loader", at_most=plan.num_steps(epoch))
