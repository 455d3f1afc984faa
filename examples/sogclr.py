"""python examples/sogclr.py configs/emoji-mining.yaml --steps 1100

A loss of your own: InfoNCE over the whole corpus, estimated from batches (Yuan et al. 2022, SogCLR, arXiv:2202.12387).
InfoNCE contrasts a row with the rows of its batch. The smaller the batch, the further its gradient is from that of the
whole corpus. Here each row keeps a moving average of the sum over its negatives, over all batches that it was in. The
gradient is divided by that average in place of the batch's own sum.

`SogCLR` is called as any loss of `train_step`, with one process or several. It keeps 8 bytes for each row on each
rank. Its numbers are in its `state_dict()`; keep them in your checkpoints.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

from mmdata import Batch, Loader, load_config
from mmdata.text.tokenizer import Tokenizer
from mmdata.train import (
    DevicePrefetcher,
    DualEncoder,
    DualEncoderOutput,
    distributed,
    make_optimizer,
    train_step,
)


class SogCLR(nn.Module):
    """The loss, and its averages; in eval mode it leaves them as they are.

    For row i, g is the mean over its negatives j of exp(logit_ij - logit_ii), and u the moving average of g. The value
    is the mean of log(1 + u / eps), and the gradient that of g / (u + eps). With eps = 1 / (rows - 1) it estimates
    InfoNCE with the whole corpus as one batch, and equals it for such a batch.

    Args:
        rows: of the index.
        trained: how many of the rows are trained on; None: all.
        gamma: weight of a batch in the averages, above 0 to 1.
    """

    def __init__(self, rows: int, *, trained: int | None = None, gamma: float = 0.8) -> None:
        super().__init__()
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be above 0 to 1: got {gamma}")
        self.gamma, self.log_eps = gamma, -math.log(max(1, (trained or rows) - 1))
        # log u of each row as an image and as a text; -inf before its first batch.
        self.log_averages: Tensor
        self.register_buffer("log_averages", torch.full((rows, 2), -torch.inf))

    def forward(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        """The mean of both directions over the valid rows of all ranks, in nats."""
        # Every rank computes the loss of the global batch, so the mean of the ranks' gradients is its gradient.
        rows, valid = distributed.gather(batch["rows"]), distributed.gather(batch["valid"].long()).bool()
        images, texts = (distributed.gather_with_grad(features) for features in output[:2])  # (N, D)
        images, texts = (features.where(valid[:, None], 0.0) for features in (images, texts))
        logits = output.logit_scale * images @ texts.T  # (N, N)
        partners = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        negatives = valid[:, None] & valid & ~partners
        for name in ("image_hash", "caption_hash"):
            if name in batch:
                key = distributed.gather(batch[name])
                negatives &= key[:, None] != key
        of_images = self._of_anchors(logits, negatives, partners, rows, side=0)
        of_texts = self._of_anchors(logits.T, negatives, partners, rows, side=1)
        return (of_images + of_texts) / 2 / valid.sum().clamp(min=1)

    def _of_anchors(self, logits: Tensor, negatives: Tensor, partners: Tensor, rows: Tensor, *, side: int) -> Tensor:
        """The sum over anchors of one side; those without negatives have loss 0, and keep their averages."""
        count = negatives.sum(1, dtype=logits.dtype)
        some = count > 0
        usable = negatives | (partners & ~some[:, None])  # a sum over nothing would have the gradient NaN
        log_g = logits.where(usable, -torch.inf).logsumexp(1) - logits.diagonal() - count.clamp(min=1).log()
        now, before = log_g.detach(), self.log_averages[rows, side].to(log_g.dtype)
        weights = now.new_tensor([1 - self.gamma, self.gamma]).log()
        average = torch.logaddexp(before + weights[0], now + weights[1]).where(before > -torch.inf, now)
        if self.training:
            self.log_averages[rows[some], side] = average[some].to(self.log_averages.dtype)
        log_sum = torch.logaddexp(average, torch.full_like(average, self.log_eps))
        # The value is that of the average; the gradient is that of this batch's mean.
        losses = log_sum - self.log_eps + (now - log_sum).exp() * (log_g - now)
        return losses.where(some, 0.0).sum()


def main() -> None:
    """Train the model of a config file with this loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--gamma", type=float, default=0.8)
    given = parser.parse_args()
    device = distributed.init()
    config = load_config(given.config)
    loader = Loader.from_config(config.data)
    vocabulary = Tokenizer.load(config.data.tokenizer).vocab_size
    model = DualEncoder.from_config(config.model, vocab_size=vocabulary).to(device)
    wrapped = distributed.wrap(model, device)
    # The plan leaves out the rows that data.select does not name.
    loss_function = SogCLR(len(loader.index), trained=loader.plan.num_rows, gamma=given.gamma).to(device)
    optimizer = make_optimizer(model, config.train)
    step = epoch = 0
    while step < given.steps:
        loader.set_epoch(epoch)
        epoch += 1
        for batch in DevicePrefetcher(loader, device):
            optimizer.zero_grad()
            loss = train_step(wrapped, batch, loss_function).loss
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == given.steps:
                print(f"step {step} · loss {loss.item():.3f}", flush=True)
            if step == given.steps:
                break


if __name__ == "__main__":
    main()
