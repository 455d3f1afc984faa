"""What can go wrong with a URL: some faults are final, some may pass when the URL is asked for again."""

from __future__ import annotations

from mmdata.errors import BadSample, Reason, printable

MAX_WORDS = 80
"""Characters of a server's words, or of an error's, in a message."""


PASSING = frozenset({408, 429})
"""Statuses below 500 that may be another one later."""


def short(words: str) -> str:
    """Words for a message, printable and at most MAX_WORDS long."""
    return printable(words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}…")


class BadStatus(BadSample):
    """The server answered with a status that is no image's.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(Reason.HTTP_STATUS, detail)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the status may be another one later."""
        return self.status in PASSING or self.status >= 500


class LeftAlone(BadSample):
    """The host is not asked now, so nothing is known of the URL.

    Attributes:
        after_s: seconds until it is asked again.
    """

    def __init__(self, after_s: float, detail: str) -> None:
        super().__init__(Reason.HOST_LEFT_ALONE, detail)
        self.after_s = after_s


class TooManyRedirects(BadSample):
    """A URL redirects further than is followed."""

    def __init__(self, followed: int) -> None:
        super().__init__(Reason.BAD_ANSWER, f"redirected more than {followed} times")


class TryAgain(Exception):
    """A failure that may pass.

    Attributes:
        final: what is raised if there is no further attempt.
        after_s: seconds that the server asks to wait; 0 if it asks for none.
    """

    def __init__(self, final: BadSample, after_s: float = 0.0) -> None:
        super().__init__(str(final))
        self.final = final
        self.after_s = after_s


class NoRoom(Exception):
    """There is no room for a body now.

    Attributes:
        need: bytes for which room is needed before the URL is asked for again.
    """

    def __init__(self, need: int) -> None:
        super().__init__(f"no room for {need} bytes")
        self.need = need
