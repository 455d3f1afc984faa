"""What is wrong with a path that is given as a config: what it is, and the command that makes a config of it."""

from __future__ import annotations

import shlex
from pathlib import Path

from mmdata.errors import nearest, printable
from mmdata.files import shipped
from mmdata.recognize import Kind, find_run, recognize

EXPECTED = "and a config (a YAML file with the sections data, model, train) is expected"
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


def shipped_configs() -> dict[str, Path]:
    """The configs that come with mmdata, by the names of their files."""
    return {config.name: config for config in sorted(shipped("configs").glob("*.yaml"))}


def _no_such_file(path: Path) -> str:
    if "=" in path.name:
        return f"config '{path}': this is a setting; the config comes first, as in `mmdata train CONFIG {path}`"
    ours = shipped_configs()
    beside = {other.stem: str(other) for other in path.parent.glob("*.y*ml")}
    known = {**{name.removesuffix(".yaml"): name for name in ours}, **beside}
    near = known.get(nearest(path.stem, known) or "")
    meant = f"; did you mean '{near}'?" if near else f"; shipped with mmdata: {', '.join(ours)}"
    return f"config '{printable(str(path))}': no such file{meant}"
