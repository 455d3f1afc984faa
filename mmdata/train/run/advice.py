"""Whether harder batches can help a run, from what its log says of the negatives (docs/mining.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLD_APART = 0.9
"""In-batch accuracy from which harder batches may teach more: it was 0.93 where the arms of docs/mining.md began."""
MANY_FALSE = 0.2
"""Share of negatives above, or as good as above, their positive from which many are probably none; a guess."""
TIMES_CHANCE = 2.0
"""R@1 on unseen rows, in chances, below which a model has learnt nothing that holds for them; it was 0.3 on NLVR."""
LARGEST_CHANCE = 0.1
"""Of fewer than ten candidates R@1 says little."""


def advise(mining: Mapping[str, Any], settings: Mapping[str, Any], evaluation: Mapping[str, Any] | None = None) -> str:
    """One or two sentences, with the setting to try; "" if the line does not tell.

    Args:
        mining: the last line "mining" of metrics.jsonl.
        settings: of the run, as in config.yaml.
        evaluation: the last line "evaluation", if any.
    """
    accuracy, false = mining.get("in_batch_accuracy"), mining.get("false_negative_share")
    if accuracy is None:
        return ""
    told = f"in-batch accuracy {accuracy:.2f} at step {mining['step']}"
    train, data = settings.get("train") or {}, settings.get("data") or {}
    if false is not None and false > MANY_FALSE and not train.get("teacher"):
        masked = "train.teacher" if train.get("mask_false_negatives") else "train.mask_false_negatives=true"
        return (
            f"{told}, and {false:.0%} of the negatives are as near as their positives: many may be none; try {masked} "
            "before anything that makes negatives harder."
        )
    if accuracy < TOLD_APART:
        return f"{told}: random batches still teach; mining early has not helped in any experiment of docs/mining.md."
    if by_heart := _by_heart(evaluation or {}):
        return f"{told}, and {by_heart}: it has learnt its rows by heart; more rows help, and harder batches do not."
    if data.get("groups"):
        return f"{told}: the batches are grouped, and told apart all the same: what they can teach is learnt."
    return (
        f"{told}: the batches are easy. If the corpus has rows that differ in little, batches of neighbours can teach "
        "more: make groups of four by this model (`mmdata neighbours`), go on from it (`model.init_from`) with half of "
        "each batch from them (data.groups.share=0.5), and compare (docs/mining.md)."
    )


def _by_heart(evaluation: Mapping[str, Any]) -> str:
    """That a model finds little of what it is evaluated on, in words; "" if it finds more, or nobody knows."""
    ways, chance = ("image_to_text_r1", "text_to_image_r1"), evaluation.get("chance_r1")
    if not chance or chance > LARGEST_CHANCE or any(way not in evaluation for way in ways):
        return ""
    mean = sum(float(evaluation[way]) for way in ways) / 2
    return f"R@1 on data.val is {mean:.1%} at a chance of {chance:.1%}" if mean < TIMES_CHANCE * chance else ""
