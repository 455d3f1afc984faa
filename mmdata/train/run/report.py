"""What a run says of itself: lines, metrics.jsonl and TensorBoard, evaluation.json. Rank 0 speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mmdata.config import TrainConfig
from mmdata.errors import counted
from mmdata.files import write_whole
from mmdata.train.log.advice import advise, mines
from mmdata.train.log.log import METRICS, RunLog, evaluated_steps, last_logged_step, read_lines
from mmdata.train.log.provenance import provenance
from mmdata.train.log.when import is_measured, never_begins
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import on_first
from mmdata.train.run import sole

EVALUATION = "evaluation.json"


class RunReport:
    """The log of a run, and what it advises; until it is closed, no other process trains in the run's folder.

    Args:
        output: the run's folder.
        config: how to train.
        settings: all settings of the run.
        device: of this rank.
        command: how the run was started; None: "the same command".

    Raises:
        ConfigError: another process trains in the folder; on all ranks.
    """

    log: RunLog
    total_steps: int

    def __init__(
        self,
        output: Path,
        config: TrainConfig,
        *,
        settings: Mapping[str, Any],
        device: torch.device,
        command: str | None,
    ) -> None:
        self.output, self.config, self.settings, self.device = output, config, settings, device
        self.command = command
        self.speaks, self.mines = collectives.rank() == 0, mines(settings)
        on_first(lambda: sole.hold(output), collectives.cpu_group())
        self._opened = ExitStack()
        self._opened.callback(sole.release, output)

    @cached_property
    def evaluated_steps(self) -> set[int]:
        """The steps that have been evaluated."""
        return set(evaluated_steps(self.output / METRICS))

    def begin(self, resumed: Path | None, step: int, total_steps: int) -> None:
        """Open the log. Say from where the run goes on, on what, and what in it never begins.

        Args:
            resumed: the checkpoint from which it goes on; None: it starts.
            step: updates already made.
            total_steps: of the whole run.
        """
        config, ranks, kind = self.config, collectives.world_size(), self.device.type
        where = f"resuming from {resumed}: step {step} of {total_steps}"
        if resumed is None:
            where = f"starting: {total_steps} steps, in {self.output}"
            # A run that was killed before its first checkpoint has lines of steps that this run makes again.
            if logged := last_logged_step(self.output / METRICS):
                where = (
                    f"{self.output} has {logged:,} logged steps and no checkpoint (train.checkpoint_every_steps is "
                    f"{config.checkpoint_every_steps:,}): starting again from step 0 of {total_steps}"
                )
        self.total_steps = total_steps
        self.evaluated_steps = {each for each in self.evaluated_steps if each <= step}  # the others are made again
        self.log = RunLog(
            self.output, step=step, total_steps=total_steps, tensorboard=config.tensorboard, speaks=self.speaks
        )
        self._opened.callback(self.log.close)
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else kind
        on = name if ranks == 1 else f"{ranks} ranks of {name}"
        self.log.say(f"{where}; on {on}, in {config.precision}")
        if config.warmup_steps >= total_steps:
            self.log.say(
                f"train.warmup_steps is {config.warmup_steps}, and the run has {counted(total_steps, 'step')}: "
                "the learning rate will not reach its peak; a tenth of the run is usual, "
                f"train.warmup_steps={total_steps // 10}"
            )
        for line in never_begins(config, total_steps):
            self.log.say(line)

    def close(self) -> None:
        """Close the files, and let another process train in the folder."""
        self._opened.close()

    def measures(self, step: int) -> bool:
        """Whether the negatives of update number `step`, from 1, are measured; the first harder ones always are."""
        return is_measured(step) or (self.mines and step == self.config.mining_after_steps + 1)

    def start(self, step: int) -> None:
        """Record where and with which code the updates after `step` updates are made, if there are any left."""
        if self.speaks and step < self.total_steps:
            self.log.record("start", {"step": step, **provenance(self.device)}, aloud=False)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Record an evaluation."""
        if self.speaks:
            write_whole(self.output / EVALUATION, (json.dumps(values, indent=2) + "\n").encode())
        self.log.record("evaluation", values)  # last: a resumed run takes this line for a finished evaluation
        self.evaluated_steps.add(int(values["step"]))

    def stopped(self, by: str, where: str) -> None:
        """Say where a signal has stopped the run, and how it goes on."""
        command = f"`{self.command}`" if self.command else "the same command"
        self.log.say(f"stopped by {by} {where}; {command} resumes")

    def finished(self, where: str, load: str) -> None:
        """Say what to do with the run; `load` loads the weights of one without the settings of `mmdata train`.

        It says too whether harder batches can help: of the whole run, whose earlier lines another process may have
        written.
        """
        if self.speaks and self.mines and (advice := advise(read_lines(self.output / METRICS), self.settings)):
            self.log.say(advice)
        if {"data", "model"} <= set(self.settings):
            load = f"`mmdata report {self.output}`, or in Python: import mmdata; mmdata.load_run({str(self.output)!r})"
        self.log.say(f"finished {where}; next: {load}")
