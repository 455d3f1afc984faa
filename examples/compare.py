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
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from paired import markdown
from pydantic import Field

from mmdata.cli import exit_code
from mmdata.cli import main as mmdata
from mmdata.config import load_config
from mmdata.config.settings import Settings
from mmdata.config.strict_yaml import parse, read_yaml
from mmdata.errors import ConfigError


class Arm(Settings):
    """One way to train."""

    settings: tuple[str, ...] = ()
    init_from: str | None = None
    neighbours: Annotated[int, Field(ge=2)] | None = None


class Experiment(Settings):
    """The runs of a file, each made when its scores are asked for."""

    config: str
    output: str
    baseline: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    arms: dict[str, Arm]
    pairs: str | None = None
    settings: tuple[str, ...] = ()

    def wrong(self, arm: str) -> str:
        """What is wrong with an arm, or with those that it needs."""
        chain, needed = [], arm
        while needed:
            if needed not in self.arms:
                return f"no arm '{needed}'; there are {', '.join(self.arms)}"
            chain.append(needed)
            needed = self.needed(needed)
            if needed in chain:
                return f"{' needs '.join([*chain, needed])}; an arm cannot need itself: give it another init_from"
        for word in (*self.settings, *self.arms[arm].settings):
            if word.partition("=")[0] in ("train.output", "train.seed", "data.seed"):
                return f"{word}: each run has its own; --output and --seeds set them"
        if not load_config(self.config, self.words(arm, self.seeds[0])).data.val:
            return f"arm '{arm}': data.val is not set; retrieval on it is measured"
        return ""

    def needed(self, arm: str) -> str | None:
        """The arm whose finished model of the same seed an arm needs."""
        given = self.arms[arm]
        return given.init_from or (self.baseline if given.neighbours else None)

    def folder(self, arm: str, seed: int) -> Path:
        return Path(self.output, f"{arm}-{seed}")

    def groups(self, arm: str, seed: int) -> Path:
        """The file of the groups that an arm with `neighbours` trains on."""
        size, needed = self.arms[arm].neighbours, self.arms[arm].init_from or self.baseline
        model = hashlib.sha256(json.dumps(self.made_from(needed, seed)).encode()).hexdigest()[:8]
        return Path(self.output, "groups", f"{needed}-{seed}-by-{size}-{model}.npy")

    def words(self, arm: str, seed: int) -> list[str]:
        """The settings of a run. The arm's own are behind its groups, which data.groups.share changes."""
        given = self.arms[arm]
        words = [*self.settings, f"train.output={self.folder(arm, seed)}", f"train.seed={seed}", f"data.seed={seed}"]
        if given.init_from:
            words.append(f"model.init_from={self.folder(given.init_from, seed)}")
        if given.neighbours:
            words.append(f"data.groups={{source: {self.groups(arm, seed)}, size: {given.neighbours}}}")
        return [*words, *given.settings]

    def made_from(self, arm: str, seed: int) -> dict[str, Any]:
        """What decides a run, and with it the run whose model it needs."""
        made_from = {"config": read_yaml(self.config), "settings": self.words(arm, seed), "pairs": self.pairs}
        needed = self.needed(arm)
        return {**made_from, "needed": self.made_from(needed, seed)} if needed else made_from

    def scores(self, arm: str, seed: int) -> dict[str, float]:
        """R@1 (the mean of both directions), grounding with `train.regions`, and the accuracy for each type of swap.

        Makes the run if it is missing.
        """
        folder, made_from = self.folder(arm, seed), self.made_from(arm, seed)
        result = folder / "result.json"
        if result.is_file():
            found = json.loads(result.read_text())
            if found["made_from"] != made_from:
                sys.exit(f"{folder}: of other settings or another model; remove it and runs from it, or give --output")
            return found["scores"]
        if needed := self.needed(arm):
            self.scores(needed, seed)
            groups, size = self.groups(arm, seed), self.arms[arm].neighbours
            if size and not groups.is_file():
                of_teacher = ("--run", self.folder(needed, seed), "--size", str(size), "--out", groups)
                command("neighbours", self.config, *self.settings, *of_teacher)
        command("train", self.config, *self.words(arm, seed))
        if self.pairs:
            command("evaluate", folder, "--pairs", self.pairs)
        evaluated = json.loads((folder / "evaluation.json").read_text())
        scores = {"r1": (evaluated["image_to_text_r1"] + evaluated["text_to_image_r1"]) / 2}
        if "grounding_accuracy" in evaluated:
            scores["grounding"] = evaluated["grounding_accuracy"]
        scores |= {kind: one["accuracy"] for kind, one in evaluated.get("compositional", {}).items()}
        aside = result.with_suffix(".part")
        entry = {"arm": arm, "seed": seed, "scores": scores, "made_from": made_from}
        aside.write_text(json.dumps(entry, indent=1))
        os.replace(aside, result)  # a kill leaves no half of a result
        return scores


def read(path: Path, settings: Sequence[str], output: Path | None) -> Experiment:
    """An experiment from its file; `settings` are added, and a mistake is told before anything is trained."""
    given = parse(Experiment, read_yaml(path), origin=str(path))
    changes = {"settings": (*given.settings, *settings), "output": str(output or given.output)}
    experiment = given.model_copy(update=changes)
    for arm in (experiment.baseline, *experiment.arms):
        if wrong := experiment.wrong(arm):
            raise ConfigError(f"{path}: {wrong}")
    return experiment


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
    experiment = read(given.file, given.settings, given.output)
    baseline, seeds = experiment.baseline, given.seeds or experiment.seeds
    arms = dict.fromkeys([baseline, *(given.arms or experiment.arms)])
    if unknown := [arm for arm in arms if arm not in experiment.arms]:
        parser.error(f"no arm '{unknown[0]}'; there are {', '.join(experiment.arms)}")
    scores: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in arms}
    for seed in seeds:
        for arm in arms:
            scores[arm][seed] = experiment.scores(arm, seed)
    for metric in scores[baseline][seeds[0]]:
        print("\n" + "\n".join(markdown(scores, baseline, metric, [])))


if __name__ == "__main__":
    sys.exit(exit_code(main))
