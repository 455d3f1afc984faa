"""Batches at native resolution: patches, their mask and their shapes, with one number of patches on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmdata import Loader, model_inputs
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.plan import Bucket
from tests.images.placed import patches

from .conftest import Corpus

NATIVE = {"image_buckets": None, "image_patches": [40, 48], "patch_size": 8}
"""Of the corpus's images, those of 48 × 48 pixels need 36 patches, the others 40: they share the smaller number."""


@pytest.fixture
def native(corpus: Corpus) -> Loader:
    return corpus.loader(**NATIVE)


def test_native_batch_has_the_shapes_and_types_of_the_contract(native: Loader):
    texts = ("keys", "captions", "caption_sources")
    for batch in native:
        length, patches = batch["input_ids"].shape[1], batch["pixel_values"].shape[1]
        assert Bucket(length, 0, 0, patches) in native.plan.policy.buckets
        assert {key: (value.dtype, tuple(value.shape)) for key, value in batch.items() if key not in texts} == {
            "pixel_values": (torch.uint8, (8, patches, 8 * 8 * 3)),
            "pixel_attention_mask": (torch.int64, (8, patches)),
            "spatial_shapes": (torch.int64, (8, 2)),
            "input_ids": (torch.int64, (8, length)),
            "attention_mask": (torch.int64, (8, length)),
            "labels": (torch.int64, (8,)),
            "crop": (torch.float32, (8, 4)),
            "flipped": (torch.bool, (8,)),
            "image_hash": (torch.int64, (8,)),
            "caption_hash": (torch.int64, (8,)),
            "caption_numbers": (torch.int64, (8,)),
            "valid": (torch.bool, (8,)),
            "rows": (torch.int64, (8,)),
        }


def test_native_rows_are_those_of_the_corpus(corpus: Corpus, native: Loader):
    transform = PixelTransform("train", crop_scale=(0.3, 0.9), seed=5, patch_size=8)
    seen: list[int] = []
    for batch in native:
        for place in batch["valid"].nonzero().flatten().tolist():
            row = int(batch["rows"][place])
            seen.append(row)
            sample = corpus.samples[row]
            image = EncodedImage(sample.image, sample.info.format, sample.info.orientation, row)
            (high, wide), expected = patches(transform, image, batch["pixel_values"].shape[1])
            assert torch.equal(batch["pixel_values"][place], expected)
            assert batch["spatial_shapes"][place].tolist() == [high, wide]
            mask = batch["pixel_attention_mask"][place]
            assert mask.tolist() == [1] * (high * wide) + [0] * (len(mask) - high * wide)
    assert sorted(seen) == list(range(50))


def test_native_images_share_a_batch_whatever_their_aspect_ratio(corpus: Corpus):
    loader = corpus.loader(**NATIVE, transform="eval", text_buckets=[32])
    batches = list(loader)
    assert [batch["pixel_values"].shape[1] for batch in batches] == [40] * 6 + [48]  # what is left goes to more patches
    shapes = {tuple(shape) for batch in batches[:6] for shape in batch["spatial_shapes"].tolist()}
    assert shapes == {(6, 6), (5, 8), (8, 5)}


def test_native_rows_that_are_masked_are_empty_but_harmless(corpus: Corpus, tmp_path: Path):
    damaged = corpus.copy(tmp_path / "damaged")
    damaged.overwrite(3, "image", b"no image at all")
    damaged.overwrite(8, "caption", b"\xff\xfe")  # the pixels of this row are written before
    loader = damaged.loader(**NATIVE, max_bad_share=1.0)
    batches = list(loader)
    assert sorted(entry.row for entry in loader.ledger) == [3, 8]
    masked = [(batch, place) for batch in batches for place in (~batch["valid"]).nonzero().flatten().tolist()]
    assert len(masked) == 8  # six fill up the last batch
    for batch, place in masked:
        assert (batch["pixel_values"][place] == 0).all()
        assert batch["spatial_shapes"][place].tolist() == [1, 1]
        assert batch["pixel_attention_mask"][place].nonzero().flatten().tolist() == [0]


def test_model_inputs_keep_masks_and_shapes_of_patches(native: Loader):
    assert set(model_inputs(next(iter(native)))) == {
        "pixel_values",
        "pixel_attention_mask",
        "spatial_shapes",
        "input_ids",
        "attention_mask",
        "labels",
    }
