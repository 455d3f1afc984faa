"""What all that write to S3 have in common: the client, which repeats requests that failed, and what its errors say."""

from __future__ import annotations

import base64
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from mmdata.errors import ConfigError, DataError
from mmdata.storage.fetch import ATTEMPTS, GIVE_CREDENTIALS, cause_of, is_denied

CONNECT_S = 10
"""Longest wait for a connection."""


def new_client(connections: int) -> Any:
    """A client of botocore for S3, which repeats requests that failed.

    Args:
        connections: that it keeps open.
    """
    # botocore comes with s3fs, which reads; boto3 does not. Its own retries know the errors that S3 wants repeated.
    import botocore.session
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        connect_timeout=CONNECT_S,
        max_pool_connections=connections,
        request_checksum_calculation="when_required",  # ours is given; stores of others know no trailing ones
        response_checksum_validation="when_required",
    )
    return botocore.session.get_session().create_client("s3", config=config)


def encoded(digest: bytes) -> str:
    """A hash as S3 writes it."""
    return base64.b64encode(digest).decode()


def status_of(error: Exception) -> int:
    """The HTTP status of an answer of S3, or 0."""
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: Exception) -> str:
    """The code of an error of S3, or ""."""
    return str(_answer(error).get("Error", {}).get("Code", ""))


def is_missing(error: Exception) -> bool:
    """Whether there is no such file in the bucket."""
    return status_of(error) == 404 and code_of(error) != "NoSuchBucket"


@contextmanager
def explained(place: str, bucket: str, *, kept: str) -> Generator[None, None, None]:
    """Raise errors of botocore as our own.

    Args:
        place: URL that is asked for.
        bucket: name of the bucket.
        kept: what of the work so far is not done again, as "what was sent is not sent again".

    Raises:
        ConfigError: no such bucket, or credentials are missing or not accepted.
        DataError: the server, or the way to it, failed each time.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        url, cause = f"s3://{bucket}", cause_of(error)
        if code_of(error) == "NoSuchBucket":
            raise ConfigError(f"'{url}': no such bucket; make it with `aws s3 mb {url}`, or correct the URL") from error
        if is_denied(error):
            raise ConfigError(f"'{place}': access denied ({cause}); {GIVE_CREDENTIALS}") from error
        raise failed(place, error, kept=kept) from error


def failed(place: str, error: Exception, *, kept: str) -> DataError:
    """The error of a request that failed each time; see `explained`."""
    return DataError(
        f"'{place}': failed, the last attempt: {cause_of(error)}; run this again when the server can be reached: {kept}"
    )


def _answer(error: Exception) -> dict[str, Any]:
    """What S3 said; empty for other errors, some of which have a `response` of another kind, or None."""
    found = getattr(error, "response", None)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
