"""Which failed requests are made again, when, and what is said of them in the end.

A request that fails is logged, and made again after a wait: ATTEMPTS times, and not when BUDGET_S have passed since the
first failure. A failure that waiting cannot mend (no such file, no credentials, another answer than the file) is raised
immediately.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from itertools import count
from math import inf
from threading import Event
from time import monotonic
from typing import Any, TypeVar, cast

from mmdata.errors import ConfigError, DataError, Interrupted, counted

logger = logging.getLogger("mmdata")

ATTEMPTS = 8
"""Requests for the same bytes before an error is raised: about a minute of waiting."""
WAIT_S = 0.5
"""Upper bound of the wait before the second request. The bound doubles with each request; the wait is a random part."""
MAX_WAIT_S = 30
"""Largest bound of a wait."""
BUDGET_S = 180
"""No request is made again when so much time has passed since the first one failed."""

_DENIED = {401, 403, 407}
_FINAL = {400, 404, 405, 410, 412, 416, 501}  # statuses that another request will not change
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "RefreshError",
    "GatedRepoError",
}
"""Names of exceptions of botocore, google.auth and huggingface_hub, so that none of them has to be imported."""

_QUERY = re.compile(r"\?[^\s'\">]+")

GIVE_CREDENTIALS = (
    "give the credentials that this protocol takes from the environment "
    "(AWS_PROFILE or AWS_ACCESS_KEY_ID for s3, GOOGLE_APPLICATION_CREDENTIALS for gs, HF_TOKEN for hf)"
)
"""The remedy in the error of a request that was denied."""

T = TypeVar("T")


class WrongAnswer(Exception):
    """The server sent something else than the file; asking again would not change that."""


class Failed(Exception):
    """A request that may succeed when it is repeated.

    Attributes:
        status: HTTP status; None without a response.
    """

    def __init__(self, words: str, status: int | None = None) -> None:
        super().__init__(words)
        self.status = status


class Absent(DataError):
    """The server says that it has no such file."""


def repeated(
    request: Callable[[], T],
    name: str,
    stop: Event | None = None,
    *,
    start: int | None = None,
    failures: int = 0,
    budget_s: float | None = None,
) -> T:
    """The result of a request, which is made again when it fails, as long as waiting may help.

    Each failure that is followed by another attempt is logged.

    Args:
        request: asks once.
        name: of the file, for the log and the error.
        stop: ends the waiting.
        start: offset of the first byte that is asked for; None if the request is not for a file's bytes.
        failures: how many of the ATTEMPTS have been used up.
        budget_s: seconds after the first failure in which another attempt may begin; default: BUDGET_S. An answer that
            comes slowly costs nothing of that.

    Raises:
        Absent: no such file.
        ConfigError: credentials are missing or not accepted.
        DataError: a wrong answer, or all attempts failed.
        Interrupted: `stop` was set.
    """
    stop, until = stop or Event(), inf
    for attempt in count(failures + 1):
        try:
            return request()
        except Exception as error:
            until = min(until, monotonic() + (BUDGET_S if budget_s is None else budget_s))
            if attempt < ATTEMPTS and monotonic() < until and not stop.is_set() and _may_pass(error):
                wait_s = random.uniform(0, min(MAX_WAIT_S, WAIT_S * 2 ** (attempt - failures - 1)))
                message = "'%s': attempt %d of %d failed (%s); the next one in %.1f s"
                logger.warning(message, name, attempt, ATTEMPTS, cause_of(error), wait_s)
                stop.wait(wait_s)
            elif not stop.is_set():
                if isinstance(error, (DataError, ConfigError, Interrupted)):
                    raise
                raise _explained(error, name, start=start, attempts=attempt) from error
            if stop.is_set():
                raise Interrupted(name) from error
    raise AssertionError


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status in an exception of aiohttp, botocore, gcsfs or huggingface_hub, or None."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif hasattr(error, "status"):
        found = getattr(error, "status", None)
    else:
        found = getattr(response, "status_code", getattr(error, "code", None))
    return int(found) if str(found).isdecimal() else None


def code_of(error: BaseException) -> str:
    """The code of an error of S3, or ""; other errors have a `response` of another kind, or None."""
    found = getattr(error, "response", None)
    return str(cast("dict[str, Any]", found).get("Error", {}).get("Code", "")) if isinstance(found, dict) else ""


def cause_of(error: BaseException) -> str:
    """Type and message of a failed request, in one line: what the server or the network said."""
    # s3fs takes args[0] of the OSError of a failed read, which may have none: the IndexError's context has the message.
    while (isinstance(error, IndexError) or not str(error)) and (deeper := error.__cause__ or error.__context__):
        error = deeper
    # The signature in a URL's query is a secret.
    return _QUERY.sub("?…", f"{type(error).__name__}: {error}".replace("\n", " "))[:300]


def is_denied(error: BaseException | None) -> bool:
    """Whether credentials are missing or not accepted."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, PermissionError) or bool(names & _NO_CREDENTIALS) or status_of(error) in _DENIED


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    final = (
        *(FileNotFoundError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError),
        *(WrongAnswer, ConfigError, DataError, Interrupted),
    )
    is_final = status_of(error) in _FINAL and code_of(error) != "RequestTimeout"  # which S3 sends with status 400
    return not (isinstance(error, final) or is_denied(error) or is_final)


def _explained(error: Exception, name: str, *, start: int | None, attempts: int) -> Exception:
    """An error for the user."""
    if isinstance(error, WrongAnswer):
        return DataError(f"'{name}': {error}")
    cause = cause_of(error)
    if is_denied(error):
        return ConfigError(f"'{name}': access denied ({cause}); {GIVE_CREDENTIALS}")
    if isinstance(error, FileNotFoundError) or status_of(error) in (404, 410):
        return Absent(f"'{name}': no such file" + ("" if start is None else "; upload it, or correct the URL"))
    if status_of(error) == 416:
        return DataError(f"'{name}': ends before byte {start}: shorter than indexed; upload it again, or index it anew")
    if start is None:
        return DataError(
            f"'{name}': failed, {counted(attempts, 'attempt')}, the last one: {cause}; run this again when the server "
            "can be reached: what is there is not sent again"
        )
    return DataError(
        f"'{name}': cannot be fetched, {counted(attempts, 'attempt')} from byte {start} on, the last one: {cause}; "
        "is the server up, and the network? Start again when it is: what was finished is not fetched again"
    )
