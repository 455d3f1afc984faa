"""Several ways to train, each from the same seeds: the runs of an experiment, and the table of what each gains."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mmdata.atomic import naming
from mmdata.batch import Batch
from mmdata.cli import main as mmdata
from mmdata.compositional import load_pairs, read_pairs
from mmdata.config import CompareConfig, Config, DataConfig, load_config
from mmdata.errors import ConfigError
from mmdata.inspect.paired import markdown
from mmdata.train.evaluation.evaluate import compositional, embed
from mmdata.train.run.trainer import EVALUATION
from mmdata.trained import TrainedRun

RESULTS = "results.jsonl"
R1 = ("image_to_text_r1", "text_to_image_r1")
Line = dict[str, Any]
"""A line of results.jsonl."""


class Run(NamedTuple):
    """One training: an arm, a seed, and what tuning found for the arm."""

    arm: str
    seed: int
    tuned: tuple[str, ...]


class Stopped(Exception):
    """A training was stopped by a signal; holds the exit code."""


class Experiment:
    """The runs of a config, made when their result is asked for.

    Args:
        path: the config file.
        overrides: given on the command line, for all arms.
        config: what both say.
        compare: its section `compare`.

    Attributes:
        arms: their names, the baseline first.
    """

    def __init__(self, path: Path, overrides: list[str], config: Config, compare: CompareConfig) -> None:
        self._path, self._overrides = path, overrides
        self._data, self._compare = config.data, compare
        self._output = Path(compare.output)
        self.arms = sorted(compare.arms, key=lambda arm: arm != compare.baseline)

    def tune(self, arm: str) -> tuple[str, ...]:
        """The settings of `compare.tuning` with which an arm retrieves best on the validation set.

        Never chosen by the pairs: what decides must not have been tuned on.
        """
        if not (tries := self._tries(arm)):
            return self._compare.tuning[0]
        return max(tries, key=lambda run: self.result(run)["r1"]).tuned

    def _tries(self, arm: str) -> list[Run]:
        """The runs that tune an arm; none where there is nothing to choose."""
        seed, tuning = self._compare.tuning_seed, self._compare.tuning
        return [] if seed is None or len(tuning) == 1 else [Run(arm, seed, tuned) for tuned in tuning]

    def result(self, run: Run) -> Line:
        """The line of results.jsonl of a run, which is made if there is none."""
        digest = self._digest(run)
        if digest not in self._results():
            self._make(run)
        return self._results()[digest]

    def table(self, metric: str) -> list[str]:
        """Lines of Markdown: what each arm gains over the baseline in a metric, from the runs that have ended.

        Raises:
            ConfigError: no run of the baseline has ended.
        """
        scores = self._finished()
        if not scores.get(self._compare.baseline):
            raise ConfigError(
                f"'{self._output / RESULTS}': no run of the baseline '{self._compare.baseline}' there yet"
            )
        columns = [name for name in metrics_of(self._compare) if name != metric]
        columns += ["mean_blind", "mean_shuffled"] if self._compare.pairs else []
        lines = markdown(scores, self._compare.baseline, metric, columns)
        for arm, found in scores.items():
            if seconds := [line["cpu_s"] for line in found.values()]:
                how = f"tuned to {' '.join(self.tune(arm))}; " if self._tries(arm) else ""
                lines.append(f"{arm}: {how}{sum(seconds) / len(seconds):.1f} s of processor time a run")
        return lines

    def _finished(self) -> dict[str, dict[int, Line]]:
        """For each arm that is tuned its results by seed; of seeds that the baseline has. Makes no run."""
        results = self._results()
        scores: dict[str, dict[int, Line]] = {}
        for arm in self.arms:  # the baseline first: what the digest of neighbours asks of it is then there
            seeds = self._compare.seeds if arm == self._compare.baseline else list(scores[self._compare.baseline])
            if any(self._digest(run) not in results for run in self._tries(arm)):
                if arm == self._compare.baseline:
                    break
                continue
            runs = {seed: self._digest(Run(arm, seed, self.tune(arm))) for seed in seeds}
            scores[arm] = {seed: results[digest] for seed, digest in runs.items() if digest in results}
        return scores

    def _make(self, run: Run) -> None:
        started = time.process_time()
        if self._compare.arms[run.arm].neighbours is not None and not self._groups(run).is_file():
            self._group(run)
        grouped = time.process_time()
        folder = self._folder(run)
        _command("train", str(self._path), *self._settings(run), f"train.output={folder}", "compare=null")
        ended = time.process_time()
        scores = json.loads((folder / EVALUATION).read_text())
        line: Line = {"arm": run.arm, "seed": run.seed, "tuned": run.tuned, "digest": self._digest(run)}
        line |= {"r1": sum(scores[name] for name in R1) / 2}
        line |= {"cpu_s": ended - grouped, "neighbours_s": grouped - started}
        line |= {} if self._compare.pairs is None else _evaluate(folder, self._compare.pairs)
        results = self._output / RESULTS
        with naming(results), results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _group(self, run: Run) -> None:
        """Write the neighbours in the eyes of the baseline's finished model of the same seed."""
        size = str(self._compare.arms[run.arm].neighbours)
        where = ["--run", str(self._folder(self._teacher(run))), "--out", str(self._groups(run)), "--device", "cpu"]
        _command("neighbours", str(self._path), *self._overrides, "--size", size, *where)

    def _teacher(self, run: Run) -> Run:
        """The baseline's run of the same seed; while the baseline is tuned its other arms wait."""
        baseline = self._compare.baseline
        teacher = Run(baseline, run.seed, self.tune(baseline))
        self.result(teacher)
        return teacher

    def _settings(self, run: Run) -> list[str]:
        arm = self._compare.arms[run.arm]
        seeds = [f"train.seed={run.seed}", f"data.seed={run.seed}"]
        if arm.neighbours is not None:
            seeds.append(f"data.groups={{source: {self._groups(run)}, size: {arm.neighbours}}}")
        return [*self._overrides, *arm.settings, *run.tuned, *seeds]

    def _digest(self, run: Run) -> str:
        """Equal for runs of equal settings."""
        settings = load_config(self._path, [*self._settings(run), "compare=null"]).model_dump_json()
        return hashlib.sha256(settings.encode()).hexdigest()[:16]

    def _folder(self, run: Run) -> Path:
        return self._output / "runs" / f"{run.arm}-{run.seed}-{self._digest(run)}"

    def _groups(self, run: Run) -> Path:
        teacher = self._folder(self._teacher(run)).name
        return self._output / "groups" / f"{teacher}-by-{self._compare.arms[run.arm].neighbours}.arrow"

    def _results(self) -> dict[str, Line]:
        file = self._output / RESULTS
        lines = file.read_text().splitlines() if file.is_file() else []
        found: list[Line] = [json.loads(line) for line in lines]
        # A run that was made before there were pairs is evaluated again, and not trained.
        return {line["digest"]: line for line in found if self._compare.pairs is None or "mean_blind" in line}


