"""Where the run of a config lies, and what is wrong with a path that is given as a run."""

from __future__ import annotations

from pathlib import Path

from mmdata.config.config import Config, load_config
from mmdata.errors import ConfigError
from mmdata.recognize import CHECKPOINTS, LATEST, NO_RUN, Kind, find_run, recognize


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


def not_a_run(path: Path) -> str:
    """What a path is that is no run, and what to give instead."""
    kind = recognize(path)
    if kind is Kind.ABSENT:
        return NO_RUN
    if kind is Kind.CONFIG:
        return f"a config, and a run is expected; {_run_of_config(path)}"
    if kind is Kind.RUN:
        return "a run that has no checkpoint yet; `mmdata train` writes the first after train.checkpoint_every_steps"
    if whole := path.parent if kind is Kind.CHECKPOINTS else find_run(path):
        return f"a part of the run '{whole}': give '{whole}'"
    if path.is_dir() and (runs := sorted(path.glob(f"*/{CHECKPOINTS}/{LATEST}"))):
        return f"a folder of runs; give one of them: {', '.join(run.parent.parent.name for run in runs)}"
    return f"{kind.value}, and a run is expected; `mmdata train CONFIG` makes one"


def _run_of_config(path: Path) -> str:
    """What to give in place of a config."""
    try:
        run = run_folder(path, load_config(path))
    except ConfigError as error:
        return f"it has a mistake: {error}"
    made = (run / CHECKPOINTS).is_dir()
    return f"its run is '{run}': {f'give {str(run)!r}' if made else f'`mmdata train {path}` makes it'}"
