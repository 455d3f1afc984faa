"""python examples/captioning.py SHARDS VAL_SHARDS MODEL     # MODEL: a VisionEncoderDecoderModel, a folder or a name

Fine-tune a model that writes captions. A new one of two others is made with
`VisionEncoderDecoderModel.from_encoder_decoder_pretrained(IMAGE_MODEL, TEXT_MODEL).save_pretrained("MODEL")`; save the
tokenizer and the image processor beside it. The model, and some captions that it writes, are in OUT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, VisionEncoderDecoderModel

import mmdata
from mmdata.batch import normalized, valid_inputs
from mmdata.integrations.adapt import pixel_stats

IGNORED = -100
"""A label that the losses of transformers leave out."""


def main() -> None:
    """Train for some epochs, then write captions of validation images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("val_shards")
    parser.add_argument("model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a caption; longer ones are cut")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--out", type=Path, default=Path("runs/captioning"))
    given = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = VisionEncoderDecoderModel.from_pretrained(given.model).to(device)
    tokenizer, processor = (kind.from_pretrained(given.model) for kind in (AutoTokenizer, AutoImageProcessor))
    end, start = tokenizer.eos_token_id, model.config.decoder_start_token_id
    model.generation_config.update(decoder_start_token_id=start, eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    stats = pixel_stats(model, processor)  # mean and deviation of pixels that it expects
    data = {
        "tokenizer": given.model,
        "max_length": given.max_length,
        "image_size": model.config.encoder.image_size,
        "global_batch_size": given.batch_size,
    }
    train = mmdata.Loader.from_config({"shards": given.shards, **data})
    val = mmdata.Loader.from_config({"shards": given.val_shards, **data, "transform": "eval", "shuffle": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)

    def pixels_and_labels(batch: mmdata.Batch) -> tuple[Tensor, Tensor]:
        """Labels are the caption's tokens; padding is none. The model shifts them by one itself."""
        inputs = {name: value.to(device) for name, value in valid_inputs(batch).items()}
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
        return normalized(inputs["pixel_values"], *stats), labels

    for epoch in range(given.epochs):
        model.train()
        train.set_epoch(epoch)
        for batch in train:
            pixels, labels = pixels_and_labels(batch)
            loss = model(pixel_values=pixels, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        val.set_epoch(0)  # the same batches each time
        with torch.no_grad():
            found = [model(pixel_values=pixels, labels=labels).loss for pixels, labels in map(pixels_and_labels, val)]
        print(f"epoch {epoch + 1} · loss {loss.item():.3f} · validation {torch.stack(found).mean():.3f}", flush=True)

    batch = next(iter(val))
    pixels, labels = pixels_and_labels(batch)
    written = model.generate(pixel_values=pixels, max_new_tokens=given.max_length)
    true = labels.masked_fill(labels == IGNORED, tokenizer.pad_token_id)
    lines = zip(*(tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (written, true)), strict=True)
    for part in (model, tokenizer, processor):
        part.save_pretrained(given.out)
    (given.out / "captions.txt").write_text("".join(f"{one}\n  true: {two}\n" for one, two in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
