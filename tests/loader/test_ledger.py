"""What is kept of masked rows: few in memory, all in a file, each once; their counts outlive a resumed run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mmdata.errors import DataError
from mmdata.launcher import Ranks
from mmdata.loader.ledger import Ledger, LedgerEntry, RowCounts

from .conftest import Corpus


def entry(epoch: int, step: int, row: int = 0, reason: str = "corrupt_image") -> LedgerEntry:
    return LedgerEntry(epoch, step, row, "s.tar", "k", 512, "decode", reason, "d")


def places(path: Path) -> list[tuple[int, int, int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["epoch"], line["step"], line["row"]) for line in lines]


def test_ledger_keeps_the_newest_entries_and_exact_counts():
    ledger = Ledger(1.0)
    ledger.add([entry(0, 0, row, "corrupt_image") for row in range(3)], 3)
    ledger.add([entry(0, 1, row, "file_changed") for row in range(10_000)], 10_000)
    assert len(ledger) == 10_000
    assert {e.reason for e in ledger} == {"file_changed"}
    assert ledger.counts == RowCounts(10_003, Counter({"corrupt_image": 3, "file_changed": 10_000}))


def test_ledger_logs_a_reason_once_also_where_a_batch_has_it_twice(caplog: pytest.LogCaptureFixture):
    ledger = Ledger(1.0)
    ledger.add([entry(0, 0, 1), entry(0, 0, 2), entry(0, 0, 3, "file_changed")], 8)
    ledger.add([entry(0, 1, 4)], 8)
    assert [record.args[1] for record in caplog.records if record.args] == ["corrupt_image", "file_changed"]  # type: ignore[index]


def test_ledger_lists_reasons_by_number():
    ledger = Ledger(0.0)
    ledger.add([entry(0, 0, 1), entry(0, 0, 2, "file_changed"), entry(0, 0, 3, "file_changed")], 10)
    with pytest.raises(DataError, match=r"^3 of 10 rows could not be used \(file_changed 2, corrupt_image 1\), more"):
        ledger.check()


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
    ledger.restore(RowCounts(900, Counter(corrupt_image=49, file_changed=1)))
    ledger.add([entry(0, 0)], 50)
    message = (
        r"^51 of 1000 rows could not be used \(corrupt_image 50, file_changed 1\), more than "
        r"max_bad_share 5\.0%; the first: shard 's\.tar', sample 'k': d; `mmdata replay CONFIG 0 --epoch 0` makes "
        r"this row alone\. `mmdata verify`"
    )
    with pytest.raises(DataError, match=message):
        ledger.add([], 50)
    ledger.restore(RowCounts(1000, Counter(corrupt_image=51)))
    with pytest.raises(DataError, match=r"\(corrupt_image 51\), more than max_bad_share 5\.0%\. `mmdata verify`"):
        ledger.check()


def test_ledger_advises_to_verify_shards_only_for_what_is_in_them():
    ledger = Ledger(0.05)
    with pytest.raises(DataError) as caught:
        ledger.judge(RowCounts(1000, Counter(transform_failed=900)))
    assert "verify" not in str(caught.value)
    assert "data.transform raised or gave other pixels than it should; data.loading.max_bad_share" in str(caught.value)
    with pytest.raises(DataError, match=r"`mmdata verify` checks the shards; data\.transform raised"):
        ledger.judge(RowCounts(1000, Counter(transform_failed=900, corrupt_image=1)))


def test_ledger_merged_counts_what_was_before_the_resume_once():
    earlier = RowCounts(100, Counter(corrupt_image=2))
    ranks = [Ledger(1.0), Ledger(1.0)]
    for number, ledger in enumerate(ranks):
        ledger.restore(earlier)
        ledger.add([entry(0, 0)] * number, 8)
    assert ranks[0].merge([ledger.counts for ledger in ranks]) == RowCounts(116, Counter(corrupt_image=3))


def test_ledger_of_one_of_several_ranks_warns_once_and_leaves_the_judgement_to_the_caller(
    caplog: pytest.LogCaptureFixture,
):
    ledger = Ledger(0.0, Ranks(1, 2))
    ledger.add([entry(0, 0)], 2000)
    ledger.check()
    (warning,) = [record.getMessage() for record in caplog.records if "rank 1 of 2" in record.getMessage()]
    assert "check_rows(merge_states(states)), called with the states of all ranks on every rank" in warning
    with pytest.raises(DataError, match=r"^1 of 2000 rows"):
        ledger.judge(ledger.counts)


def test_loader_resumed_writes_each_masked_row_once_and_goes_on_counting(corpus: Corpus, tmp_path: Path):
    damaged, path = corpus.copy(tmp_path / "corpus"), tmp_path / "l.jsonl"
    for row in range(0, 50, 5):
        damaged.overwrite(row, "image", bytes(400))
    killed = damaged.loader(max_bad_share=0.5)
    killed.ledger.write_to(path, epoch=0, step=0)
    iterator = iter(killed)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(killed.state_dict()))
    for _ in range(2):  # after the checkpoint
        next(iterator)
    assert {step for _, step, _ in places(path)} > {3}
    resumed = damaged.loader(max_bad_share=0.5)
    resumed.load_state_dict(state)
    resumed.ledger.write_to(path, epoch=state["epoch"], step=state["step"])
    assert {step for _, step, _ in places(path)} <= {0, 1, 2}
    list(resumed)
    assert sorted(row for _, _, row in places(path)) == list(range(0, 50, 5))
    end = resumed.state_dict()
    assert (end["rows_seen"], end["rows_masked"]) == (50, {"file_changed": 10})
    assert resumed.ledger.masked.total() == len(resumed.ledger) < 10


def test_loader_states_of_two_ranks_merge_into_one_for_any_number(corpus: Corpus, tmp_path: Path):
    damaged = corpus.copy(tmp_path / "corpus")
    for row in range(0, 50, 5):
        damaged.overwrite(row, "image", bytes(400))
    ranks = [damaged.loader(rank=rank, world_size=2, max_bad_share=0.1) for rank in range(2)]
    for loader in ranks:
        list(loader)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in ranks]
    merged = ranks[1].merge_states(states)
    assert (merged["rows_seen"], merged["rows_masked"]) == (50, {"file_changed": 10})
    with pytest.raises(DataError, match=r"^10 of 50 rows could not be used \(file_changed 10\), more than max_bad"):
        ranks[0].check_rows(merged)
    damaged.loader(max_bad_share=0.2).check_rows(merged)
    resumed = [damaged.loader(rank=rank, world_size=4, max_bad_share=0.5) for rank in range(4)]
    for loader in resumed:
        loader.load_state_dict(merged)
    assert resumed[3].merge_states([loader.state_dict() for loader in resumed]) == merged


def test_loader_rows_are_judged_from_the_thousandth_or_the_end_of_an_epoch_on(corpus: Corpus):
    loader = corpus.loader(max_bad_share=0.1)
    state = {**loader.state_dict(), "rows_seen": 40, "rows_masked": {"file_changed": 10}}
    loader.check_rows({**state, "step": 6})
    many, all_bad = {"rows_seen": 1000, "rows_masked": {"file_changed": 101}}, {"rows_masked": {"file_changed": 40}}
    for change in ({"step": 7}, {"epoch": 1}, many, {"step": 6, **all_bad}):
        with pytest.raises(DataError, match=r"rows could not be used \(file_changed"):
            loader.check_rows({**state, **change})


def test_ledger_says_where_a_row_lies_and_at_which_stage_it_failed(corpus: Corpus, tmp_path: Path):
    damaged = corpus.copy(tmp_path / "corpus")
    damaged.overwrite(3, "image", bytes(400))
    damaged.overwrite(22, "caption", b"\xff")
    list(loader := damaged.loader(max_bad_share=0.5))
    found = {(e.row, e.shard, e.key, e.offset, e.stage, e.reason) for e in loader.ledger}
    columns = corpus.index.take(np.array([3, 22]), ["image_offset", "caption_offset"])
    image, caption = int(columns["image_offset"][0]), int(columns["caption_offset"][1])
    assert found == {
        (3, "000000.tar", "00003", image, "read", "file_changed"),
        (22, "000001.tar", "00022", caption, "caption", "bad_caption"),
    }
    assert (damaged.folder / "shards" / "000000.tar").read_bytes()[image : image + 400] == bytes(400)
