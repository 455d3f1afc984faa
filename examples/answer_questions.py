"""python examples/answer_questions.py SHARDS MODEL     # MODEL: LLaVA or another AutoModelForImageTextToText

Fine-tune a model that answers questions about an image. A caption is a question and its answer: "What is red? the
ball". The loader's workers put it into the model's chat template, and only the answer is trained.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

import mmdata
from mmdata.batch import normalized, valid_inputs
from mmdata.integrations.adapt import pixel_stats

IGNORED = -100
"""A label that the losses of transformers leave out."""


class Chat:
    """Makes of "question? answer" the text of a conversation; see `data.text_transform`.

    Args:
        processor: has the chat template and the token that stands for an image.
        image_tokens: how many of them the model replaces by the features of an image.
    """

    def __init__(self, processor: Any, image_tokens: int) -> None:
        self.processor, self.images = processor, processor.image_token * image_tokens

    def __call__(self, caption: str, _: random.Random) -> str:
        question, mark, answer = caption.partition("?")
        asked = [{"type": "image"}, {"type": "text", "text": question + mark}]
        talk = [{"role": "user", "content": asked}]
        talk.append({"role": "assistant", "content": [{"type": "text", "text": answer.strip()}]})
        return self.processor.apply_chat_template(talk).replace(self.processor.image_token, self.images)

    def header(self) -> str:
        """What the template writes before each answer."""
        talk = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        asked = self.processor.apply_chat_template(talk)
        return self.processor.apply_chat_template(talk, add_generation_prompt=True).removeprefix(asked)


def labels_of(ids: Tensor, mask: Tensor, header: Tensor) -> Tensor:
    """The tokens (B, L) after the header of the answer; `IGNORED` elsewhere, and in a row that was cut before it."""
    found = (ids.unfold(1, len(header), 1) == header).all(2)  # (B, L - len(header) + 1)
    begins = torch.where(found.any(1), found.int().argmax(1) + len(header), ids.shape[1])
    is_answer = torch.arange(ids.shape[1], device=ids.device) >= begins[:, None]
    return ids.where(is_answer & (mask > 0), IGNORED)


def main() -> None:
    """Train for some epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model")
    parser.add_argument("--image-tokens", type=int, default=576, help="of LLaVA 1.5: (336 / 14) squared")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=704, help="tokens of image, question and answer")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--out", type=Path, default=Path("runs/answers"))
    given = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForImageTextToText.from_pretrained(given.model).to(device).train()
    processor = AutoProcessor.from_pretrained(given.model)
    stats = pixel_stats(model, processor.image_processor)  # mean and deviation of pixels that it expects
    chat = Chat(processor, given.image_tokens)
    header = processor.tokenizer(chat.header(), add_special_tokens=False, return_tensors="pt").input_ids[0].to(device)
    loader = mmdata.Loader.from_config(
        {
            "shards": given.shards,
            "tokenizer": given.model,
            "global_batch_size": given.batch_size,
            "image_size": model.config.vision_config.image_size,
            "text_transform": chat,
            "max_length": given.max_length,
            "text_buckets": [given.max_length],  # texts are longer than captions
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    for epoch in range(given.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            inputs = {name: value.to(device) for name, value in valid_inputs(batch).items()}
            inputs["pixel_values"] = normalized(inputs["pixel_values"], *stats)
            labels = labels_of(inputs["input_ids"], inputs["attention_mask"], header)
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1} · loss {loss.item():.3f}", flush=True)
    for part in (model, processor):
        part.save_pretrained(given.out)


if __name__ == "__main__":
    main()
