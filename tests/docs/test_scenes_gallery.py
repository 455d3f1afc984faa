"""Scripts that score the runs of an experiment: what is mistaken for what, scores that are kept, the paired table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "benchmarks"))  # as `python docs/benchmarks/…` does

import compared
import scenes_gallery

SWAPS: list[str | None] = [None, "colour", "size", "shape", "relation"]


def test_own_swaps_are_the_rows_after_a_scene():
    rows = scenes_gallery.own_swaps(SWAPS * 2)
    assert {kind: found.tolist() for kind, found in rows.items()} == {
        "scene": [0, 5], "colour": [1, 6], "size": [2, 7], "shape": [3, 8], "relation": [4, 9],
    }  # fmt: skip


def test_own_swaps_refuses_another_order():
    with pytest.raises(ValueError, match=r"expected each scene and then its swaps colour, size, shape, relation"):
        scenes_gallery.own_swaps([None, "size", "colour", "shape", "relation"])


def test_confused_counts_the_nearest_wrong_candidate_and_who_beats_it():
    similarities = np.zeros((10, 10), np.float32)
    similarities[0] = [0.5, 0.1, 0.1, 0.1, 0.9, 0.2, 0.0, 0.0, 0.0, 0.0]  # its relation swap is nearer than itself
    similarities[5] = [0.7, 0.0, 0.0, 0.0, 0.0, 0.8, 0.8, 0.1, 0.1, 0.1]  # its colour swap ties with itself
    similarities[1] = 1.0  # no scene of the test: does not count
    found = scenes_gallery.confused(similarities, scenes_gallery.own_swaps(SWAPS * 2))
    assert found == {
        "nearest colour": 0.5, "right colour": 0.5, "nearest size": 0.0, "right size": 1.0,
        "nearest shape": 0.0, "right shape": 1.0, "nearest relation": 0.5, "right relation": 0.5,
    }  # fmt: skip


def test_confused_leaves_other_scenes_out_of_own_swaps():
    similarities = np.zeros((10, 10), np.float32)
    similarities[0, 9] = similarities[5, 0] = 1.0  # the swap of another scene, and another scene
    found = scenes_gallery.confused(similarities, scenes_gallery.own_swaps(SWAPS * 2))
    assert sum(found[f"nearest {swap}"] for swap in scenes_gallery.SWAPS) == 0


def test_scored_makes_each_score_once(tmp_path: Path):
    for arm in ("random", "half"):
        (run := tmp_path / f"{arm}-1").mkdir()
        (run / "result.json").write_text(json.dumps({"arm": arm, "seed": 1}))
        (run / "config.yaml").write_text(f"data: {{shards: {arm}}}\n")
    asked: list[str] = []

    def score(run: Path, config: dict[str, Any]) -> dict[str, float]:
        asked.append(run.name)
        return {"R@1": float(len(config["data"]["shards"]))}

    expected = {"random": {1: {"R@1": 6.0}}, "half": {1: {"R@1": 4.0}}}
    for _ in range(2):
        assert compared.scored(tmp_path, tmp_path / "kept.json", score) == expected
    assert asked == ["half-1", "random-1"]


def test_report_pairs_by_seed(capsys: pytest.CaptureFixture[str]):
    arms = {
        "random": {1: {"R@1": 0.5}, 2: {"R@1": 0.5}, 3: {"R@1": 0.7}},
        "half": {1: {"R@1": 0.6}, 2: {"R@1": 0.7}, 3: {"R@1": 0.8}},
        "stage": {1: {"R@1": 0.4}, 2: {"R@1": 0.3}},
    }
    compared.report(arms, ["R@1"])
    # Differences 0.1, 0.2, 0.1: t = 0.1333 / 0.0333 = 4, p = 0.057 of two degrees of freedom; three of three, p = 0.25.
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "| random | 3 | 56.7 | | | | |",
        "| half | 3 | 70.0 | +13.3 (-1.0 to +27.7) | 3 | 5.7e-02 | 2.5e-01 |",
        "| stage | 2 | 35.0 | -15.0 (-78.5 to +48.5) | 0 |  | 5.0e-01 |",
    ]
