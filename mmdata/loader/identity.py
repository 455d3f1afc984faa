"""What the batches of a loader depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmdata.loader.builder import BatchSpec
from mmdata.plan import Plan

Identity = dict[str, Any]
"""What batches depend on, by name: JSON."""


def identity_of(plan: Plan, spec: BatchSpec) -> Identity:
    """What batches depend on: their rows, and the pixels and tokens of these.

    It leaves out what may change when a run is resumed: `data.loading` and the number of ranks.
    A loader adds its `data.fields`.
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
        "targets": spec.targets and spec.targets.identity,
        "caption_hash": getattr(plan.rows, "equals_fingerprint", None),
        **transform.identity(),
        **spec.text_transform.identity(),
        "transform_seed": transform.seed if own_seed else None,
        "tokenizer": spec.tokenizer and spec.tokenizer.identity,
    }


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
