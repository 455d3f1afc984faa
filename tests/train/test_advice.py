"""When the log advises to mine, and when not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mmdata.inspect import run_sections
from mmdata.inspect.runs import read_runs
from mmdata.train.run.advice import advise
from tests.train.test_loop import make_trainer

EASY = {"step": 500, "in_batch_accuracy": 0.97, "false_negative_share": 0.01}


@pytest.mark.parametrize(
    ("mining", "settings", "said"),
    [
        ({"step": 5}, {}, "$"),
        (
            EASY | {"in_batch_accuracy": 0.6},
            {},
            r"in-batch accuracy 0\.60 at step 500: random batches still teach",
        ),
        (
            EASY,
            {},
            r"in-batch accuracy 0\.97 at step 500: the batches are easy\. If .*mmdata neighbours",
        ),
        (
            EASY,
            {"data": {"groups": {"source": "run"}}},
            r".*: the batches are grouped, and told apart all",
        ),
        (
            EASY | {"false_negative_share": 0.3},
            {},
            r".* and 30% of .* try train\.mask_false_negatives=true",
        ),
        (
            EASY | {"false_negative_share": 0.5, "in_batch_accuracy": 0.6},  # where they can be many
            {},
            r".* and 50% of .* try train\.mask_false_negatives=true",
        ),
        (
            EASY | {"false_negative_share": 0.3},
            {"train": {"mask_false_negatives": True}},
            r".* try train\.teacher",
        ),
    ],
)
def test_advice_names_the_setting(mining: dict[str, Any], settings: dict[str, Any], said: str):
    assert re.match(said, advise(mining, settings).replace('"', "")), advise(mining, settings)


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
    assert said in advise(EASY, {}, evaluation)


def test_advice_says_what_was_found_of_what():
    assert advise(EASY, {}, AT_CHANCE) == (
        "in-batch accuracy 0.97 at step 500, and R@1 on data.val is 0.4% at a chance of 1.3%: it has learnt its rows "
        "by heart; more rows help, and harder batches do not."
    )


def test_run_and_report_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert make_trainer(tmp_path, mining_telemetry_every_steps=4).run() == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in-batch accuracy")]
    (section,) = run_sections.negatives(read_runs([tmp_path]))
    assert section.note == told[0].upper() + told[1:]
    assert section.tables[0].rows[0][1] == "12"


def test_report_without_measurements_has_no_such_section(tmp_path: Path):
    assert make_trainer(tmp_path).run() == 0
    assert run_sections.negatives(read_runs([tmp_path])) == []
