"""python examples/compare.py examples/arms/emoji-mining.yaml [section.key=value ...]

Train a model in several ways (arms), each from the same seeds, and print what each arm gains over the baseline: the
mean of the paired differences, with its 95 % interval. The file:

    config: photos.yaml                     # data.val must be set: retrieval on it is measured
    output: runs/compare                    # folder of the runs, OUTPUT/ARM-SEED
    baseline: random
    seeds: [1, 2, 3, 4]
    pairs: pairs.jsonl                      # optional: a compositional test, as `mmdata evaluate --pairs` takes it
    settings: [train.steps=500]             # optional: of all arms, as those of the command line are
    arms:
      stage: {settings: [train.steps=2000]}
      random: {init_from: stage}            # begins with the finished model of stage with the same seed
      half: {init_from: stage, neighbours: 4, settings: [data.groups.share=0.5]}

`neighbours: 4` groups near rows, as the model of `init_from` sees them, or the baseline's. The same command makes the
runs that are missing. CUDA_VISIBLE_DEVICES="" hides the GPUs; OMP_NUM_THREADS=1 makes runs of a CPU equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from paired import markdown

from mmdata.cli import exit_code
from mmdata.cli import main as mmdata
from mmdata.config import load_config


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    settings: Sequence[str] = ()
    init_from: str | None = None
    neighbours: int | None = None


class Experiment:
    """The runs of a file, each made when its scores are asked for.

    Args:
        path: of the file.
        settings: of all arms, "section.key=value".
        output: folder of the runs; None: that of the file.
    """

    def __init__(self, path: Path, settings: Sequence[str], output: Path | None) -> None:
        content: dict[str, Any] = yaml.safe_load(path.read_text())
        self.config, self.baseline, self.seeds = content["config"], content["baseline"], content["seeds"]
        self.output = output or Path(content["output"])
        self.pairs = content.get("pairs")
        self.settings = [*content.get("settings", []), *settings]
        self.arms = {name: Arm(**(given or {})) for name, given in content["arms"].items()}

    def needed(self, arm: str) -> str | None:
        """The arm whose finished model of the same seed an arm needs."""
        given = self.arms[arm]
        return given.init_from or (self.baseline if given.neighbours else None)

    def folder(self, arm: str, seed: int) -> Path:
        return self.output / f"{arm}-{seed}"

    def groups(self, arm: str, seed: int) -> Path:
        """The file of the groups that an arm with `neighbours` trains on."""
        return self.output / "groups" / f"{self.needed(arm)}-{seed}-by-{self.arms[arm].neighbours}.npy"

    def words(self, arm: str, seed: int) -> list[str]:
        """The settings of a run. The arm's own are behind its groups, which data.groups.share changes."""
        given = self.arms[arm]
        words = [*self.settings, f"train.output={self.folder(arm, seed)}", f"train.seed={seed}", f"data.seed={seed}"]
        if given.init_from:
            words.append(f"model.init_from={self.folder(given.init_from, seed)}")
        if given.neighbours:
            words.append(f"data.groups={{source: {self.groups(arm, seed)}, size: {given.neighbours}}}")
        return [*words, *given.settings]

    def scores(self, arm: str, seed: int) -> dict[str, float]:
        """R@1 (the mean of both directions) and the accuracy for each type of swap; makes the run if it is missing."""
        folder, words = self.folder(arm, seed), self.words(arm, seed)
        made_from = {"config": yaml.safe_load(Path(self.config).read_text()), "settings": words, "pairs": self.pairs}
        result = folder / "result.json"
        if result.is_file():
            found = json.loads(result.read_text())
            if found["made_from"] != made_from:
                sys.exit(f"{folder}: a run with other settings; remove it, or give another folder with --output")
            return found["scores"]
        if needed := self.needed(arm):
            self.scores(needed, seed)
            groups, size = self.groups(arm, seed), self.arms[arm].neighbours
            if size and not groups.is_file():
                of_teacher = ("--run", self.folder(needed, seed), "--size", str(size), "--out", groups)
                command("neighbours", self.config, *self.settings, *of_teacher)
        command("train", self.config, *words)
        if self.pairs:
            command("evaluate", folder, "--pairs", self.pairs)
        evaluated = json.loads((folder / "evaluation.json").read_text())
        scores = {"r1": (evaluated["image_to_text_r1"] + evaluated["text_to_image_r1"]) / 2}
        scores |= {kind: one["accuracy"] for kind, one in evaluated.get("compositional", {}).items()}
        aside = result.with_suffix(".part")
        entry = {"arm": arm, "seed": seed, "scores": scores, "made_from": made_from}
        aside.write_text(json.dumps(entry, indent=1))
        os.replace(aside, result)  # a kill leaves no half of a result
        return scores


def command(*words: str | Path) -> None:
    """Run a command of mmdata in this process, which has imported what it needs; ends the program if it fails."""
    print(f"$ mmdata {shlex.join(map(str, words))}", flush=True)
    if code := mmdata([str(word) for word in words]):
        sys.exit(code)


def main() -> None:
    """Make the runs that are missing, and print a table for each score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="of all arms")
    parser.add_argument("--output", type=Path, help="in place of the file's")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the file's; several processes may share them")
    parser.add_argument("--arms", nargs="+", help="only these, the baseline, and what they need; default: all")
    given = parser.parse_intermixed_args()
    experiment = Experiment(given.file, given.settings, given.output)
    baseline, seeds = experiment.baseline, given.seeds or experiment.seeds
    arms = dict.fromkeys([baseline, *(given.arms or experiment.arms)])
    for arm in {*arms, *filter(None, map(experiment.needed, experiment.arms))} - experiment.arms.keys():
        parser.error(f"no arm '{arm}'; there are {', '.join(experiment.arms)}")
    for arm in arms:  # a mistake is told before anything is trained
        load_config(experiment.config, experiment.words(arm, seeds[0]))
    scores: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in arms}
    for seed in seeds:
        for arm in arms:
            scores[arm][seed] = experiment.scores(arm, seed)
    for metric in scores[baseline][seeds[0]]:
        print("\n" + "\n".join(markdown(scores, baseline, metric, [])))


if __name__ == "__main__":
    sys.exit(exit_code(main))
