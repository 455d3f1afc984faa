"""A finding about this machine: a status and, for a fault, a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was checked.
        status: ok; info (nothing to do); warn (works, with a loss); fail (does not work).
        found: the finding, in one line.
        remedy: what to do; "" if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def in_one_line(error: BaseException) -> str:
    """The message of an error in one line; its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
