"""Several ways to train, each from the same seeds: the runs of an experiment, and the table of what each gains."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from mmdata.batch import Batch
from mmdata.cli import main as mmdata
from mmdata.config import CompareConfig, Config, DataConfig, load_config
from mmdata.errors import ConfigError
from mmdata.files import append_json_line, naming, read_json_lines
from mmdata.inspect.paired import markdown
from mmdata.train.evaluation.evaluate import compositional, embed
from mmdata.train.run.trainer import EVALUATION
from mmdata.trained import TrainedRun
from mmdata.trained.pairs import load_pairs, read_pairs

RESULTS = "results.jsonl"
R1 = ("image_to_text_r1", "text_to_image_r1")
Line = dict[str, Any]
"""A line of results.jsonl."""


PER_RUN = {"train.output": "compare.output", "train.seed": "compare.seeds", "data.seed": "compare.seeds"}
"""Settings that differ from run to run, and the one that says how."""


class ArmRun(NamedTuple):
    """One training: an arm and a seed."""

    arm: str
    seed: int


class Stopped(Exception):
    """A training was stopped by a signal; holds the exit code."""


class Experiment:
    """The runs of a config, made when their result is asked for.

    Args:
        path: the config file.
        overrides: given on the command line, for all arms.
        config: what both say.
        compare: its section `compare`, maybe with seeds of the command line.
        device: on which neighbours are searched for.

    Attributes:
        arms: their names: each after the one that it begins with, the baseline before those that it does not need.
    """

    def __init__(
        self, path: Path, overrides: list[str], config: Config, compare: CompareConfig, device: str = "cpu"
    ) -> None:
        self._path, self._overrides, self._device = path, overrides, device
        self._data, self._compare = config.data, compare
        self._output = Path(compare.output)
        self._check_overrides()
        self._check_arms()
        self._saved: dict[Path, Config | str] = {}
        self.arms: list[str] = []
        for arm in (compare.baseline, *compare.arms):
            self._add(arm)

    def _check_overrides(self) -> None:
        """Refuse settings of the command line that would change no run.

        Raises:
            ConfigError: names the setting, and what decides in its place.
        """
        arms = [[_key(setting) for setting in arm.settings] for arm in self._compare.arms.values()]
        for key in map(_key, self._overrides):
            if key in PER_RUN:
                raise ConfigError(
                    f"{key}: each run has its own, which {PER_RUN[key]} gives; change that, or leave it out"
                )
            if all(any(f"{key}.".startswith(f"{own}.") for own in keys) for keys in arms):
                raise ConfigError(f"{key}: each arm sets it, so that no run would have this one; change it there")

    def _check_arms(self) -> None:
        """Read the settings of each arm before anything is trained; its model and groups are not there yet."""
        for name, arm in self._compare.arms.items():
            given = [] if arm.init_from is None else [f"model.init_from={self._output}"]
            if arm.neighbours is not None:
                given.append(f"data.groups={{source: {self._output}, size: {arm.neighbours}}}")
            try:
                load_config(self._path, [*self._overrides, *given, *arm.settings, "compare=null"])
            except ConfigError as error:
                raise ConfigError(f"compare.arms.{name}: {error}") from error

    def _add(self, arm: str) -> None:
        if arm in self.arms:
            return
        if (needed := self._compare.arms[arm].init_from) is not None:
            self._add(needed)
        self.arms.append(arm)

    def _needed(self, arm: str) -> str | None:
        """The arm whose finished model an arm begins with, or is grouped by; None if it needs none."""
        settings = self._compare.arms[arm]
        return settings.init_from or (self._compare.baseline if settings.neighbours is not None else None)

    def result(self, run: ArmRun) -> Line:
        """The line of results.jsonl of a run, which is made if there is none."""
        line = self._line(run)
        if line is None:
            if why := self._why_not_found(run):
                print(f"{run.arm}, seed {run.seed}: {why}; a new run is made", flush=True)
            self._make(run)
            line = self._line(run)
            assert line is not None, "the run that was made has other settings than the one that was asked for"
        return line

    def table(self, metric: str, *, arms: Sequence[str] = ()) -> list[str]:
        """Lines of Markdown: what each arm gains over the baseline in a metric, from the runs that have ended.

        Args:
            metric: what is compared.
            arms: only these, and the baseline; none given: all.

        Raises:
            ConfigError: no run of the baseline has ended.
        """
        baseline = self._compare.baseline
        scores = {arm: found for arm, found in self._finished().items() if not arms or arm in (baseline, *arms)}
        if not scores.get(baseline):
            needed = self._needed(baseline)
            seeds = self._compare.seeds if needed is None or needed in scores else []
            tried = (self._why_not_found(ArmRun(baseline, seed)) for seed in seeds)
            why = next(filter(None, tried), "") or self._other_seeds(baseline)
            raise ConfigError(
                f"'{self._output / RESULTS}': no run of the baseline '{baseline}' there yet{why and f' ({why})'}"
            )
        columns = [name for name in metrics_of(self._compare) if name != metric]
        columns += ["mean_blind", "mean_shuffled"] if self._compare.pairs else []
        lines = markdown(scores, baseline, metric, columns)
        for arm, found in scores.items():
            if seconds := [line["cpu_s"] for line in found.values()]:
                lines.append(f"{arm}: {sum(seconds) / len(seconds):.1f} s of processor time a run")
        return lines

    def _finished(self) -> dict[str, dict[int, Line]]:
        """For each arm its results by seed, the baseline first; of seeds that it has. Makes no run."""
        scores: dict[str, dict[int, Line]] = {}
        for arm in self.arms:
            # What an arm needs comes before it: its settings name a run of that one, which is there then.
            needed = self._needed(arm)
            if needed is not None and needed not in scores:
                continue
            seeds = self._compare.seeds if needed is None else list(scores[needed])
            found = {seed: self._line(ArmRun(arm, seed)) for seed in seeds}
            scores[arm] = {seed: line for seed, line in found.items() if line is not None}
        baseline = scores.pop(self._compare.baseline, {})
        others = {arm: {seed: found[seed] for seed in baseline if seed in found} for arm, found in scores.items()}
        return {self._compare.baseline: baseline, **others}

    def _make(self, run: ArmRun) -> None:
        started = time.process_time()
        if self._compare.arms[run.arm].neighbours is not None and not self._groups(run).is_file():
            self._group(run)
        grouped = time.process_time()
        folder = self._folder(run)
        settings = [*self._settings(run), *self._number_format(run)]
        _command("train", str(self._path), *settings, f"train.output={folder}", "compare=null")
        ended = time.process_time()
        scores = json.loads((folder / EVALUATION).read_text())
        digest = folder.name.rpartition("-")[2]
        line: Line = {"arm": run.arm, "seed": run.seed, "digest": digest}
        line |= {"r1": sum(scores[name] for name in R1) / 2}
        line |= {"cpu_s": ended - grouped, "neighbours_s": grouped - started}
        line |= {} if self._compare.pairs is None else score_pairs(folder, self._compare.pairs)
        results = self._output / RESULTS
        with naming(results):
            append_json_line(results, line)

    def _group(self, run: ArmRun) -> None:
        """Write the neighbours in the eyes of the model that the arm begins with, or of the baseline's."""
        size = str(self._compare.arms[run.arm].neighbours)
        where = ["--run", str(self._folder(self._teacher(run))), "--out", str(self._groups(run))]
        where += ["--device", self._device]
        _command("neighbours", str(self._path), *self._overrides, "--size", size, *where)

    def _teacher(self, run: ArmRun) -> ArmRun:
        """The finished run of the same seed that a run needs."""
        needed = self._needed(run.arm)
        assert needed is not None, f"the arm '{run.arm}' needs no other"
        teacher = ArmRun(needed, run.seed)
        self.result(teacher)
        return teacher

    def _settings(self, run: ArmRun) -> list[str]:
        arm = self._compare.arms[run.arm]
        given: list[str] = []
        if arm.init_from is not None:
            given.append(f"model.init_from={self._folder(self._teacher(run))}")
        if arm.neighbours is not None:  # before the arm's own settings, which may have a data.groups.share
            given.append(f"data.groups={{source: {self._groups(run)}, size: {arm.neighbours}}}")
        seeds = [f"train.seed={run.seed}", f"data.seed={run.seed}"]
        return [*self._overrides, *given, *arm.settings, *seeds]

    def _config(self, run: ArmRun) -> Config:
        return _without_place(load_config(self._path, [*self._settings(run), "compare=null"]))

    def _number_format(self, run: ArmRun) -> list[str]:
        """The setting that gives a run the number format of the first run there is, if its own leave it to the device.

        Runs of several formats, as of a machine without a GPU and one with, cannot be compared.
        """
        if self._config(run).train.precision != "auto":
            return []
        configs = (self._config_of(line) for line in self._all_lines())
        first = next((config for config in configs if isinstance(config, Config)), None)
        return [] if first is None else [f"train.precision={first.train.precision}"]

    def _resolved(self, run: ArmRun) -> Config:
        """The settings of a run, with its number format where that is known."""
        return _without_place(
            load_config(self._path, [*self._settings(run), *self._number_format(run), "compare=null"])
        )

    def _folder(self, run: ArmRun) -> Path:
        if line := self._line(run, evaluated=False):
            return self._folder_of(line)
        return self._output / "runs" / f"{run.arm}-{run.seed}-{digest_of(self._config(run))}"

    def _folder_of(self, line: Line) -> Path:
        return self._output / "runs" / f"{line['arm']}-{line['seed']}-{line['digest']}"

    def _groups(self, run: ArmRun) -> Path:
        teacher = self._folder(self._teacher(run)).name
        return self._output / "groups" / f"{teacher}-by-{self._compare.arms[run.arm].neighbours}.npy"

    def _line(self, run: ArmRun, *, evaluated: bool = True) -> Line | None:
        """The newest line of results.jsonl of a run with the same settings; None if there is none.

        The digest tells, or the run's config.yaml: a run that was made when there were other settings has
        another digest. A run that was made before there were pairs is evaluated again, and not trained: it
        counts unless `evaluated`.
        """
        digest = digest_of(self._config(run))
        for line in reversed(self._lines_of(run)):
            if evaluated and self._compare.pairs is not None and "mean_blind" not in line:
                continue
            found, wanted = self._config_of(line), self._resolved(run)
            of_the_format = not isinstance(found, Config) or found.train.precision == wanted.train.precision
            if found == wanted or (line["digest"] == digest and of_the_format):
                return line
        return None

    def _why_not_found(self, run: ArmRun) -> str:
        """Which settings a run of this arm and seed in results.jsonl has instead; "" if there is no such run."""
        lines = self._lines_of(run)
        if not lines or self._line(run, evaluated=False):
            return ""
        found = self._config_of(lines[-1])
        if isinstance(found, str):
            return found
        wanted = self._resolved(run)
        differ = differences(found.model_dump(mode="json"), wanted.model_dump(mode="json"))
        return f"the run in '{self._folder_of(lines[-1])}' has other settings: {'; '.join(differ)}"

    def _other_seeds(self, arm: str) -> str:
        """Which seeds an arm has runs of that are not asked for; "" if there are none."""
        there = sorted({line["seed"] for line in self._all_lines() if line["arm"] == arm} - {*self._compare.seeds})
        return f"there are runs of other seeds: --seeds {' '.join(map(str, there))}" if there else ""

    def _lines_of(self, run: ArmRun) -> list[Line]:
        """The lines of results.jsonl of an arm and a seed, oldest first."""
        return [line for line in self._all_lines() if (line["arm"], line["seed"]) == (run.arm, run.seed)]

    def _all_lines(self) -> list[Line]:
        needs = {"arm": str, "seed": int, "digest": str}
        return list(read_json_lines(self._output / RESULTS, needs))

    def _config_of(self, line: Line) -> Config | str:
        """The settings that a run has saved, or why they cannot be read."""
        path = self._folder_of(line) / "config.yaml"
        if path not in self._saved:
            try:
                self._saved[path] = _without_place(load_config(path))
            except ConfigError as error:
                self._saved[path] = f"the settings of the run in '{path.parent}' cannot be read: {error}"
        return self._saved[path]


