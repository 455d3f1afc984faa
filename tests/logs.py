"""What a test has made mmdata log."""

from __future__ import annotations

import logging

import pytest


def of_mmdata(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records of its loggers; asyncio's may come at any time, about what an earlier test has left."""
    return [record for record in caplog.records if record.name.startswith("mmdata")]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Their messages."""
    return [record.getMessage() for record in of_mmdata(caplog)]
