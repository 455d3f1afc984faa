"""The page of `make gpu`: what its rows say about what was aimed at, and what their columns mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

Row = dict[str, Any]
Measured = float | None

LEGEND = {
    "ms": "milliseconds of forward and backward of the loss, median",
    "memory_mb": "the most that the loss needs beyond the features, in 10⁶ bytes",
    "memory_over_tiled": "its memory ÷ that of the tiled loss; empty where one of them takes less than 0.05 MB",
    "tiled_over_it": "time of the tiled loss ÷ its time: below 1 the tiled loss is faster",
    "loss": "the value, in nats",
    "rows": "of a batch",
    "step_ms": "milliseconds of an update on a batch that lies on the device, median",
    "samples_per_s": "rows a second",
    "tflops": "10¹² operations a second in the towers' products, forward and backward",
    "share_of_peak": "of what the device does in bfloat16 by its maker's data sheet: the mfu of a run's log",
    "cudnn_ms": "milliseconds of forward and backward of one layer's attention by cuDNN, torch's choice; median",
    "flash_ms": "the same by FlashAttention",
    "memory_gb": "the most that tensors took, in 10⁹ bytes",
    "share_of_synthetic": "speed of steps that the loader feeds ÷ speed of the same step on one (synthetic) batch",
    "per_core": "samples_per_s ÷ cores",
    "image_bytes": "of a file, on average",
    "seconds": "of the whole command",
    "data_wait_share": "of the time in which the step waited for a batch, median of the run's second half",
    "last_loss": "at the end of the run, in nats",
    "text_to_image_r1": "of the last evaluation: share of captions whose own image is the nearest of all",
}
"""What columns mean."""

WORDS = {
    "eager": "without torch.compile",
    "compiled": "the blocks of the towers go through torch.compile, as by train.compile",
    "padded to 77": "all texts have 77 tokens, as open_clip's",
    "bucketed": "texts are padded to one of the plan's four lengths",
    "fed by the loader": "each step has a new batch of the loader; a synthetic one is the same batch again and again",
}
"""What words in names mean."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What one number shall be.

    Args:
        what: the number, in words.
        measured: finds it in the rows; None: not there.
        at_least, at_most: the bound; one of them is given.
        share: it is shown in percent.
    """

    what: str
    measured: Callable[[Sequence[Row]], Measured]
    at_least: float | None = None
    at_most: float | None = None
    share: bool = False
    decides: Callable[[Sequence[Row]], str] | None = None
    """Names the row that the number is from, where several may be it."""

    def line(self, rows: Sequence[Row]) -> str:
        """A row of the table of aims."""
        value, bound = self.measured(rows), self.at_most if self.at_least is None else self.at_least
        assert bound is not None
        sign = "≤" if self.at_least is None else "≥"
        verdict = "not measured"
        if value is not None:
            reached = value <= bound if self.at_least is None else value >= bound
            verdict = "reached" if reached else "**not reached**"
            verdict += f", by {self.decides(rows)}" if self.decides is not None else ""
        shown = "" if value is None else self._shown(value)
        return f"| {self.what} | {sign} {self._shown(bound)} | {shown} | {verdict} |"

    def _shown(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.share else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def value_of(rows: Sequence[Row], name: str, column: str) -> Measured:
    """A number of the row with a name."""
    found = [row.get(column) for row in rows if row["name"] == name]
    return found[0] if found and isinstance(found[0], (int, float)) else None


def ratio(name: str, other: str, column: str) -> Callable[[Sequence[Row]], Measured]:
    """Finds one row's number ÷ another's."""

    def measured(rows: Sequence[Row]) -> Measured:
        above, below = value_of(rows, name, column), value_of(rows, other, column)
        return above / below if above is not None and below else None

    return measured


def best(what: str, start: str, column: str, *, at_least: float, share: bool = False) -> Aim:
    """An aim for the largest number in the rows whose names start so; that row decides, and is named."""

    def largest(rows: Sequence[Row]) -> Row | None:
        found = [row for row in rows if row["name"].startswith(start) and isinstance(row.get(column), (int, float))]
        return max(found, key=lambda row: row[column], default=None)

    def measured(rows: Sequence[Row]) -> Measured:
        row = largest(rows)
        return None if row is None else row[column]

    def decides(rows: Sequence[Row]) -> str:
        row = largest(rows)
        return "" if row is None else row["name"]

    return Aim(what=what, measured=measured, at_least=at_least, share=share, decides=decides)


def _cost(rows: Sequence[Row]) -> Measured:
    # By rows a second: a form for which there is too little memory takes fewer rows a step.
    plain, mining = "vit_b_32, padded to 77, compiled", "vit_b_32, padded to 77, compiled, mining top_k 64"
    found = ratio(plain, mining, "samples_per_s")(rows)
    return None if found is None else found - 1


def _bucketed(rows: Sequence[Row]) -> Measured:
    for form in ("compiled", "eager"):
        found = ratio(f"vit_b_32, bucketed, {form}", f"vit_b_32, padded to 77, {form}", "samples_per_s")(rows)
        if found is not None:
            return found
    return None


def _gigabytes(rows: Sequence[Row]) -> Measured:
    found = value_of(rows, "tiled, 1,048,576 x 512", "memory_mb")
    return None if found is None else found / 1e3


AIMS = [
    *(
        Aim(
            what=f"time of the tiled loss ÷ open_clip's under bf16, {rows:,} × 512",
            measured=ratio(f"tiled, {rows:,} x 512", f"open_clip, {rows:,} x 512", "ms"),
            at_most=1.0,
        )
        for rows in (8192, 32768, 65536)
    ),
    Aim(
        what="memory of open_clip's loss ÷ the tiled one's, 65,536 × 512",
        measured=ratio("open_clip, 65,536 x 512", "tiled, 65,536 x 512", "memory_mb"),
        at_least=80,
    ),
    Aim(what="memory of the tiled loss, 1,048,576 × 512, GB", measured=_gigabytes, at_most=12),
    best("ViT-B/32, share of the peak", "vit_b_32, ", "share_of_peak", at_least=0.35, share=True),
    best("ViT-B/16, share of the peak", "vit_b_16, ", "share_of_peak", at_least=0.4, share=True),
    best("ViT-B/16, samples/s padded to 77", "vit_b_16, padded", "samples_per_s", at_least=3200),
    best("ViT-L/14, share of the peak", "vit_l_14, ", "share_of_peak", at_least=0.4, share=True),
    best("ViT-L/14, samples/s padded to 77", "vit_l_14, padded", "samples_per_s", at_least=750),
    Aim(what="ViT-B/32, samples/s bucketed ÷ padded to 77", measured=_bucketed, at_least=1.3),
    Aim(
        what="ViT-B/16, samples/s compiled ÷ eager",
        measured=ratio("vit_b_16, padded to 77, compiled", "vit_b_16, padded to 77, eager", "samples_per_s"),
        at_least=1.25,
    ),
    Aim(what="ViT-B/32, mining (top_k 64): longer step", measured=_cost, at_most=0.05, share=True),
    best(
        "ViT-B/32 fed by the loader ÷ on one batch", "vit_b_32 fed by the loader", "share_of_synthetic", at_least=0.98
    ),
]
"""What is aimed at, on an H200 with 16 cores."""


def page(machine: str, rows: Sequence[Row], *, rehearsal: bool) -> str:
    """The Markdown of all rows: the aims, and a table for each part."""
    lines = [f"# {machine}", ""]
    if rehearsal:
        lines += ["**A rehearsal: small models, few rows. Its figures say nothing about a GPU.**"]
    else:
        lines += ["## Aims on an H200 with 16 cores", "", "| what | aim | here | |", "|---|---|---|---|"]
        lines += [aim.line(rows) for aim in AIMS]
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        columns = [name for name in dict.fromkeys(chain.from_iterable(own)) if name not in ("part", "command")]
        lines += ["", f"## {part}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in own]
        lines += ["", *(f"    {command}" for command in dict.fromkeys(row["command"] for row in own)), ""]
        lines += [f"- `{name}`: {LEGEND[name]}" for name in columns if name in LEGEND]
        said = " ".join(f"{value}" for row in own for name, value in row.items() if name != "command")
        lines += [f"- {word}: {meaning}" for word, meaning in WORDS.items() if word in said]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, (int, float)) else str(value).replace("|", "/")
