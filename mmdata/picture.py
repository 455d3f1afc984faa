"""A batch as a picture: what the model gets, for notebooks and `mmdata replay`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, cast

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mmdata.batch import CLIP_MEAN, CLIP_STD, Batch

GAP = 4
"""Pixels between two cells."""
FONT_SIZE = 12
LINE_HEIGHT = 15
CHARACTER_WIDTH = 6
MAX_LINES = 3
"""Lines of text below an image; longer texts are cut."""
MOST_NORMALIZED = 16
"""No normalised pixel is as large: CLIP's are below 3."""
MIN_WIDTH = 112
"""Of a cell, in pixels: below small images there must be room for words."""
PAPER, INK, MASKED = (255, 255, 255), (32, 32, 32), (214, 214, 214)
BOX_COLOURS = ((230, 25, 75), (60, 180, 75), (0, 130, 200), (245, 130, 48), (145, 30, 180), (0, 150, 150))
"""Boxes have them in turn."""
SEEN_THROUGH_GREY = 64
"""Share, of 255, of what a crop leaves out."""


def show(
    batch: Batch,
    *,
    rows: int = 64,
    columns: int | None = None,
    tokenizer: Any = None,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
) -> Image.Image:
    """Draw a batch as the model gets it: each image after crop and augmentation, with its text below.

    The text is the row's caption (`captions`), else its key. A row that is masked is grey. An image of native
    resolution is put together from its patches. Boxes of the batch are outlined.

    Args:
        batch: of a `Loader`, of `mmdata.stream`, or on a GPU; or what `valid_inputs` makes of one.
        rows: the largest number of rows drawn, the first ones.
        columns: cells side by side; None: about as many as there are lines of cells.
        tokenizer: of Hugging Face: the text below is then `input_ids`, decoded, which shows what was cut off.
        mean: of each channel, from 0 to 1; used where `pixel_values` are float, which are taken for normalised, or for
            pixels from 0 to 255 where one is above 16.
        std: standard deviation of each channel, likewise.

    Returns:
        An RGB image of Pillow, which a notebook shows; `.save("batch.png")` writes it.

    Raises:
        ValueError: no batch with `pixel_values`, no tokenizer, or `rows` or `columns` is below 1.
    """
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise ValueError(
            "tokenizer: expected one of transformers, such as "
            f'AutoTokenizer.from_pretrained("openai/clip-vit-base-patch32"): got {tokenizer!r:.100}'
        )
    if "pixel_values" not in batch:
        has = f"it has {', '.join(batch)}" if hasattr(batch, "keys") else f"it is of type {type(batch).__name__}"
        raise ValueError(f"the batch has no pixel_values to draw; {has}")
    if rows < 1 or (columns is not None and columns < 1):
        raise ValueError(f"rows and columns must be 1 or more: got {rows} and {columns}")
    if batch["pixel_values"].is_floating_point() and (batch["pixel_values"] > MOST_NORMALIZED).any():
        mean, std = (0.0,) * 3, (1 / 255,) * 3  # from 0 to 255, as the loader's pixels
    count = min(rows, len(batch["pixel_values"]))
    pixels = [pixels_of(batch, row, mean, std) for row in range(count)]
    texts = [_text_of(batch, row, tokenizer) for row in range(count)]
    width = max([MIN_WIDTH, *(image.shape[1] for image in pixels)])
    height = max((image.shape[0] for image in pixels), default=0)
    lines = [_wrapped(text, width // CHARACTER_WIDTH) for text in texts]
    cell = height + LINE_HEIGHT * max((len(text) for text in lines), default=0)
    across = min(columns or math.ceil(math.sqrt(count)), count) or 1
    size = across * (width + GAP) + GAP, math.ceil(count / across) * (cell + GAP) + GAP
    picture = Image.new("RGB", size, PAPER)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(FONT_SIZE)
    for row, (image, text) in enumerate(zip(pixels, lines, strict=True)):
        left, top = GAP + row % across * (width + GAP), GAP + row // across * (cell + GAP)
        if _is_valid(batch, row):
            drawn = Image.fromarray(image.numpy())
            if "boxes" in batch and "boxes_valid" in batch:
                draw_boxes(drawn, batch["boxes"][row][batch["boxes_valid"][row]].tolist())
            picture.paste(drawn, (left, top))
        else:
            draw.rectangle((left, top, left + width - 1, top + height - 1), fill=MASKED)
        draw.multiline_text((left, top + height), "\n".join(text), fill=INK, font=font, spacing=LINE_HEIGHT - FONT_SIZE)
    return picture


def draw_boxes(image: Image.Image, boxes: Sequence[Sequence[float]], words: Sequence[str] = ()) -> None:
    """Outline boxes in an image, each with its words, if there are any, in its upper left corner.

    Args:
        image: RGB; drawn on.
        boxes: left, top, right and bottom of each, in pixels.
        words: of each box.
    """
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE)
    for i, (left, top, right, bottom) in enumerate(boxes):
        colour = BOX_COLOURS[i % len(BOX_COLOURS)]
        # The last pixel of a box lies before its right and bottom edge, and a thin one has a pixel, too.
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=2)
        if words:
            draw.text((left + 3, top + 1), words[i], fill=colour, font=font, stroke_width=2, stroke_fill=PAPER)


def greyed(image: Image.Image, crop: Sequence[float]) -> Image.Image:
    """An image in which all is grey but a crop of it: top, left, height and width, in pixels, also beyond the image."""
    top, left, height, width = crop
    mask = Image.new("L", image.size, SEEN_THROUGH_GREY)
    ImageDraw.Draw(mask).rectangle((left, top, left + max(0, width - 1), top + max(0, height - 1)), fill=255)
    return Image.composite(image, Image.new("RGB", image.size, MASKED), mask)


def pixels_of(batch: Batch, row: int, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """A row's image as the model gets it, uint8 (H, W, 3), on the CPU. The arguments are those of `show`."""
    pixels = batch["pixel_values"][row].cpu()
    if "spatial_shapes" in batch:
        down, across = cast("list[int]", batch["spatial_shapes"][row].tolist())
        side = math.isqrt(pixels.shape[1] // 3)
        patches = pixels[: down * across].reshape(down, across, side, side, 3)
        pixels = patches.transpose(1, 2).reshape(down * side, across * side, 3)
    else:
        pixels = pixels.permute(1, 2, 0)
    if pixels.is_floating_point():
        pixels = ((pixels * torch.tensor(std) + torch.tensor(mean)) * 255).round().clamp(0, 255)
    return pixels.to(torch.uint8).contiguous()


def _text_of(batch: Batch, row: int, tokenizer: Any) -> str:
    if not _is_valid(batch, row):
        return f"masked: {batch['keys'][row] or 'padding'}"
    if tokenizer is not None and "input_ids" in batch and "attention_mask" in batch:
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        return str(tokenizer.decode(ids.tolist()))
    texts = batch.get("captions") or batch.get("keys")
    return texts[row] if texts else ""


def _is_valid(batch: Batch, row: int) -> bool:
    return "valid" not in batch or bool(batch["valid"][row])


def _wrapped(text: str, characters: int) -> list[str]:
    return textwrap.wrap(text, characters, max_lines=MAX_LINES, placeholder=" …") or [""]
