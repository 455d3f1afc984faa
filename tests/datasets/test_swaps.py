"""Swapped captions of the scenes corpus: false of their picture, true of the swapped one; and as many of others."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

SCENES = Path(__file__).parents[2] / "datasets" / "scenes"
sys.path.insert(0, str(SCENES))  # as `python datasets/scenes/swaps.py` does

import grammar  # noqa: E402
import render  # noqa: E402
import swaps  # noqa: E402
from scene import COLOURS, INVERSE, SHAPES, SWAPS, Scene, Thing, all_scenes, swapped  # noqa: E402

from mmdata import Index  # noqa: E402
from mmdata.convert import ConvertConfig, convert  # noqa: E402
from mmdata.index import ShardStore  # noqa: E402
from mmdata.tars import captions_of  # noqa: E402
from tests.programs import run_program  # noqa: E402

SETTINGS = render.Settings(seed=0, train=300, val=5, pairs=1)
SCENE = Scene(Thing("small", "red", "circle"), Thing("large", "orange", "square"), "left of")


@pytest.mark.parametrize(
    ("swap", "caption", "expected"),
    [
        ("colour", "a red circle and an orange square", "an orange circle and a red square"),
        ("colour", "circle and square", None),
        ("colour", "Red circle over orange square. Both.", "Orange circle over red square. Both."),
        ("size", "a small circle with a big square", "a big circle with a small square"),
        ("size", "Little circle, large square. It is smaller.", "Large circle, little square. It is larger."),
        ("size", "A circle and a square. The circle is small.", None),
        ("shape", "a circle and a square", None),
        ("shape", "a red circle and an orange square", "a red square and an orange circle"),
        ("shape", "a circle to the left of a square", "a square to the left of a circle"),
        ("shape", "a small circle and a large square", "a small square and a large circle"),
        ("relation", "a red circle left of an orange square", "an orange square left of a red circle"),
        ("relation", "a red circle and an orange square", None),
        ("relation", "square right of circle", "circle right of square"),
    ],
)  # fmt: skip
def test_swap_of_one_caption(swap: str, caption: str, expected: str | None):
    assert swaps.swap_caption(SCENE, swap, caption) == expected


def test_size_swap_of_a_medium_thing():
    scene = Scene(Thing("small", "lime", "bar"), Thing("medium", "red", "ring"), "left of")
    swapped_text = swaps.swap_caption(scene, "size", "a small lime bar left of a medium red ring")
    assert swapped_text == "a medium lime bar left of a small red ring"


def test_swap_where_the_things_do_not_differ_enough():
    alike = Scene(Thing("small", "red", "circle"), Thing("large", "red", "square"), "left of")
    same_size = Scene(Thing("small", "red", "circle"), Thing("small", "blue", "square"), "left of")
    text = "a small red circle left of a large red square"
    assert [swaps.swap_caption(alike, swap, text) for swap in SWAPS] == [None] * 4
    assert swaps.swap_caption(same_size, "size", "a small red circle left of a small blue square") is None


def says(caption: str) -> tuple[list[dict[str, str]], str | None]:
    """What the first sentence says of the two things, in its order, and how the first stands to the second."""
    phrase = caption.split(".")[0].lower()
    things: list[dict[str, str]] = []
    facts: dict[str, str] = {}
    small, large = grammar.SYNONYMS["small"], grammar.SYNONYMS["large"]
    for word in re.findall("[a-z]+", phrase):
        if word in COLOURS:
            facts["colour"] = word
        elif word in small + large:
            facts["size"] = "small" if word in small else "large"
        elif word in SHAPES:
            things.append({**facts, "shape": word})
            facts = {}
    relation = next((r for r, words in grammar.RELATIONS.items() if any(f" {w} " in phrase for w in words)), None)
    return things, relation


def holds(caption: str, scene: Scene) -> bool:
    """Whether the first sentence is true of a scene, one way round or the other; read without swaps.py."""
    (a, b), relation = says(caption)
    for first, second, place in (
        (scene.first, scene.second, scene.relation),
        (scene.second, scene.first, INVERSE[scene.relation]),
    ):
        fits = all(getattr(first, k) == v for k, v in a.items()) and all(getattr(second, k) == v for k, v in b.items())
        if fits and relation in (None, place):
            return True
    return False


@pytest.mark.parametrize("swap", SWAPS)
def test_swapped_captions_are_false_of_their_scene_and_true_of_the_swapped_one(swap: str):
    rng = random.Random(0)
    backdrop = grammar.Backdrop("grainy", "grey", "wide")
    made = 0
    for scene in rng.sample(all_scenes(), 600):
        for caption in grammar.captions(rng, scene, backdrop):
            text = swaps.swap_caption(scene, swap, caption)
            if text is None:
                continue
            made += 1
            other = swapped(scene, swap)
            assert other is not None
            assert not holds(text, scene), (caption, text)
            assert holds(text, other), (caption, text)
            assert holds(caption, scene)
            assert swaps.swap_caption(other, swap, text) == caption, "a second swap takes back the first"
    assert made > 300


def test_program_writes_both_files_with_the_keys_of_the_shards(tmp_path: Path):
    corpus = tmp_path / "corpus"
    render.render(corpus, SETTINGS)
    command = [sys.executable, str(SCENES / "swaps.py"), str(corpus), "--types", "relation,size", "--seed", "3"]
    first = run_program(command, capture_output=True, text=True, check=True).stdout
    files = {name: corpus / "train" / f"{name}.parquet" for name in ("swaps", "others")}
    assert re.search(rf"{files['swaps']}: \d+ captions for 1,\d+ captions of 300 pictures", first)
    before = {name: path.read_bytes() for name, path in files.items()}
    run_program(command, check=True, capture_output=True)
    assert {name: path.read_bytes() for name, path in files.items()} == before

    convert(corpus / "train" / "captions.jsonl", tmp_path / "shards", ConvertConfig(shard_rows=100))
    index = Index.open(tmp_path / "shards")
    tables = {name: pq.read_table(path).to_pylist() for name, path in files.items()}
    truth = [json.loads(line) for line in (corpus / "train" / "truth.jsonl").read_text().splitlines()]
    captions = shard_captions(index)
    everything = {text for texts in captions.values() for text in texts}
    used = set()
    for number, (false, other) in enumerate(zip(tables["swaps"], tables["others"], strict=True)):
        scene = Scene(Thing(*truth[number]["first"]), Thing(*truth[number]["second"]), truth[number]["relation"])
        assert false["key"] == other["key"]
        for own, text, random_text in zip(captions[false["key"]], false["captions"], other["captions"], strict=True):
            made = {swap: swaps.swap_caption(scene, swap, own) for swap in ("size", "relation")}
            assert text in made.values() or (text is None and set(made.values()) == {None})
            assert (text is None) == (random_text is None)
            assert random_text is None or random_text in everything
            used |= {swap for swap, result in made.items() if text is not None and result == text}
    assert used == {"size", "relation"}


def shard_captions(index: Index) -> dict[str, list[str]]:
    """The captions that lie in shards, by their key."""
    rows = list(range(len(index)))
    columns = index.take(rows, ["caption_offset", "caption_bytes", "caption_format"])
    shards, _ = index.locate(rows)
    store = ShardStore(index)
    found: dict[str, list[str]] = {}
    for i, key in enumerate(index.keys(rows)):
        data = store.read(int(shards[i]), int(columns["caption_offset"][i]), int(columns["caption_bytes"][i]))
        found[key] = captions_of(data, int(columns["caption_format"][i]))
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--types", "size,place"], "--types size,place: expected some of colour,size,shape,relation"),
        ([], "truth.jsonl'; expected a folder that render.py made"),
    ],
)
def test_program_refuses(tmp_path: Path, words: list[str], message: str):
    command = [sys.executable, str(SCENES / "swaps.py"), str(tmp_path / "none"), *words]
    result = run_program(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
