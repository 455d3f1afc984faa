"""The whole config: one YAML file with the sections data, model and train."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import model_validator

from mmdata.config.data import DataConfig
from mmdata.config.model import ModelConfig
from mmdata.config.settings import Settings
from mmdata.config.strict_yaml import parse, read_yaml
from mmdata.config.train import SameGroupConfig, TrainConfig
from mmdata.recognize import Kind, recognize


class Config(Settings):
    """The whole file."""

    data: DataConfig
    """What is loaded, and in which batches."""
    model: ModelConfig = ModelConfig()
    """Which image tower and text tower, and how their features meet."""
    train: TrainConfig = TrainConfig()
    """How the towers are trained."""

    @model_validator(mode="after")
    def _check_groups(self) -> Config:
        groups, miner = self.data.groups, self.train.miner
        if not isinstance(miner, SameGroupConfig):
            return self
        if groups is None:
            raise ValueError(
                "train.miner same_group keeps the rows of a row's own group, and batches have none: set data.groups, "
                "or take the miner top_k"
            )
        rows = groups.size or 1 + (groups.candidates or 0)
        if rows % miner.size:
            given = f"data.groups.size is {rows}" if groups.size else f"1 + data.groups.candidates is {rows}"
            raise ValueError(
                f"train.miner.size is {miner.size}, and {given}: the miner would take rows of different groups for "
                f"one; set train.miner.size={rows}"
            )
        return self

    @model_validator(mode="after")
    def _check_regions(self) -> Config:
        targets = self.data.targets
        if self.train.regions is None:
            return self
        if targets is None or targets.boxes is None or targets.box_texts is None:
            raise ValueError(
                "train.regions compares boxes with their phrases: set data.targets.boxes and data.targets.box_texts to "
                "their sources, such as json:boxes and json:boxes.phrase"
            )
        if self.model.patch_dropout:
            raise ValueError(
                f"train.regions pools regions from all patches, and model.patch_dropout {self.model.patch_dropout} "
                "leaves some out: set model.patch_dropout=0"
            )
        return self


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
