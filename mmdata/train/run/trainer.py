"""The training loop: any iterable of batches, any number of ranks, stopped and resumed at any step.

A run that was killed and resumed makes the same updates as one that was not: bit for bit on one CPU thread.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.errors import ConfigError, TrainingError, counted
from mmdata.files import write_whole
from mmdata.recognize import CHECKPOINTS
from mmdata.train import compiler
from mmdata.train.batches import Batches, LoaderExtras, count_steps
from mmdata.train.memory.ema import EMA
from mmdata.train.memory.kept import FeatureMemory
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.objective import ContrastiveLoss, check_objective, make_loss
from mmdata.train.precision import AUTOCAST, Precision, choose_precision, numerics
from mmdata.train.prefetch import DevicePrefetcher, HostCopy
from mmdata.train.ranks import collectives, parallel, sharding
from mmdata.train.ranks.lockstep import Lockstep, check_same_batches, checked_state, gather, on_first
from mmdata.train.run import checkpoint, sole
from mmdata.train.run.advice import advise, mines
from mmdata.train.run.checkpoint import rng_state, seed_rank, set_rng_state
from mmdata.train.run.checkpoint_writer import CheckpointWriter
from mmdata.train.run.log import METRICS, RunLog, evaluated_steps, last_logged_step, read_lines
from mmdata.train.run.meter import DataWait, Meter
from mmdata.train.run.optimizer import check_schedule, make_optimizer, scheduled_rate, set_learning_rate
from mmdata.train.run.provenance import provenance
from mmdata.train.run.regroup import regroup
from mmdata.train.run.rehearsal import rehearse
from mmdata.train.run.same_run import check_same_run
from mmdata.train.run.sharded_writer import ShardedCheckpointWriter
from mmdata.train.run.stopping import StopSignals
from mmdata.train.run.update import FiniteUpdates, Update
from mmdata.train.run.utilization import FlopCounter
from mmdata.train.run.watchdog import LONG_S, STALL_TIMEOUT_S, Watchdog
from mmdata.train.run.when import is_measured, never_begins
from mmdata.train.step import StepOutput, train_step

EVALUATION = "evaluation.json"
COUNTERS = ("step", "epoch", "epoch_step", "grad_norm")

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class Trainer:
    """One rank's side of a run.

    Args:
        model: a `DualEncoder`, or anything with the same forward, on the device to train on.
        batches: this rank's batches.
        config: how to train.
        output: the run's folder, shared by all ranks: checkpoints/, metrics.jsonl, evaluation.json. A run found there
            is resumed.
        settings: all settings of the run as plain data; kept in checkpoints, compared on resume.
        evaluate: called with the model in eval mode, on every rank, after each `evaluate_every_epochs` epochs and at
            the end; returns named numbers.
        command: how the run was started, for the message that says how it goes on; None: "the same command".

    Raises:
        ConfigError: settings of the loss that do not fit together; neither epochs nor steps given; the run in `output`
            had other settings, or another length, or is under way in another process; the batches are of another rank
            or world size than the process group.
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
        command: str | None = None,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.precision: Precision = choose_precision(config.precision, self.device)
        self.config = config = config.model_copy(update={"precision": self.precision})
        self.output = output
        self.settings = settings or {"train": config.model_dump(mode="json")}
        self.evaluate = evaluate
        self.command = command
        collectives.check_ranks(batches)
        check_objective(config, model)
        # Ranks agree through CPU tensors: for a collective on the GPU the host would wait for the step.
        several = collectives.world_size() > 1
        group = dist.new_group(backend="gloo", timeout=collectives.TIMEOUT) if several else None
        self.group = cast("dist.ProcessGroup | None", group)
        on_first(lambda: sole.hold(output), self.group)
        check_same_batches(LoaderExtras.of(batches).identity, self.group)
        self.stop = StopSignals(self.group)
        self.lockstep = Lockstep(self.group, lambda: self.stop.received)
        took = self.lockstep.took if several else None
        self.source, self.batches = batches, DevicePrefetcher(batches, self.device, took=took)
        collectives.share_weights(model)
        self.teacher = EMA.from_config(model, config)
        flops = FlopCounter(model) if self.device.type == "cuda" else None
        self.meter = Meter(self.group, flops, DataWait(batches, output / "config.yaml"))
        self.parallel = parallel.prepare(model, config, self.device, autocast_dtype=AUTOCAST[self.precision])
        self.optimizer = make_optimizer(model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.memory = FeatureMemory.from_config(config, batches, output, self.device)
        self.watchdog = Watchdog(STALL_TIMEOUT_S, lambda: self.step, self.group)
        self.total_steps = count_steps(batches, config)
        self.mines = mines(self.settings)
        check_schedule(config, self.total_steps)
        self.updates = FiniteUpdates(self.scaler, output)
        self.epoch = self.epoch_step = self.step = 0
        self.grad_norm = math.nan
        self._unchecked: Update | None = None
        batches.set_epoch(0)
        seed_rank(config.seed, collectives.rank())
        try:
            where = self._resume()
        except BaseException:
            sole.release(output)  # a notebook goes on
            raise
        speaks = collectives.rank() == 0
        self.log = RunLog(
            output, step=self.step, total_steps=self.total_steps, tensorboard=config.tensorboard, speaks=speaks
        )
        self.sharded = sharding.is_sharded(model)
        writer = ShardedCheckpointWriter if self.sharded else CheckpointWriter
        self.writer = writer(
            output / CHECKPOINTS,
            keep=config.keep_checkpoints,
            say=self.log.say,
            group=self.group,
        )
        self.log.say(f"{where}; on {_in_words(self.device, collectives.world_size())}, in {self.precision}")
        if config.warmup_steps >= self.total_steps:
            self.log.say(
                f"train.warmup_steps is {config.warmup_steps}, and the run has {counted(self.total_steps, 'step')}: "
                "the learning rate will not reach its peak; a tenth of the run is usual, "
                f"train.warmup_steps={self.total_steps // 10}"
            )
        for line in never_begins(config, self.total_steps):
            self.log.say(line)

    def run(self) -> int:
        """Train to the end, or until a signal.

        Returns:
            0, or 128 + the number of the signal that stopped the run, a checkpoint having been written.

        Raises:
            TrainingError: a loss or gradient that is not finite, batches that do not keep to their `len`, too many rows
                that could not be used over all ranks, no batch on another rank, or the end of one; on every rank.
        """
        self.model.train()  # transformers' from_pretrained returns a model in eval mode
        formats, held = numerics(self.precision, self.device), contextlib.ExitStack()
        held.callback(sole.release, self.output)
        with held, formats, self.stop, contextlib.closing(self.log), self.watchdog, self.writer:
            rehearsed = False
            try:
                if stopped := self._rehearse():
                    return self._stopped_in_rehearsal(stopped)
                rehearsed = True
                return self._train()
            except Exception as error:
                if not (said := compiler.failure(error)):
                    raise
                # Ctrl-C reaches the compiler's processes too, and their end is the error.
                if not (stopped := self.stop.received):
                    raise ConfigError(said) from error
                if not rehearsed:
                    return self._stopped_in_rehearsal(stopped)
                self.log.say(
                    f"stopped by {Signals(stopped).name} while code was compiled, after step {self.step} of "
                    f"{self.total_steps}; the last checkpoint counts; {self._how_to_go_on()}"
                )
                return 128 + stopped

    def _train(self) -> int:
        """The updates of `run`, once all shapes are rehearsed."""
        if self.step < self.total_steps and collectives.rank() == 0:
            self.log.record("start", {"step": self.step, **provenance(self.device)}, aloud=False)
        self.meter.begin()
        stopped = self._evaluate_if_due()  # the run before this one may have ended just before it
        while not stopped and self.step < self.total_steps:
            stopped = self._run_epoch() or self._evaluate_if_due()
        if stopped:
            self.log.say(
                f"stopped by {Signals(stopped).name} after step {self.step} of {self.total_steps}; "
                f"checkpoint in {self.output / CHECKPOINTS}; {self._how_to_go_on()}"
            )
            return 128 + stopped
        if self.mines:
            self._advise()
        self.log.say(
            f"finished after step {self.step}; checkpoint in {self.output / CHECKPOINTS}; next: {self._next()}"
        )
        return 0

    def _advise(self) -> None:
        """Say whether harder batches can help; of the whole run, whose earlier lines another process may have made."""
        if collectives.rank() > 0:
            return
        if advice := advise(read_lines(self.output / METRICS), self.settings):
            self.log.say(advice)

    def _next(self) -> str:
        """What to do with a finished run; one without the settings of `mmdata train` has weights only."""
        if {"data", "model"} <= set(self.settings):
            return f"`mmdata report {self.output}`, or in Python mmdata.load_run('{self.output}')"
        newest = self.output / CHECKPOINTS / checkpoint.checkpoint_name(self.step, sharded=self.sharded)
        load = "mmdata.train.run.checkpoint.load_checkpoint" if self.sharded else "torch.load"
        given = f"Path('{newest}')" if self.sharded else f"'{newest}'"
        return f"model.load_state_dict({load}({given})['model'])"

    def _stopped_in_rehearsal(self, stopped: int) -> int:
        self.log.say(f"stopped by {Signals(stopped).name} in the rehearsal, before an update; {self._how_to_go_on()}")
        return 128 + stopped

    def _how_to_go_on(self) -> str:
        return f"{f'`{self.command}`' if self.command else 'the same command'} resumes"

    def _rehearse(self) -> int:
        """A step of each shape of the epoch, without an update; returns the signal that stopped it, or 0."""
        blank = LoaderExtras.of(self.source).blank_batches
        slow_at_first = self.device.type == "cuda" or self.config.compile
        wanted = slow_at_first if self.config.rehearse == "auto" else self.config.rehearse
        if not wanted or blank is None or self.step == self.total_steps:
            return 0
        stopped = 0

        def begin(words: str) -> bool:
            nonlocal stopped
            self.watchdog.at(f"rehearsing {words}")
            stopped = self.stop.agreed()
            return not stopped

        normalizers = self.memory.normalizers
        unmoved = normalizers.unmoved() if normalizers else contextlib.nullcontext()
        with self.meter.paused(), parallel.apart(self.parallel), unmoved:
            # At the last step all that begins later is there: teacher and miner.
            rehearse(
                blank(),
                lambda batch: self._add_gradients(batch, step=self.total_steps - 1),
                model=self.model,
                optimizer=self.optimizer,
                device=self.device,
                begin=begin,
                say=self.log.say,
            )
        return stopped

    def _run_epoch(self) -> int:
        """The rest of this epoch; returns the signal that stopped it, or 0."""
        length = len(self.batches)
        batches = self.watchdog.waited_for(self.meter.waited_for(iter(self.batches)))
        for batch in self.lockstep.batches(batches):
            if self.epoch_step == length:
                raise TrainingError(f"epoch {self.epoch}: more than len(batches) = {length} batches came")
            self._update(batch)
            del batch  # its memory may be needed for the next one
            if self.epoch_step < length:
                stopped = self._save_if_due(self.lockstep.signal())
                if stopped or self.step == self.total_steps:
                    return stopped
        if self.epoch_step < length:
            raise TrainingError(f"epoch {self.epoch}: {self.epoch_step} of len(batches) = {length} batches came")
        self.epoch, self.epoch_step = self.epoch + 1, 0
        self._regroup_if_due()
        self.batches.set_epoch(self.epoch)
        return self._save_if_due(self.stop.agreed())

    def _regroup_if_due(self) -> None:
        """Give the loader new groups at the start of an epoch, where it takes them."""
        regroups, cache = LoaderExtras.of(self.source).regroups, self.memory.cache
        if regroups is None or cache is None or not regroups.is_due(self.epoch) or self.step == self.total_steps:
            return
        with self.meter.paused():
            self.watchdog.at("searching neighbours", LONG_S)
            found = regroup(regroups, cache, self.epoch, seed=self.config.seed, device=self.device, group=self.group)
            check_same_batches(LoaderExtras.of(self.source).identity, self.group)
        self.log.record("groups", {"step": self.step, "epoch": self.epoch, **found})

    def _update(self, batch: Batch) -> None:
        """One optimizer update from one global batch."""
        self.watchdog.at("computing")
        rate = scheduled_rate(self.step, self.config, self.total_steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        begins = self.mines and self.step == self.config.mining_after_steps
        if begins and self.step > 0:
            self.log.say(f"mining begins with step {self.step + 1} (train.mining_after_steps)")
        loss, output, of_teacher = self._add_gradients(batch, step=self.step)
        self.scaler.unscale_(self.optimizer)
        norm = sharding.clip_grad_norm(self.model.parameters(), self.config.grad_clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.teacher is not None:
            self.teacher.update(self.model)
        self.memory.keep(output.output, batch, self.step, of_teacher)
        self._check()
        self._unchecked = Update.of(self.step, batch, HostCopy(output.loss, norm))
        self.step += 1
        self.epoch_step += 1
        if self.memory.drift is not None:
            self.memory.drift.measure(self.model, self.step)
        self.log.advance(self.step)
        if self.step % self.config.log_every_steps == 0 or self.step == self.total_steps:
            self._log(rate, output.output.logit_scale)
        if begins or is_measured(self.step):
            with self.meter.paused():
                values = {"step": self.step, "epoch": self.epoch, **loss.telemetry(output.output, batch)}
                self.log.record("mining", values, aloud=self.mines)

    def _add_gradients(
        self, batch: Batch, *, step: int
    ) -> tuple[ContrastiveLoss, StepOutput, DualEncoderOutput | None]:
        """The gradients of one batch, with the loss of the update after `step` updates.

        Returns:
            The loss, what the step left, and the teacher's features if the queue is to hold those.
        """
        feeds = self.config.queue is not None and step >= self.config.mining_after_steps
        features = self.teacher.embed(batch) if self.teacher and (feeds or self.teacher.masks_at(step)) else None
        teacher_mask = self.teacher and self.teacher.teacher_mask(batch, step, features)
        loss = make_loss(step, self.config, teacher_mask, self.memory.queue, self.memory.normalizers)
        size, dtype = self.config.micro_batch_size, AUTOCAST[self.precision]
        output = train_step(self.parallel, batch, loss, micro_batch_size=size, autocast_dtype=dtype, scaler=self.scaler)
        return loss, output, features if feeds else None

    def _check(self) -> None:
        """Check loss and gradient of the last update, one update late, so that the host does not wait for the device.

        The norm is that of the ranks' mean gradient, so all ranks stop if one rank's rows are at fault.
        """
        update, self._unchecked = self._unchecked, None
        if update is None:
            return
        loss, self.grad_norm = self.updates.judge(update, last=update.step + 1 == self.total_steps)
        self.meter.add_loss(loss, self.grad_norm)

    def _log(self, rate: float, logit_scale: Tensor | None) -> None:
        self._check()
        state = checked_state(self.batches, self.source, self.group)
        if self.step == self.total_steps and (check_rows := LoaderExtras.of(self.source).check_rows) is not None:
            check_rows(state)
        measured = self.meter.read()
        values = {"step": self.step, "epoch": self.epoch, "loss": measured.pop("loss"), "lr": rate}
        values |= {
            "grad_norm": self.grad_norm,
            **measured,
            "logit_scale": None if logit_scale is None else float(logit_scale),
        }
        if self.scaler.is_enabled():
            values |= {"loss_scale": self.scaler.get_scale(), "skipped_updates": self.updates.skipped}
        self.log.record("train", values)
        drift = self.memory.drift.telemetry() if self.memory.drift is not None else {}
        for kind, numbers in self.memory.telemetry(self.step, drift):
            self.log.record(kind, {"step": self.step, "epoch": self.epoch, **numbers})
        for line in self.meter.remarks():
            self.log.say(line)

    def _evaluation_due(self) -> bool:
        every = self.config.evaluate_every_epochs
        epoch_done = self.epoch_step == 0 and self.epoch > 0 and every > 0 and self.epoch % every == 0
        return self.evaluate is not None and (epoch_done or self.step == self.total_steps)

    def _evaluate_if_due(self) -> int:
        """Evaluate between two epochs, while a checkpoint is written; returns the signal that came, or 0."""
        if self.evaluate is None or not self._evaluation_due() or self._evaluated_step == self.step:
            return 0
        with self.meter.paused():
            self.watchdog.at("evaluating", LONG_S)
            random_state = rng_state(self.device)
            self.model.eval()
            values = {"step": self.step, "epochs_done": self.epoch, **self.evaluate(self.model)}
            self.model.train()
            set_rng_state(random_state, self.device)
            self.watchdog.at("writing a checkpoint")
            self.writer.wait()  # a run that is killed and resumed must not come to this step a second time
            if collectives.rank() == 0:
                write_whole(self.output / EVALUATION, (json.dumps(values, indent=2) + "\n").encode())
            self.log.record("evaluation", values)  # last: a resumed run takes this line for a finished evaluation
            self._evaluated_step = self.step
        return self.stop.agreed()

    def _save_if_due(self, stopped: int) -> int:
        """Write a checkpoint where one is due, or a signal stops the run; returns that signal, or 0."""
        due = self.step == self.total_steps or self.step % self.config.checkpoint_every_steps == 0
        if stopped or due or self._evaluation_due():
            with self.meter.paused():
                self._check()
                self.watchdog.at("writing a checkpoint")
                self.watchdog.meet()
                self._save(background=not stopped and self.step < self.total_steps)
        return stopped

    def _save(self, *, background: bool) -> None:
        self.writer.wait()
        state: dict[str, Any] = {
            **{name: getattr(self, name) for name in COUNTERS},
            "total_steps": self.total_steps,
            "skipped_updates": self.updates.skipped,
            "bad_in_a_row": self.updates.bad_in_a_row,
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "teacher": self.teacher and self.teacher.state_dict(),
            "batches": checked_state(self.batches, self.source, self.group),
            "meter": self.meter.state_dict(),
            "memory": self.memory.state_dict(),
            "rng": gather(rng_state(self.device), self.group),
        }
        sound = self.updates.sound_step(self.step)
        form = state if self.sharded else sharding.whole_state(state)
        self.writer.save(form, sound_step=sound, background=background)

    def _resume(self) -> str:
        """Go on from the newest checkpoint in `output`, where there is one; returns a line that says so."""
        path = checkpoint.latest_checkpoint(self.output / CHECKPOINTS)
        evaluated = evaluated_steps(self.output / METRICS)
        if len(set(gather((path and path.name, evaluated), self.group))) > 1:
            raise ConfigError(f"train.output '{self.output}': the ranks see different files there; share the folder")
        if path is None:
            self._evaluated_step = None
            if (regroups := LoaderExtras.of(self.source).regroups) is not None:
                on_first(regroups.forget_groups, self.group)
            # A run that was killed before its first checkpoint has lines of steps that this run makes again.
            if logged := last_logged_step(self.output / METRICS):
                return (
                    f"{self.output} has {logged:,} logged steps and no checkpoint (train.checkpoint_every_steps is "
                    f"{self.config.checkpoint_every_steps:,}): starting again from step 0 of {self.total_steps}"
                )
            return f"starting: {self.total_steps} steps, in {self.output}"
        like = sharding.own_shares(self.model, self.optimizer, self.memory.shares())
        state = checkpoint.load_checkpoint(path, mapped=True, like=like, group=self.group)
        extras = LoaderExtras.of(self.source)
        other_shards = extras.other_shards(state["batches"]) if extras.other_shards else ""
        check_same_run(state, self.settings, self.config, self.total_steps, origin=str(path), other_shards=other_shards)
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.updates.skipped, self.updates.bad_in_a_row = state["skipped_updates"], state.get("bad_in_a_row", 0)
        checkpoint.load_weights(self.model, state, origin=str(path))
        sharding.load_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.teacher is not None:
            self.teacher.load_state_dict(state["teacher"])
        self.batches.load_state_dict(state["batches"])
        self.meter.load_state_dict(state["meter"])
        said = self.memory.load_state_dict(state.get("memory", {}), self.step, self.device, self.group)
        self._evaluated_step = self.step if self.step in evaluated else None
        if len(state["rng"]) == collectives.world_size():
            set_rng_state(state["rng"][collectives.rank()], self.device)
        return f"resuming from {path}: step {self.step} of {self.total_steps}{said and '; '}{said}"


def _in_words(device: torch.device, ranks: int) -> str:
    """What a run computes on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name if ranks == 1 else f"{ranks} ranks of {name}"
