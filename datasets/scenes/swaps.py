"""Captions that are false of their picture by one swap, and as many of other pictures: files for negative_captions.

python datasets/scenes/swaps.py data/scenes --types size,relation --seed 0

Writes train/swaps.parquet and train/others.parquet, one list a picture: its i-th entry goes with the i-th caption, and
is null where none of the swaps makes that caption false.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from grammar import RELATIONS, SYNONYMS
from scene import COLOURS, SHAPES, SWAPS, Scene, Size, Swap, Thing, swapped

Captions = list[str | None]

WORDS: dict[Swap, frozenset[str]] = {
    "colour": frozenset(COLOURS),
    "shape": frozenset(SHAPES),
    "size": frozenset(word for words in SYNONYMS.values() for word in words),
}
PLACES = re.compile("|".join(rf"\b{words}\b" for phrases in RELATIONS.values() for words in phrases))


def swap_caption(scene: Scene, swap: Swap, caption: str) -> str | None:
    """A true caption after one exchange between the two things: true of `scene.swapped`, false of the scene.

    Words change places, as "a red circle and a blue square" becomes "a blue circle and a red square".

    Returns:
        None where the caption's first sentence, which names both things, does not tell the two pictures apart.
    """
    if swapped(scene, swap) is None or not _tells(scene, swap, _words(caption.split(".")[0])):
        return None
    kinds = ("colour", "shape", "size") if swap == "relation" else (swap,)
    exchange: dict[str, str] = {}
    for kind in kinds:
        exchange |= _exchange(kind, scene.first, scene.second, caption)
    text = re.sub(r"[A-Za-z]+", lambda word: _like(word[0], exchange.get(word[0].lower(), word[0].lower())), caption)
    return re.sub(r"\b([Aa])n? (?=(\w))", lambda a: f"{a[1]}{'n' if a[2] in 'aeiou' else ''} ", text)


def _tells(scene: Scene, swap: Swap, words: str) -> bool:
    """Whether a phrase that names both things is false of the swapped scene; their colours and shapes differ."""
    found = set(words.split())
    relation = PLACES.search(words) is not None
    if swap == "relation":
        return relation
    if swap != "shape":
        return bool(found & WORDS[swap])
    # "A circle and a square" stays true when only these two words change places.
    sizes = scene.first.size != scene.second.size and bool(found & WORDS["size"])
    return relation or sizes or bool(found & WORDS["colour"])


def _exchange(kind: Swap, a: Thing, b: Thing, caption: str) -> dict[str, str]:
    """Words of one kind that take each other's place."""
    if kind == "colour":
        return {a.colour: b.colour, b.colour: a.colour}
    if kind == "shape":
        return {a.shape: b.shape, b.shape: a.shape}
    if a.size == b.size:
        return {}
    found = set(_words(caption).split())
    # The words that this caption uses: "little" where it says "little", so that none comes in that was not there.
    one, other = (_used(thing.size, found) for thing in (a, b))
    return {one: other, other: one, "smaller": "larger", "larger": "smaller"}


def _used(size: Size, found: set[str]) -> str:
    return next((word for word in SYNONYMS.get(size, ()) if word in found), size)


def _words(text: str) -> str:
    return re.sub(r"[^a-z]+", " ", text.lower())


def _like(old: str, new: str) -> str:
    return new.capitalize() if old[0].isupper() else new


def read_scenes(folder: Path) -> list[tuple[str, Scene, list[str]]]:
    """(key, scene, captions) of each picture of a part; the key is the one that `mmdata convert` gives: its number."""
    rows: list[tuple[str, Scene, list[str]]] = []
    with (folder / "truth.jsonl").open("rb") as truth, (folder / "captions.jsonl").open("rb") as captions:
        for number, (told, said) in enumerate(zip(map(json.loads, truth), map(json.loads, captions), strict=True)):
            if told["image"] != said["image"]:
                raise ValueError(
                    f"'{folder}': truth.jsonl has {told['image']} where captions.jsonl has {said['image']}"
                )
            scene = Scene(Thing(*told["first"]), Thing(*told["second"]), told["relation"])
            rows.append((f"{number:09d}", scene, said["captions"]))
    return rows


def make(
    rows: list[tuple[str, Scene, list[str]]], swaps: list[Swap], seed: int
) -> tuple[list[Captions], list[Captions]]:
    """For each picture the swapped captions, one of the possible swaps each, and as many of other pictures."""
    rng = random.Random(f"{seed}/swaps")
    false: list[Captions] = []
    other: list[Captions] = []
    for number, (_, scene, captions) in enumerate(rows):
        choices = [[text for swap in swaps if (text := swap_caption(scene, swap, c)) is not None] for c in captions]
        false.append([rng.choice(found) if found else None for found in choices])
        strangers = [(number + rng.randrange(1, len(rows))) % len(rows) for _ in captions]
        picked = [rng.choice(rows[stranger][2]) for stranger in strangers]
        other.append([text if found else None for text, found in zip(picked, choices, strict=True)])
    return false, other


def main() -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="Swapped captions of the scenes corpus, and as many random ones.")
    parser.add_argument("corpus", metavar="CORPUS", type=Path, help="folder that render.py made")
    parser.add_argument("--types", default="size,relation", help=f"swaps to make, of {','.join(SWAPS)}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    swaps = [swap for swap in SWAPS if swap in options.types.split(",")]
    if len(swaps) != len(options.types.split(",")):
        parser.error(f"--types {options.types}: expected some of {','.join(SWAPS)}")
    try:
        rows = read_scenes(options.corpus / "train")
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}; expected a folder that render.py made", file=sys.stderr)
        return 2
    if len(rows) < 2:
        print(f"error: '{options.corpus}': {len(rows)} pictures; captions of others need two", file=sys.stderr)
        return 2
    for name, lists in zip(("swaps", "others"), make(rows, swaps, options.seed), strict=True):
        out = options.corpus / "train" / f"{name}.parquet"
        table = {"key": [key for key, _, _ in rows], "captions": lists}
        pq.write_table(pa.table(table, schema=pa.schema({"key": pa.string(), "captions": pa.list_(pa.string())})), out)
        count = sum(text is not None for texts in lists for text in texts)
        print(f"{out}: {count:,} captions for {sum(map(len, lists)):,} captions of {len(rows):,} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
