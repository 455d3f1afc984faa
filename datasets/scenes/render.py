"""Renders the scenes corpus: image folders and a JSONL of captions, as a user has them. Same settings, same bytes.

python datasets/scenes/render.py data/scenes --seed 0 --train 20000 --val 500 --pairs 200-per-type
python datasets/scenes/render.py data/scenes-siblings --families 400 --siblings
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from draw import EXTENSIONS, Look, boxes, draw, encode, make_look
from families import GALLERY, SCENES_OF_FAMILY, deal_families, family_number
from grammar import Backdrop, captions, class_names, full_caption, pair_captions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from scene import SWAPS, Scene, Split, Swap, label, split_scenes

Row = dict[str, Any]  # a line of a JSONL file

FOLDER_IMAGES = 1_000
CHUNK_IMAGES = 100
TEMPLATES = ("{}", "a picture of {}", "an image of {}", "this is {}")


@dataclass(frozen=True)
class Settings:
    """Everything that the bytes of a corpus depend on.

    Attributes:
        seed: of scenes, looks and captions.
        train: pictures to train on.
        val: pictures of val; with `families` the scenes of the test, each of which has five pictures in the gallery.
        pairs: a number per type of swap.
        families: to train on, with full captions, and a gallery as val; None: scenes of any kind, with all captions.
        siblings: whether all 8 scenes of a family are trained on, or one; None without `families`.
    """

    seed: int
    train: int
    val: int
    pairs: int
    families: int | None = None
    siblings: bool | None = None

    def recorded(self) -> dict[str, int]:
        """What corpus.json says: the settings that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Picture(NamedTuple):
    """A scene, how it looks, and what is said of it."""

    scene: Scene
    look: Look
    captions: list[str]


class Pair(NamedTuple):
    """Two scenes that one swap takes into each other, under one look; `captions[i]` is true of `scenes[i]` only."""

    swap: Swap
    scenes: tuple[Scene, Scene]
    look: Look
    captions: tuple[str, str]


