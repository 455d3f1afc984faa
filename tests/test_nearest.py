"""Suggestions for misspelt names: only near ones."""

from __future__ import annotations

import pytest

from mmdata.nearest import did_you_mean, nearest

COMMANDS = ["bench", "compare", "convert", "doctor", "evaluate", "plan", "replay", "report", "train", "verify"]


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("trian", COMMANDS, "train"),
        ("eval", COMMANDS, "evaluate"),
        ("Verfiy", COMMANDS, "verify"),
        ("xyzzy", COMMANDS, None),
        ("help", COMMANDS, None),
        ("ViT-B-16", ["tiny", "vit_b_16"], "vit_b_16"),
        ("topk", ["all", "top_k", "ratio"], "top_k"),
        ("foo", ["dropout", "loss", "for_all"], None),
        ("lrr", ["lr", "k"], "lr"),
        ("ab", ["bc"], None),  # half of two letters is no likeness
        ("gpu", ["auto", "cpu", "cuda"], None),
        ("", COMMANDS, None),
        ("x", [], None),
    ],
)
def test_nearest_is_a_name_that_was_probably_meant(word: str, known: list[str], found: str | None):
    assert nearest(word, known) == found
    assert did_you_mean(word, known) == (f"; did you mean '{found}'?" if found else "")
