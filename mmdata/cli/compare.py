"""mmdata compare: several ways to train, each from the same seeds; what each gains, and how sure that is.

    mmdata compare configs/mining.yaml
    mmdata compare configs/mining.yaml --seeds 1 2 3
    mmdata compare configs/mining.yaml --table --metric relation

The section `compare` of the config names the arms. Each run is an `mmdata train` of its own, on one thread, and ends
as a line of results.jsonl in `compare.output`. GPUs are not used unless --device cuda is given. A run
that is there already is not made again, so the same command goes on after a stop; several may run at once, each with
seeds of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.cli.paths import check_shards
from mmdata.errors import ConfigError

if TYPE_CHECKING:
    from mmdata.config import CompareConfig, Config


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with a section compare")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for all arms, e.g. train.steps=1000")
    parser.add_argument("--seeds", type=int, nargs="+", help="these, for the table too; default: compare.seeds")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these, of the table too; default: all")
    parser.add_argument("--table", action="store_true", help="run nothing, print what there is")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of all runs; cpu (the default): GPUs are not used"
    )
    swaps = "a type of swap in compare.pairs, or mean, of all types"
    parser.add_argument(
        "--metric", default="r1", help=f"score that is compared: r1, retrieval (the default), or {swaps}"
    )


def run(options: argparse.Namespace) -> int:
    """Run what is missing, print the table."""
    from mmdata.config import load_config

    config = load_config(options.config, options.overrides)
    if config.compare is None:
        raise ConfigError(f"config '{options.config}': no section compare; see configs/mining.yaml for one")
    if unknown := set(options.arms or []) - set(config.compare.arms):
        raise ConfigError(f"--arms {', '.join(sorted(unknown))}: expected some of {', '.join(config.compare.arms)}")
    if not config.data.val:
        raise ConfigError("data.val is not set: retrieval on it is measured")
    check_shards(config.data)
    compare = config.compare.model_copy(update={"seeds": options.seeds or config.compare.seeds})
    if len(set(compare.seeds)) < len(compare.seeds):
        raise ConfigError(f"--seeds must differ: got {compare.seeds}")
    with _on(options.device):
        return _compare(options, config, compare)


def _compare(options: argparse.Namespace, config: Config, compare: CompareConfig) -> int:
    import torch

    from mmdata.cli.experiment import ArmRun, Experiment, Stopped, metrics_of
    from mmdata.train.ranks import collectives

    torch.set_num_threads(1)
    if not options.table:
        collectives.init(options.device)  # refuses cuda where there is none
    if options.metric not in (known := metrics_of(compare)):
        raise ConfigError(f"--metric {options.metric}: expected one of {', '.join(known)}")
    experiment = Experiment(options.config, options.overrides, config, compare, options.device)
    try:
        if not options.table:
            for seed in compare.seeds:
                for arm in experiment.arms:
                    if arm in (options.arms or experiment.arms):
                        experiment.result(ArmRun(arm, seed))
    except Stopped as stopped:
        return int(stopped.args[0])
    print("\n".join(experiment.table(options.metric, arms=options.arms or ())))
    return 0


@contextlib.contextmanager
def _on(device: str) -> Generator[None]:
    """Hide the GPUs from the runs of this process where the device is the CPU: `mmdata train` takes one if it can."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif device == "cpu":
            del os.environ["CUDA_VISIBLE_DEVICES"]
