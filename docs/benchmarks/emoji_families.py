"""Families of emoji: pictures that differ in skin tone or sex only. Holds some of their rows out, and scores those.

python docs/benchmarks/emoji_families.py hold-out emoji/captions.csv shards/emoji datasets/emoji/held-out.csv
python docs/benchmarks/emoji_families.py score runs/emoji-mining datasets/emoji/held-out.csv

hold-out writes the keys of 500 rows that have four siblings or more, at most half of each family.
score embeds all rows with each finished run of examples/compare.py, and prints for each arm R@1 (the mean of both
directions) over all queries, the held-out ones, the others with siblings, and those without; with the paired gain
over the baseline, Student's t and Holm's correction over the arms, and the sign test.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from compared import embedded, recalled, report, scored
from numpy.typing import NDArray

from mmdata import Index

SKIN_TONES = range(0x1F3FB, 0x1F400)
PEOPLE = {0x1F468: 0x1F9D1, 0x1F469: 0x1F9D1, 0x1F466: 0x1F9D2, 0x1F467: 0x1F9D2, 0x1F474: 0x1F9D3, 0x1F475: 0x1F9D3}
"""man, woman: person; boy, girl: child; older man, older woman: older person."""
LEFT_OUT = {0xFE0F, 0x2640, 0x2642}
"""Variation selector, female sign, male sign."""
SUBSETS = ("all", "held out", "with siblings", "without siblings")


def family_of(codepoints: str) -> str:
    """Equal for emoji that differ in skin tone or sex only; from "U+1F468-U+1F3FB-U+200D-U+1F680"."""
    points = [int(point.removeprefix("U+"), 16) for point in codepoints.split("-")]
    kept = [PEOPLE.get(point, point) for point in points if point not in SKIN_TONES and point not in LEFT_OUT]
    while kept and kept[-1] == 0x200D:  # the joiner of a sign that was left out
        kept.pop()
    return "-".join(f"{point:x}" for point in kept)


def hold_out(captions: Path, shards: Path, out: Path, count: int = 500) -> None:
    index = Index.open(shards)
    with captions.open(newline="") as file:
        rows = list(csv.DictReader(file))
    # `mmdata convert` numbers the rows it writes by the lines of the table: a key is the number of a line.
    keys = [str(key) for key in index.keys(range(len(index)))]
    family = {key: family_of(rows[int(key)]["codepoints"]) for key in keys}
    members: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        members[family[key]].append(key)
    generator = np.random.default_rng(0)
    large = [sorted(found) for _, found in sorted(members.items()) if len(found) >= 5]
    candidates = [key for found in large for key in generator.permutation(found)[: len(found) // 2]]
    held = sorted(generator.choice(candidates, count, replace=False).tolist())
    print(
        f"{len(members)} families, {len(large)} of five rows or more with {sum(map(len, large))} rows; "
        f"{sum(len(found) > 1 for found in members.values())} of two or more with "
        f"{sum(len(found) for found in members.values() if len(found) > 1)}; held out {len(held)}"
    )
    with out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["key", "family", "siblings", "held_out"])
        chosen = set(held)
        for key in keys:
            if len(members[family[key]]) > 1:
                table.writerow([key, family[key], len(members[family[key]]) - 1, int(key in chosen)])


def subsets(index: Index, table: Path) -> dict[str, NDArray[np.bool_]]:
    with table.open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    keys = [str(key) for key in index.keys(range(len(index)))]
    held = np.array([key in rows and rows[key]["held_out"] == "1" for key in keys])
    siblings = np.array([key in rows for key in keys])
    return dict(zip(SUBSETS, (np.ones(len(keys), np.bool_), held, siblings & ~held, ~siblings), strict=True))


def score(folder: Path, table: Path) -> None:
    masks: dict[str, NDArray[np.bool_]] = {}

    def of_run(run: Path, config: dict[str, Any]) -> dict[str, float]:
        shards = Path(config["data"]["shards"])
        masks.update(masks or subsets(Index.open(shards), table))
        found = recalled(embedded(run, shards))
        return {subset: float(found[mask].mean()) for subset, mask in masks.items()}

    report(scored(folder, folder / "families.json", of_run), SUBSETS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["hold-out", "score"])
    parser.add_argument("paths", nargs="+", type=Path)
    arguments = parser.parse_args()
    {"hold-out": hold_out, "score": score}[arguments.command](*arguments.paths)
