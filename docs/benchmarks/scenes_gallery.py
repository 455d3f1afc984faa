"""Each scene of the test among all, its four swaps with them: scores the finished runs of examples/compare.py.

PYTHONPATH=. python docs/benchmarks/scenes_gallery.py runs/scenes-mining data/scenes-siblings/val

Queries are the scenes of the test (500), candidates all pictures or captions of the gallery (2,500). Prints R@1, the
mean and each direction, with the paired gains over the baseline; then for each arm how often the nearest wrong
candidate is one of the query's own swaps, and how often the query is nearer to its own than to the swap (chance 50 %).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from compared import Arms, Scores, embedded, recalled, report, scored
from numpy.typing import NDArray

from mmdata import Index

SWAPS = ("colour", "size", "shape", "relation")
RECALL = ("R@1", "text to image", "image to text")


def own_swaps(swaps: list[str | None]) -> dict[str, NDArray[np.int64]]:
    """Rows of the gallery by what they are: those of the test as "scene", and in the same order their swaps.

    Args:
        swaps: of each row; a scene of the test has None and is followed by its four swaps.
    """
    kinds = np.array([swap or "scene" for swap in swaps])
    rows = {kind: np.flatnonzero(kinds == kind) for kind in ("scene", *SWAPS)}
    scenes = rows["scene"]
    for place, swap in enumerate(SWAPS, 1):
        if not np.array_equal(rows[swap], scenes + place):
            raise ValueError(f"truth.jsonl: expected each scene and then its swaps {', '.join(SWAPS)}; got other rows")
    return rows


def confused(similarities: NDArray[np.float32], rows: dict[str, NDArray[np.int64]]) -> Scores:
    """What is mistaken for what.

    Args:
        similarities: (N, N), of the queries (rows) and the candidates of the other kind.
        rows: as `own_swaps` returns them.

    Returns:
        "nearest SWAP": share of queries whose nearest wrong candidate is that swap of theirs; "right SWAP": share that
        are nearer to their own than to that swap, a tie is wrong.
    """
    scenes = rows["scene"]
    of_scenes = similarities[scenes]
    own = of_scenes[np.arange(len(scenes)), scenes]
    wrong = of_scenes.copy()
    wrong[np.arange(len(scenes)), scenes] = -np.inf
    nearest = wrong.argmax(axis=1)
    found: Scores = {}
    for swap in SWAPS:
        found[f"nearest {swap}"] = float((nearest == rows[swap]).mean())
        found[f"right {swap}"] = float((own > of_scenes[np.arange(len(scenes)), rows[swap]]).mean())
    return found


def score(folder: Path, gallery: Path) -> None:
    with (gallery / "truth.jsonl").open() as file:
        swaps = [json.loads(line)["swap"] for line in file]
    rows = own_swaps(swaps)

    def of_run(run: Path, config: dict[str, Any]) -> Scores:
        shards = Path(config["data"]["val"]["shards"])
        # `mmdata convert` numbers the rows it writes by the lines of the table.
        assert [int(key) for key in Index.open(shards).keys(range(len(swaps)))] == list(range(len(swaps)))
        found = embedded(run, shards)
        of_images, of_texts = recalled(found)[rows["scene"]].mean(axis=0).tolist()
        scores = {"R@1": (of_images + of_texts) / 2, "text to image": of_texts, "image to text": of_images}
        similarities = (found.text @ found.image.T).numpy()
        both = [confused(one, rows) for one in (similarities, similarities.T)]
        return scores | {name: (both[0][name] + both[1][name]) / 2 for name in both[0]}

    arms = scored(folder, folder / "gallery.json", of_run)
    report(arms, RECALL)
    report_swaps(arms)


def report_swaps(arms: Arms) -> None:
    for kind, title in (("nearest", "the nearest wrong one is its own swap"), ("right", "nearer than the swap")):
        total = ["any"] if kind == "nearest" else []
        print(f"\n### {title}\n\n| {' | '.join(('arm', *total, *SWAPS))} |\n{'|---' * (len(total) + 5)}|")
        for arm, seeds in arms.items():
            means = [float(np.mean([found[f"{kind} {swap}"] for found in seeds.values()])) for swap in SWAPS]
            cells = [sum(means), *means] if total else means
            print(f"| {arm} | {' | '.join(f'{100 * mean:.1f}' for mean in cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="output of the experiment")
    parser.add_argument("gallery", type=Path, help="the folder val that render.py made")
    arguments = parser.parse_args()
    score(arguments.runs, arguments.gallery)
