"""python examples/clip_from_scratch.py shards/photos/train shards/photos/val --epochs 20

Train a CLIP of your own, from the index to the scores. Read it from top to bottom. Each part is public, and each can
be replaced. Make the shards with `mmdata convert photos shards/photos --val-share 0.05 --train-tokenizer 8192`. The
program uses a CPU or one GPU; `mmdata train` adds more GPUs, checkpoints and a log.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import mmdata
from mmdata.text.tokenizer import Tokenizer
from mmdata.train import DevicePrefetcher, DualEncoder, losses, miners, train_step
from mmdata.train.evaluation.evaluate import evaluate_retrieval
from mmdata.train.models.dual_encoder import DualEncoderOutput

WIDTH = 256
"""Features of the towers, and of the space in which images and captions meet."""


def look(shards: str) -> None:
    """1. The index: a table of all rows, which is read without opening a tar."""
    index = mmdata.Index.open(shards)
    heights, lengths = index.column("height"), index.token_histogram()
    print(f"{len(index)} images, {heights.min()} to {heights.max()} pixels high")
    print(f"{lengths.sum()} captions, of {len(lengths) - 1} tokens at most")
    sample = index[0]  # opens the tar, and decodes one image
    print(f"row 0: key {sample.key}, {sample.image.size[0]} × {sample.image.size[1]} pixels, {sample.captions[0]!r}")


def make_loaders(given: argparse.Namespace) -> tuple[mmdata.Loader, mmdata.Loader]:
    """2. The loaders: worker threads read, decode, crop and tokenize; a batch is a dictionary of tensors."""
    data = {
        "tokenizer": given.tokenizer,
        "global_batch_size": given.batch_size,
        "image_size": given.image_size,
    }
    train = mmdata.Loader.from_config({"shards": given.shards, **data})
    val = mmdata.Loader.from_config({"shards": given.val_shards, **data, "transform": "eval", "shuffle": False})
    return train, val


class ImageTower(nn.Module):
    """3. A small vision transformer: patches of 16 × 16 pixels become tokens, and their mean becomes the features."""

    def __init__(self, image_size: int, *, patch: int = 16, depth: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image_size // patch) ** 2, WIDTH))
        self.blocks = transformer(depth, heads)

    def forward(self, pixel_values: Tensor) -> Tensor:
        tokens = self.patches(pixel_values).flatten(2).transpose(1, 2)  # (B, 3, H, W) to (B, N, WIDTH)
        return self.blocks(tokens + self.positions).mean(dim=1)  # (B, WIDTH)


class TextTower(nn.Module):
    """A small text transformer. Captions are padded to one length; the mask keeps padding out of the mean."""

    def __init__(self, vocab_size: int, *, max_length: int = 77, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(max_length, WIDTH))
        self.blocks = transformer(depth, heads)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]  # (B, L, WIDTH)
        tokens = self.blocks(tokens, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)  # (B, L, 1)
        return (tokens * mask).sum(dim=1) / mask.sum(dim=1)  # (B, WIDTH)


def transformer(depth: int, heads: int) -> nn.TransformerEncoder:
    """Pre-norm blocks, as in ViT and CLIP."""
    block = nn.TransformerEncoderLayer(
        WIDTH, heads, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(block, depth, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def mined_loss(miner: miners.Miner | None):
    """4. The loss: InfoNCE over the batch, in which each image meets its hardest captions only, and the reverse.

    Mining happens here, on the features of a whole batch, and not in the loader: the model is on this device.
    """

    def loss(output: DualEncoderOutput, batch: mmdata.Batch) -> Tensor:
        return losses.clip_loss(
            output.image_features,  # (B, WIDTH), L2-normalised
            output.text_features,
            output.logit_scale,
            miner=miner,
            valid=batch["valid"],  # rows that could not be decoded, or that fill up the last batch, take no part
            same=(batch["image_hash"], batch["caption_hash"]),
        )

    return loss


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """Share of the highest learning rate: it rises over the first steps, and falls as a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def main() -> None:
    """Train, and print the scores on the validation set after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("val_shards")
    parser.add_argument("--tokenizer", help="a folder, or clip; default: the folder tokenizer in SHARDS")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=128, help="a multiple of 16")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--negatives", type=int, default=32, help="hardest negatives of each row; 0 keeps all")
    parser.add_argument("--mine-after", type=int, default=2, help="epochs with all negatives, before mining begins")
    given = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = torch.bfloat16 if device.type == "cuda" else None
    look(given.shards)
    given.tokenizer = given.tokenizer or str(Path(given.shards) / "tokenizer")
    train, val = make_loaders(given)
    model = DualEncoder(
        ImageTower(given.image_size),
        TextTower(Tokenizer.load(given.tokenizer).vocab_size),
        image_projection=nn.Linear(WIDTH, WIDTH),
        text_projection=nn.Linear(WIDTH, WIDTH),
    ).to(device)
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]  # biases, norms, the scale
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.lr, betas=(0.9, 0.98))
    steps = given.epochs * len(train)  # len() is exact
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps, steps // 10 or 1))

    for epoch in range(given.epochs):
        mines = given.negatives and epoch >= given.mine_after  # a new model's hardest negatives are noise
        loss_function = mined_loss(miners.TopK(given.negatives) if mines else None)
        model.train()
        train.set_epoch(epoch)  # another order, other crops
        for batch in DevicePrefetcher(train, device):  # copies the next batch while this one is used
            step = train_step(model, batch, loss_function, autocast_dtype=precision)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        model.eval()
        val.set_epoch(0)
        # 5. Evaluation: every caption looks for its image, and every image for its captions.
        scores = evaluate_retrieval(model, val)
        print(
            f"epoch {epoch + 1} · loss {step.loss.item():.3f} · rows left out {train.ledger.masked.total()} · "
            f"R@1 image to text {scores['image_to_text_r1']:.1%}, text to image {scores['text_to_image_r1']:.1%}, "
            f"by chance {scores['chance_r1']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
