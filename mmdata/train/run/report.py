"""What a run says of itself: lines, metrics.jsonl and other trackers, evaluation.json. Rank 0 speaks.

One run trains in a folder at a time: a second start would write into the first one's checkpoints and log. The kernel
gives a lock back when its process ends, however it ends: a run that was killed is resumed at once.
"""

from __future__ import annotations

import errno
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import torch

from mmdata.config import TrainConfig
from mmdata.errors import ConfigError, counted, printable
from mmdata.files import HeldElsewhere, lock, write_whole
from mmdata.train.log.advice import advise, mines
from mmdata.train.log.log import METRICS, JsonLines, TrackedRun, evaluated_steps, finite, format_values, read_lines
from mmdata.train.log.provenance import provenance
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import on_first

if TYPE_CHECKING:
    from mmdata.train.log.trackers import TrackerThread

logger = logging.getLogger("mmdata")

EVALUATION = "evaluation.json"
RUN_ID = "run_id"
"""File of a run's folder with the id that its trackers know it by; only of a run with `train.trackers`."""
MEASURED_EVERY = 97
"""Of so many updates one is measured. It costs a pass over the similarities, far less than 1 % of so many updates. A
prime: of every 100, and with 50 steps an epoch, each measurement would be of an epoch's last batch."""
MUCH_OF_THE_START = 0.05
"""Share of the averaged weights that are those of the run's start, from which on the log says so."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What file systems answer that have no flock."""
_held: dict[Path, ExitStack] = {}
"""Folders of this process. A notebook may make a second trainer for a folder: it has one process at a time."""


