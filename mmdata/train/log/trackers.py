"""Where the numbers of a run go besides metrics.jsonl: TensorBoard, wandb, trackio, or a tracker of the user's.

Each tracker works in a thread of its own, and its errors are caught: once begun, none stops or slows a run.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any

from mmdata.config.settings import name_of
from mmdata.errors import ConfigError, counted, did_you_mean, where_to_look
from mmdata.train.log.log import TrackedRun, Tracker

logger = logging.getLogger("mmdata")

CLOSE_S = 15
"""How long the end of a run waits for its trackers; torchrun kills a rank 30 s after a signal."""
WAITING = 10_000
"""Calls that may wait for a slow tracker; further ones are lost, and counted."""


class TrackerThread:
    """A tracker that has begun, in a thread; the first error is logged, further ones are counted.

    Args:
        name: of the tracker, as in `train.trackers`.
        tracker: the tracker.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.lost = 0
        self._name, self._tracker = name, tracker
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"mmdata-{name}")
        self._thread.start()

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Let the tracker record a line; its thread reads `values` later."""
        if self._calls.qsize() < WAITING:
            self._calls.put(partial(self._tracker.record, kind, values))
        else:
            self._lose(f"{WAITING:,} lines wait for it")

    def flush(self) -> None:
        """Let the tracker send what it holds."""
        self._calls.put(self._tracker.flush)

    def close(self, exit_code: int) -> None:
        """Let the tracker end; `join` waits for it."""
        self._calls.put(partial(self._tracker.close, exit_code))
        self._calls.put(None)

    def join(self, until: float) -> None:
        """Wait for the end of the tracker, but not after the time `until`, of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._lose(f"it has not ended within {CLOSE_S} s")
        if self.lost > 1:
            logger.warning("train.trackers '%s': %s in this run", self._name, counted(self.lost, "error"))

    def _work(self) -> None:
        while call := self._calls.get():
            try:
                call()
            except Exception as error:
                self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            logger.warning(
                "train.trackers '%s': %s. The run goes on without; metrics.jsonl has every number, and further errors "
                "are counted",
                self._name,
                why,
            )


def begin_trackers(targets: Iterable[str | Callable[..., Any]], run: TrackedRun, begun: list[TrackerThread]) -> None:
    """Begin the trackers of `train.trackers`, and add each to `begun`, which the caller closes.

    Raises:
        ImportError: the library of one is not installed.
        ConfigError: one does not exist, is no `Tracker`, or lacks a login.
    """
    for name, tracker in [(name_of(target), _make(target)) for target in targets]:
        tracker.begin(run)
        begun.append(TrackerThread(name, tracker))


def close_trackers(trackers: list[TrackerThread], exit_code: int) -> None:
    """End all trackers at once, and wait for them for `CLOSE_S` seconds at most."""
    until = time.monotonic() + CLOSE_S
    for tracker in trackers:
        tracker.close(exit_code)
    for tracker in trackers:
        tracker.join(until)


