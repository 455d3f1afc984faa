"""When the log advises to mine, and when not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata.inspect.runs import read_runs, table_of_runs
from mmdata.train.log.advice import advise
from tests.train.test_loop import make_trainer

Settings = dict[str, Any]
EASY = {"kind": "mining", "step": 500, "epoch": 4, "rows": 64, "in_batch_accuracy": 0.97, "kept_share": 1.0}
EASY |= {"false_negative_share": 0.01, "admissible_false_negative_share": 0.01}
HARD = EASY | {"in_batch_accuracy": 0.6}
FALSE = {"admissible_false_negative_share": 0.3}
COLLAPSED = EASY | {"in_batch_accuracy": 0.01, "admissible_false_negative_share": 1.0}
MASKED = {"train": {"mask_false_negatives": True}}
FILE = {"data": {"groups": {"source": "groups.npy", "size": 4}}}
OF_RUN = {"data": {"groups": {"source": "run", "size": 4, "every_epochs": 2}}}
ALL = {"name": "all"}
TOP_K = {"train": {"miner": {"name": "top_k", "k": 1}, "mask_false_negatives": True}}


def advice(line: Settings, settings: Settings) -> str:
    return advise([line | {"rows": 512}], settings)


@pytest.mark.parametrize(
    ("mining", "settings", "said"),
    [
        ({"kind": "mining", "step": 5}, {}, "$"),
        (HARD, {}, r"in-batch accuracy 0\.60 \(one batch with 512 rows, step 500\): random batches still teach"),
        (HARD, {}, r".* Where images or captions repeat, train\.mask_false_negatives=true comes first"),
        (HARD, MASKED, r".* any experiment of docs/mine\.md\.$"),
        (
            EASY,
            {},
            r".*: the batches are easy\. Try a lower .*\[logit_scale\] model\.logit_scale_init=5\. If .*neighbours",
        ),
        (EASY, {"model": {"freeze": ["logit_scale"]}}, r".*: the batches are easy\. If .*mmdata neighbours"),
        (EASY, {"train": {"loss": "siglip"}}, r".*: the batches are easy\. If .*mmdata neighbours"),
        (EASY, FILE, r".*: the batches are grouped, and told apart all"),
        (HARD | FALSE, {}, r".* and 30% of .* try train\.mask_false_negatives=true"),
        (EASY | FALSE, {}, r".* and 30% of .* try train\.mask_false_negatives=true"),
        (EASY | FALSE, MASKED, r".* try train\.teacher, or data\.caption_hash where"),
        (EASY | FALSE, MASKED | {"data": {"caption_hash": "same"}}, r".* try train\.teacher before"),
        (EASY | FALSE, {"train": {"teacher": {"decay": 0.9}}}, r".*: the batches are easy"),
        (COLLAPSED, MASKED, r".* and 100% of .* has collapsed: start again with a lower train\.lr"),
        (COLLAPSED, TOP_K, r".* start again with a higher train\.mining_after_steps, or a lower train\.lr"),
    ],
)
def test_advice_names_the_setting(mining: Settings, settings: Settings, said: str):
    assert re.match(said, advice(mining, settings)), advice(mining, settings)


@pytest.mark.parametrize("settings", [FILE, OF_RUN, {"data": {"groups": {"source": "label", "candidates": 3}}}])
def test_batches_of_groups_are_not_called_random(settings: Settings):
    said = advice(HARD, settings)
    assert said.startswith(
        "in-batch accuracy 0.60 (one batch with 512 rows, step 500): the batches hold groups of rows (data.groups), "
        "which are harder to tell apart than random rows. Whether they help shows in a comparison with as many random "
    )
    assert "mining early" not in said


def test_negatives_that_a_miner_has_chosen_are_not_taken_for_all():
    mined = HARD | {"false_negative_share": 0.5, "kept_share": 0.02}  # k of 1
    assert "as near as their positives" not in advice(mined, TOP_K)
    mined["admissible_false_negative_share"] = 0.5
    assert "50% of the negatives" in advice(mined, MASKED)


def test_advice_is_of_the_mean_of_the_last_quarter_by_rows():
    line = EASY | {"rows": 64}
    lines = [line | {"step": step, "in_batch_accuracy": 0.1} for step in (100, 200, 299)]
    lines += [line | {"step": 310, "in_batch_accuracy": 0.95}, line | {"step": 360, "in_batch_accuracy": 0.99}]
    lines += [line | {"step": 400, "in_batch_accuracy": 0.5, "rows": 4}]  # an epoch's last batch
    said = advise(lines, {})
    assert said.startswith(
        "in-batch accuracy 0.96 (mean of 3 batches with 132 rows, steps 310 to 400): the batches are"
    )


AT_CHANCE = {"image_to_text_r1": 0.0087, "text_to_image_r1": 0.0, "chance_r1": 0.01295}


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        (AT_CHANCE, "by heart"),
        (AT_CHANCE | {"text_to_image_r1": 0.05}, "the batches are easy"),  # more than twice the chance
        (AT_CHANCE | {"chance_r1": 0.25}, "the batches are easy"),  # four candidates
        ({"zero_shot_top1": 0.1}, "the batches are easy"),
    ],
)
def test_a_model_that_finds_nothing_unseen_is_not_advised_to_mine(evaluation: dict[str, Any], said: str):
    assert said in advise([EASY, {"kind": "evaluation", "step": 500} | evaluation], {})


def test_advice_says_what_was_found_of_what():
    assert advise([EASY | {"rows": 512}, {"kind": "evaluation"} | AT_CHANCE], {}) == (
        "in-batch accuracy 0.97 (one batch with 512 rows, step 500), and R@1 on data.val is 0.4% at a chance of 1.3%: "
        "it has learnt its rows by heart; more rows help, and harder batches do not."
    )


@pytest.fixture
def all_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update of a run is measured."""
    monkeypatch.setattr("mmdata.train.run.report.RunReport.measures", lambda self, step: True)


@pytest.mark.usefixtures("all_measured")
def test_run_and_report_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert make_trainer(tmp_path, miner=ALL).run() == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in-batch accuracy")]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"train": {"miner": ALL}}))
    section = table_of_runs(read_runs([tmp_path]))
    assert section.note.endswith(told[0].upper() + told[1:])
    assert ("hard negatives, measured", "mean of 3 batches with 24 rows, steps 10 to 12") in section.tables[0].rows


@pytest.mark.usefixtures("all_measured")
def test_a_run_that_was_stopped_is_advised_by_its_earlier_lines_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert make_trainer(tmp_path / "whole", miner=ALL).run() == 0
    stopped = make_trainer(tmp_path / "stopped", checkpoint_every_steps=10, miner=ALL)
    update = stopped._update

    def killed(batch: Any) -> None:
        if stopped.step == 10:
            raise KeyboardInterrupt
        update(batch)

    stopped._update = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert make_trainer(tmp_path / "stopped", checkpoint_every_steps=10, miner=ALL).run() == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = [line for line in lines if line.startswith("in-batch accuracy")]
    assert first == second
    assert "steps 10 to 12" in first


def test_report_without_measurements_has_no_such_rows(tmp_path: Path):
    assert make_trainer(tmp_path).run() == 0
    section = table_of_runs(read_runs([tmp_path]))
    assert "in-batch accuracy" not in section.note
    assert not any("negatives" in row[0] for row in section.tables[0].rows)
