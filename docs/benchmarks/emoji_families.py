"""Families of emoji: pictures that differ in skin tone or sex only. Holds some of their rows out, and scores those.

python docs/benchmarks/emoji_families.py hold-out emoji/captions.csv shards/emoji datasets/emoji/held-out.csv
python docs/benchmarks/emoji_families.py score runs/emoji-mining datasets/emoji/held-out.csv

hold-out writes the keys of 500 rows that have four siblings or more, at most half of each family.
score embeds all rows with each finished run of `mmdata compare`, and prints for each arm R@1 (the mean of both
directions) over all queries, the held-out ones, the others with siblings, and those without; with the paired gain
over the baseline, Student's t and Holm's correction over the arms, and the sign test.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy import stats

from mmdata import Index, load_run
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.config.strict_yaml import parse
from mmdata.inspect.paired import difference
from mmdata.inspect.queries import retrieve
from mmdata.loader import Loader
from mmdata.train.evaluation.evaluate import embed

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


def recalled(run: Path, shards: Path) -> NDArray[np.float64]:
    """Of each row (N, 2): whether its picture finds one of its caption's text first, and the other way."""
    trained = load_run(run)
    everything = {"select": None, "join": [], "groups": None, "val": {"shards": str(shards)}, "global_batch_size": 64}
    settings = parse(DataConfig, trained.config.data.model_dump() | everything, origin="evaluation")
    features = embed(trained.model.eval(), Loader.from_config(evaluation_data(settings, hashes=True)))
    assert features.text is not None, "the corpus has captions"
    assert features.ids is not None, "the batches have hashes"
    order = features.rows.argsort()
    rows, ids, image, text = (x[order] for x in (features.rows, features.ids, features.image, features.text))
    of_images = retrieve(text, image, ids.flip(1), rows=rows)  # a picture looks for its caption
    of_texts = retrieve(image, text, ids, rows=rows)
    return np.stack([of_images.ranks == 1, of_texts.ranks == 1], axis=1).astype(np.float64)


def subsets(index: Index, table: Path) -> dict[str, NDArray[np.bool_]]:
    with table.open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    keys = [str(key) for key in index.keys(range(len(index)))]
    held = np.array([key in rows and rows[key]["held_out"] == "1" for key in keys])
    siblings = np.array([key in rows for key in keys])
    return dict(zip(SUBSETS, (np.ones(len(keys), np.bool_), held, siblings & ~held, ~siblings), strict=True))


def score(folder: Path, table: Path) -> None:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    saved = folder / "families.json"
    known: dict[str, dict[str, float]] = json.loads(saved.read_text()) if saved.is_file() else {}
    masks: dict[str, NDArray[np.bool_]] = {}
    for line in lines:
        if line["seed"] == 0:  # the seed of the tuning
            continue
        name = f"{line['arm']}-{line['seed']}-{line['digest']}"
        if name not in known:
            config = yaml.safe_load((folder / "runs" / name / "config.yaml").read_text())
            shards = Path(config["data"]["shards"])
            masks = masks or subsets(Index.open(shards), table)
            found = recalled(folder / "runs" / name, shards)
            known[name] = {subset: float(found[mask].mean()) for subset, mask in masks.items()}
            saved.write_text(json.dumps(known, indent=1))
    report(lines, known)


def report(lines: list[dict[str, Any]], known: dict[str, dict[str, float]], baseline: str = "random") -> None:
    arms: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for line in lines:
        if line["seed"] != 0:
            arms[line["arm"]][line["seed"]] = known[f"{line['arm']}-{line['seed']}-{line['digest']}"]
    others = [arm for arm in arms if arm != baseline]
    for subset in SUBSETS:
        print(f"\n### {subset}\n\n| arm | seeds | R@1 | gain (95 %) | won | p of t, Holm | p of signs |\n{'|---' * 7}|")
        tests = {arm: paired(arms[arm], arms[baseline], subset) for arm in others}
        compared = sorted((arm for arm in others if arm != "stage"), key=lambda arm: tests[arm]["p"])
        holm, least = {}, 0.0
        for place, arm in enumerate(compared):
            least = max(least, min(1.0, (len(compared) - place) * tests[arm]["p"]))
            holm[arm] = least
        mean = np.mean([found[subset] for found in arms[baseline].values()])
        print(f"| {baseline} | {len(arms[baseline])} | {100 * mean:.1f} | | | | |")
        for arm in others:
            t = tests[arm]
            p = f"{holm[arm]:.1e}" if arm in holm else ""
            print(
                f"| {arm} | {t['seeds']} | {100 * t['mean']:.1f} | {100 * t['gain']:+.1f} ({100 * t['low']:+.1f} to "
                f"{100 * t['high']:+.1f}) | {t['won']} | {p} | {t['sign']:.1e} |"
            )


def paired(one: dict[int, dict[str, float]], other: dict[int, dict[str, float]], subset: str) -> dict[str, Any]:
    seeds = sorted(one.keys() & other.keys())
    both = [one[seed][subset] for seed in seeds], [other[seed][subset] for seed in seeds]
    found = difference(*both)
    lost = int(np.sum(np.less(*both)))
    return {
        "seeds": found.seeds,
        "mean": float(np.mean(both[0])),
        "gain": found.mean,
        "low": found.low,
        "high": found.high,
        "won": found.won,
        "p": float(stats.ttest_rel(*both).pvalue) if found.seeds > 1 else 1.0,
        "sign": stats.binomtest(found.won, found.won + lost).pvalue if found.won + lost else 1.0,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["hold-out", "score"])
    parser.add_argument("paths", nargs="+", type=Path)
    arguments = parser.parse_args()
    {"hold-out": hold_out, "score": score}[arguments.command](*arguments.paths)
