"""Fine-tune a CLIP in a loop of your own: plain torch, resumable at any batch.

python examples/plain_torch.py SHARDS MODEL --steps 1000     # MODEL: a folder or a Hugging Face name
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import CLIPModel

import mmdata
from mmdata.batch import normalized, to_device, valid_inputs


def main() -> None:
    """Train for some steps; a checkpoint that is there is resumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/plain_torch.pt"))
    given = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("this loop is one process: start it with python, not with torchrun")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = CLIPModel.from_pretrained(given.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    loader = mmdata.Loader.from_config(
        {
            "shards": given.shards,
            "tokenizer": given.model,
            "global_batch_size": given.batch_size,
            "image_size": model.config.vision_config.image_size,
            "max_length": model.config.text_config.max_position_embeddings,
        }
    )
    step = 0
    if given.checkpoint.is_file():
        state = torch.load(given.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        step = state["step"]

    model.train()
    while step < given.steps:
        for batch in loader:  # the rest of this epoch; the next round gives the next epoch, in another order
            inputs = valid_inputs(to_device(batch, device))
            inputs["pixel_values"] = normalized(inputs["pixel_values"])  # uint8 until here
            loss = model(**inputs, return_loss=True).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == given.steps:
                print(f"step {step} · loss {loss.item():.3f} · padding {loader.stats.padding_share:.1%}")
            if step == given.steps:
                break

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    given.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**state, "step": step}, given.checkpoint)


if __name__ == "__main__":
    main()
