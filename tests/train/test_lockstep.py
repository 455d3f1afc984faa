"""Ranks agree on each batch in one collective a step, which nobody waits for before the batch is due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.train.prefetch import DevicePrefetcher
from mmdata.train.ranks import lockstep
from mmdata.train.ranks.lockstep import SIGNAL, Lockstep
from tests.programs import run_ranks


class Others:
    """Stands in for the other ranks: answers a question when it is waited for, and notes the order of events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.signal_at: dict[int, int] = {}
        self._asked = 0

    def all_reduce(self, values: Tensor, **settings: Any) -> Any:
        assert settings["async_op"]
        number, self._asked = self._asked, self._asked + 1
        self.events.append(f"ask {number}")
        others = self

        class Work:
            def wait(self) -> None:
                others.events.append(f"wait {number}")
                values[SIGNAL] = max(int(values[SIGNAL]), others.signal_at.get(number, 0))

        return Work()


class Numbers:
    """A loader of three batches."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Batch]:
        for number in range(3):
            yield cast(Batch, {"rows": torch.tensor([number])})

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    others = Others()
    monkeypatch.setattr(lockstep.dist, "all_reduce", others.all_reduce)
    return others


def test_ranks_ask_a_batch_ahead_and_once_a_step(others: Others):
    together = Lockstep(cast(Any, object()), lambda: 0)
    ahead = DevicePrefetcher(Numbers(), "cpu", took=together.took)
    for _ in range(2):
        others.events.clear()
        others._asked = 0
        for batch in together.batches(iter(ahead)):
            others.events.append(f"step {int(batch['rows'])}")
        # Question 3 says that the epoch has ended. Nothing is waited for before its batch is due.
        assert others.events == [
            *("ask 0", "ask 1", "wait 0", "step 0"),
            *("ask 2", "wait 1", "step 1"),
            *("ask 3", "wait 2", "step 2"),
            "wait 3",
        ]


def test_a_signal_of_another_rank_comes_with_the_answer_about_the_batch_ahead(others: Others):
    others.signal_at = {2: 15}
    together = Lockstep(cast(Any, object()), lambda: 0)
    ahead = DevicePrefetcher(Numbers(), "cpu", took=together.took)
    assert [together.signal() for _ in together.batches(iter(ahead))] == [0, 15, 0]


def test_one_rank_asks_nobody(others: Others):
    together = Lockstep(None, lambda: 2)
    assert [together.signal() for _ in together.batches(iter(DevicePrefetcher(Numbers(), "cpu")))] == [2, 2, 2]
    assert others.events == []


@pytest.mark.sweep
def test_ranks_wait_for_long_work_of_the_first_and_name_a_rank_that_does_not_come(tmp_path: Path):
    run_ranks(Path(__file__).with_name("waiting_ranks.py"), tmp_path)


def test_batches_of_different_numbers_of_rows_end_all_ranks_with_the_numbers(tmp_path: Path):
    # In the losses' own collectives one gloo process would abort, and nccl would wait for ever.
    run_ranks(Path(__file__).with_name("uneven_ranks.py"), tmp_path)
    for part in ("run", "evaluation"):
        said = {(tmp_path / f"{part}-{rank}").read_text() for rank in range(2)}
        assert said == {
            "rank 0 has a batch of 4 rows, and rank 1 one of 3 rows: all ranks need equally many. Give each rank's "
            "loader the same batch size, and leave out a smaller last batch (drop_last=True), or fill it up with rows "
            "whose `valid` is False"
        }
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) >= 3, (
        "the start, and the two steps before"
    )
