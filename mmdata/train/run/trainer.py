"""The training loop: any iterable of batches, any number of ranks, stopped and resumed at any step.

A run that was killed and resumed makes the same updates as one that was not: bit for bit on one CPU thread.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.errors import ConfigError, TrainingError
from mmdata.recognize import CHECKPOINTS
from mmdata.train.batches import Batches, LoaderExtras, count_steps
from mmdata.train.log.meter import Meter
from mmdata.train.log.utilization import FlopCounter
from mmdata.train.memory.kept import RunMemory
from mmdata.train.models.dual_encoder import DualEncoder
from mmdata.train.precision import AUTOCAST, Precision, choose_precision, numerics
from mmdata.train.prefetch import DevicePrefetcher
from mmdata.train.ranks import collectives, parallel, sharding
from mmdata.train.ranks.lockstep import Lockstep, check_same_batches, checked_state, gather, on_first
from mmdata.train.run import checkpoint
from mmdata.train.run.checkpoint_writer import CheckpointWriter
from mmdata.train.run.groups import describe_groups, freeze_groups
from mmdata.train.run.objective import ContrastiveLoss, check_loss, make_loss
from mmdata.train.run.optimizer import (
    averages,
    check_schedule,
    learning_rate,
    load_averages,
    make_optimizer,
    set_learning_rate,
)
from mmdata.train.run.random_state import rng_state, seed_rank, set_rng_state
from mmdata.train.run.rehearsal import rehearse
from mmdata.train.run.report import RunReport
from mmdata.train.run.same_run import check_same_run
from mmdata.train.run.step import StepOutput, train_step
from mmdata.train.run.update import FiniteUpdates
from mmdata.train.run.watchdog import LONG_S, STALL_TIMEOUT_S, Watchdog

COUNTERS = ("step", "epoch", "epoch_step", "grad_norm")
STATISTICS = ("running_mean", "running_var")

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class _Stopped(Exception):
    """A signal ends the run; `where`, in words."""

    def __init__(self, signal: int, where: str) -> None:
        super().__init__(signal, where)
        self.signal, self.where = signal, where


class Trainer:
    """One rank's side of a run.

    Args:
        model: a `DualEncoder`, or anything with the same forward, on the device to train on.
        batches: this rank's batches.
        config: how to train.
        output: the run's folder, shared by all ranks: checkpoints/, metrics.jsonl, evaluation.json. A run found there
            is resumed.
        settings: all settings of the run as plain data; kept in checkpoints, compared on resume.
        evaluate: called with the model in eval mode, with `train.ema` with the averaged one, on every rank, after each
            `evaluate_every_epochs` epochs and at the end; returns named numbers. With `train.parallel` fsdp and bf16 it
            must run the model under autocast.
        teacher: the model of `train.distill.teacher`, on the device; it is frozen.

    Raises:
        ConfigError: settings of the loss that do not fit together; groups or an optimizer that do not fit the model;
            neither epochs nor steps given; the run in `output` had other settings, or another length, or is under way
            in another process; the batches are of another rank or world size than the process group.
        DataError: a damaged checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        config: TrainConfig,
        *,
        output: Path,
        settings: dict[str, Any] | None = None,
        evaluate: Evaluate | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.model, self.output, self.evaluate = model, output, evaluate
        self.device = next(model.parameters()).device
        self.precision: Precision = choose_precision(config.precision, self.device)
        self.autocast_dtype = AUTOCAST[self.precision]
        self.config = config = config.model_copy(update={"precision": self.precision})
        self.settings = settings or {"train": config.model_dump(mode="json")}
        self.source, self.extras = batches, LoaderExtras.of(batches)
        collectives.check_ranks(batches)
        # A model of your own may have a bias that shows in its output only.
        has_bias = getattr(model, "logit_bias", model) is not None
        check_loss(config, has_bias=has_bias, embed_dim=getattr(model, "embed_dim", None))
        if config.regions is not None and isinstance(model, DualEncoder):  # before averages are copies of it
            model.compare_regions()
        if (teacher is None) == (config.distill is not None and config.distill.teacher is not None):
            raise ConfigError("train.distill.teacher and Trainer(teacher=model) belong together: give both, or neither")

        # Ranks agree through CPU tensors: for a collective on the GPU the host would wait for the step.
        self.group = collectives.cpu_group()
        self.report = RunReport(output, config, settings=self.settings, device=self.device)
        check_same_batches(self.extras.identity, self.group)
        self.watchdog = Watchdog(STALL_TIMEOUT_S, lambda: self.step, self.group)
        self.lockstep = Lockstep(self.group, lambda: self.watchdog.received)
        took = None if self.group is None else self.lockstep.took
        self.batches = DevicePrefetcher(batches, self.device, took=took)

        collectives.share_weights(model)
        freeze_groups(model, config.groups)
        held: dict[str, Any] = {"autocast_dtype": self.autocast_dtype, "distilled": teacher}
        self.memory = RunMemory(config, model, batches, output, **held)
        flops = FlopCounter(model) if self.device.type == "cuda" else None
        self.meter = Meter(self.group, flops, self.extras.stats)
        blank, dtype = self.extras.blank_batches, self.autocast_dtype
        self.parallel = parallel.prepare(model, config, self.device, autocast_dtype=dtype, blank_batches=blank)
        if sharding.is_sharded(model):
            self.memory.shard(self.device)
        self.optimizer = make_optimizer(model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.updates = FiniteUpdates(self.scaler, output)

        self.total_steps = count_steps(batches, config)
        check_schedule(config, self.total_steps)
        self.epoch = self.epoch_step = self.step = 0
        self.grad_norm = math.nan
        batches.set_epoch(0)
        seed_rank(config.seed, collectives.rank())
        try:
            resumed = self._resume()
            is_over = self.step == self.total_steps and (evaluate is None or self.step in self.report.evaluated_steps)
            self.report.begin(resumed, self.step, self.total_steps, is_over=is_over)
        except BaseException:
            self.report.close()  # a notebook goes on
            raise
        for line in describe_groups(model, self.optimizer, config):
            self.report.say(line)
        keep, say = config.keep_checkpoints, self.report.say
        self.writer = CheckpointWriter(output / CHECKPOINTS, keep=keep, say=say, group=self.group)

    def run(self) -> int:
        """Train to the end, or until a signal.

        Returns:
            0, or 128 + the number of the signal that stopped the run, a checkpoint having been written.

        Raises:
            TrainingError: a loss or gradient that is not finite, batches that do not keep to their `len`, too many rows
                that could not be used over all ranks, no batch on another rank, or the end of one; on every rank.
        """
        self.model.train()  # transformers' from_pretrained returns a model in eval mode
        formats = numerics(self.precision, self.device)
        # The report within the watchdog: torchrun sends SIGTERM to a rank that still waits for its trackers.
        with formats, self.watchdog, contextlib.closing(self.report), self.writer:
            try:
                self._rehearse()
                self._train()
            except _Stopped as stopped:
                self.report.stopped(Signals(stopped.signal), stopped.where)
                return 128 + stopped.signal
            finally:
                self.watchdog.at(None, LONG_S)  # the writer waits for the checkpoint in progress
        return 0

    def _train(self) -> None:
        """The updates of `run`, once all shapes are rehearsed."""
        self.report.start(self.step)
        self.meter.begin()
        self._evaluate_if_due()  # the run before this one may have ended just before it
        while self.step < self.total_steps:
            self._run_epoch()
            self._evaluate_if_due()
        newest = self.output / CHECKPOINTS / checkpoint.checkpoint_name(self.step)
        self.report.finished(
            f"after step {self.step}; checkpoint in {newest.parent}",
            "from pathlib import Path; from mmdata.train.run.checkpoint import load_checkpoint; "
            f"model.load_state_dict(load_checkpoint(Path({str(newest)!r}))['model'])",
        )

    def _run_epoch(self) -> None:
        """The rest of this epoch."""
        length = len(self.batches)
        batches = self.watchdog.waited_for(self.meter.waited_for(iter(self.batches)))
        for batch in self.lockstep.batches(batches):
            if self.epoch_step == length:
                raise TrainingError(f"epoch {self.epoch}: more than len(batches) = {length} batches came")
            self._update(batch)
            del batch  # its memory may be needed for the next one
            if self.epoch_step < length:
                self._save_if_due(self.lockstep.signal())
                if self.step == self.total_steps:
                    return
        if self.epoch_step < length:
            raise TrainingError(f"epoch {self.epoch}: {self.epoch_step} of len(batches) = {length} batches came")
        self.epoch, self.epoch_step = self.epoch + 1, 0
        if self.step < self.total_steps:
            with self.meter.paused():
                self.watchdog.at("searching neighbours", LONG_S)
                found = self.memory.regroup(self.epoch)
            if found:
                self.report.record("groups", {"step": self.step, "epoch": self.epoch, **found})
        self.batches.set_epoch(self.epoch)
        self._save_if_due(self.watchdog.agreed())

    def _update(self, batch: Batch) -> None:
        """One optimizer update from one global batch."""
        self.watchdog.at("computing")
        rate = set_learning_rate(self.optimizer, learning_rate(self.step, self.config, self.total_steps))
        self.optimizer.zero_grad(set_to_none=True)
        loss, output = self._add_gradients(batch, step=self.step)
        self.scaler.unscale_(self.optimizer)
        norm = sharding.clip_grad_norm(self.model.parameters(), self.config.grad_clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.memory.keep(self.model, output.output, batch, self.step)
        self._check()
        self.updates.made(self.step, batch, output.loss, norm)
        self.meter.region_loss = loss.region_loss
        self.step += 1
        self.epoch_step += 1
        if self.step % self.config.log_every_steps == 0 or self.step == self.total_steps:
            self._log(rate, output.output.logit_scale)
        if self.report.measures(self.step):
            with self.meter.paused():
                values = {"step": self.step, "epoch": self.epoch, **loss.telemetry(output.output, batch)}
                self.report.record("mining", values, aloud=self.report.mines)

    def _add_gradients(self, batch: Batch, *, step: int) -> tuple[ContrastiveLoss, StepOutput]:
        """The gradients of one batch, with the loss of the update after `step` updates."""
        teacher_mask = self.memory.teacher_mask(batch, step)
        distilled = self.memory.distilled_features(batch)
        loss = make_loss(step, self.config, teacher_mask, self.memory.queue, distilled)
        size, dtype = self.config.micro_batch_size, self.autocast_dtype
        output = train_step(self.parallel, batch, loss, micro_batch_size=size, autocast_dtype=dtype, scaler=self.scaler)
        return loss, output

    def _rehearse(self) -> None:
        """A step of each shape of the epoch, without an update."""
        blank = self.extras.blank_batches
        slow_at_first = self.device.type == "cuda" or self.config.compile is True
        wanted = slow_at_first if self.config.rehearse == "auto" else self.config.rehearse
        if not wanted or blank is None or self.step == self.total_steps:
            return

        def begin(words: str) -> None:
            self.watchdog.at(f"rehearsing {words}")
            if stopped := self.watchdog.agreed():
                raise _Stopped(stopped, "in the rehearsal, before an update")

        def step(batch: Batch) -> None:
            self._add_gradients(batch, step=self.total_steps - 1)  # all that begins later is there: teacher and miner

        with self.meter.paused(), parallel.apart(self.parallel):
            rehearse(blank(), step, model=self.model, optimizer=self.optimizer, begin=begin, say=self.report.say)

    def _check(self) -> None:
        """Check loss and gradient of the last update, one update late, so that the host does not wait for the device.

        The norm is that of the ranks' mean gradient, so all ranks stop if one rank's rows are at fault.
        """
        if checked := self.updates.check(self.total_steps):
            loss, self.grad_norm = checked
            self.meter.add_loss(loss, self.grad_norm)

    def _log(self, rate: float, logit_scale: Tensor | None) -> None:
        self._check()
        state = checked_state(self.batches, self.source, self.group)
        if self.step == self.total_steps and self.extras.check_rows is not None:
            self.extras.check_rows(state)
        at, measured = {"step": self.step, "epoch": self.epoch}, self.meter.read()
        values = {**at, "loss": measured.pop("loss"), "lr": rate, "grad_norm": self.grad_norm, **measured}
        values["logit_scale"] = None if logit_scale is None else float(logit_scale)
        if self.scaler.is_enabled():
            values |= {"loss_scale": self.scaler.get_scale(), "skipped_updates": self.updates.skipped}
        self.report.record("train", values)
        for kind, numbers in self.memory.telemetry(self.step):
            self.report.record(kind, {**at, **numbers})
        if line := self.meter.explain_wait():
            self.report.say(line)

    def _evaluation_due(self) -> bool:
        every = self.config.evaluate_every_epochs
        epoch_done = self.epoch_step == 0 and self.epoch > 0 and every > 0 and self.epoch % every == 0
        return self.evaluate is not None and (epoch_done or self.step == self.total_steps)

    def _evaluate_if_due(self) -> None:
        """Evaluate between two epochs, while a checkpoint is written."""
        if self.evaluate is None or not self._evaluation_due() or self.step in self.report.evaluated_steps:
            return
        with self.meter.paused():
            self.watchdog.at("evaluating", LONG_S)
            random_state = rng_state(self.device)
            values: dict[str, float] = {"step": self.step, "epochs_done": self.epoch}
            values |= {} if self.memory.ema is None else {"ema": True}
            judged = self.model if self.memory.ema is None else self.memory.ema.model
            # Each rank's batch norms have seen its own rows; a checkpoint has rank 0's statistics.
            collectives.share_weights(judged, STATISTICS)
            values |= self.evaluate(judged.eval())
            self.model.train()
            set_rng_state(random_state, self.device)
            self.watchdog.at("writing a checkpoint", LONG_S)
            self.writer.wait()  # a run that is killed and resumed must not come to this step a second time
            self.report.evaluated(values)
        self._stop_if(self.watchdog.agreed())

    def _save_if_due(self, stopped: int) -> None:
        """Write a checkpoint where one is due, or a signal, `stopped`, ends the run."""
        due = self.step == self.total_steps or self.step % self.config.checkpoint_every_steps == 0
        if stopped or due or self._evaluation_due():
            with self.meter.paused():
                self._check()
                self.watchdog.at("writing a checkpoint", LONG_S)  # `meet` has a limit of its own
                self.watchdog.meet()
                self._save(background=not stopped and self.step < self.total_steps)
        self._stop_if(stopped)

    def _stop_if(self, stopped: int) -> None:
        if stopped:
            where = f"after step {self.step} of {self.total_steps}; checkpoint in {self.output / CHECKPOINTS}"
            raise _Stopped(stopped, where)

    def _save(self, *, background: bool) -> None:
        self.writer.wait()
        state: dict[str, Any] = {
            **{name: getattr(self, name) for name in COUNTERS},
            "total_steps": self.total_steps,
            "skipped_updates": self.updates.skipped,
            "bad_in_a_row": self.updates.bad_in_a_row,
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": averages(self.model, self.optimizer),
            "scaler": self.scaler.state_dict(),
            "batches": checked_state(self.batches, self.source, self.group),
            "meter": self.meter.state_dict(),
            "memory": self.memory.state_dict(),
            "rng": gather(rng_state(self.device), self.group),
        }
        self.writer.save(state, sound_step=self.updates.sound_step(self.step), background=background)

    def _resume(self) -> Path | None:
        """Go on from the newest checkpoint in `output`, where there is one; returns it."""
        path = checkpoint.latest_checkpoint(self.output / CHECKPOINTS)
        seen = path and path.name, sorted(self.report.evaluated_steps)
        if any(other != seen for other in gather(seen, self.group)):
            raise ConfigError(f"train.output '{self.output}': the ranks see different files there; share the folder")
        if path is None:
            if self.extras.regroups is not None:
                on_first(self.extras.regroups.forget_groups, self.group)
            return None
        state = checkpoint.load_checkpoint(path, parts=(), group=self.group)
        other_shards = self.extras.other_shards(state["batches"]) if self.extras.other_shards else ""
        check_same_run(state, self.settings, self.config, self.total_steps, origin=str(path), other_shards=other_shards)
        like = {"model": self.model.state_dict(), "optimizer": averages(self.model, self.optimizer, make=True)}
        checkpoint.read_tensors(path, state, like=like | {"memory": self.memory.state_dict()})
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.updates.skipped, self.updates.bad_in_a_row = state["skipped_updates"], state["bad_in_a_row"]
        checkpoint.load_weights(self.model, state, origin=str(path))
        load_averages(self.model, self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.batches.load_state_dict(state["batches"])
        self.meter.load_state_dict(state["meter"])
        self.memory.load_state_dict(state["memory"])
        if len(state["rng"]) == collectives.world_size():
            set_rng_state(state["rng"][collectives.rank()], self.device)
        return path
