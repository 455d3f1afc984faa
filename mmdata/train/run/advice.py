"""Whether harder batches can help a run, from what its log says of the negatives (docs/mine.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
FEW_ROWS = 256
"""Rows below which chance alone moves the accuracy by some hundredths: 0.02 is one standard deviation of 0.9 in 256."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """Means over the last measurements of a run, each weighted by its valid rows.

    Attributes:
        batches: how many were measured.
        rows: in all of them; 0 where the log does not say.
        first_step: of them.
        last_step: of them.
        is_grouped: the batches held groups of rows (data.groups).
        accuracy: in-batch accuracy, of all admissible negatives.
        false_share: of all admissible negatives, those as near as the positive; None where only those that a miner
            kept were counted.
        kept_share: negatives that the miner kept.
        effective: negatives that share the gradient.
    """

    batches: int
    rows: int
    first_step: int
    last_step: int
    is_grouped: bool
    accuracy: float | None
    false_share: float | None
    kept_share: float | None
    effective: float | None

    @property
    def origin(self) -> str:
        """Of what the means are, in words: "mean of 6 batches with 370 rows, steps 310 to 400"."""
        rows = f" with {self.rows:,} rows" if self.rows else ""
        if self.batches == 1:
            return f"one batch{rows}, step {self.last_step:,}"
        return f"mean of {self.batches:,} batches{rows}, steps {self.first_step:,} to {self.last_step:,}"


def mines(settings: Mapping[str, Any]) -> bool:
    """Whether a run asks for harder negatives than those of random batches; `settings` as in config.yaml."""
    train, data = _section(settings, "train"), _section(settings, "data")
    return bool(data.get("groups")) or any(train.get(name) for name in ("miner", "teacher", "queue"))


def measured(mining: Sequence[Line], settings: Mapping[str, Any]) -> Measured | None:
    """The means of the last part of a run; None without a measurement.

    Args:
        mining: the lines "mining" of metrics.jsonl, oldest first.
        settings: of the run, as in config.yaml.
    """
    groups = _section(settings, "data").get("groups")
    if not mining:
        return None
    last, is_grouped = mining[-1]["step"], _has_groups(mining[-1], groups)
    lines = [
        line for line in mining if line["step"] > (1 - LAST_PART) * last and _has_groups(line, groups) == is_grouped
    ]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [(value, line["rows"]) for value, line in zip(values, lines, strict=True) if value is not None]
        total = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / total if total else None

    return Measured(
        batches=len(lines),
        rows=int(sum(line["rows"] for line in lines)),
        first_step=lines[0]["step"],
        last_step=last,
        is_grouped=is_grouped,
        accuracy=mean([line.get("in_batch_accuracy") for line in lines]),
        false_share=mean([line.get("admissible_false_negative_share") for line in lines]),
        kept_share=mean([line.get("kept_share") for line in lines]),
        effective=mean([line.get("effective_negatives") for line in lines]),
    )


def advise(mining: Sequence[Line], settings: Mapping[str, Any], evaluation: Line | None = None) -> str:
    """A few sentences, with the settings to try; "" if the lines do not tell.

    Args:
        mining: the lines "mining" of metrics.jsonl, oldest first.
        settings: of the run, as in config.yaml.
        evaluation: the last line "evaluation", if any.
    """
    found = measured(mining, settings)
    if found is None or found.accuracy is None:
        return ""
    train, data = _section(settings, "train"), _section(settings, "data")
    also = "".join(
        f"; {words}"
        for name, words in (
            ("miner", "of all negatives of the batch, not only those that train.miner keeps"),
            ("queue", "without the negatives of train.queue"),
        )
        if train.get(name)
    )
    told = f"in-batch accuracy {found.accuracy:.2f} ({found.origin}{also})"
    few = " Few rows were measured: the accuracy may be off by some hundredths."
    return told + _means(found, settings, train, data, evaluation or {}) + (few if 0 < found.rows < FEW_ROWS else "")


def _means(
    found: Measured, settings: Mapping[str, Any], train: Mapping[str, Any], data: Mapping[str, Any], evaluation: Line
) -> str:
    """What the numbers mean, as the end of a sentence that names the accuracy, and what to try."""
    assert found.accuracy is not None
    masks = train.get("mask_false_negatives")
    if found.false_share is not None and found.false_share > MANY_FALSE and not train.get("teacher"):
        known = (
            "" if data.get("caption_hash") else ", or data.caption_hash where a column says which rows are the same,"
        )
        remedy = f"train.teacher{known}" if masks else "train.mask_false_negatives=true"
        return (
            f", and {found.false_share:.0%} of the negatives are as near as their positives: unless the model has "
            f"learnt little yet, many may be none; try {remedy} before anything that makes negatives harder."
        )
    if found.accuracy < TOLD_APART:
        return _still_teaches(found, train, masks=bool(masks))
    if by_heart := _by_heart(evaluation):
        return f", and {by_heart}: it has learnt its rows by heart; more rows help, and harder batches do not."
    if found.is_grouped:
        return ": the batches are grouped, and told apart all the same: what they can teach is learnt."
    is_fixed = "logit_scale" in (_section(settings, "model").get("freeze") or [])
    scale = ""
    if not is_fixed and train.get("loss", "clip") == "clip":
        scale = (
            " The cheapest to try is a lower fixed scale: go on from this model with model.freeze=[logit_scale] "
            "model.logit_scale_init=5."
        )
    return (
        f": the batches are easy.{scale} If the corpus has rows that differ in little, batches of neighbours can teach "
        "more: make groups of four by this model (`mmdata neighbours`), and go on from it (`model.init_from`) with "
        "half of each batch from them (data.groups.share=0.5). Compare with as many more random batches "
        "(docs/mine.md)."
    )


def _still_teaches(found: Measured, train: Mapping[str, Any], *, masks: bool) -> str:
    """What an accuracy below `TOLD_APART` means."""
    if found.is_grouped:
        return (
            ": the batches hold groups of rows (data.groups), which are harder to tell apart than random rows, so the "
            "number does not say whether random batches would still teach. Whether the groups help shows in a "
            "comparison with as many random batches (docs/mine.md)."
        )
    used = " and ".join(f"train.{name}" for name in ("miner", "queue") if train.get(name))
    without = f" Compare with a run without {used}." if used else ""
    mask = (
        ""
        if masks
        else " Where images or captions repeat, train.mask_false_negatives=true comes first: such rows "
        "cannot be told apart."
    )
    return (
        f": random batches still teach; mining early has not helped in any experiment of docs/mine.md.{without}{mask}"
    )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return settings.get(name) or {}


def _has_groups(line: Line, groups: Mapping[str, Any] | None) -> bool:
    """Whether the batch of a line held groups: those of a run begin between two of its epochs."""
    if not groups:
        return False
    return groups.get("source") != "run" or line.get("epoch", 0) >= groups.get("every_epochs", 1)


def _by_heart(evaluation: Line) -> str:
    """That a model finds little of what it is evaluated on, in words; "" if it finds more, or nobody knows."""
    ways, chance = ("image_to_text_r1", "text_to_image_r1"), evaluation.get("chance_r1")
    if not chance or chance > LARGEST_CHANCE or any(way not in evaluation for way in ways):
        return ""
    mean = sum(float(evaluation[way]) for way in ways) / 2
    return f"R@1 on data.val is {mean:.1%} at a chance of {chance:.1%}" if mean < TIMES_CHANCE * chance else ""
