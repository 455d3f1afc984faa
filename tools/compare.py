"""mmdata compare: several ways to train, each from the same seeds; what each gains, and how sure that is.

    mmdata compare configs/mining.yaml
    mmdata compare configs/mining.yaml --seeds 1 2 3
    mmdata compare configs/mining.yaml --table --metric relation

The section `compare` of the config names the arms. Each run is an `mmdata train` of its own, on one thread, and ends
as a line of results.jsonl in `compare.output`. A run that is there already is not made again, so the same command goes
on after a stop; several may run at once, each with seeds of its own, once the settings of all arms are tuned.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mmdata import Batch
from mmdata.atomic import naming
from mmdata.cli import main as mmdata
from mmdata.cli import run
from mmdata.compositional import load_pairs, read_pairs
from mmdata.config import CompareConfig, Config, DataConfig, load_config
from mmdata.errors import ConfigError
from mmdata.inspect.paired import markdown
from mmdata.train import DualEncoder
from mmdata.train.evaluation.evaluate import compositional, embed
from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint, load_weights
from mmdata.train.run.trainer import EVALUATION
from mmdata.transform.text import Tokenizer

RESULTS = "results.jsonl"
R1 = ("image_to_text_r1", "text_to_image_r1")
Line = dict[str, Any]


class Run(NamedTuple):
    """One training: an arm, a seed, and what tuning found for the arm."""

    arm: str
    seed: int
    tuned: tuple[str, ...]


class Stopped(Exception):
    """A training was stopped by a signal; holds the exit code."""


def main() -> int:
    """Tune, run what is missing, print the table."""
    options = parse_arguments()
    config = load_config(options.config, options.overrides)
    if config.compare is None:
        raise ConfigError(f"config '{options.config}': no section compare; see configs/mining.yaml for one")
    if unknown := set(options.arms or []) - set(config.compare.arms):
        raise ConfigError(f"--arms {', '.join(sorted(unknown))}: expected some of {', '.join(config.compare.arms)}")
    torch.set_num_threads(1)
    if config.data.val_shards is None:
        raise ConfigError("data.val_shards is not set: retrieval on it is measured, and what tuning goes by")
    metric = options.metric or config.compare.primary
    if metric not in (known := metrics_of(config.compare)):
        named = "--metric" if options.metric else "compare.primary"
        raise ConfigError(f"{named} {metric}: expected one of {', '.join(known)}")
    experiment = Experiment(options.config, options.overrides, config, config.compare)
    try:
        if not options.table:
            best = {arm: experiment.tune(arm) for arm in experiment.arms if arm in (options.arms or experiment.arms)}
            for seed in options.seeds or config.compare.seeds:
                for arm, tuned in best.items():
                    experiment.result(Run(arm, seed, tuned))
    except Stopped as stopped:
        return int(stopped.args[0])
    experiment.show(metric)
    return 0


def metrics_of(compare: CompareConfig) -> list[str]:
    """What runs can be compared by."""
    swaps = [] if compare.pairs is None else [*sorted({pair.type for pair in read_pairs(compare.pairs)}), "mean"]
    return [*swaps, "r1"]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mmdata compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with a section compare")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for all arms, e.g. train.steps=1000")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these; default: compare.seeds")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these; default: all")
    parser.add_argument("--table", action="store_true", help="run nothing, print what there is")
    parser.add_argument("--metric", help="score that is compared; default: compare.primary")
    return parser.parse_intermixed_args()


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

    def show(self, metric: str) -> None:
        """Print the table of what there is."""
        scores = self._finished()
        if not scores.get(self._compare.baseline):
            raise ConfigError(
                f"'{self._output / RESULTS}': no run of the baseline '{self._compare.baseline}' there yet"
            )
        columns = [name for name in metrics_of(self._compare) if name != metric]
        columns += ["mean_blind", "mean_shuffled"] if self._compare.pairs else []
        print("\n".join(markdown(scores, self._compare.baseline, metric, columns)))
        for arm, found in scores.items():
            if seconds := [line["cpu_s"] for line in found.values()]:
                how = f"tuned to {' '.join(self.tune(arm))}; " if self._tries(arm) else ""
                print(f"{arm}: {how}{sum(seconds) / len(seconds):.1f} s of processor time a run")

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
        command("train", str(self._path), *self._settings(run), f"train.output={folder}", "compare=null")
        ended = time.process_time()
        scores = json.loads((folder / EVALUATION).read_text())
        line: Line = {"arm": run.arm, "seed": run.seed, "tuned": run.tuned, "digest": self._digest(run)}
        line |= {"r1": sum(scores[name] for name in R1) / 2}
        line |= {"cpu_s": ended - grouped, "neighbours_s": grouped - started}
        line |= {} if self._compare.pairs is None else evaluate(folder, self._compare.pairs)
        results = self._output / RESULTS
        with naming(results), results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _group(self, run: Run) -> None:
        """Write the neighbours in the eyes of the baseline's finished model of the same seed."""
        size = str(self._compare.arms[run.arm].neighbours)
        where = ["--run", str(self._folder(self._teacher(run))), "--out", str(self._groups(run)), "--device", "cpu"]
        command("neighbours", str(self._path), *self._overrides, "--size", size, *where)

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


def command(*arguments: str) -> None:
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
def pairs_of(path: str, data: str) -> tuple[tuple[Batch, list[str]], ...]:
    """The batches of a compositional test, decoded once."""
    return tuple(load_pairs(path, DataConfig.model_validate_json(data)))


def evaluate(folder: Path, path: str) -> Line:
    """Accuracy for each type of swap, and what is left of it without the pictures: those must be 50 %.

    TYPE_blind: every picture is the mean of all, so the text alone scores. TYPE_shuffled: those of the pair before.
    """
    state = load_checkpoint(find_checkpoint(folder))
    config = Config.model_validate(state["settings"])
    tokenizer = Tokenizer.load(config.data.tokenizer, max_length=config.data.max_length)
    model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size)
    load_weights(model, state, origin=str(folder))
    data = config.data.model_copy(update={"seed": 0, "groups": None, "negative_captions": None})
    batches = pairs_of(path, data.model_dump_json())
    types = [name for _, names in batches for name in names]
    features = embed(model.eval(), (batch for batch, _ in batches))
    mean = torch.nn.functional.normalize(features.image.mean(0, keepdim=True)).expand_as(features.image)
    looks = {"": features.image, "_blind": mean, "_shuffled": features.image.roll(2, 0)}
    line: Line = {"logit_scale": model.logit_scale.exp().item()}
    for name, images in looks.items():
        scores = compositional(images, features.text, types)
        line |= {f"{kind}{name}": values["accuracy"] for kind, values in scores.items()}
    return line


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(main)
