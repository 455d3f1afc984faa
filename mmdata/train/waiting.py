"""Says in the log why the loop waits for data: at first sight, and when the reason changes."""

from __future__ import annotations

from pathlib import Path

from mmdata.train.batches import Batches, KeepsClock

NOTICEABLE = 0.05  # of the time, waiting for data


class DataWait:
    """Reads the clock of a loader between two log lines.

    Args:
        batches: the loader; of one without a clock nothing is said.
        config: the run's settings as a file, for the command that looks closer; where there is none, CONFIG stands.
    """

    def __init__(self, batches: Batches, config: Path) -> None:
        self._batches = batches if isinstance(batches, KeepsClock) else None
        self._config = config
        self._before = self._batches.stats.copy() if self._batches else None
        self._said = ""  # the stage that was named last

    def explain(self, wait_share: float, step_ms: float) -> str | None:
        """A line for the log, or None where there is nothing new to say.

        Args:
            wait_share: of the time since the last call, spent waiting for data.
            step_ms: milliseconds of an update without that.
        """
        if self._batches is None or self._before is None:
            return None
        interval = self._batches.stats.since(self._before)
        self._before = self._batches.stats.copy()
        found = interval.bottleneck()
        if found is None or wait_share < NOTICEABLE or found.stage == self._said:
            return None
        self._said = found.stage
        config = self._config if self._config.is_file() else "CONFIG"
        return (
            f"data wait {wait_share:.0%}: {found.words}; "
            f"`mmdata bench {config} --step-ms {step_ms:.0f}` measures what would help"
        )
