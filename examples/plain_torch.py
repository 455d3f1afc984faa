"""python examples/plain_torch.py SHARDS MODEL --steps 1000     # MODEL: a folder with a tokenizer, or a hub name

Fine-tune a CLIP in a loop of your own, with mixed precision, accumulation and clipping. Ctrl-C writes a checkpoint, and
the same command continues with the next batch; after `kill -9` it continues from the last checkpoint. Its updates are
those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import CLIPModel

import mmdata
from mmdata.batch import normalized, valid_inputs
from mmdata.integrations.adapt import pixel_stats


def main() -> None:
    """Train for some steps; a checkpoint that is there is resumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an update; each is contrasted alone")
    types = ["float32", "bfloat16", "float16"]
    parser.add_argument(
        "--dtype", choices=types, help="of autocast; default: bfloat16 on a GPU that has it, or float32"
    )
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/plain_torch.pt"))
    given = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("this loop is one process: start it with python, not with torchrun")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # what is left in float32: TF32 on a GPU
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    given.dtype = given.dtype or ("bfloat16" if has_bfloat16 else "float32")
    model = CLIPModel.from_pretrained(given.model).to(device).train()  # from_pretrained returns it in eval mode
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=given.dtype == "float16")  # else it does nothing
    autocast = torch.autocast(device.type, getattr(torch, given.dtype), enabled=given.dtype != "float32")
    loader = mmdata.Loader.from_config(
        {
            "shards": given.shards,
            "tokenizer": given.model,
            "global_batch_size": given.batch_size,
            "image_size": model.config.vision_config.image_size,
            "max_length": model.config.text_config.max_position_embeddings,
        }
    )
    stats = pixel_stats(model)  # mean and deviation of pixels that it expects
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "loader": loader}
    step = 0
    if given.checkpoint.is_file():
        state = torch.load(given.checkpoint, weights_only=True, map_location="cpu")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])  # of dropout on a CPU; on a GPU see torch.cuda.get_rng_state
        step = state["step"]

    def save() -> None:
        state = {name: part.state_dict() for name, part in parts.items()}
        given.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        aside = given.checkpoint.with_suffix(".part")
        torch.save({**state, "rng": torch.get_rng_state(), "step": step}, aside)
        os.replace(aside, given.checkpoint)  # a kill leaves the old checkpoint or the new one

    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))

    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch, each in another order
    while step < given.steps and not stopped:
        loss = torch.zeros((), device=device)
        for _ in range(given.accumulate):
            inputs = valid_inputs(next(batches))  # before the copy: on a GPU it would wait for the step before
            inputs = {name: value.to(device) for name, value in inputs.items()}
            inputs["pixel_values"] = normalized(inputs["pixel_values"], *stats)  # uint8 until here
            with autocast:
                part = model(**inputs, return_loss=True).loss / given.accumulate
            scaler.scale(part).backward()
            loss += part.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0 or step == given.steps:
            print(f"step {step} · loss {loss.item():.3f} · padding {loader.stats.padding_share:.1%}", flush=True)
        if step % given.save_steps == 0:
            save()
    save()
    if stopped:
        sys.exit(f"stopped after step {step}; the same command continues")


if __name__ == "__main__":
    main()