def metrics_of(compare: CompareConfig) -> list[str]:
    """What runs can be compared by."""
    swaps = [] if compare.pairs is None else [*sorted({pair.type for pair in read_pairs(compare.pairs)}), "mean"]
    return [*swaps, "r1"]


def _command(*arguments: str) -> None:
    """Run a command of mmdata in this process, which has imported already what it needs."""
    print(f"$ mmdata {shlex.join(arguments)}", flush=True)
    before, sys.argv = sys.argv, ["mmdata", *arguments]
    try:
        mmdata()
    except SystemExit as end:
        if end.code:
            raise Stopped(end.code) from None
    finally:
        sys.argv = before


@cache
def _pairs_of(path: str, data: str) -> tuple[tuple[Batch, list[str]], ...]:
    """The batches of a compositional test, decoded once."""
    return tuple(load_pairs(path, DataConfig.model_validate_json(data)))


def _evaluate(folder: Path, path: str) -> Line:
    """Accuracy for each type of swap, and what is left of it without the pictures: those must be 50 %.

    TYPE_blind: every picture is the mean of all, so the text alone scores. TYPE_shuffled: those of the pair before.
    """
    trained = TrainedRun.load(folder)
    data = trained.config.data.model_copy(update={"seed": 0, "groups": None, "negative_captions": None})
    batches = _pairs_of(path, data.model_dump_json())
    types = [name for _, names in batches for name in names]
    features = embed(trained.model, (batch for batch, _ in batches))
    assert features.text is not None, "pairs have captions"
    mean = torch.nn.functional.normalize(features.image.mean(0, keepdim=True)).expand_as(features.image)
    looks = {"": features.image, "_blind": mean, "_shuffled": features.image.roll(2, 0)}
    line: Line = {"logit_scale": trained.model.logit_scale.exp().item()}
    for name, images in looks.items():
        scores = compositional(images, features.text, types)
        line |= {f"{kind}{name}": values["accuracy"] for kind, values in scores.items()}
    return line
