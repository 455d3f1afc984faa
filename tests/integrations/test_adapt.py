"""What every foreign loop needs, on literal batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdata.batch import CLIP_MEAN, CLIP_STD, Batch, normalized, to_device, valid_inputs
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError
from mmdata.integrations.adapt import SameEpoch
from mmdata.loader import Loader


def batch(valid: list[bool]) -> Batch:
    return {
        "pixel_values": torch.arange(len(valid) * 3, dtype=torch.uint8).view(-1, 3, 1, 1),
        "input_ids": torch.arange(len(valid)).view(-1, 1),
        "attention_mask": torch.ones(len(valid), 1, dtype=torch.int64),
        "labels": torch.arange(len(valid)),
        "valid": torch.tensor(valid),
        "rows": torch.arange(len(valid)),
        "keys": [str(i) for i in range(len(valid))],
    }


@pytest.mark.parametrize(
    ("valid", "kept"),
    [([True, True, True], [0, 1, 2]), ([False, True, True], [1, 2])],
)
def test_valid_inputs_keeps_valid_rows(valid: list[bool], kept: list[int]):
    given = batch(valid)
    inputs = valid_inputs(given)
    assert set(inputs) == {"pixel_values", "input_ids", "attention_mask", "labels"}
    assert inputs["labels"].tolist() == inputs["input_ids"].flatten().tolist() == kept
    assert inputs["pixel_values"].shape == (len(kept), 3, 1, 1)
    assert given["valid"].tolist() == valid  # the batch itself is left as it was


@pytest.mark.parametrize(("valid", "rows"), [([True, True], 2), ([False, True], 1), ([False, False], 1)])
def test_valid_inputs_and_pixels_of_a_moved_batch_do_not_ask_the_device(valid: list[bool], rows: int):
    moved = to_device(batch(valid), "meta")  # has no numbers: nonzero and tolist raise there
    inputs = valid_inputs(moved)
    assert {name: (value.device.type, len(value)) for name, value in inputs.items()} == dict.fromkeys(
        inputs, ("meta", rows)
    )
    pixels = normalized(inputs["pixel_values"])
    assert (pixels.device.type, pixels.dtype, len(pixels)) == ("meta", torch.float32, rows)


def test_a_moved_batch_knows_its_valid_rows_when_the_memory_is_used_again():
    given = batch([False, True])
    moved = to_device(given, "meta")
    given["valid"].fill_(True)
    assert len(valid_inputs(to_device(moved, "meta"))["labels"]) == 1


def test_rows_that_are_masked_after_the_move_are_left_out():
    moved = to_device(batch([True, True, True]), "meta")
    moved["valid"] = torch.tensor([False, True, False])
    assert valid_inputs(moved)["labels"].shape == (1,)
    moved = to_device(batch([True, True, True]), "meta")
    moved["valid"][0] = False
    with pytest.raises(NotImplementedError):  # the device is asked, and meta has no numbers
        valid_inputs(moved)
    again = to_device(batch([True, True, True]), "meta")
    again["valid"] = torch.tensor([False, True, False])
    assert valid_inputs(to_device(again, "meta"))["labels"].shape == (1,)


def test_normalized_has_clips_mean_and_deviation_to_the_last_bit():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, -1, -1)
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (CLIP_MEAN, CLIP_STD))
    assert torch.equal(normalized(pixels), (pixels.float() - mean) / std)


def test_valid_inputs_of_a_batch_without_data_have_one_row_without_label_and_text():
    given = batch([False, False, False])
    given["labels"] = torch.tensor([3, 1, 2])
    given["attention_mask"] = torch.ones(3, 4, dtype=torch.int64)
    inputs = valid_inputs(given)
    assert {name: len(value) for name, value in inputs.items()} == dict.fromkeys(inputs, 1)
    assert inputs["labels"].tolist() == [-1]
    assert inputs["attention_mask"].tolist() == [[1, 0, 0, 0]]
    assert given["labels"].tolist() == [3, 1, 2]  # the batch itself is left as it was
    assert given["attention_mask"].all()


def test_clip_loss_of_a_single_row_is_nothing(clip: Any):
    inputs = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}
    loss = clip(**inputs, pixel_values=torch.zeros(1, 3, 32, 32), return_loss=True).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in clip.parameters())


def test_normalized_agrees_with_transformers():
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor(OPENAI_CLIP_MEAN).view(3, 1, 1), torch.tensor(OPENAI_CLIP_STD).view(3, 1, 1)
    torch.testing.assert_close(normalized(pixels), (pixels / 255 - mean) / std)
    half = normalized(pixels, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    torch.testing.assert_close(half, pixels / 127.5 - 1)
    assert normalized(half) is half


def test_normalized_takes_patches_as_transformers_makes_them():
    from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor

    image = torch.randint(0, 256, (3, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    patches, expected = (
        Siglip2ImageProcessor(patch_size=8, max_num_patches=6, do_resize=False, image_mean=mean, image_std=std)(
            image, return_tensors="pt", do_rescale=floats, do_normalize=floats
        )["pixel_values"]
        for floats in (False, True)
    )
    torch.testing.assert_close(normalized(patches.to(torch.uint8), mean, std), expected)


def test_same_epoch_repeats_itself(data: dict[str, Any]):
    loader = SameEpoch(Loader.from_config(data))
    first, second = ([made["rows"].tolist() for made in loader] for _ in range(2))
    assert first == second
    assert len(loader) == len(first) == 3


def test_evaluation_data_changes_what_an_evaluation_needs(data: dict[str, Any]):
    given = DataConfig(**data, val={"shards": "val"})
    found = evaluation_data(given)
    assert (found.shards, found.transform, found.shuffle, found.loading.num_processes) == ("val", "eval", False, 0)
    changes = {"shards": given.shards, "transform": "train", "shuffle": True}
    assert found.with_loading(num_processes="auto").model_copy(update=changes) == given
    with pytest.raises(ConfigError, match=r"data\.val is not set: there is nothing to evaluate on"):
        evaluation_data(DataConfig(**data))
