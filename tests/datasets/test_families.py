"""Families of scenes: each once, all siblings or none, a gallery of swaps; and the default corpus as it was."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

SCENES = Path(__file__).parents[2] / "datasets" / "scenes"
sys.path.insert(0, str(SCENES))  # as `python datasets/scenes/render.py` does

import draw  # noqa: E402
import families  # noqa: E402
import grammar  # noqa: E402
import render  # noqa: E402
from scene import INVERSE, SWAPS, Scene, Thing, swapped  # noqa: E402

from tests.programs import run_program  # noqa: E402

SETTINGS = render.Settings(seed=0, train=40, val=12, pairs=0, families=5, siblings=True)
SCENE = Scene(Thing("small", "red", "ring"), Thing("medium", "lime", "bar"), "left of")
Rows = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("families") / "corpus"
    render.render(out, SETTINGS)
    return out


@pytest.fixture(scope="module")
def rows(corpus: Path) -> Rows:
    """`rows("train/captions.jsonl")`: the objects of a table of the corpus."""
    return lambda table: [json.loads(line) for line in (corpus / table).read_text(encoding="utf-8").splitlines()]


def scene_of(truth: dict[str, Any]) -> Scene:
    return Scene(Thing(*truth["first"]), Thing(*truth["second"]), truth["relation"])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, str(SCENES / "render.py"), *arguments], capture_output=True, text=True)


# The deal


def test_families_are_3780_of_eight_scenes_an_axis():
    known = families.all_families()
    assert len(known) == 45 * 3 * 28 == 3_780
    assert list(known.values()) == list(range(3_780))
    for family in list(known)[::500]:
        scenes = family.scenes("above")
        assert len(set(scenes)) == families.SCENES_OF_FAMILY == 8
        assert {families.family_number(scene) for scene in scenes} == {known[family]}


def test_each_swap_of_a_scene_is_a_sibling():
    number = families.family_number(SCENE)
    others = [swapped(SCENE, swap) for swap in SWAPS]
    (family,) = (family for family, found in families.all_families().items() if found == number)
    assert len({SCENE, *others}) == 5
    assert {SCENE, *others} < set(family.scenes("left of"))


@pytest.mark.parametrize(("siblings", "count"), [(True, 160), (False, 20)])
def test_deal_has_each_scene_once_and_shares_no_family_with_the_gallery(siblings: bool, count: int):
    split = families.deal_families(0, test=30, train=20, siblings=siblings)
    assert len(split.train) == len(set(split.train)) == count
    assert len(split.val) == len(set(split.val)) == 150
    trained, tested = ({families.family_number(scene) for scene in part} for part in (split.train, split.val))
    assert (len(trained), len(tested), trained & tested) == (20, 30, set())
    neighbours = [sum(swapped(scene, swap) in split.train for swap in SWAPS) for scene in split.train]
    assert set(neighbours) == {4 if siblings else 0}


def test_gallery_is_each_scene_and_its_four_swaps():
    split = families.deal_families(0, test=30, train=20, siblings=True)
    for first in range(0, 150, 5):
        scene, *others = split.val[first : first + 5]
        assert others == [swapped(scene, swap) for swap in SWAPS]


def test_deals_of_one_seed_have_one_gallery_and_hold_each_other():
    few = families.deal_families(0, test=30, train=20, siblings=False)
    many = families.deal_families(0, test=30, train=160, siblings=False)
    whole = families.deal_families(0, test=30, train=20, siblings=True)
    assert few.val == many.val == whole.val
    assert few.train == many.train[:20]
    assert set(few.train) < set(whole.train)
    assert families.deal_families(1, test=30, train=20, siblings=False).val != few.val


def test_deal_refuses_more_families_than_exist():
    with pytest.raises(ValueError, match=r"500 test scenes and 3281 families do not fit: only 3780 families exist"):
        families.deal_families(0, test=500, train=3_281, siblings=False)


# Captions and pictures


def test_full_caption_names_all_facts_in_either_order():
    assert grammar.full_caption(SCENE, flipped=False) == "a small red ring left of a medium lime bar"
    assert grammar.full_caption(SCENE, flipped=True) == "a medium lime bar right of a small red ring"


CLAIM = re.compile(r"an? (\w+) (\w+) (\w+) (left of|right of|above|below) an? (\w+) (\w+) (\w+)")


def test_each_picture_has_one_caption_that_is_true_and_says_all(rows: Rows):
    orders: Counter[bool] = Counter()
    for part in ("train", "val"):
        for row, truth in zip(rows(f"{part}/captions.jsonl"), rows(f"{part}/truth.jsonl"), strict=True):
            (caption,) = row["captions"]
            found = CLAIM.fullmatch(caption)
            assert found is not None, caption
            a, relation, b = Thing(*found.groups()[:3]), found[4], Thing(*found.groups()[4:])  # type: ignore[arg-type]
            assert Scene.of(a, relation, b) == scene_of(truth)  # type: ignore[arg-type]
            assert row["label"] == families.family_number(scene_of(truth))
            orders[relation in INVERSE and relation == truth["relation"]] += 1
    assert min(orders.values()) > 20  # either thing is mentioned first


def test_render_writes_each_scene_once_and_the_gallery_in_order(corpus: Path, rows: Rows):
    assert sorted(path.name for path in corpus.iterdir()) == ["corpus.json", "pairs", "pairs.jsonl", "train", "val"]
    record = {"seed": 0, "train": 40, "val": 12, "pairs": 0, "families": 5, "siblings": True}
    assert json.loads((corpus / "corpus.json").read_text()) == record
    train, val = ([scene_of(row) for row in rows(f"{part}/truth.jsonl")] for part in ("train", "val"))
    assert (len(train), len(set(train)), len(val), len(set(val))) == (40, 40, 60, 60)
    swaps = [row["swap"] for row in rows("val/truth.jsonl")]
    assert swaps == [None, *SWAPS] * 12
    assert all("swap" not in row for row in rows("train/truth.jsonl"))


def test_a_scene_and_its_swaps_differ_in_nothing_else(corpus: Path, rows: Rows):
    truths, captions = rows("val/truth.jsonl"), rows("val/captions.jsonl")
    for first in range(0, 60, 5):
        words = [sorted(row["captions"][0].split()) for row in captions[first : first + 5]]
        assert all(found == words[0] for found in words)
        pictures = [
            np.array(Image.open(corpus / "val" / row["image"]).convert("RGB")) for row in truths[first : first + 5]
        ]
        assert all(picture.shape == (len(picture), len(picture), 3) for picture in pictures)
        if not truths[first]["image"].endswith(".png"):
            continue
        area = np.zeros(pictures[0].shape[:2], bool)
        for truth in truths[first : first + 5]:
            for top, left, height, width in truth["boxes"]:
                area[int(top) - 1 : int(top + height) + 3, int(left) - 1 : int(left + width) + 3] = True
        assert all(np.array_equal(picture[~area], pictures[0][~area]) for picture in pictures)


def test_colours_of_families_are_drawn_as_named(corpus: Path, rows: Rows):
    seen: set[str] = set()
    for truth in rows("train/truth.jsonl") + rows("val/truth.jsonl"):
        part = "val" if "swap" in truth else "train"
        pixels = np.asarray(Image.open(corpus / part / truth["image"]).convert("RGB"), np.float64)
        for (_, colour, shape), (top, left, height, width) in zip(
            (truth["first"], truth["second"]), truth["boxes"], strict=True
        ):
            y, x = int(top + height / 2), int(left + width * (0.875 if shape == "ring" else 0.5))
            found = pixels[y - 1 : y + 2, x - 1 : x + 2].mean(axis=(0, 1))
            nearest = min(draw.RGB, key=lambda name: float(np.abs(np.subtract(draw.RGB[name], found)).sum()))
            assert nearest == colour, (truth, found)
            seen.add(colour)
    assert seen == set(families.ALL_COLOURS)


@pytest.mark.parametrize("shape", families.ALL_SHAPES)
def test_outlines_of_all_shapes_stay_inside_their_box_when_turned(shape: Any):
    for outline, _ in draw.OUTLINES[shape]:
        for degrees in range(-12, 13):
            turn = np.exp(1j * np.radians(degrees))
            turned = [complex(x, y) * turn for x, y in outline]
            assert max(max(abs(point.real), abs(point.imag)) for point in turned) <= 0.5 + 1e-9


# The command, and what it did before


def test_command_takes_one_scene_of_each_family(tmp_path: Path):
    out = tmp_path / "single"
    done = command(str(out), "--families", "7", "--no-siblings", "--val", "2", "--workers", "1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{out}: rendered")
    record = {"seed": 0, "train": 7, "val": 2, "pairs": 0, "families": 7, "siblings": False}
    assert json.loads((out / "corpus.json").read_text()) == record


@pytest.mark.parametrize("options", [("--families", "0", "--train", "1"), ("--families", "3", "--pairs", "1-per-type")])
def test_command_explains_what_families_do_not_take(options: tuple[str, ...]):
    refused = command("x", *options)
    assert refused.returncode == 2
    assert (
        "--families must be at least 1, and takes no --pairs: its val holds each test scene's swaps" in refused.stderr
    )


def test_default_corpus_is_what_it_was():
    """Scenes, looks and captions of the corpus without families, by a digest from before there were any."""
    settings = render.Settings(seed=0, train=20_000, val=500, pairs=200)
    said = [render.make_picture(settings, part, number) for part in ("train", "val") for number in range(60)]
    said += [render.make_pair(settings, number) for number in range(0, 800, 20)]
    assert hashlib.sha256(repr(said).encode()).hexdigest() == DIGEST
    assert settings.recorded() == {"seed": 0, "train": 20_000, "val": 500, "pairs": 200}
    assert replace(settings, families=3).recorded() != settings.recorded()


DIGEST = "026943000dadec6bda621621685faace2d5aaf243c1b12ec819fc0676133c3b4"
