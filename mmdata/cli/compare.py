"""mmdata compare: several ways to train, each from the same seeds; what each gains, and how sure that is.

    mmdata compare configs/mining.yaml
    mmdata compare configs/mining.yaml --seeds 1 2 3
    mmdata compare configs/mining.yaml --table --metric relation

The section `compare` of the config names the arms. Each run is an `mmdata train` of its own, on one thread, and ends
as a line of results.jsonl in `compare.output`. A run that is there already is not made again, so the same command goes
on after a stop; several may run at once, each with seeds of its own, once the settings of all arms are tuned.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mmdata.cli.paths import check_shards
from mmdata.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with a section compare")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for all arms, e.g. train.steps=1000")
    parser.add_argument("--seeds", type=int, nargs="+", help="these, for the table too; default: compare.seeds")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these, of the table too; default: all")
    parser.add_argument("--table", action="store_true", help="run nothing, print what there is")
    parser.add_argument("--metric", help="score that is compared; default: compare.primary")


def run(options: argparse.Namespace) -> int:
    """Tune, run what is missing, print the table."""
    from mmdata.config import load_config

    config = load_config(options.config, options.overrides)
    if config.compare is None:
        raise ConfigError(f"config '{options.config}': no section compare; see configs/mining.yaml for one")
    if unknown := set(options.arms or []) - set(config.compare.arms):
        raise ConfigError(f"--arms {', '.join(sorted(unknown))}: expected some of {', '.join(config.compare.arms)}")
    if not config.data.val:
        raise ConfigError("data.val is not set: retrieval on it is measured, and what tuning goes by")
    check_shards(config.data)
    compare = config.compare.model_copy(update={"seeds": options.seeds or config.compare.seeds})
    if len(set(compare.seeds)) < len(compare.seeds) or compare.tuning_seed in compare.seeds:
        tuned = "" if compare.tuning_seed is None else f", also from compare.tuning_seed ({compare.tuning_seed})"
        raise ConfigError(f"--seeds must differ{tuned}: got {compare.seeds}")
    import torch

    from mmdata.cli.experiment import ArmRun, Experiment, Stopped, metrics_of

    torch.set_num_threads(1)
    metric = options.metric or config.compare.primary
    if metric not in (known := metrics_of(config.compare)):
        named = "--metric" if options.metric else "compare.primary"
        raise ConfigError(f"{named} {metric}: expected one of {', '.join(known)}")
    experiment = Experiment(options.config, options.overrides, config, compare)
    try:
        if not options.table:
            best = {arm: experiment.tune(arm) for arm in experiment.arms if arm in (options.arms or experiment.arms)}
            for seed in compare.seeds:
                for arm, tuned in best.items():
                    experiment.result(ArmRun(arm, seed, tuned))
    except Stopped as stopped:
        return int(stopped.args[0])
    print("\n".join(experiment.table(metric, arms=options.arms or ())))
    return 0