class RunReport:
    """The log of a run, and what it advises; until it is closed, no other process trains in the run's folder.

    A lost terminal never stops a run.

    Args:
        output: the run's folder.
        config: how to train.
        settings: all settings of the run.
        device: of this rank.

    Raises:
        ConfigError: another process trains in the folder; on all ranks.
    """

    total_steps: int

    def __init__(
        self,
        output: Path,
        config: TrainConfig,
        *,
        settings: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.output, self.config, self.settings, self.device = output, config, settings, device
        self.speaks, self.mines = collectives.rank() == 0, mines(settings)
        on_first(lambda: hold(output), collectives.cpu_group())
        self._metrics = JsonLines()
        self._trackers: list[TrackerThread] = []
        self._exit_code = 1
        self._opened = ExitStack()
        self._opened.callback(release, output)

    @cached_property
    def evaluated_steps(self) -> set[int]:
        """The steps that have been evaluated."""
        return set(evaluated_steps(self.output / METRICS))

    def begin(self, resumed: Path | None, step: int, total_steps: int, *, is_over: bool) -> None:
        """Open the log. Say from where the run goes on, on what, and what in it never begins.

        Args:
            resumed: the checkpoint from which it goes on; None: it starts.
            step: updates already made; lines of later steps, left by a killed run, are removed.
            total_steps: of the whole run.
            is_over: nothing is left to train or to evaluate, and so nothing to tell trackers.

        Raises:
            ImportError, ConfigError: see `begin_trackers`; on all ranks.
        """
        config, ranks, kind = self.config, collectives.world_size(), self.device.type
        where = f"resuming from {resumed}: step {step} of {total_steps}"
        if resumed is None:
            where = f"starting: {total_steps} steps, in {self.output}"
        self.total_steps = total_steps
        self.evaluated_steps = {each for each in self.evaluated_steps if each <= step}  # the others are made again
        run = TrackedRun("", self.output, self.settings, step)
        if self.speaks:
            self._metrics.begin(run)
            self._opened.callback(lambda: self._metrics.close(self._exit_code))
        if config.trackers and not is_over:
            on_first(lambda: self._begin_trackers(run), collectives.cpu_group())
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else kind
        on = name if ranks == 1 else f"{ranks} ranks of {name}"
        self.say(f"{where}; on {on}, in {config.precision}")
        if config.warmup_steps >= total_steps:
            self.say(
                f"train.warmup_steps is {config.warmup_steps}, and the run has {counted(total_steps, 'step')}: "
                "the learning rate will not reach its peak; a tenth of the run is usual, "
                f"train.warmup_steps={total_steps // 10}"
            )
        if config.ema is not None and (left := config.ema.decay**total_steps) > MUCH_OF_THE_START:
            self.say(
                f"train.ema.decay is {config.ema.decay}, and the run has {counted(total_steps, 'step')}: {left:.0%} of "
                "the averaged weights will be those of the start; set a lower one"
            )
        for line in never_begins(config, total_steps):
            self.say(line)

    def _begin_trackers(self, run: TrackedRun) -> None:
        """Begin the trackers that the settings name, with the id in the run's folder, or a new one."""
        from mmdata.train.log.trackers import begin_trackers, close_trackers

        path = self.output / RUN_ID
        if not path.is_file():
            write_whole(path, f"{secrets.token_hex(4)}\n".encode())
        self._opened.callback(lambda: close_trackers(self._trackers, self._exit_code))
        begin_trackers(self.config.trackers, run._replace(run_id=path.read_text().strip()), self._trackers)

    def close(self) -> None:
        """Close files and trackers, and let another process train in the folder."""
        self._opened.close()

    def record(self, kind: str, values: Mapping[str, Any], *, aloud: bool = True) -> None:
        """Append one line to metrics.jsonl, and tell the trackers; `kind` is "train", "evaluation", "mining", …

        It is printed too if it is `aloud`, without lists, such as histograms.
        """
        if not self.speaks:
            return
        # The norm of an update that fp16 skips is infinite or NaN.
        known = {name: finite(value) for name, value in values.items()}
        for tracker in (self._metrics, *self._trackers):
            tracker.record(kind, known)
        if aloud:
            numbers = {name: value for name, value in known.items() if isinstance(value, (int, float))}
            self.say(f"{'' if kind == 'train' else kind + ': '}{format_values(numbers)}")

    def say(self, line: str) -> None:
        """Print one line."""
        if self.speaks:
            with suppress(OSError):
                print(printable(line, keep="\n"), flush=True)

    def measures(self, step: int) -> bool:
        """Whether the negatives of update number `step`, from 1, are measured; the first harder ones always are."""
        return step % MEASURED_EVERY == MEASURED_EVERY // 2 or (
            self.mines and step == self.config.mining_after_steps + 1
        )

    def start(self, step: int) -> None:
        """Record where and with which code the updates after `step` updates are made, if there are any left."""
        if self.speaks and step < self.total_steps:
            self.record("start", {"step": step, **provenance(self.device)}, aloud=False)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Record an evaluation."""
        if self.speaks:
            write_whole(self.output / EVALUATION, (json.dumps(values, indent=2) + "\n").encode())
        self.record("evaluation", values)  # last: a resumed run takes this line for a finished evaluation
        self.evaluated_steps.add(int(values["step"]))
        for tracker in self._trackers:
            tracker.flush()

    def stopped(self, by: Signals, where: str) -> None:
        """Say where a signal has stopped the run, and how it goes on."""
        self._exit_code = 128 + by
        self.say(f"stopped by {by.name} {where}; the same command resumes")

    def finished(self, where: str, load: str) -> None:
        """Say what to do with the run; `load` loads the weights of one without the settings of `mmdata train`.

        It says too whether harder batches can help: of the whole run, whose earlier lines another process may have
        written.
        """
        self._exit_code = 0
        if self.speaks and self.mines and (advice := advise(read_lines(self.output / METRICS), self.settings)):
            self.say(advice)
        if {"data", "model"} <= set(self.settings):
            load = f"`mmdata report {self.output}`, or in Python: import mmdata; mmdata.load_run({str(self.output)!r})"
        self.say(f"finished {where}; next: {load}")


def never_begins(config: TrainConfig, total_steps: int) -> Iterator[str]:
    """A line for each part of the training that would begin after the last update."""
    if config.mining_after_steps < total_steps:
        return
    masks = config.teacher is not None and config.teacher.margin is not None
    for name, is_given in {"miner": config.miner, "queue": config.queue, "teacher": masks}.items():
        if is_given:
            yield (
                f"train.mining_after_steps is {config.mining_after_steps:,}, and the run has "
                f"{counted(total_steps, 'step')}: the {name} does nothing in it; set train.mining_after_steps lower, "
                f"to 0 where the run begins with a trained model, or leave train.{name} out"
            )


def hold(folder: Path) -> None:
    """Hold a run's folder, which is made if it is missing, until `release` or the end of this process.

    Raises:
        ConfigError: another process trains there.
        OSError: the folder cannot be written.
    """
    place = folder.resolve()
    if place in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    try:
        stack.enter_context(lock(place, signed=True))
    except HeldElsewhere as error:
        by = f", {error.by}" if error.by else ""
        raise ConfigError(
            f"train.output '{folder}': another process trains there{by}; wait until it has ended, end it "
            "(after a kill of torchrun its ranks may still be at work), or give another train.output"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "train.output '%s': this file system has no locks (%s): nothing refuses a second run there, so start one "
            "at a time",
            folder,
            error.strerror,
        )
    _held[place] = stack


def release(folder: Path) -> None:
    """Let another process train in the folder."""
    if stack := _held.pop(folder.resolve(), None):
        stack.close()
