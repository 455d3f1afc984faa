"""What is kept of masked rows: few in memory, all in a file, each once; their counts outlive a resumed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmdata.errors import DataError
from mmdata.loader.ledger import Ledger, LedgerEntry

from .conftest import Corpus


def entry(epoch: int, step: int, row: int = 0, reason: str = "corrupt_image") -> LedgerEntry:
    return LedgerEntry(epoch, step, row, "s.tar", "k", reason, "d")


def places(path: Path) -> list[tuple[int, int, int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["epoch"], line["step"], line["row"]) for line in lines]


def test_ledger_keeps_the_newest_entries_and_exact_counts():
    ledger = Ledger(1.0)
    ledger.add([entry(0, 0, row, "corrupt_image") for row in range(3)], 3)
    ledger.add([entry(0, 1, row, "file_changed") for row in range(10_000)], 10_000)
    assert len(ledger.entries) == 10_000
    assert {e.reason for e in ledger.entries} == {"file_changed"}
    assert ledger.masked == {"corrupt_image": 3, "file_changed": 10_000}
    assert ledger.rows_masked == 10_003


def test_ledger_file_has_an_entry_as_soon_as_it_is_known(tmp_path: Path):
    ledger = Ledger(0.0)
    ledger.write_to(tmp_path / "l.jsonl", epoch=0, step=0)
    with pytest.raises(DataError, match=r"^1 of 2000 rows could not be used \(corrupt_image 1\)"):
        ledger.add([entry(0, 0, 7)], 2000)
    assert places(tmp_path / "l.jsonl") == [(0, 0, 7)]


def test_ledger_file_loses_what_a_resumed_run_makes_again(tmp_path: Path):
    path = tmp_path / "l.jsonl"
    killed = Ledger(1.0)
    killed.write_to(path, epoch=0, step=0)
    for place in ((0, 3), (1, 0), (1, 1), (1, 2)):
        killed.add([entry(*place)], 8)
    with path.open("a") as file:
        file.write('{"epoch": 0, "st')  # killed while it wrote
    resumed = Ledger(1.0)
    resumed.write_to(path, epoch=1, step=1)
    assert places(path) == [(0, 3, 0), (1, 0, 0)]
    resumed.add([entry(1, 1), entry(1, 1, 5)], 8)
    assert places(path) == [(0, 3, 0), (1, 0, 0), (1, 1, 0), (1, 1, 5)]


def test_ledger_judges_by_what_was_counted_before_the_run_was_resumed():
    ledger = Ledger(0.05)
    ledger.restore(rows_seen=900, rows_masked=50)
    ledger.add([entry(0, 0)], 50)
    message = (
        r"^51 of 1000 rows could not be used \(corrupt_image 1, before the run was resumed 50\), more than "
        r"max_bad_share 5\.0%; the first: shard 's\.tar', sample 'k': d\. `mmdata verify`"
    )
    with pytest.raises(DataError, match=message):
        ledger.add([], 50)
    ledger.restore(rows_seen=1000, rows_masked=51)
    with pytest.raises(DataError, match=r"resumed 51\), more than max_bad_share 5\.0%\. `mmdata verify`"):
        ledger.check()


def test_loader_resumed_writes_each_masked_row_once_and_goes_on_counting(corpus: Corpus, tmp_path: Path):
    damaged, path = corpus.copy(tmp_path / "corpus"), tmp_path / "l.jsonl"
    for row in range(0, 50, 5):
        damaged.overwrite(row, "image", bytes(400))
    killed = damaged.loader(max_bad_share=0.5)
    killed.write_ledger(path)
    iterator = iter(killed)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(killed.state_dict()))
    for _ in range(2):  # after the checkpoint
        next(iterator)
    assert {step for _, step, _ in places(path)} > {3}
    resumed = damaged.loader(max_bad_share=0.5)
    resumed.load_state_dict(state)
    resumed.write_ledger(path)
    assert {step for _, step, _ in places(path)} <= {0, 1, 2}
    list(resumed)
    assert sorted(row for _, _, row in places(path)) == list(range(0, 50, 5))
    end = resumed.state_dict()
    assert (end["rows_seen"], end["rows_masked"]) == (50, 10)
    assert resumed.masked.total() == len(resumed.ledger) < 10
