"""What can go wrong with a URL: some faults are final, some may pass when the URL is asked for again."""

from __future__ import annotations

from mmdata.errors import BadSample, Reason, printable

MAX_WORDS = 80
"""Characters of a server's words, or of an error's, in a message."""


def short(words: str) -> str:
    """Words for a message, printable and at most MAX_WORDS long."""
    return printable(words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}…")


class UrlFault(BadSample):
    """Why a URL gives no image.

    Attributes:
        status: of the last answer, in HTTP; 0 if it is not at fault.
        may_pass: whether the URL may be asked for again.
        after_s: seconds until the host wants to be asked again; 0 if it does not say so.
    """

    def __init__(
        self, reason: Reason, detail: str, *, status: int = 0, may_pass: bool = False, after_s: float = 0.0
    ) -> None:
        super().__init__(reason, detail)
        self.status = status
        self.may_pass = may_pass
        self.after_s = after_s

    @property
    def is_silence(self) -> bool:
        """Whether the host gave no answer, or asked for fewer requests."""
        return self.status == 429 or self.reason in (Reason.TIMED_OUT, Reason.UNREACHABLE)
