"""What scripts that score the finished runs of examples/compare.py share: features, scores kept once made, and a table.

Runs of one seed are paired; gains come with Student's t, Holm's correction over the arms, and the sign test.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from mmdata import load_run
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.config.strict_yaml import parse
from mmdata.inspect.queries import retrieve
from mmdata.loader import Loader
from mmdata.train.evaluation.embedding import embed

Scores = dict[str, float]
Arms = dict[str, dict[int, Scores]]
"""Arm → seed → name of the score → value."""


class Embedded(NamedTuple):
    """All rows of some shards, in the order of their index: int64 (N,), int64 (N, 2) hashes, float32 (N, D) each."""

    rows: Tensor
    ids: Tensor
    image: Tensor
    text: Tensor


def embedded(run: Path, shards: Path) -> Embedded:
    """Features of all rows of `shards` by a finished run."""
    trained = load_run(run)
    everything = {"select": None, "join": [], "groups": None, "val": {"shards": str(shards)}, "global_batch_size": 64}
    settings = parse(DataConfig, trained.config.data.model_dump() | everything, origin="evaluation")
    features = embed(trained.model.eval(), Loader.from_config(evaluation_data(settings)))
    assert features.text is not None, "the corpus has captions"
    assert features.ids is not None, "the batches have hashes"
    order = features.rows.argsort()
    return Embedded(*(x[order] for x in (features.rows, features.ids, features.image, features.text)))


def recalled(found: Embedded) -> NDArray[np.float64]:
    """Of each row (N, 2): whether its picture finds one of its caption's text first, and the other way."""
    of_images = retrieve(found.text, found.image, found.ids.flip(1), rows=found.rows)  # a picture looks for its caption
    of_texts = retrieve(found.image, found.text, found.ids, rows=found.rows)
    return np.stack([of_images.ranks == 1, of_texts.ranks == 1], axis=1).astype(np.float64)


def scored(folder: Path, saved: Path, score: Callable[[Path, dict[str, Any]], Scores]) -> Arms:
    """Scores of the finished runs of an experiment.

    Args:
        folder: of the experiment's runs.
        saved: JSON file of the scores that are known; a run is scored once.
        score: of a run's folder and the mapping of its config.yaml.
    """
    known: dict[str, Scores] = json.loads(saved.read_text()) if saved.is_file() else {}
    arms: Arms = defaultdict(dict)
    for path in sorted(folder.glob("*/result.json")):
        run, result = path.parent, json.loads(path.read_text())
        if run.name not in known:
            known[run.name] = score(run, yaml.safe_load((run / "config.yaml").read_text()))
            saved.write_text(json.dumps(known, indent=1))
        arms[result["arm"]][result["seed"]] = known[run.name]
    return arms


def report(arms: Arms, names: Sequence[str], *, baseline: str = "random", begins: str = "stage") -> None:
    """Print a table for each score: its mean, and the paired gain over the baseline.

    Args:
        arms: all that there is.
        names: of the scores.
        baseline: the arm with which the others are paired.
        begins: the arm that the others begin with, which counts as none of the comparisons.
    """
    others = [arm for arm in arms if arm != baseline]
    for name in names:
        print(f"\n### {name}\n\n| arm | seeds | R@1 | gain (95 %) | won | p of t, Holm | p of signs |\n{'|---' * 7}|")
        tests = {arm: paired(arms[arm], arms[baseline], name) for arm in others}
        compared = sorted((arm for arm in others if arm != begins), key=lambda arm: tests[arm]["p"])
        holm, least = {}, 0.0
        for place, arm in enumerate(compared):
            least = max(least, min(1.0, (len(compared) - place) * tests[arm]["p"]))
            holm[arm] = least
        mean = np.mean([found[name] for found in arms[baseline].values()])
        print(f"| {baseline} | {len(arms[baseline])} | {100 * mean:.1f} | | | | |")
        for arm in others:
            t = tests[arm]
            p = f"{holm[arm]:.1e}" if arm in holm else ""
            print(
                f"| {arm} | {t['seeds']} | {100 * t['mean']:.1f} | {100 * t['gain']:+.1f} ({100 * t['low']:+.1f} to "
                f"{100 * t['high']:+.1f}) | {t['won']} | {p} | {t['sign']:.1e} |"
            )


def paired(one: dict[int, Scores], other: dict[int, Scores], name: str) -> dict[str, Any]:
    """Gain of an arm over another in a score, over the seeds that both have."""
    seeds = sorted(one.keys() & other.keys())
    both = [one[seed][name] for seed in seeds], [other[seed][name] for seed in seeds]
    gains = np.subtract(*both)
    won, lost = int((gains > 0).sum()), int((gains < 0).sum())
    test = stats.ttest_rel(*both) if len(seeds) > 1 else None
    low, high = (np.nan, np.nan) if test is None else test.confidence_interval(0.95)
    return {
        "seeds": len(seeds),
        "mean": float(np.mean(both[0])),
        "gain": float(gains.mean()),
        "low": float(low),
        "high": float(high),
        "won": won,
        "p": 1.0 if test is None else float(test.pvalue),
        "sign": stats.binomtest(won, won + lost).pvalue if won + lost else 1.0,
    }
