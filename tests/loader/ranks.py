"""Run under torchrun by test_two_ranks.py: a loop of one's own over loaders and streams that are given no ranks.

usage: ranks.py '{"data": {…}, "bad": {…}, "stream": {…}, "out": FOLDER}'

`bad` are settings of a corpus with damaged rows, `stream` those of the same shards without their index.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mmdata
from mmdata.errors import DataError
from mmdata.integrations.adapt import judged_together
from mmdata.samplers import BucketBatchSampler
from mmdata.train.ranks import collectives

SEEN = 1000
"""Rows that the run has seen before: from then on a loader judges at every batch."""


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def later(loader: Any) -> Any:
    """The loader, resumed after many rows that were all good."""
    loader.load_state_dict({**loader.state_dict(), "rows_seen": SEEN})
    return loader


def steps(batches: Iterator[Any]) -> int:
    """Go through batches as a training loop does, in which each rank waits for the others at each step."""
    count = 0
    for _ in batches:
        together = torch.ones(1)
        dist.all_reduce(together)
        assert together.item() == dist.get_world_size()
        count += 1
    return count


def judged(loader: Any) -> str:
    """What `check_rows` says of the rows of all ranks."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    try:
        loader.check_rows(loader.merge_states(states))
    except DataError as error:
        return str(error)
    return "few enough"


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """What this rank saw."""
    kept = Kept()
    logging.getLogger("mmdata").addHandler(kept)
    loader = mmdata.Loader.from_config(spec["data"])
    stream = mmdata.stream(None, spec["stream"], steps_per_epoch=2)
    found: dict[str, Any] = {
        "loader": [batch["rows"].tolist() for batch in loader],
        "stream": [batch["keys"] for batch in stream],
        "sampler": list(BucketBatchSampler([3, 4, 5] * 8, 4)),
    }
    found["said"] = [message for message in kept.messages if "RANK and WORLD_SIZE" in message]
    of_bad = later(mmdata.Loader.from_config(spec["bad"]))
    found["own loop"] = [steps(of_bad), judged(of_bad)]
    of_bad = later(mmdata.stream(None, spec["stream"], steps_per_epoch=2))
    found["own loop of a stream"] = [steps(of_bad), judged(of_bad)]
    found["warned"] = [message for message in kept.messages if "would leave the others waiting" in message]
    found["integration"] = ended_by(later(mmdata.Loader.from_config(spec["bad"])))
    found["integration of a stream"] = ended_by(later(mmdata.stream(None, spec["stream"], steps_per_epoch=2)))
    return found


def ended_by(loader: Any) -> str:
    """The error that ends a loop in which the rows of all ranks are judged."""
    try:
        steps(judged_together(loader))
    except DataError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    collectives.init("cpu")
    seen = main(given)
    (Path(given["out"]) / f"rank{collectives.rank()}.json").write_text(json.dumps(seen))