def _key(setting: str) -> str:
    """ "train.lr=0.1" → "train.lr"."""
    return setting.partition("=")[0].strip()


def digest_of(config: Config) -> str:
    """Equal for runs of equal settings, in one version of mmdata."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]


def _without_place(config: Config) -> Config:
    """The settings that decide the result: without the folder of the run."""
    return config.model_copy(update={"train": config.train.model_copy(update={"output": None}), "compare": None})


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """The settings in which two dictionaries differ, in words: "train.lr was 0.1, is 0.2"."""
    differ: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differ += differences(cast("dict[str, Any]", old), cast("dict[str, Any]", new), f"{prefix}{key}.")
        elif old != new:
            differ.append(f"{prefix}{key} was {old!r}, is {new!r}")
    return differ


def metrics_of(compare: CompareConfig) -> list[str]:
    """What runs can be compared by."""
    swaps = [] if compare.pairs is None else [*sorted({pair.type for pair in read_pairs(compare.pairs)}), "mean"]
    return [*swaps, "r1"]


def _command(*arguments: str) -> None:
    """Run a command of mmdata in this process, which has imported already what it needs."""
    print(f"$ mmdata {shlex.join(arguments)}", flush=True)
    if code := mmdata(arguments):
        raise Stopped(code)


@cache
def _pairs_of(path: str, data: str) -> tuple[tuple[Batch, list[str]], ...]:
    """The batches of a compositional test, decoded once."""
    return tuple(load_pairs(path, DataConfig.model_validate_json(data)))


def score_pairs(folder: Path, path: str) -> dict[str, Any]:
    """Accuracy for each type of swap, and what is left of it without the pictures: 50 % where a pair has two images.

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
    one_image = read_pairs(path)[0].has_one_image
    line: dict[str, Any] = {"logit_scale": trained.model.logit_scale.exp().item()}
    for name, images in looks.items():
        scores = compositional(images, features.text, types, one_image=one_image)
        line |= {f"{kind}{name}": values["accuracy"] for kind, values in scores.items()}
    return line