class TensorBoard:
    """Event files in the folder `tensorboard` of a run; those of steps that are made again are purged."""

    def __init__(self) -> None:
        self._library = _library("tensorboard", "torch.utils.tensorboard", "mmdata[tensorboard]")

    def begin(self, run: TrackedRun) -> None:
        """Open the event file."""
        self._writer = self._library.SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add the scalars of a line."""
        for name, value in scalars(kind, values).items():
            self._writer.add_scalar(name, value, values["step"])

    def flush(self) -> None:
        """Write the file to disk."""
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A run of wandb. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and its other variables hold.

    wandb drops values of a step below one that it has, and a resumed run repeats some. So the steps of the charts are
    the values of "step", and wandb numbers the calls itself.
    """

    def __init__(self) -> None:
        self._library = _library("wandb", "wandb", "mmdata[wandb]")

    def begin(self, run: TrackedRun) -> None:
        """Open the run with its id; offline if the server cannot be reached.

        Raises:
            ConfigError: there is no login, or the server refuses it.
        """
        wandb = self._library
        ours = {"NAME": ("run_name", run.folder.name), "DIR": ("root_dir", str(run.folder))}
        ours["FINISH_TIMEOUT"] = "finish_timeout", str(CLOSE_S - 3)
        settings = dict(setting for variable, setting in ours.items() if f"WANDB_{variable}" not in os.environ)
        given = {"id": run.run_id, "resume": "allow", "config": dict(run.settings), "settings": settings}
        try:
            if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
                raise ConfigError(
                    "train.trackers 'wandb': no login; run `wandb login`, set WANDB_API_KEY, or set "
                    "WANDB_MODE=offline and upload the run later with `wandb sync`"
                )
            self._run = wandb.init(**given)
        except wandb.errors.CommError as error:
            if isinstance(error, wandb.errors.AuthenticationError) or re.search(r"returned error 4\d\d", str(error)):
                raise ConfigError(
                    f"train.trackers 'wandb': {error}; run `wandb login --relogin`, or set WANDB_MODE=offline"
                ) from error
            why = str(error).partition("\n")[0]
            logger.warning("train.trackers 'wandb': %s. It logs offline; `wandb sync` uploads the run later", why)
            wandb.teardown()  # the run that has failed to begin still has the id
            self._run = wandb.init(**given, mode="offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Log the scalars of a line."""
        if found := scalars(kind, values):
            self._run.log({**found, "step": values["step"]})

    def flush(self) -> None:
        """Nothing: a process of wandb sends each line."""

    def close(self, exit_code: int) -> None:
        """Upload the rest; what is not uploaded in time stays on the disk, for `wandb sync`."""
        self._run.finish(exit_code=exit_code)


class Trackio:
    """A run of trackio, in the project TRACKIO_PROJECT, or mmdata. TRACKIO_DIR and its other variables hold."""

    def __init__(self) -> None:
        self._library = _library("trackio", "trackio", "trackio")

    def begin(self, run: TrackedRun) -> None:
        """Open the run; trackio knows it by its name."""
        project, name = os.environ.get("TRACKIO_PROJECT", "mmdata"), f"{run.folder.name}-{run.run_id}"
        self._run = self._library.init(project, name=name, config=dict(run.settings), resume="allow", embed=False)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Log the scalars of a line."""
        if found := scalars(kind, values):
            self._run.log(found, step=values["step"])

    def flush(self) -> None:
        """Nothing: a thread of trackio writes each line."""

    def close(self, exit_code: int) -> None:
        """Write the rest."""
        self._run.finish()


BUILT_IN: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def scalars(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by their names in charts; none of the kind "start".

    Example:
        ("train", {"step": 3, "epoch": 0, "loss": 1.5, "lr": None}) gives {"train/loss": 1.5}.
    """
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and kind != "start"}
    return {f"{kind}/{name}": value for name, value in numbers.items() if name not in ("step", "epoch", "epochs_done")}


def _library(tracker: str, module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"train.trackers '{tracker}' needs {tracker}: pip install '{package}'") from error


def _make(target: str | Callable[..., Any]) -> Tracker:
    name = name_of(target)
    if isinstance(target, str) and ":" not in target and target not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"train.trackers '{name}': expected {known} or 'module:Class'{did_you_mean(name, BUILT_IN)}")
    try:
        kind: Any = BUILT_IN.get(name) or (resolve_name(target) if isinstance(target, str) else target)
    except (ImportError, AttributeError) as error:
        where = where_to_look(error, name.partition(":")[0])
        raise ConfigError(f"train.trackers '{name}': cannot be imported: {error}{where}") from error
    tracker = kind()
    if not isinstance(tracker, Tracker):
        raise ConfigError(f"train.trackers '{name}': expected a class with the methods begin, record, flush and close")
    return tracker
