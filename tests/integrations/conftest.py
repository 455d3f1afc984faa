"""Shards, settings and a tiny CLIP for the loops of others; all made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata.images import ImageInfo
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.shard_writer import ShardWriter

ROWS = 22  # with batches of 8: two full steps and one with two masked rows


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    """The section `data` of settings on two shards with 22 rows."""
    return write(tmp_path_factory.mktemp("shards"), photo, labels=False)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    """As `data`; each row has a label."""
    return write(tmp_path_factory.mktemp("labelled"), photo, labels=True)


@pytest.fixture(scope="session")
def boxed(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    """As `data`; each row has up to three boxes, which batches have too."""
    data = write(tmp_path_factory.mktemp("boxed"), photo, labels=False, boxes=True)
    return data | {"targets": {"boxes": "json:boxes", "box_buckets": [3]}}


def write(folder: Path, photo: Any, *, labels: bool, boxes: bool = False, rows: int = ROWS) -> dict[str, Any]:
    """The corpus, and settings for it."""
    rng = np.random.default_rng(0)
    captions = [" ".join(rng.choice(["a", "red", "blue", "dog", "cat"], size=2 + 3 * (i % 3))) for i in range(rows)]
    train_tokenizer(captions, folder / "tokenizer", vocab_size=300, max_length=32)
    tokenizer = Tokenizer.load(folder / "tokenizer", max_length=32)
    with ShardWriter(folder, shard_rows=12, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint) as writer:
        for i, caption in enumerate(captions):
            label = i % 5 if labels else None
            image = photo(40, 40, seed=i)
            extra = {"boxes": [[k, 2, 20, 30] for k in range(i % 4)]} if boxes else None
            writer.write(Sample(f"{i:04d}", image, ImageInfo("JPEG", 40, 40, 1), [caption], label=label, extra=extra))
    return {
        "shards": str(folder),
        "tokenizer": str(folder / "tokenizer"),
        "global_batch_size": 8,
        "image_size": 32,
        "max_length": 32,
        "text_buckets": 2,
    }


@pytest.fixture
def clip(tiny_clip: Any) -> Any:
    """A CLIPModel of 60,000 parameters for images of 32 × 32 and texts of 32 tokens."""
    return tiny_clip()


@pytest.fixture(scope="session")
def tiny_clip() -> Any:
    """`tiny_clip()` makes such a model, always of the same weights."""
    return make_clip


def make_clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": 300, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1}
    vision = small | {"image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
