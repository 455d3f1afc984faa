"""A run of the loop on made-up batches, as a program that tests start, signal and kill.

python small_run.py '{"output": "…", "train": {…}, "signal": "SIGKILL", "at": 7, "times": 1, "seconds_a_batch": 0,
                      "dropout": 0.3, "double": false, "largest_file": 5000, "steps_of_last": 2, "sleep_s": 0,
                      "others_sleep_s": 0, "error": "", "error_in_step": "", "stall_timeout_s": 600, "slow_save_of": 6,
                      "save_takes_s": 1000, "own_weights": false, "batch_norm": false, "slow_rank": 0,
                      "no_memory": false}'

Writes one line of rows a batch to OUTPUT/rows.jsonl. While batch number `at` is being made, counted from 0 over the
whole run, the last rank sleeps for `sleep_s`, sends itself `signal`, and raises `error`; the others sleep for
`others_sleep_s`. In update `at` the last rank's model raises `error_in_step`. `stall_timeout_s` is in place of the
watchdog's. Rank `slow_rank` (else the last) waits for `save_takes_s` before it writes its share of the checkpoint of
step `slow_save_of`, and makes batch `at` after the beginning of that. Otherwise a single process makes batch `at` when
the checkpoint before it is written. With `own_weights` the ranks begin with other weights each; with `no_memory` the
last rank has none for a copy of its state.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.files import remove
from mmdata.recognize import CHECKPOINTS
from mmdata.train import DualEncoder
from mmdata.train.evaluation.evaluate import evaluate_retrieval
from mmdata.train.ranks import collectives
from mmdata.train.run import trainer as trainer_module
from mmdata.train.run import watchdog
from mmdata.train.run.checkpoint import known_checkpoints, step_of
from mmdata.train.run.trainer import Trainer

BATCH_SIZE, STEPS = 8, 4


class SmallBatches:
    """Four batches an epoch, each a function of epoch and step; a loader as the loop wants it."""

    index = range(STEPS * BATCH_SIZE)

    def __init__(self, before: Callable[[int, list[int]], None] = lambda number, rows: None) -> None:
        self.before = before
        self.epoch = self.step = 0
        self.count, self.steps = STEPS, STEPS
        self.spoil: Callable[[int, Batch], None] = lambda number, batch: None

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.step = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]

    def __iter__(self) -> Iterator[Batch]:
        rank, size = collectives.rank(), BATCH_SIZE // collectives.world_size()
        mine = slice(rank * size, (rank + 1) * size)
        while self.step < self.steps:
            number = self.epoch * STEPS + self.step
            generator = torch.Generator().manual_seed(number)
            rows = torch.randperm(STEPS * BATCH_SIZE, generator=generator)[:BATCH_SIZE]
            pixels = torch.randint(0, 256, (BATCH_SIZE, 3, 4, 4), generator=generator).to(torch.uint8)
            ids = torch.randint(1, 20, (BATCH_SIZE, 5), generator=generator)
            mask = (torch.arange(5) < torch.randint(1, 6, (BATCH_SIZE, 1), generator=generator)).long()
            self.before(number, rows.tolist())
            self.step += 1
            batch = Batch(
                pixel_values=pixels[mine],
                input_ids=ids[mine],
                attention_mask=mask[mine],
                image_hash=rows[mine],
                caption_hash=rows[mine] // 2,
                valid=torch.ones(size, dtype=torch.bool),
                rows=rows[mine],
                keys=[str(row) for row in rows[mine].tolist()],
            )
            self.spoil(number, batch)
            yield batch


class SmallText(nn.Module):
    """Mean of token vectors, with dropout, so that a resumed run shows whether it draws the same numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.vectors = nn.Embedding(20, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(2)  # (B, L, 1)
        return self.dropout((self.vectors(input_ids) * mask).sum(1) / mask.sum(1))


def small_model(dropout: float = 0.3, *, batch_norm: bool = False) -> DualEncoder:
    """Some hundred parameters; the same at each call."""
    torch.manual_seed(0)
    image = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16))
    text = SmallText(dropout)
    return DualEncoder(image, text, image_projection=nn.Linear(16, 8), text_projection=nn.Linear(16, 8))


