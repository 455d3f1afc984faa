"""How near the gradients of small batches are to the gradient of the whole corpus: InfoNCE's, and those of sogclr.

python docs/benchmarks/global_gradient.py configs/emoji-mining.yaml    # minutes, on one thread

A run with the loss of examples/sogclr.py stops at five moments. At each, the gradient of InfoNCE with the whole
corpus as one batch is computed (gradient caching), and the gradients of the batches of eight epochs by both losses.
The table has the cosine to the corpus's gradient: of one batch (mean), and of the mean over the epochs, which shows
what is wrong also on average. "settled": sogclr after 20 more epochs of the same model, so that no average is out of
date.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from mmdata.batch import Batch
from mmdata.config import DataConfig, load_config
from mmdata.loader.loader import Loader
from mmdata.train import ContrastiveLoss, DualEncoder, make_optimizer, train_step
from mmdata.train.run.optimizer import learning_rate, set_learning_rate
from mmdata.train.run.step import LossFunction

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from sogclr import SogCLR


def gradient(model: nn.Module, batch: Batch, loss: LossFunction, size: int | None = None) -> Tensor:
    model.zero_grad()
    train_step(model, batch, loss, micro_batch_size=size)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--gamma", type=float, default=0.8)
    parser.add_argument("--epochs", type=int, default=8, help="over which a mean is taken")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(arguments.config, [f"train.steps={arguments.steps}"])
    torch.manual_seed(0)
    loader = Loader.from_config(config.data)
    rows = len(loader.index)
    entries = len(AutoTokenizer.from_pretrained(config.data.tokenizer))
    used = sum(int(batch["valid"].sum()) for batch in loader)
    whole_data = config.data.model_copy(update={"global_batch_size": used, "text_buckets": 1})
    model = DualEncoder.from_config(config.model, vocab_size=entries)
    optimizer = make_optimizer(model, config.train)
    kept, settled = (SogCLR(rows, gamma=arguments.gamma) for _ in range(2))
    moments = [round(arguments.steps * share) for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    infonce = ContrastiveLoss("clip")
    names = ("InfoNCE", "sogclr", "settled")
    heads = [f"{name}, {of}" for of in ("one batch", "mean") for name in names]
    print(f"| updates | logit scale | {' | '.join(heads)} |\n{'|---' * 8}|")
    step = epoch = 0
    while step < arguments.steps:
        loader.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            if step == arguments.steps:
                break
            set_learning_rate(optimizer, learning_rate(step, config.train, arguments.steps))
            optimizer.zero_grad()
            train_step(model, batch, kept.train())
            nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip_norm or 1e9)
            optimizer.step()
            step += 1
            if step in moments:
                settled.load_state_dict(kept.state_dict())
                settle(model, config.data, settled)
                whole = next(iter(Loader.from_config(whole_data)))
                full = gradient(model, whole, infonce, 64)
                compared = [infonce, kept.eval(), settled.eval()]
                probe = Loader.from_config(config.data.model_copy(update={"seed": 1000 + step}))
                epochs = (probe.set_epoch(epoch) or probe for epoch in range(arguments.epochs))
                found: list[list[Tensor]] = [[], [], []]
                for other in itertools.chain.from_iterable(epochs):
                    for grads, loss in zip(found, compared, strict=True):
                        grads.append(gradient(model, other, loss))
                stacked = [torch.stack(grads) for grads in found]
                rows_and_means = [*stacked, *(grads.mean(0, keepdim=True) for grads in stacked)]
                cells = [f"{torch.cosine_similarity(grads, full[None], dim=1).mean():.3f}" for grads in rows_and_means]
                print(f"| {step} | {model.logit_scale.exp():.1f} | {' | '.join(cells)} |", flush=True)


@torch.no_grad()
def settle(model: DualEncoder, data: DataConfig, loss: SogCLR, epochs: int = 20) -> None:
    """Move the averages on with a model that stays as it is: each batch weighs less than the one before."""
    gamma = loss.train().gamma
    for epoch in range(epochs):
        loss.gamma = 1 / (1 + epoch)
        for batch in Loader.from_config(data.model_copy(update={"seed": 2000 + epoch})):
            loss(model(batch), batch)
    loss.gamma = gamma


if __name__ == "__main__":
    main()
