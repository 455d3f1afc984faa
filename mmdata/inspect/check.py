"""A finding about this machine: a status and, where something is wrong, a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: ok; info (nothing to do, good to know); warn (works, with a loss); fail (does not work).
        found: what is there, in one line.
        remedy: what to do about it; "" where nothing is to be done.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def in_one_line(error: BaseException) -> str:
    """What an error says, or its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
