"""mmdata.show: a batch as a picture of what the model gets."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

import mmdata
from mmdata.batch import Batch, BatchDict, normalized, valid_inputs
from mmdata.picture import BOX_COLOURS, GAP, MASKED, MIN_WIDTH, draw_boxes, greyed

SIDE = 32


def batch_of(**entries: Any) -> Batch:
    """Two rows of one colour each, the second masked."""
    pixels = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
    pixels[0, 0] = 200
    made = {"pixel_values": pixels, "valid": torch.tensor([True, False]), "rows": torch.tensor([5, 7])}
    return cast(Batch, BatchDict({**made, "keys": ["a", "b"], **entries}))


def corner(picture: Image.Image, place: int) -> tuple[int, ...]:
    """The colour inside a cell of a picture whose cells stand in one line."""
    return tuple(np.asarray(picture)[GAP + 2, GAP + 2 + place * (MIN_WIDTH + GAP)].tolist())


def test_show_draws_pixels_and_greys_masked_rows():
    picture = mmdata.show(batch_of(), columns=2)
    assert (picture.mode, picture.width) == ("RGB", 2 * MIN_WIDTH + 3 * GAP)
    assert [corner(picture, place) for place in (0, 1)] == [(200, 0, 0), MASKED]
    assert np.array_equal(picture, cast(Any, batch_of()).grid(columns=2))


def test_show_undoes_normalisation():
    batch = batch_of()
    batch["pixel_values"] = normalized(batch["pixel_values"])
    assert corner(mmdata.show(batch, columns=2), 0) == (200, 0, 0)


def test_show_draws_a_float_copy_of_pixels_as_they_are():
    batch = batch_of()
    batch["pixel_values"] = batch["pixel_values"].float()
    assert corner(mmdata.show(batch, columns=2), 0) == (200, 0, 0)


def test_show_draws_the_inputs_of_a_model_without_keys_and_valid():
    inputs = cast(Batch, valid_inputs(batch_of()))
    assert inputs.keys() == {"pixel_values"}
    assert corner(mmdata.show(inputs), 0) == (200, 0, 0)


def test_show_puts_patches_together():
    image = np.random.default_rng(3).integers(0, 256, (2 * 8, 3 * 8, 3), dtype=np.uint8)
    # As Siglip2ImageProcessor of transformers cuts them: rows of patches, then rows, columns and channels of a patch.
    patches = image.reshape(2, 8, 3, 8, 3).transpose(0, 2, 1, 3, 4).reshape(6, 8 * 8 * 3)
    padded = np.zeros((2, 10, 8 * 8 * 3), np.uint8)
    padded[0, :6] = patches
    picture = mmdata.show(
        batch_of(pixel_values=torch.from_numpy(padded), spatial_shapes=torch.tensor([[2, 3], [1, 1]])), columns=2
    )
    assert np.array_equal(np.asarray(picture)[GAP : GAP + 16, GAP : GAP + 24], image)


def test_show_outlines_the_boxes_of_a_batch():
    boxes = torch.tensor([[[4.0, 6, 20, 24], [0, 0, 32, 32]], [[0, 0, 32, 32], [0, 0, 0, 0]]])
    valid = torch.tensor([[True, False], [True, False]])
    drawn = np.asarray(mmdata.show(batch_of(boxes=boxes, boxes_valid=valid), columns=2))[GAP : GAP + SIDE]
    expected = np.zeros((SIDE, SIDE, 3), np.uint8)
    expected[...] = (200, 0, 0)
    expected[6:24, 4:20] = BOX_COLOURS[0]
    expected[8:22, 6:18] = (200, 0, 0)
    assert np.array_equal(drawn[:, GAP : GAP + SIDE], expected)
    assert (drawn[:, GAP + MIN_WIDTH + GAP :][:, :SIDE] == MASKED).all()  # the row that is masked


@pytest.mark.parametrize("box", [(5.0, 5.0, 5.0, 5.0), (5.2, 0.0, 5.4, 32.0), (-40.0, -3.0, 90.0, 4.0)])
def test_boxes_that_are_thin_or_reach_beyond_the_image_are_drawn(box: tuple[float, float, float, float]):
    image = Image.new("RGB", (SIDE, SIDE))
    draw_boxes(image, [box])
    assert (np.asarray(image) == BOX_COLOURS[0]).all(axis=2).any()


def test_words_stand_in_the_corner_of_their_box():
    image = Image.new("RGB", (100, 60))
    draw_boxes(image, [(40, 20, 90, 50)], ["dog"])
    changed = np.argwhere(np.asarray(image).any(axis=2))
    assert (changed.min(axis=0) >= (20, 40)).all()
    assert (changed.max(axis=0) < (50, 90)).all()
    assert (np.asarray(image)[23:40, 43:70] == 255).any()  # light edges of the letters


@pytest.mark.parametrize("crop", [(8, 4, 16, 16), (7.6, 4.4, 16.2, 15.2), (16.0, -8.0, 48.0, 24.0), (3, 3, 0.2, 0.2)])
def test_all_but_a_crop_is_greyed(crop: tuple[float, float, float, float]):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    before, after = np.asarray(image).astype(int), np.asarray(greyed(image, crop)).astype(int)
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    top, left, height, width = crop
    # Of pixels at the edge either is right: the edge may lie between two.
    outwards = np.stack([top - rows, rows - top - height, left - columns, columns - left - width]).max(axis=0)
    assert np.array_equal(after[outwards < -1], before[outwards < -1])
    assert np.abs(after[outwards > 1] - MASKED[0]).max() <= 0.26 * MASKED[0]  # a quarter of what it was, rounded


def test_show_writes_what_was_tokenized_below_the_image():
    class Words:
        def decode(self, ids: list[int]) -> str:
            assert ids == [4, 5]
            return "four five"

    ids = {"input_ids": torch.tensor([[4, 5, 0], [0, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    below = [
        np.asarray(mmdata.show(batch_of(**ids, **more), columns=2, tokenizer=tokenizer))[GAP + SIDE :, :MIN_WIDTH]
        for tokenizer, more in ((Words(), {}), (None, {"captions": ["four five", ""]}), (None, {}))
    ]
    assert np.array_equal(below[0], below[1])
    assert below[0].min() < 100, "there are letters"
    assert below[1].shape != below[2].shape or not np.array_equal(below[1], below[2])  # the key


def test_show_draws_the_first_rows_alone_and_an_empty_batch():
    assert mmdata.show(batch_of(), rows=1).width == MIN_WIDTH + 2 * GAP
    empty = {"pixel_values": torch.zeros(0, 3, 8, 8), "valid": torch.zeros(0, dtype=torch.bool), "keys": []}
    assert mmdata.show(batch_of(**empty)).height > 0


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ({}, {"rows": 0}, "rows and columns must be 1 or more: got 0 and None"),
        ({}, {"columns": 0}, "rows and columns must be 1 or more: got 64 and 0"),
        (
            {},
            {"tokenizer": "clip"},
            "tokenizer: expected one of transformers, such as "
            "AutoTokenizer.from_pretrained(\"openai/clip-vit-base-patch32\"): got 'clip'",
        ),
    ],
)
def test_show_refuses_what_draws_nothing(entries: dict[str, Any], options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mmdata.show(batch_of(**entries), **options)


def test_show_names_what_a_batch_without_pixels_has():
    batch = batch_of()
    del cast(Any, batch)["pixel_values"]
    with pytest.raises(ValueError, match=r"^the batch has no pixel_values to draw; it has valid, rows, keys$"):
        mmdata.show(batch)
    with pytest.raises(ValueError, match=r"^the batch has no pixel_values to draw; it is of type list$"):
        mmdata.show(cast(Any, ["a caption"]))
