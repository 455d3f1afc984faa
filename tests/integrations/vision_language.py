"""A tiny Llava, as TRL fine-tunes it on a loader's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from trl import SFTConfig, SFTTrainer

import mmdata
from mmdata.integrations.huggingface import as_dataset

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def asked(row: dict[str, Any]) -> dict[str, Any]:
    """TRL's form of an image with a prompt and its completion."""
    question, answer = ({"role": "user", "content": "what is this?"}, {"role": "assistant", "content": row["text"]})
    return {"images": [row["image"]], "prompt": [question], "completion": [answer]}


def fine_tuner(
    loader: mmdata.Loader, tokenizer: str, out: Path, batch_size: int, arguments: dict[str, Any]
) -> SFTTrainer:
    """TRL's trainer of the model on the loader's rows."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        images,
        words,
        patch_size=16,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    small["num_attention_heads"] = 2
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**small, image_size=32, patch_size=16),
        text_config=LlamaConfig(**small, vocab_size=len(words), num_key_value_heads=2),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    return SFTTrainer(
        model=LlavaForConditionalGeneration(config),
        args=SFTConfig(str(out), per_device_train_batch_size=batch_size, max_length=None, **arguments),
        train_dataset=as_dataset(loader, row=asked),
        processing_class=processor,
    )
