"""What a test has made mmdata log."""

from __future__ import annotations

import logging

import pytest


def of_mmdata(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Its records. Others may come at any time: asyncio logs what an earlier test has left when that is collected."""
    return [record for record in caplog.records if record.name.startswith("mmdata")]
