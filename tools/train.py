"""mmdata train: a dual encoder from shards. A run that was stopped goes on with the same command.

    mmdata train configs/scenes.yaml train.epochs=3 data.loading.num_workers=4
    torchrun --nproc-per-node 2 tools/train.py configs/scenes.yaml

The run's folder (train.output, or runs/NAME for NAME.yaml) gets checkpoints/, metrics.jsonl, config.yaml,
evaluation.json and, where rows could not be loaded, ledger-rankN.jsonl.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from mmdata import Loader
from mmdata.atomic import write_whole
from mmdata.cli import run
from mmdata.config import Config, DataConfig, load_config
from mmdata.config.data import evaluation_data
from mmdata.loader.ledger import cut_ledger
from mmdata.train import DualEncoder
from mmdata.train.evaluation.evaluate import evaluate_retrieval
from mmdata.train.objective import check_objective
from mmdata.train.ranks import collectives
from mmdata.train.run.trainer import AUTOCAST, Trainer
from mmdata.transform.text import Tokenizer


def main() -> int:
    """Train; the exit code is 0, or 128 + the signal that stopped the run."""
    parser = argparse.ArgumentParser(
        prog="mmdata train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with the sections data, model and train")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. train.lr=1e-3")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    output = Path(config.train.output or Path("runs") / options.config.stem)
    return train(config, output, collectives.init(config.train.device))


def train(config: Config, output: Path, device: torch.device) -> int:
    """Put loader, model and loop together, and run them."""
    rank, world_size = collectives.rank(), collectives.world_size()
    data = config.data.model_copy(update={"add_hashes": config.data.add_hashes or config.train.needs_hashes})
    loader = Loader.from_config(data, rank=rank, world_size=world_size)
    tokenizer = Tokenizer.load(data.tokenizer, max_length=data.max_length)
    torch.manual_seed(config.train.seed)  # the same weights on all ranks
    model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size).to(device)
    check_objective(config.train, model, negative_captions=data.negative_captions is not None)
    evaluate = evaluate_on(data, AUTOCAST[config.train.precision]) if data.val_shards else None
    settings = config.model_dump(mode="json")
    trainer = Trainer(model, loader, config.train, output=output, settings=settings, evaluate=evaluate)
    if rank == 0:
        write_whole(output / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
    state = loader.state_dict()
    loader.ledger.write_to(output / f"ledger-rank{rank}.jsonl", epoch=state["epoch"], step=state["step"])
    if rank == 0:
        cut_ledgers_of_former_ranks(output, state, world_size)
    return trainer.run()


def cut_ledgers_of_former_ranks(output: Path, state: dict[str, Any], world_size: int) -> None:
    """Take out what ranks that this run has no more have listed after the step at which it goes on."""
    for path in output.glob("ledger-rank*.jsonl"):
        if int(path.stem.removeprefix("ledger-rank")) >= world_size:
            cut_ledger(path, epoch=state["epoch"], step=state["step"])


def evaluate_on(data: DataConfig, autocast_dtype: torch.dtype | None) -> Callable[[nn.Module], Mapping[str, float]]:
    """Retrieval over `data.val_shards`, as the loop calls it; equal images or captions are no mistakes."""
    data = evaluation_data(data, hashes=True)
    loader = Loader.from_config(data, rank=collectives.rank(), world_size=collectives.world_size())

    def evaluate(model: nn.Module) -> dict[str, float]:
        loader.set_epoch(0)
        return evaluate_retrieval(model, loader, autocast_dtype=autocast_dtype)

    return evaluate


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(main, under_torchrun=True)
