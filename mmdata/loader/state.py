"""A loader's identity, and the position in a state whose identity is the same."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmdata.errors import ConfigError
from mmdata.loader.batch_maker import BatchMaker
from mmdata.plan import Plan
from mmdata.plan.position import check_count, check_epoch, check_state

logger = logging.getLogger("mmdata")

Identity = dict[str, Any]
"""What batches depend on, by name: JSON."""

SINCE = {
    "transform",
    "crop_scale",
    "decode",
    "augment",
    "transform_source",
    "transform_seed",
    "tokenizer",
    "patch_size",
    "fields",
}
"""Entries that the states of earlier versions lack: they are taken to be unchanged, with a warning."""
OF_TEXTS = {"text_transform", "text_transform_source", "caption_template", "caption_dropout"}
"""Entries that they lack, too, because there was nothing that changed a text: None."""


def identity_of(plan: Plan, maker: BatchMaker) -> Identity:
    """What batches depend on: their rows, and the pixels and tokens of these.

    It leaves out what may change when a run is resumed: `data.loading`, the number of ranks, and hashes in the batch.
    """
    transform = maker.transform
    own_seed = transform.identity()["transform"] != "eval" and transform.seed != plan.seed
    return {
        "weights": None,
        "order": None,
        "leftover": "merge",
        **plan.identity(),
        "negative_captions": maker.negatives and maker.negatives.fingerprint,
        "captions": maker.captions and maker.captions.name,
        "caption_hash": getattr(plan.rows, "equals_fingerprint", None),
        **transform.identity(),
        **maker.text_transform.identity(),
        "transform_seed": transform.seed if own_seed else None,
        "tokenizer": maker.tokenizer and maker.tokenizer.identity,
    }


def differences(saved: dict[str, Any], identity: Identity, *, of: str) -> list[str]:
    """The names of the entries in which the identity of a state differs from this one.

    Only logs entries that the state of an earlier version lacks, and a change in the file of a user's transform or
    text_transform, which may be a comment.

    Args:
        saved: identity in the state.
        identity: of the loader or stream.
        of: "loader" or "stream", for the log.
    """
    if missing := [name for name in identity if name in SINCE and name not in saved]:
        logger.warning(
            "this %s state was written by an earlier version, which did not say %s: they are taken to be what they are "
            "now; if you have changed one of them since, pixels or tokens are not those of an undisturbed run",
            of,
            ", ".join(missing),
        )
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
    compared = [name for name in identity if not name.endswith("transform_source") and name not in missing]
    return [name for name in compared if _rows_of(saved.get(name)) != _rows_of(identity[name])]


_OF_ROWS = re.compile(r"^data\.(?:select|shards|join|row_weights|captions|fields)\b.* \(([0-9a-f]{16})\)$", re.DOTALL)


def _rows_of(value: Any) -> Any:
    """Of the name of selected rows their digest, since a file may have another name; another value as it is."""
    found = (
        re.search(
            r"^data\.(?:select|shards|join|row_weights|captions|fields)\b.* \(([0-9a-f]{16})\)$",
            value,
            re.DOTALL,
        )
        if isinstance(value, str)
        else None
    )
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
    plan_of_state = check_state(state, of="loader").get("plan")
    saved = {
        "negative_captions": None,
        "selection": None,
        "weights": None,
        "captions": None,
        "caption_hash": None,
        **dict.fromkeys(OF_TEXTS),
        **({} if identity.get("fields") else {"fields": None}),
        **(plan_of_state if isinstance(plan_of_state, Mapping) else {}),
    }
    if "extra_captions" in saved:  # their name in earlier versions
        saved["negative_captions"] = saved.pop("extra_captions")
    if missing := [key for key in identity if key not in saved and key not in SINCE]:
        raise ConfigError(
            f"this loader state does not say {', '.join(missing)} of its plan: this version's loader did not "
            "write it; resume with the one that did, or start anew"
        )
    if changed := differences(saved, identity, of="loader"):
        listed = ", ".join(f"{key} was {saved[key]!r} and is {identity[key]!r}" for key in changed)
        others = {"other fields": {"fields"}, "other pixels or tokens": SINCE | OF_TEXTS}
        other = next((words for words, names in others.items() if set(changed) <= names), "another plan")
        raise ConfigError(
            f"this loader state belongs to {other}: {listed}; resume with the settings and shards "
            "it was saved with, or start anew"
        )
    epoch = check_epoch(state, of="loader")
    return epoch, check_count(state, "step", of="loader", at_most=plan.num_steps(epoch))
