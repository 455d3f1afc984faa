"""The whole config: one YAML file with the sections data, model, train and compare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from mmdata.config.data import DataConfig
from mmdata.config.model import ModelConfig
from mmdata.config.settings import Integer, Location, Settings
from mmdata.config.strict_yaml import parse, read_yaml
from mmdata.config.train import TrainConfig
from mmdata.errors import did_you_mean
from mmdata.recognize import Kind, recognize


class ArmConfig(Settings):
    """One of the ways to train that `mmdata compare` compares."""

    settings: tuple[str, ...] = ()
    """The settings that this arm changes, written as on the command line: "train.loss=hard_negative"."""
    init_from: str | None = None
    """Name of the arm with whose finished model of the same seed this one begins (`model.init_from`). null: weights of
    its own seed."""
    neighbours: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Number of near neighbours that stand together in a batch (`data.groups.size`), found by the model that this arm
    begins with, else by the baseline's finished model of the same seed. null: batches are not grouped."""


class CompareConfig(Settings):
    """Several ways to train, each from the same seeds, and what they are measured by."""

    output: Location
    """Folder of all runs and of results.jsonl."""
    arms: dict[str, ArmConfig]
    """The ways to train, by name; each changes some settings."""
    baseline: str
    """Name of the arm that the others are compared with; it runs first, after the arm that it begins with."""
    seeds: Annotated[list[Integer], Field(min_length=2)]
    """Seeds of weights and batches; each arm is trained once with each of them, so that the comparison is paired."""
    pairs: Location | None = None
    """JSONL file of a compositional test, as `mmdata evaluate --pairs` takes it; null: only retrieval on `data.val` is
    measured."""

    @model_validator(mode="after")
    def _check(self) -> CompareConfig:
        if self.baseline not in self.arms or self.arms[self.baseline].neighbours is not None:
            raise ValueError(f"baseline '{self.baseline}' must be one of the arms, without neighbours of its own")
        for name in self.arms:
            self._check_way_to(name)
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ: got {self.seeds}")
        return self

    def _check_way_to(self, name: str) -> None:
        """Raise ValueError if an arm begins with the model of no arm, or in the end with its own."""
        passed = [name]
        while (name := self.arms[name].init_from or "") != "":
            if name not in self.arms:
                raise ValueError(
                    f"arm '{passed[-1]}': init_from '{name}' is none of the arms{did_you_mean(name, self.arms)}"
                )
            if name in passed:
                raise ValueError(f"arms begin with each other's models: {' <- '.join([*passed, name])}")
            passed.append(name)


class Config(Settings):
    """The whole file."""

    data: DataConfig
    """What is loaded, and in which batches."""
    model: ModelConfig = ModelConfig()
    """Which image tower and text tower, and how their features meet."""
    train: TrainConfig = TrainConfig()
    """How the towers are trained."""
    compare: CompareConfig | None = None
    """Several ways to train, for `mmdata compare`; all other programs leave it alone."""

    @field_validator("compare", mode="before")
    @classmethod
    def _absent(cls, compare: object) -> object:
        return compare or None  # a run's config.yaml says `compare: null`


def load_config(path: str | os.PathLike[str], overrides: str | list[str] | None = None) -> Config:
    """Read a YAML file into a `Config`.

    Args:
        path: the file.
        overrides: "section.key=value", e.g. "data.loading.num_workers=4", or several; values are parsed as YAML.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (the nearest known one is named), a value out of range.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    return parse(Config, read_yaml(path, overrides), origin=str(path), overrides=overrides)


def run_folder(path: Path, config: Config) -> Path:
    """Folder of the run that `mmdata train PATH` makes or resumes.

    That is `train.output` if it is set; for the config.yaml that a run has written, the folder of that run; else
    runs/NAME for NAME.yaml.
    """
    if config.train.output is not None:
        return Path(config.train.output)
    if path.name == "config.yaml" and recognize(path.parent) is Kind.RUN:
        return path.parent
    return Path("runs") / path.stem
