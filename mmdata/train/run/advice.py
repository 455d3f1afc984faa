"""Whether harder batches can help a run, from what its log says of the negatives (docs/mining.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLD_APART = 0.9
"""In-batch accuracy from which harder batches may teach more: it was 0.93 where the arms of docs/mining.md began."""
MANY_FALSE = 0.2
"""Share of negatives above, or as good as above, their positive from which many are probably none; a guess."""


def advise(mining: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """One or two sentences, with the setting to try; "" if the line does not tell.

    Args:
        mining: the last line "mining" of metrics.jsonl.
        settings: of the run, as in config.yaml.
    """
    accuracy, false = mining.get("in_batch_accuracy"), mining.get("false_negative_share")
    if accuracy is None:
        return ""
    told = f"in-batch accuracy {accuracy:.2f} at step {mining['step']}"
    if accuracy < TOLD_APART:
        return f"{told}: random batches still teach; mining early has not helped in any experiment of docs/mining.md."
    train, data = settings.get("train") or {}, settings.get("data") or {}
    if false is not None and false > MANY_FALSE and not train.get("teacher"):
        masked = "train.teacher" if train.get("mask_false_negatives") else "train.mask_false_negatives=true"
        return (
            f"{told}, and {false:.0%} of the negatives are as near as their positives: many may be none; try {masked} "
            "before anything that makes negatives harder."
        )
    if data.get("groups"):
        return f"{told}: the batches are grouped, and told apart all the same; a larger data.groups.size is harder."
    return (
        f"{told}: the batches are easy. If the corpus has rows that differ in little, batches of neighbours can teach "
        'more: go on from this model with `model.init_from` and "data.groups={source: run, size: 4}", '
        "train.feature_cache={}, and compare (docs/mining.md)."
    )
