"""Where the run of a config lies."""

from __future__ import annotations

from pathlib import Path

from mmdata.config.config import Config, load_config
from mmdata.config.strict_yaml import read_yaml
from mmdata.errors import ConfigError
from mmdata.recognize import Kind, recognize


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


def run_of_config(path: Path) -> Path:
    """Folder of the run of a config file, as `run_folder`; of a file with a mistake as far as it can be told."""
    try:
        return run_folder(path, load_config(path))
    except ConfigError:  # the command that reads the config says what is wrong with it
        return Path(_output_of(path) or Path("runs") / path.stem)


def _output_of(path: Path) -> str | None:
    """`train.output` of a config file that is not valid as a whole; None if it is not set or cannot be read."""
    try:
        train = read_yaml(path).get("train")
    except ConfigError:
        return None
    output = train.get("output") if isinstance(train, dict) else None
    return output if isinstance(output, str) else None
