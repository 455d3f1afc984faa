"""What is wrong with a path that is given as a config, or as a run: what it is, and what to give instead."""

from __future__ import annotations

import shlex
from pathlib import Path

from mmdata.errors import nearest, printable
from mmdata.files import shipped
from mmdata.recognize import CHECKPOINTS, NO_RUN, Kind, find_run, recognize

EXPECTED = "and a config (a YAML file with the sections data, model, train) is expected"
OPEN_CLIP_CONFIG = "open_clip_config.json"
WRITES_ONE = "`mmdata init SOURCE` writes one for a table, a folder of images, or shards"


def not_a_config(path: Path) -> str:
    """A message for a path that holds no config.

    Example:
        "'shards/photos' is a folder of shards, and a config (a YAML file with …) is expected: `mmdata init
        shards/photos` writes one"
    """
    kind = recognize(path)
    if kind is Kind.ABSENT:
        return _no_such_file(path)
    named = f"'{path}' is {kind.value}, {EXPECTED}"
    if run := find_run(path):
        return f"{named}: that of the run is '{run / 'config.yaml'}'"
    if kind.is_corpus:
        source = path.parent if kind is Kind.TAR and recognize(path.parent) is Kind.SHARDS else path
        return f"{named}: `mmdata init {shlex.quote(str(source))}` writes one"
    return f"{named}; {WRITES_ONE}"


def not_a_run(path: Path) -> str:
    """What a path is that is no run, and what to give instead."""
    kind = recognize(path)
    if kind is Kind.ABSENT:
        return NO_RUN
    if kind is Kind.RUN:
        return "a run that has no checkpoint yet; `mmdata train` writes the first after train.checkpoint_every_steps"
    if whole := path.parent if kind is Kind.CHECKPOINTS else find_run(path):
        return f"a part of the run '{whole}': give '{whole}'"
    if kind is Kind.CONFIG:
        return f"a config, and a run is expected; its run is 'runs/{path.stem}', unless train.output names another"
    if runs := _runs_in(path):
        return f"a folder of runs; give one of them: {', '.join(runs)}"
    return f"{kind.value}, and a run is expected; `mmdata train CONFIG` makes one"


def other_setting(path: Path, *, key: str) -> str:
    """What `key` is told of a path with a model that another setting takes; "" if it may be its own.

    Args:
        path: a folder or file, or a name on the hub, where nothing is.
        key: model.init_from, model.open_clip; model.clip, model.vision or model.text.
    """
    own = {"model.init_from": CHECKPOINTS, "model.open_clip": OPEN_CLIP_CONFIG}.get(key, "config.json")
    if (path / own).exists():  # a folder on the hub may have the files of both libraries
        return ""
    kind, what = recognize(path), ""
    of_open_clip = f"set model.name=pretrained model.open_clip={path} in its place"
    if kind in (Kind.RUN, Kind.CHECKPOINT, Kind.CHECKPOINTS) and key != "model.init_from":
        what = f"{kind.value}; set model.init_from={path} in its place, and model.name to that of the run"
    elif kind is Kind.WEIGHTS and key != "model.open_clip":
        what = f"{kind.value}; {of_open_clip} if they are of open_clip; of transformers model.clip takes the folder"
    elif (path / OPEN_CLIP_CONFIG).is_file():
        what = f"a model of open_clip; {of_open_clip}"
    elif (path / "config.json").is_file():
        ways = f"model.clip={path} in its place, or model.vision and model.text for two towers"
        what = f"a model of transformers; set model.name=pretrained {ways}"
    return f"{key} '{path}': this is {what}" if what else ""


def is_near_a_run(path: Path) -> bool:
    """Whether a path that is no run and no shards is a part of a run, or a folder of runs."""
    kind = recognize(path)
    if kind in (Kind.RUN, Kind.SHARDS, Kind.ABSENT):
        return False
    return kind in (Kind.CHECKPOINT, Kind.CHECKPOINTS) or find_run(path) is not None or bool(_runs_in(path))


def find_shipped(path: Path) -> Path | None:
    """The config that comes with mmdata and has this name, with or without .yaml; None if there is none."""
    ours = shipped_configs()
    return ours.get(path.name) or ours.get(f"{path.name}.yaml")


def shipped_configs() -> dict[str, Path]:
    """The configs that come with mmdata, by the names of their files."""
    return {config.name: config for config in sorted(shipped("configs").glob("*.yaml"))}


def _runs_in(path: Path) -> list[str]:
    """Names of the runs in a folder."""
    return sorted({run.parent.parent.name for run in path.glob(f"*/{CHECKPOINTS}/step-*")})


def _no_such_file(path: Path) -> str:
    if "=" in path.name:
        return f"config '{path}': this is a setting; the config comes first, as in `mmdata train CONFIG {path}`"
    ours = shipped_configs()
    beside = {other.stem: str(other) for other in path.parent.glob("*.y*ml")}
    known = {**{name.removesuffix(".yaml"): name for name in ours}, **beside}
    near = known.get(nearest(path.stem, known) or "")
    meant = f"; did you mean '{near}'?" if near else f"; shipped with mmdata: {', '.join(ours)}"
    return f"config '{printable(str(path))}': no such file{meant}"