def train_config(**changes: Any) -> TrainConfig:
    """Three epochs of four steps, one log line a step, a checkpoint every three steps."""
    defaults: dict[str, Any] = {"epochs": 3, "log_every_steps": 1, "checkpoint_every_steps": 3}
    defaults |= {"warmup_steps": 2, "lr": 0.01}
    if "steps" in changes:
        del defaults["epochs"]
    return parse(TrainConfig, defaults | changes, origin="test")


def go_back(output: Path, step: int) -> None:
    """Delete the checkpoints of a run after a step."""
    for path in known_checkpoints(output / CHECKPOINTS):
        if step_of(path) > step:
            remove(path)


def evaluate(model: nn.Module) -> dict[str, float]:
    """Retrieval over the batches of epoch 0, in which equal rows have equal pixels: their order decides nothing."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (STEPS * BATCH_SIZE, 3, 4, 4), generator=generator).to(torch.uint8)
    batches = SmallBatches()
    batches.spoil = lambda number, batch: batch["pixel_values"].copy_(pixels[batch["rows"]])
    return evaluate_retrieval(model, batches)


def happen(spec: dict[str, Any]) -> None:
    """What the JSON argument wants to happen to this rank at batch `at`."""

    def send(name: str) -> None:
        for _ in range(spec.get("times", 1)):
            os.kill(os.getpid(), getattr(signal, name))

    if collectives.rank() < collectives.world_size() - 1:
        time.sleep(spec.get("others_sleep_s", 0))
        return
    time.sleep(spec.get("sleep_s", 0))
    if "signal" in spec:
        send(spec["signal"])
    if "error" in spec:
        raise RuntimeError(spec["error"])


def write_slowly(step: int | None, seconds: float) -> threading.Event:
    """Make this rank's share of a step one that is written late; the event is set when that is begun."""
    began, write = threading.Event(), FileSystemWriter.write_data

    def late(self: FileSystemWriter, *given: Any) -> Any:
        if step is not None and f"step-{step:010d}" in str(self.path):
            began.set()
            time.sleep(seconds)
        return write(self, *given)

    FileSystemWriter.write_data = late  # type: ignore[method-assign]
    return began


def main() -> int:
    """Run as told by the JSON argument."""
    spec = json.loads(sys.argv[1])
    output = Path(spec["output"])
    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    collectives.init("cpu")
    if "largest_file" in spec and collectives.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec["largest_file"], spec["largest_file"]))

    is_last = collectives.rank() == collectives.world_size() - 1
    if is_last and spec.get("no_memory"):
        # The error is that of torch's allocator.
        DefaultStager.stage = lambda self, tensors: torch.empty(2**60, dtype=torch.uint8)  # type: ignore[method-assign]
    is_slow = collectives.rank() == spec.get("slow_rank", collectives.world_size() - 1)
    slow_save_of = spec.get("slow_save_of") if is_slow else None
    began = write_slowly(slow_save_of, spec.get("save_takes_s", 1000))

    def before(number: int, rows: list[int]) -> None:
        if number == spec.get("at") and slow_save_of is not None:
            assert began.wait(60)
        elif number == spec.get("at") and collectives.world_size() == 1:
            trainer.writer.wait()  # so that it is certain which checkpoint there is
        if collectives.rank() == 0:
            with (output / "rows.jsonl").open("a") as file:
                file.write(json.dumps({"batch": number, "rows": rows}) + "\n")
        time.sleep(spec.get("seconds_a_batch", 0))
        if number == spec.get("at"):
            happen(spec)

    config = train_config(**spec.get("train", {}))
    model = small_model(spec.get("dropout", 0.3), batch_norm=spec.get("batch_norm", False))
    if spec.get("own_weights"):
        for weight in model.parameters():
            weight.data += collectives.rank()
    if spec.get("double"):
        model = model.double()
    if "error_in_step" in spec and collectives.rank() == collectives.world_size() - 1:

        def fail(*given: Any) -> None:
            if trainer.step == spec["at"]:
                raise ValueError(spec["error_in_step"])

        model.register_forward_pre_hook(fail)
    trainer_module.STALL_TIMEOUT_S = spec.get("stall_timeout_s", watchdog.STALL_TIMEOUT_S)
    batches = SmallBatches(before)
    if is_last:
        batches.steps = spec.get("steps_of_last", STEPS)
    trainer = Trainer(model, batches, config, output=output, evaluate=evaluate)
    return trainer.run()


if __name__ == "__main__":
    sys.exit(main())
