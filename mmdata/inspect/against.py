"""Times mmdata and other loaders on the same shards, batch size and workers, in turn, each run in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

from mmdata.config import DataConfig
from mmdata.config.settings import name_of
from mmdata.cores import most_workers
from mmdata.errors import ConfigError, Problems
from mmdata.index import Index
from mmdata.loader.corpus import open_index
from mmdata.nearest import did_you_mean

PEERS = ("webdataset", "torch")
WHAT = {
    "mmdata": "as configured",
    "webdataset": "as OpenCLIP uses it: Pillow, torchvision's crop, float; captions one by one, padded to max_length",
    "torch": "DataLoader over a Dataset of the index's rows: Pillow, torchvision's crop, float; captions by batch",
}
"""What each loader does, for the table of results."""


def peers_of(names: str) -> list[str]:
    """The loaders of a list such as "webdataset,torch".

    Raises:
        ConfigError: an unknown loader.
    """
    listed = list(dict.fromkeys(name.strip() for name in names.split(",")))
    if unknown := [name for name in listed if name not in PEERS]:
        quoted = ", ".join(f"'{name}'{did_you_mean(name, PEERS)}" for name in unknown)
        raise ConfigError(f"--against: no loader {quoted}; give {' or '.join(PEERS)}, or both")
    return listed


def compare(
    data: DataConfig, names: list[str], *, steps: int, rounds: int, said: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Samples per second of mmdata and of other loaders: medians of `rounds` runs, in turn.

    Args:
        data: settings; the other loaders use those they support: one square image size, a crop, a fixed batch size.
        names: some of `PEERS`.
        steps: timed batches in each run, after the first three.
        rounds: runs of each loader.
        said: called with a line after each run.

    Raises:
        Problems: another loader is not installed, or cannot read these shards or make these batches.
        ConfigError: a loader failed.
    """
    if problems := find_problems(data, open_index(data), names):
        raise Problems(*problems)
    rates: dict[str, list[float]] = {name: [] for name in ("mmdata", *names)}
    for number in range(rounds):
        for name, found in rates.items():
            found.append(_run(data, name, steps))
            said(f"run {number + 1} of {rounds}: {name} {found[-1]:,.0f} samples/s")
    return {name: median(found) for name, found in rates.items()}


def fit_workers(data: DataConfig, names: list[str]) -> DataConfig:
    """Replace `num_workers: auto` by the number of shards, if webdataset has fewer shards than `auto` workers."""
    if data.loading.num_workers != "auto" or "webdataset" not in names:
        return data
    shards = open_index(data).num_shards
    return data if shards >= most_workers("auto") else data.with_loading(num_workers=shards)


def find_problems(data: DataConfig, index: Index, names: list[str]) -> list[str]:
    """Reasons for which other loaders cannot do what the settings ask for, all of them before anything is timed."""
    problems: list[str] = []
    for name in names:
        if find_spec(name) is None:
            problems.append(f"--against {name}: not installed here; `pip install {name}`, or leave it out")
    if index.caches:
        problems.append(
            "--against compares loaders on local shards, and data.shards has a URL: copy some shards with their index "
            "to a local folder and give that as data.shards"
        )
    if len(index.sources) > 1:
        problems.append(
            f"--against compares loaders on one dataset, and data.shards is a mixture of {len(index.sources)}: "
            "give one of them as data.shards"
        )
    if data.tokenizer is None:
        raise ConfigError("--against compares batches of images and texts: give data.tokenizer")
    if data.image_patches is not None:
        problems.append(
            "--against: no other loader here makes batches of native resolution; give data.image_patches=null"
        )
    if data.transform not in ("train", "eval"):
        problems.append(
            f"--against: transform '{data.transform}' is made for mmdata; give data.transform=train or eval"
        )
    if data.text_transform is not None:
        problems.append(
            f"--against: text_transform '{name_of(data.text_transform)}' is made for mmdata; give "
            "data.text_transform=null"
        )
    shards = index.num_shards
    if "webdataset" in names and shards < most_workers(data.loading.num_workers):
        problems.append(
            f"--against webdataset: it gives each worker shards of its own, and {shards} shards are too few for "
            f"{most_workers(data.loading.num_workers)} workers; give data.loading.num_workers={shards}"
        )
    return problems


def _run(data: DataConfig, name: str, steps: int) -> float:
    """One run, in a new process: caches, threads and imports of the run before would change the result."""
    settings = {"data": data.model_dump(mode="json"), "name": name, "steps": steps}
    done = subprocess.run(
        [sys.executable, "-m", "mmdata.inspect.peers"],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"},
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        raise ConfigError(f"--against: the run of '{name}' failed with exit code {done.returncode}: {said[-1]}")
    return float(done.stdout.splitlines()[-1])