@dataclass(frozen=True)
class Chunk:
    """Consecutive pictures of train or val, or consecutive pairs: what one call of a worker renders."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Rendered:
    """Rows of a chunk for captions.jsonl (or pairs.jsonl) and truth.jsonl, and how many images were written."""

    rows: list[Row]
    truth: list[Row]
    num_images: int


def render(out: Path, settings: Settings, *, workers: int = 1, start_method: str = "spawn") -> bool:
    """Write the whole corpus to `out`, which appears only once complete.

    Args:
        out: folder that does not exist yet, or holds the corpus of the same settings.
        settings: what to render.
        workers: processes; 1 renders in this one. Changes who does the work, never a byte.
        start_method: how worker processes start; see `multiprocessing`.

    Returns:
        False when `out` held this very corpus already and nothing was done.

    Raises:
        ValueError: `out`, or the rest of an interrupted run beside it, holds something else; too many scenes asked for.
    """
    if out.exists():
        _check_settings(out, settings)
        return False
    _split(settings)
    aside = out.with_name(f"{out.name}.partial")
    if aside.exists():
        _check_settings(aside, settings)
    else:
        aside.mkdir(parents=True)
        _write_json(aside / "corpus.json", settings.recorded())
    if settings.families is None:
        _write_json(aside / "classes.json", {"classes": class_names(), "templates": TEMPLATES})
    chunks = list(_chunks(settings))
    work = functools.partial(_render_chunk, aside, settings)
    if workers == 1:
        _collect(aside, settings, chunks, map(work, chunks))
    else:
        context = multiprocessing.get_context(start_method)
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            _collect(aside, settings, chunks, pool.map(work, chunks))
    aside.rename(out)
    return True


def make_picture(settings: Settings, part: str, number: int) -> Picture:
    """Picture `number` of train or val: a pure function of its arguments. Train goes round its scenes in turn."""
    split = _split(settings)
    scenes = split.train if part == "train" else split.val
    scene = scenes[number % len(scenes)]
    if settings.families is not None:
        # A scene of the test and its swaps have one look and one wording: the swap is all in which they differ.
        first = number if part == "train" else number - number % len(GALLERY)
        rng = random.Random(f"{settings.seed}/{part}/{first}")
        look = make_look(rng, [scene] if part == "train" else scenes[first : first + len(GALLERY)])
        # Square: a wide picture that a square batch squeezes has no circles.
        look = replace(look, height=min(look.height, look.width), width=min(look.height, look.width))
        return Picture(scene, look, [full_caption(scene, flipped=rng.random() < 0.5)])
    rng = random.Random(f"{settings.seed}/{part}/{number}")
    look = make_look(rng, [scene])
    return Picture(scene, look, captions(rng, scene, _backdrop(look)))


def make_pair(settings: Settings, number: int) -> Pair:
    """Pair `number` of the compositional test: a pure function of its arguments."""
    swap, *scenes = _split(settings).pairs[number]
    rng = random.Random(f"{settings.seed}/pairs/{number}")
    look = make_look(rng, scenes)
    return Pair(swap, (scenes[0], scenes[1]), look, pair_captions(rng, swap, (scenes[0], scenes[1]), _backdrop(look)))


def image_path(number: int, extension: str) -> str:
    """Path of a picture of train or val relative to that part: sub-folders of 1,000, as large corpora have them."""
    return f"images/{number // FOLDER_IMAGES:03d}/{number:06d}{extension}"


def _check_settings(folder: Path, settings: Settings) -> None:
    record = folder / "corpus.json"
    if not record.is_file():
        raise ValueError(f"'{folder}' exists and is no rendered corpus (no corpus.json); choose another folder")
    found = json.loads(record.read_text(encoding="utf-8"))
    if found != settings.recorded():
        raise ValueError(
            f"'{folder}' holds a corpus of other settings: {found}, asked for {settings.recorded()}; delete that "
            "folder or choose another"
        )


def _chunks(settings: Settings) -> Iterator[Chunk]:
    sizes = {"train": settings.train, "val": _val_pictures(settings), "pairs": settings.pairs * len(SWAPS)}
    for part, size in sizes.items():
        for start in range(0, size, CHUNK_IMAGES):
            yield Chunk(part, start, min(size, start + CHUNK_IMAGES))


def _collect(out: Path, settings: Settings, chunks: list[Chunk], results: Iterable[Rendered]) -> None:
    """Write the rows of all chunks, which come in order, and show progress."""
    tables = {"train": "train/captions.jsonl", "val": "val/captions.jsonl", "pairs": "pairs.jsonl"}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        total = settings.train + _val_pictures(settings) + 2 * len(SWAPS) * settings.pairs
        task = progress.add_task("rendering scenes", total=total)
        for part, table in tables.items():
            (out / part).mkdir(exist_ok=True)
            for path in (out / table, out / part / "truth.jsonl"):
                path.write_bytes(b"")  # also drops the rows of an interrupted run
        for chunk, result in zip(chunks, results, strict=True):
            _append_rows(out / tables[chunk.part], result.rows)
            _append_rows(out / chunk.part / "truth.jsonl", result.truth)
            progress.advance(task, result.num_images)


def _append_rows(path: Path, rows: list[Row]) -> None:
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8", newline="\n")


@functools.lru_cache(maxsize=1)
def _split(settings: Settings) -> Split:
    if settings.families is not None:
        return deal_families(
            settings.seed, test=settings.val, train=settings.families, siblings=bool(settings.siblings)
        )
    return split_scenes(settings.seed, val=settings.val, pairs_per_type=settings.pairs)


def _val_pictures(settings: Settings) -> int:
    return settings.val * (1 if settings.families is None else len(GALLERY))


def _render_chunk(out: Path, settings: Settings, chunk: Chunk) -> Rendered:
    """What a worker does: write the pictures of a chunk. Each depends on the settings and its own number only."""
    one = _render_pair if chunk.part == "pairs" else functools.partial(_render_picture, part=chunk.part)
    results = [one(out, settings, number) for number in range(chunk.start, chunk.stop)]
    return Rendered(
        rows=[row for row, _ in results],
        truth=[truth for _, truths in results for truth in truths],
        num_images=sum(len(truths) for _, truths in results),
    )


def _render_picture(out: Path, settings: Settings, number: int, *, part: str) -> tuple[Row, list[Row]]:
    picture = make_picture(settings, part, number)
    path = image_path(number, EXTENSIONS[picture.look.format])
    truth = _write_picture(out / part, path, picture.scene, picture.look)
    row = {"image": path, "captions": picture.captions, "boxes": _phrased(truth)}
    if settings.families is None:
        return row | {"label": label(picture.scene)}, [truth]
    if part == "val":
        truth["swap"] = GALLERY[number % len(GALLERY)]
    return row | {"label": family_number(picture.scene)}, [truth]


def _render_pair(out: Path, settings: Settings, number: int) -> tuple[Row, list[Row]]:
    pair = make_pair(settings, number)
    paths = [f"pairs/{number:06d}_{i}{EXTENSIONS[pair.look.format]}" for i in range(2)]
    row: Row = {"type": pair.swap}
    row |= {f"image_{i}": path for i, path in enumerate(paths)}
    row |= {f"caption_{i}": text for i, text in enumerate(pair.captions)}
    return row, [_write_picture(out, path, scene, pair.look) for path, scene in zip(paths, pair.scenes, strict=True)]


def _write_picture(root: Path, path: str, scene: Scene, look: Look) -> Row:
    """Write one image file; returns its row of truth.jsonl."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encode(draw(scene, look), look))
    return {
        "image": path,
        "first": astuple(scene.first),
        "second": astuple(scene.second),
        "relation": scene.relation,
        "boxes": [[round(value, 2) for value in box] for box in boxes(scene, look)],
        "background": [look.texture, look.tone],
    }


