"""The scenes corpus: same settings, same bytes; captions and pictures that are true; pairs that only eyes can tell."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdata.plan.choose import choose_lengths
from mmdata.text.tokenizer import Tokenizer, train_tokenizer

SCENES = Path(__file__).parents[2] / "datasets" / "scenes"
sys.path.insert(0, str(SCENES))  # as `python datasets/scenes/render.py` does; spawned workers need it too

import draw  # noqa: E402
import grammar  # noqa: E402
import render  # noqa: E402
from scene import INVERSE, SHAPES, SWAPS, Scene, Thing, all_scenes, label, split_scenes, swapped  # noqa: E402

from tests.programs import run_program  # noqa: E402

SETTINGS = render.Settings(seed=0, train=1_100, val=200, pairs=30)
SMALL_RED_RING, LARGE_BLUE_CROSS = Thing("small", "red", "ring"), Thing("large", "blue", "cross")
Rows = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes") / "corpus"
    render.render(out, SETTINGS)
    return out


@pytest.fixture(scope="module")
def rows(corpus: Path) -> Rows:
    """`rows("train/captions.jsonl")`: the objects of a table of the corpus."""
    return lambda table: rows_of(corpus / table)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scene_of(truth: dict[str, Any]) -> Scene:
    return Scene(Thing(*truth["first"]), Thing(*truth["second"]), truth["relation"])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, str(SCENES / "render.py"), *arguments], capture_output=True, text=True)


# What an English reader makes of a caption; written apart from the grammar that makes them.

SIZE_WORDS = {"small": "small", "little": "small", "large": "large", "big": "large"}
LINK = r"(?P<link>(?:to the )?(?:left|right) of|above|over|below|under|and|with)"
THING = r"((?:(?:small|little|large|big) )?(?:[a-z]+ )?(?:circle|square|triangle|cross|ring|one))\b"
CLAIM = re.compile(rf"{THING} (?:is )?{LINK} (?:an? |the )?{THING}")


def fits(words: str, thing: Thing) -> bool:
    named = {SIZE_WORDS.get(word, word) for word in words.split()} - {"one", "is", "the", "a", "an"}
    return named <= {thing.size, thing.colour, thing.shape}


def holds(claim: re.Match[str], scene: Scene) -> bool:
    """Whether "A link B" is true of a scene."""
    link = claim["link"].removeprefix("to the ").replace("over", "above").replace("under", "below")
    links = ("and", "with", scene.relation), ("and", "with", INVERSE[scene.relation])
    orders = ((scene.first, scene.second, links[0]), (scene.second, scene.first, links[1]))
    return any(fits(claim[1], a) and fits(claim[3], b) and link in true for a, b, true in orders)


def claims(caption: str) -> list[re.Match[str]]:
    return list(CLAIM.finditer(caption.lower()))


# Scenes and splits


def test_scene_of_has_one_form_for_both_readings():
    a, b = SMALL_RED_RING, LARGE_BLUE_CROSS
    assert Scene.of(a, "right of", b) == Scene.of(b, "left of", a) == Scene(b, a, "left of")
    assert Scene.of(a, "below", b) == Scene.of(b, "above", a) == Scene(b, a, "above")
    assert Scene.of(a, "left of", b) != Scene.of(b, "left of", a)


def test_all_scenes_are_the_7080_canonical_ones():
    scenes = all_scenes()
    assert len(scenes) == len(set(scenes)) == 60 * 59 * 2
    assert {scene.relation for scene in scenes} == {"left of", "above"}


def test_swapped_exchanges_one_attribute():
    scene = Scene(SMALL_RED_RING, LARGE_BLUE_CROSS, "above")
    assert swapped(scene, "colour") == Scene(Thing("small", "blue", "ring"), Thing("large", "red", "cross"), "above")
    assert swapped(scene, "size") == Scene(Thing("large", "red", "ring"), Thing("small", "blue", "cross"), "above")
    assert swapped(scene, "shape") == Scene(Thing("small", "red", "cross"), Thing("large", "blue", "ring"), "above")
    assert swapped(scene, "relation") == Scene(LARGE_BLUE_CROSS, SMALL_RED_RING, "above")


def test_swapped_refuses_scenes_that_a_caption_could_not_tell_apart():
    red_cross, red_ring = Thing("large", "red", "cross"), Thing("large", "red", "ring")
    assert swapped(Scene(red_cross, red_ring, "above"), "relation") is None
    assert swapped(Scene(red_cross, LARGE_BLUE_CROSS, "above"), "colour") is None
    assert swapped(Scene(red_ring, LARGE_BLUE_CROSS, "above"), "size") is None


def test_split_scenes_are_disjoint_and_distinct():
    split = split_scenes(0, val=500, pairs_per_type=200)
    paired = [scene for _, one, other in split.pairs for scene in (one, other)]
    everything = [*split.train, *split.val, *paired]
    assert len(everything) == len(set(everything)) == 7_080
    assert (len(split.val), Counter(swap for swap, *_ in split.pairs)) == (500, dict.fromkeys(SWAPS, 200))
    assert all(swapped(one, swap) == other for swap, one, other in split.pairs)
    assert split_scenes(1, val=500, pairs_per_type=200).val != split.val


def test_split_scenes_refuses_more_than_exist():
    with pytest.raises(ValueError, match=r"7080 val scenes and 0 pairs a type do not fit: only 7080 scenes exist"):
        split_scenes(0, val=7_080, pairs_per_type=0)
    with pytest.raises(ValueError, match=r"10 val scenes and 5000 pairs a type .* ask for fewer with --val or --pairs"):
        split_scenes(0, val=10, pairs_per_type=5_000)


def test_no_scene_of_val_or_pairs_is_in_train(rows: Rows):
    train, val, pairs = ([scene_of(row) for row in rows(f"{part}/truth.jsonl")] for part in ("train", "val", "pairs"))
    assert (len(train), len(val), len(pairs)) == (1_100, 200, 240)
    assert len({*val, *pairs}) == 200 + 240
    assert not {*val, *pairs} & {*train}


# Files


def test_render_lays_files_out_like_a_users_corpus(corpus: Path, rows: Rows):
    assert sorted(path.name for path in corpus.iterdir()) == [
        "classes.json", "corpus.json", "pairs", "pairs.jsonl", "train", "val",
    ]  # fmt: skip
    for part, folders in (("train", ["000", "001"]), ("val", ["000"])):
        table = rows(f"{part}/captions.jsonl")
        written = {str(path.relative_to(corpus / part)) for path in (corpus / part / "images").rglob("*.*")}
        assert {row["image"] for row in table} == written
        assert sorted(path.name for path in (corpus / part / "images").iterdir()) == folders
        assert [row["image"] for row in table] == [row["image"] for row in rows(f"{part}/truth.jsonl")]
        assert all(set(row) == {"image", "captions", "label", "boxes"} for row in table)
        assert all(3 <= len(row["captions"]) == len(set(row["captions"])) <= 5 for row in table)


def test_images_have_many_shapes_and_formats(corpus: Path):
    shapes: Counter[float] = Counter()
    formats: Counter[str] = Counter()
    for path in (corpus / "train" / "images").rglob("*.*"):
        with Image.open(path) as image:
            shapes[round(image.width / image.height, 1)] += 1
            formats[str(image.format)] += 1
            assert 80 <= min(image.size) <= 112
            assert draw.EXTENSIONS[str(image.format)] == path.suffix
    assert {shape for shape, count in shapes.items() if count > 70} == {1.0, 1.3, 0.7, 0.8, 1.5}
    assert 0.65 < formats["JPEG"] / 1_100 < 0.75
    assert min(formats["PNG"], formats["WEBP"]) / 1_100 > 0.1


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
@pytest.mark.sweep(keep=1)
def test_render_bytes_do_not_depend_on_who_does_the_work(tmp_path: Path, start_method: str):
    if start_method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start_method} here")
    settings = render.Settings(seed=3, train=2 * render.CHUNK_IMAGES + 1, val=7, pairs=2)
    render.render(tmp_path / "one", settings)
    render.render(tmp_path / "two", settings, workers=2, start_method=start_method)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_render_completes_an_interrupted_run_to_the_same_bytes(tmp_path: Path):
    settings = render.Settings(seed=0, train=20, val=5, pairs=1)
    render.render(tmp_path / "whole", settings)
    render.render(tmp_path / "cut", settings)
    aside = (tmp_path / "cut").rename(tmp_path / "cut.partial")  # what a kill leaves: no folder `cut`, broken files
    (aside / "train" / "captions.jsonl").write_text('{"image": "ima')
    broken, missing, *_ = (aside / "train" / "images").rglob("*.jpg")
    broken.write_bytes(b"\xff\xd8")
    missing.unlink()
    assert render.render(tmp_path / "cut", settings)
    assert digests(tmp_path / "whole") == digests(tmp_path / "cut")
    assert not aside.exists()


def test_command_renders_once_and_refuses_other_settings(tmp_path: Path):
    out = str(tmp_path / "new" / "corpus")
    options = ("--train", "12", "--val", "3", "--pairs", "1-per-type", "--workers", "2")
    first, again, other = command(out, *options), command(out, *options), command(out, *options, "--seed", "1")
    assert (first.returncode, first.stdout.splitlines()[-1]) == (0, f"{out}: rendered")
    assert (again.returncode, again.stdout) == (0, f"{out}: was rendered already, nothing to do\n")
    assert other.returncode == 2
    assert re.search(r"holds a corpus of other settings: .*'seed': 0.*'seed': 1.*choose another", other.stderr)


def test_command_explains_what_it_cannot_do(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").write_bytes(b"")
    foreign = command(str(tmp_path / "mine"))
    assert foreign.returncode == 2
    assert "mine' exists and is no rendered corpus (no corpus.json); choose another folder" in foreign.stderr
    assert "expected a number and '-per-type', as in 200-per-type; got 'many'" in command("x", "--pairs", "many").stderr
    assert "--train and --workers must be at least 1" in command("x", "--train", "0").stderr
    too_many = command(str(tmp_path / "x"), "--val", "20000")
    assert (too_many.returncode, "only 7080 scenes exist" in too_many.stderr) == (2, True)
    assert not list(tmp_path.glob("x*"))


# Pictures


def test_phrases_are_true_of_their_boxes(rows: Rows):
    for part in ("train", "val"):
        for row, truth in zip(rows(f"{part}/captions.jsonl"), rows(f"{part}/truth.jsonl"), strict=True):
            corners = [box["bbox"] for box in row["boxes"]]
            assert corners == [[left, top, width, height] for top, left, height, width in truth["boxes"]]
            assert [box["phrase"].split() for box in row["boxes"]] == [truth["first"], truth["second"]]


@pytest.mark.parametrize("part", ["train", "pairs"])
def test_pixels_have_the_named_colour_where_the_truth_says(corpus: Path, rows: Rows, part: str):
    root = corpus if part == "pairs" else corpus / part
    for truth in rows(f"{part}/truth.jsonl"):
        pixels = np.asarray(Image.open(root / truth["image"]).convert("RGB"), np.float64)
        for (_, colour, shape), (top, left, height, width) in zip(
            (truth["first"], truth["second"]), truth["boxes"], strict=True
        ):
            # The middle of each shape is filled, but for the ring's.
            y, x = int(top + height / 2), int(left + width * (0.875 if shape == "ring" else 0.5))
            seen = pixels[y - 1 : y + 2, x - 1 : x + 2].mean(axis=(0, 1))
            nearest = min(draw.RGB, key=lambda name: float(np.abs(np.subtract(draw.RGB[name], seen)).sum()))
            assert nearest == colour, (truth, seen)


def test_boxes_show_the_relation_and_survive_every_mild_crop(rows: Rows, corpus: Path):
    for truth in rows("train/truth.jsonl"):
        (top_1, left_1, height_1, width_1), (top_2, left_2, height_2, width_2) = truth["boxes"]
        down = top_2 + height_2 / 2 - top_1 - height_1 / 2
        right = left_2 + width_2 / 2 - left_1 - width_1 / 2
        along, across = (right, down) if truth["relation"] == "left of" else (down, right)
        assert along > 0
        assert abs(across) < 0.36 * along
        with Image.open(corpus / "train" / truth["image"]) as image:
            width, height = image.size
        short = min(height, width)
        for top, left, tall, wide in truth["boxes"]:
            # Within the central square, and 10 % of the shorter side away from its edges (0.01: rounded in the file).
            assert (height - short) / 2 + 0.1 * short - 0.01 <= top <= (height + short) / 2 - 0.1 * short - tall + 0.02
            assert (width - short) / 2 + 0.1 * short - 0.01 <= left <= (width + short) / 2 - 0.1 * short - wide + 0.02


def test_sizes_are_far_apart(rows: Rows):
    diameters: dict[str, list[float]] = {"small": [], "large": []}
    for truth in rows("train/truth.jsonl"):
        for key, box in zip(("first", "second"), truth["boxes"], strict=True):
            diameters[truth[key][0]].append(box[3])
    assert min(diameters["large"]) / 80 > 1.5 * max(diameters["small"]) / 112
    assert min(draw.DIAMETERS["large"] * 0.96, 1) > 1.5 * draw.DIAMETERS["small"] * 1.04


@pytest.mark.parametrize("shape", SHAPES)
def test_outlines_stay_inside_their_box_when_turned(shape: Any):
    for degrees in np.linspace(-12, 12, 25):
        turn = math.radians(degrees)
        for outline, _ in draw.OUTLINES[shape]:
            for x, y in outline:
                assert abs(x * math.cos(turn) - y * math.sin(turn)) <= 0.5 + 1e-9
                assert abs(x * math.sin(turn) + y * math.cos(turn)) <= 0.5 + 1e-9


# Captions


def test_captions_are_true(rows: Rows):
    num_claims = 0
    for row, truth in zip(rows("train/captions.jsonl"), rows("train/truth.jsonl"), strict=True):
        scene = scene_of(truth)
        for caption in row["captions"]:
            found = claims(caption)
            assert all(holds(claim, scene) for claim in found), (caption, scene)
            num_claims += len(found)
            named = {SIZE_WORDS.get(word, word) for word in re.findall(r"\w+", caption.lower())}
            facts = {*truth["first"], *truth["second"]}
            assert named & {*draw.RGB, *SHAPES} <= facts, caption
            assert named & {*draw.TONES, *draw.TEXTURES} <= {*truth["background"]}, caption
    assert num_claims > 3_500


def test_caption_lengths_spread_like_real_ones(rows: Rows, tmp_path: Path):
    captions = [caption for row in rows("train/captions.jsonl") for caption in row["captions"]]
    train_tokenizer(captions, tmp_path / "tokenizer", vocab_size=8_192, max_length=77)
    lengths = np.asarray(Tokenizer.load(tmp_path / "tokenizer").count(captions))
    assert lengths.tolist() == [grammar.num_tokens(caption) for caption in captions]
    assert 5 <= lengths.min() <= 6
    assert 65 <= lengths.max() <= 77
    assert 12 <= np.median(lengths) <= 16
    assert 1 - lengths.mean() / 77 > 0.5
    bounds = choose_lengths(np.bincount(lengths), 8)
    padded = np.asarray(bounds)[np.searchsorted(bounds, lengths)]
    assert 1 - lengths.sum() / padded.sum() < 0.13
    spreads: list[float] = []
    for row in rows("train/captions.jsonl"):
        own = [grammar.num_tokens(caption) for caption in row["captions"]]
        spreads.append(max(own) / min(own))
    assert np.median(spreads) > 2.5  # the longest caption of a scene to its shortest


def test_mention_order_says_nothing(rows: Rows):
    for part in ("train", "val"):
        flips = [
            claim["link"] in ("right of", "to the right of", "below", "under")
            for row in rows(f"{part}/captions.jsonl")
            for caption in row["captions"]
            for claim in claims(caption)[:1]
            if claim["link"] not in ("and", "with")
        ]
        assert abs(np.mean(flips) - 0.5) < 3 * 0.5 / math.sqrt(len(flips))


def test_labels_name_the_two_shapes(corpus: Path, rows: Rows):
    classes = json.loads((corpus / "classes.json").read_text())
    assert len(classes["classes"]) == len(set(classes["classes"])) == 15
    assert all("{}" in template for template in classes["templates"])
    counts: Counter[int] = Counter()
    for row, truth in zip(rows("train/captions.jsonl"), rows("train/truth.jsonl"), strict=True):
        counts[row["label"]] += 1
        a, b = truth["first"][2], truth["second"][2]
        plural = {"cross": "crosses"}.get(a, f"{a}s")
        names = {f"a pair of {plural}"} if a == b else {f"a {a} and a {b}", f"a {b} and a {a}"}
        assert classes["classes"][row["label"]] in names
    # Two equal shapes are half as frequent as two different ones: 1/25 and 2/25 of the scenes, nearly.
    same = [label(Scene(Thing("small", "red", s), Thing("large", "red", s), "above")) for s in SHAPES]
    assert len(counts) == 15
    for number, count in counts.items():
        assert abs(count / 1_100 - (1 if number in same else 2) / 25) < 0.025


# The compositional test


def test_pairs_differ_in_the_swap_only(corpus: Path, rows: Rows):
    pairs, truths = rows("pairs.jsonl"), rows("pairs/truth.jsonl")
    assert Counter(pair["type"] for pair in pairs) == dict.fromkeys(SWAPS, 30)
    lossless = 0
    for pair, one, other in zip(pairs, truths[::2], truths[1::2], strict=True):
        assert list(pair) == ["type", "image_0", "image_1", "caption_0", "caption_1"]
        assert [pair["image_0"], pair["image_1"]] == [one["image"], other["image"]]
        assert swapped(scene_of(one), pair["type"]) == scene_of(other)
        assert one["background"] == other["background"]
        first, second = (np.array(Image.open(corpus / pair[f"image_{i}"]).convert("RGB")) for i in range(2))
        assert first.shape == second.shape
        assert np.abs(first.astype(int) - second).max() > 60
        if pair["image_0"].endswith(".png"):
            for truth in (one, other):
                for top, left, height, width in truth["boxes"]:
                    area = np.s_[int(top) - 1 : int(top + height) + 3, int(left) - 1 : int(left + width) + 3]
                    first[area] = second[area] = 0
            assert np.array_equal(first, second)
            lossless += 1
    assert lossless > 5


def test_pair_captions_are_true_of_their_own_image_only(rows: Rows):
    truths = rows("pairs/truth.jsonl")
    for i, pair in enumerate(rows("pairs.jsonl")):
        scenes = [scene_of(truth) for truth in truths[2 * i : 2 * i + 2]]
        for side in range(2):
            (claim,) = claims(pair[f"caption_{side}"])
            assert holds(claim, scenes[side]), pair
            assert not holds(claim, scenes[1 - side]), pair


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[tuple[str, str]]]:
    """Captions of 4,000 training scenes and of the 800 pairs of the full corpus, which need no drawing."""
    settings = render.Settings(seed=0, train=4_000, val=500, pairs=200)
    train = [render.make_picture(settings, "train", number).captions for number in range(settings.train)]
    pairs = [render.make_pair(settings, number).captions for number in range(4 * settings.pairs)]
    return [caption for captions in train for caption in captions], pairs


def test_pair_captions_are_the_same_words_each_true_once_and_false_once(texts: Any):
    for one, other in texts[1]:
        assert one != other
        assert sorted(one.split()) == sorted(other.split())


def test_text_only_model_scores_50_percent(texts: Any):
    """A trigram model of the captions. A pair asks it twice for the same two captions: right once, wrong once."""
    train, pairs = texts
    counts: Counter[tuple[str, ...]] = Counter()
    for caption in train:
        for order in range(4):
            counts.update(ngrams(caption, order))

    def log_probability(caption: str) -> float:
        total = 0.0
        for gram in ngrams(caption, 3):
            total += math.log(
                sum(
                    weight * counts[gram[start:]] / max(1, counts[gram[start:-1]])
                    for start, weight in ((0, 0.7), (1, 0.2), (2, 0.1))
                )
                + 1e-9
            )
        return total

    correct, one_way = 0.0, 0.0
    for one, other in pairs:
        margin = log_probability(one) - log_probability(other)
        first = 0.5 if margin == 0 else float(margin > 0)  # image 0: is caption 0 preferred?
        correct += first + (1 - first)  # image 1 is asked about the same two captions, and the right one is the other
        one_way += first
    assert correct / (2 * len(pairs)) == 0.5
    # Which scene of a pair comes first is chance, too: at most three standard deviations off.
    assert abs(one_way / len(pairs) - 0.5) < 3 * 0.5 / math.sqrt(len(pairs))


def ngrams(caption: str, order: int) -> list[tuple[str, ...]]:
    words = ("<s>", "<s>", *re.findall(r"\w+|[^\w\s]", caption.lower()), "</s>")
    return [words[i - order + 1 : i + 1] for i in range(2, len(words))]


def test_order_within_a_pair_cannot_be_learned(texts: Any):
    """Nothing about a caption tells whether it is caption 0 or caption 1 of its pair."""
    pairs = texts[1]
    assert accuracy_of_guessing_caption_0([(min(pair), max(pair)) for pair in pairs]) > 0.8  # it learns what is there
    assert abs(accuracy_of_guessing_caption_0(pairs) - 0.5) < 3 * 0.5 / math.sqrt(200)


def accuracy_of_guessing_caption_0(pairs: list[tuple[str, str]]) -> float:
    """Logistic regression on two and three words in a row, trained on 600 pairs, tried on the others."""
    grams: dict[tuple[str, ...], int] = {}
    signs: list[dict[int, int]] = []
    for pair in pairs:
        signs.append({})
        for text, sign in zip(pair, (1, -1), strict=True):
            for gram in ngrams(text, 2) + ngrams(text, 3):
                column = grams.setdefault(gram, len(grams))
                signs[-1][column] = signs[-1].get(column, 0) + sign
    features = np.zeros((len(pairs), len(grams)))
    for row, columns in enumerate(signs):
        features[row, list(columns)] = list(columns.values())
    order = np.random.default_rng(0).permutation(len(pairs))
    train, test = features[order[:600]], features[order[600:]]
    weights = np.zeros(len(grams))
    for _ in range(300):
        missing = 1 - 1 / (1 + np.exp(-train @ weights))
        weights += train.T @ missing / len(train) - 1e-3 * weights
    return float((test @ weights > 0).mean())
