"""Where the run of a config lies, and what is wrong with a path that is given as a run."""

from __future__ import annotations

from pathlib import Path

from mmdata.config.config import Config, load_config
from mmdata.config.strict_yaml import read_yaml
from mmdata.errors import ConfigError, DataError
from mmdata.recognize import CHECKPOINT_NAME, CHECKPOINTS, LATEST, NO_RUN, Kind, find_run, recognize


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


def check_run_folder(run: Path) -> None:
    """Raise a DataError if a path is not the folder of a run; says what it is, and what to give instead."""
    if recognize(run) is not Kind.RUN:
        raise DataError(f"'{run}': {not_a_run(run)}")


def not_a_run(path: Path) -> str:
    """What a path is that is no run, and what to give instead."""
    kind = recognize(path)
    if path.is_file() and kind is not Kind.CONFIG and (whole := find_run(path)):
        return f"a file of the run '{whole}': give '{whole}'"
    if path.is_file() and kind is not Kind.CONFIG:
        return f"{kind.value}, and a run is expected; `mmdata train CONFIG` makes one"
    if path.is_file():
        own = run_of_config(path)
        made = (own / CHECKPOINTS).is_dir()
        remedy = f"give '{own}'" if made else f"`mmdata train {path}` makes it"
        return f"a config, and a run is expected; its run is '{own}': {remedy}"
    if not path.exists():
        return NO_RUN
    inside = sorted(entry.name for entry in path.iterdir())
    if path.name == CHECKPOINTS and any(CHECKPOINT_NAME.fullmatch(name) for name in inside):
        return f"the checkpoints of a run; give the run itself, '{path.parent}', or one of these"
    if CHECKPOINTS in inside or "metrics.jsonl" in inside:
        return "a run that has no checkpoint yet; `mmdata train` writes the first after train.checkpoint_every_steps"
    if "manifest.json" in inside or "__mmdata__" in inside:
        return "a folder of shards, and a run is expected; `mmdata train CONFIG` makes one from them"
    if "config.json" in inside:
        return (
            "a model saved by transformers, and a run is expected; from_pretrained of transformers loads it, and "
            "model.init_from or model.clip trains it further"
        )
    if runs := [name for name in inside if (path / name / CHECKPOINTS / LATEST).is_file()]:
        return f"a folder of runs; give one of them: {', '.join(runs[:5])}{', …' if len(runs) > 5 else ''}"
    listed = f"it holds {', '.join(inside[:5])}{', …' if len(inside) > 5 else ''}" if inside else "it is empty"
    return f"neither a checkpoint nor the folder of a run ({listed}); `mmdata train CONFIG` makes a run"
