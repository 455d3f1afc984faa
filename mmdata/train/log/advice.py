"""Whether harder batches can help a run, from what its log says of the negatives (docs/mine.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TOLD_APART = 0.9
"""In-batch accuracy from which harder batches may teach more: it was 0.93 where the arms of docs/mine.md began."""
MANY_FALSE = 0.2
"""Share of negatives above, or as good as above, their positive from which many are probably none; a guess."""
TIMES_CHANCE = 2.0
"""R@1 on unseen rows, in chances, below which a model has learnt nothing that holds for them; it was 0.3 on NLVR."""
LARGEST_CHANCE = 0.1
"""Of fewer than ten candidates R@1 says little."""
LAST_PART = 0.25
"""Share of the steps, up to the last measurement, whose measurements are averaged: the model before was another one."""

COLLAPSED_SHARE, COLLAPSED_ACCURACY = 0.95, 0.1
"""Of negatives as near as their positives, and of rows told apart: a model beyond both gives all rows one feature."""

Line = Mapping[str, Any]


class Measured(NamedTuple):
    """Means over the last measurements of a run, each weighted by its valid rows.

    Attributes:
        origin: of what, in words: "mean of 6 batches with 370 rows, steps 310 to 400".
        accuracy: in-batch accuracy, of all admissible negatives.
        false_share: of all admissible negatives, those as near as the positive.
        kept_share: negatives that the miner kept.
        effective: negatives that share the gradient.
    """

    origin: str
    accuracy: float | None
    false_share: float | None
    kept_share: float | None
    effective: float | None


def mines(settings: Mapping[str, Any]) -> bool:
    """Whether a run asks for harder negatives than those of random batches; `settings` as in config.yaml."""
    train, data = _section(settings, "train"), _section(settings, "data")
    return bool(data.get("groups")) or any(train.get(name) for name in ("miner", "teacher", "queue"))


def measured(lines: Sequence[Line]) -> Measured | None:
    """The means of the last part of a run; None without a measurement.

    Args:
        lines: of metrics.jsonl, oldest first.
    """
    mining = [line for line in lines if line["kind"] == "mining"]
    if not mining:
        return None
    last = mining[-1]["step"]
    alike = [line for line in mining if line["step"] > (1 - LAST_PART) * last]
    rows = sum(line["rows"] for line in alike)

    def mean(name: str) -> float | None:
        known = [(line[name], line["rows"]) for line in alike if line.get(name) is not None]
        total = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / total if total else None

    batches = f"mean of {len(alike):,} batches with {rows:,} rows, steps {alike[0]['step']:,} to {last:,}"
    return Measured(
        batches if len(alike) > 1 else f"one batch with {rows:,} rows, step {last:,}",
        accuracy=mean("in_batch_accuracy"),
        false_share=mean("admissible_false_negative_share"),
        kept_share=mean("kept_share"),
        effective=mean("effective_negatives"),
    )


def advise(lines: Sequence[Line], settings: Mapping[str, Any]) -> str:
    """A few sentences, with the settings to try; "" if the lines do not tell.

    Args:
        lines: of metrics.jsonl, oldest first.
        settings: of the run, as in config.yaml.
    """
    found = measured(lines)
    if found is None or found.accuracy is None:
        return ""
    return f"in-batch accuracy {found.accuracy:.2f} ({found.origin}){_meaning(found, lines, settings)}"


def _meaning(found: Measured, lines: Sequence[Line], settings: Mapping[str, Any]) -> str:
    """What the numbers mean, as the end of a sentence that names the accuracy, and what to try."""
    assert found.accuracy is not None
    train, data = _section(settings, "train"), _section(settings, "data")
    masks, is_grouped = train.get("mask_false_negatives"), bool(data.get("groups"))
    if (found.false_share or 0.0) > COLLAPSED_SHARE and found.accuracy < COLLAPSED_ACCURACY:
        later = "a higher train.mining_after_steps, or " if train.get("miner") else ""
        return (
            f", and {found.false_share:.0%} of the negatives are as near as their positives: the features of all rows "
            f"are nearly the same. If that stays so, the model has collapsed: start again with {later}a lower train.lr."
        )
    if (found.false_share or 0.0) > MANY_FALSE and not train.get("teacher"):
        same = "" if data.get("caption_hash") else ", or data.caption_hash where a column says which rows are the same,"
        remedy = f"train.teacher{same}" if masks else "train.mask_false_negatives=true"
        return (
            f", and {found.false_share:.0%} of the negatives are as near as their positives: unless the model has "
            f"learnt little yet, many may be none; try {remedy} before anything that makes negatives harder."
        )
    if found.accuracy < TOLD_APART and is_grouped:
        return (
            ": the batches hold groups of rows (data.groups), which are harder to tell apart than random rows. Whether "
            "they help shows in a comparison with as many random batches (docs/mine.md)."
        )
    if found.accuracy < TOLD_APART:
        mask = " Where images or captions repeat, train.mask_false_negatives=true comes first." if not masks else ""
        return f": random batches still teach; mining early has not helped in any experiment of docs/mine.md.{mask}"
    if by_heart := _by_heart(lines):
        return f", and {by_heart}: it has learnt its rows by heart; more rows help, and harder batches do not."
    if is_grouped:
        return ": the batches are grouped, and told apart all the same: what they can teach is learnt."
    is_fixed = "logit_scale" in (_section(settings, "model").get("freeze") or [])
    lower = " Try a lower fixed scale: go on from this model with model.freeze=[logit_scale] model.logit_scale_init=5."
    return (
        f": the batches are easy.{lower if not is_fixed and train.get('loss', 'clip') == 'clip' else ''} If the corpus "
        "has rows that differ in little, batches of neighbours can teach more: make groups of four by this model "
        "(`mmdata neighbours`), and go on from it (`model.init_from`) with half of each batch from them "
        "(data.groups.share=0.5). Compare with as many more random batches (docs/mine.md)."
    )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return settings.get(name) or {}


def _by_heart(lines: Sequence[Line]) -> str:
    """That a model finds little of what it is evaluated on, in words; "" if it finds more, or nobody knows."""
    evaluation = next((line for line in reversed(lines) if line["kind"] == "evaluation"), {})
    found = [evaluation[way] for way in ("image_to_text_r1", "text_to_image_r1") if way in evaluation]
    chance = evaluation.get("chance_r1")
    if not chance or chance > LARGEST_CHANCE or len(found) < 2 or sum(found) / 2 >= TIMES_CHANCE * chance:
        return ""
    return f"R@1 on data.val is {sum(found) / 2:.1%} at a chance of {chance:.1%}"