def _phrased(truth: Row) -> list[Row]:
    """The boxes of a picture as COCO has them, left, top, width and height, each with what is in it."""
    things = zip(truth["boxes"], (truth["first"], truth["second"]), strict=True)
    return [
        {"bbox": [left, top, width, height], "phrase": " ".join(thing)} for (top, left, height, width), thing in things
    ]


def _backdrop(look: Look) -> Backdrop:
    frame = "wide" if look.width > look.height else "tall" if look.width < look.height else "square"
    return Backdrop(look.texture, look.tone, frame)


def _per_type(text: str) -> int:
    match = re.fullmatch(r"(\d+)-per-type", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a number and '-per-type', as in 200-per-type; got '{text}'")
    return int(match[1])


def _settings(options: argparse.Namespace) -> Settings:
    families: int | None = options.families
    if families is None:
        train, pairs, siblings = 20_000, 200, None
    else:
        train, pairs, siblings = families * (SCENES_OF_FAMILY if options.siblings else 1), 0, options.siblings
    return Settings(
        seed=options.seed,
        train=train if options.train is None else options.train,
        val=options.val,
        pairs=pairs if options.pairs is None else options.pairs,
        families=families,
        siblings=siblings,
    )


def main() -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="Render the scenes corpus: images, captions and compositional pairs.")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another corpus (default: %(default)s)")
    parser.add_argument("--train", type=int, help="images to train on (default: 20000; of families each scene once)")
    parser.add_argument("--val", type=int, default=500, help="images to evaluate on (default: %(default)s)")
    parser.add_argument(
        "--pairs",
        type=_per_type,
        metavar="N-per-type",
        help="pairs of each swap (default: 200-per-type; none with --families, whose val holds the swaps)",
    )
    parser.add_argument(
        "--families",
        type=int,
        metavar="N",
        help="train on N families of scenes that swaps take into each other, one full caption a picture; val: scenes "
        "of other families with their swaps",
    )
    parser.add_argument(
        "--siblings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --families: all 8 scenes of each, or one (default: all)",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    options = parser.parse_args()
    settings = _settings(options)
    if min(settings.train, options.workers) < 1 or min(settings.val, settings.pairs) < 0:
        parser.error("--train and --workers must be at least 1, --val and --pairs at least 0")
    if settings.families is not None and (settings.families < 1 or settings.pairs):
        parser.error("--families must be at least 1, and takes no --pairs: its val holds each test scene's swaps")
    try:
        done = render(options.out, settings, workers=options.workers)
    except (ValueError, OSError, BrokenProcessPool) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command starts over", file=sys.stderr)
        return 130
    print(f"{options.out}: {'rendered' if done else 'was rendered already, nothing to do'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
