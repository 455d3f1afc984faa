"""Images that travel as files and become pixels on the device: `data.decode: device`.

Workers read a file's header, choose the crop and hand the file on; `with_pixels` decodes a batch's files on the device
(nvJPEG on a GPU) and crops and resizes there. It uses torchvision alone: workers need no GPU, and the GPU half none of
the workers' decoders.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmdata.errors import ConfigError

logger = logging.getLogger("mmdata")

ENTRIES = ("encoded_images", "image_layout")
"""Entries of a batch whose pixels are not made yet; they stay on the CPU."""
CHUNK_BYTES = 2**28
"""Memory for decoded images and crops in float32 at a time: all of a batch may be many times as large as its pixels."""
PIXELS = 0
"""The orientation of a row that holds the pixels of its crop, not a file."""


class Place(NamedTuple):
    """Where a row's image lies in `encoded_images`, and which part of it the row shows: a row of `image_layout`.

    Attributes:
        begin, end: its bytes; equal where the row has no image.
        orientation: EXIF orientation 1 to 8 of a JPEG file, or `PIXELS`.
        height, width: of the file's image as displayed, in pixels.
        top, bottom, left, right: the part of it; the first pixel, and the one after the last.
        rows, columns: of the crop, in pixels.
    """

    begin: int
    end: int
    orientation: int
    height: int
    width: int
    top: int
    bottom: int
    left: int
    right: int
    rows: int
    columns: int


def with_pixels(batch: Any, device: torch.device | str) -> Any:
    """The batch with its `pixel_values` uint8 (B, 3, H, W) on the device, in place of its files.

    A batch that has pixels comes back as it is. A row whose file does not decode is masked in this batch and in the
    given one, with a warning: its `valid` is False, its pixels are zeros and its text is empty.

    Args:
        batch: a `Batch`, on the CPU.
        device: where to decode. Other than a GPU, the CPU decodes, with libjpeg.

    Raises:
        ConfigError: torchvision cannot decode on this device.
    """
    if ENTRIES[0] not in batch:
        return batch
    device = torch.device(device)
    files, places = batch[ENTRIES[0]], [Place(*place) for place in batch[ENTRIES[1]].tolist()]
    pixels = torch.zeros(len(places), 3, places[0].rows, places[0].columns, dtype=torch.uint8, device=device)
    if device.type != "meta":
        check_decodes(device)
        for row, reason in _decode_into(pixels, files, places):
            logger.warning("sample '%s' is masked: %s", batch["keys"][row], reason)
            _mask(batch, row)
    rest = {name: value for name, value in batch.items() if name not in ENTRIES}
    return type(batch)({"pixel_values": pixels, **rest})


@cache
def check_decodes(device: torch.device) -> None:
    """Raise ConfigError if torchvision cannot decode a JPEG on the device."""
    from torchvision.io import encode_jpeg

    try:
        file: Any = encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
        (image,) = _decoded([file], device)
    except (RuntimeError, ImportError) as error:
        raise ConfigError(f"torchvision cannot decode JPEG on '{device}' ({error}): set data.decode: fast") from error
    assert image.shape == (3, 16, 16)


def orient(image: Tensor, orientation: int) -> Tensor:
    """Apply an EXIF orientation (1 to 8) to a (3, H, W) image; 5 to 8 exchange height and width."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    flips = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation)
    return image.flip(flips) if flips else image


def _decode_into(pixels: Tensor, files: Tensor, places: Sequence[Place]) -> Iterator[tuple[int, str]]:
    """Write each row's crop into `pixels`; gives the rows that failed, with the reason."""
    for row, place in enumerate(places):
        if place.orientation == PIXELS and place.end > place.begin:
            pixels[row] = files[place.begin : place.end].view(pixels.shape[1:]).to(pixels.device)
    for rows in _chunks(places):
        crops = torch.zeros(len(rows), *pixels.shape[1:], device=pixels.device)
        failed: list[int] = []
        images = _each([files[places[row].begin : places[row].end] for row in rows], pixels.device)
        for i, (row, image) in enumerate(zip(rows, images, strict=True)):
            reason = image if isinstance(image, str) else _crop(image, places[row], crops[i])
            if reason:
                failed.append(i)
                yield row, reason
        crops[failed] = 0
        pixels[torch.tensor(rows, device=pixels.device)] = crops.round_().clamp_(0, 255).to(torch.uint8)


def _chunks(places: Sequence[Place]) -> Iterator[list[int]]:
    """Rows that hold files, as many at a time as `CHUNK_BYTES` allows, at least one."""
    chunk: list[int] = []
    size = 0
    for row, place in enumerate(places):
        if place.orientation == PIXELS:
            continue
        own = 3 * (place.height * place.width + 4 * place.rows * place.columns)
        if chunk and size + own > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += own
    if chunk:
        yield chunk


def _each(files: list[Tensor], device: torch.device) -> list[Tensor | str]:
    """The images uint8 (3, h, w) of files, or why one does not decode."""
    try:
        return [*_decoded(files, device)]
    except RuntimeError as error:
        if _is_the_devices(error):
            raise
    # The decoder of a batch does not say which of its files failed.
    found: list[Tensor | str] = []
    for file in files:
        try:
            found += _decoded([file], device)
        except RuntimeError as error:
            if _is_the_devices(error):
                raise
            found.append(f"its image does not decode on '{device}': {str(error).strip().splitlines()[0]}")
    return found


def _is_the_devices(error: RuntimeError) -> bool:
    """Whether an error says nothing about the file: out of memory, or a GPU that has failed."""
    # torchvision turns errors of CUDA into plain ones, with their words.
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "CUDA error", "synchronize CUDA stream")
    )


def _decoded(files: list[Tensor], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    if device.type == "cuda":
        # torchvision's decoder takes memory as work on the current stream would, and writes it from a stream of its own
        # that waits for no other: crops of images that were freed may still be read there.
        torch.cuda.current_stream(device).synchronize()
    found: Any = decode_jpeg(files, ImageReadMode.RGB, device=device)  # of a list: a list
    return found


def _crop(image: Tensor, place: Place, out: Tensor) -> str:
    """Write a row's part of its image into `out` float32 (3, H, W); returns why it cannot be, or ""."""
    image = orient(image, place.orientation)
    if image.shape != (3, place.height, place.width):
        return f"its image has {tuple(image.shape)} values, its header {place.height} × {place.width}"
    region = image[:, place.top : place.bottom, place.left : place.right].float()
    if region.shape != out.shape:
        region = interpolate(region[None], (place.rows, place.columns), mode="bicubic", antialias=True)[0]
    out.copy_(region)
    return ""


def _mask(batch: Any, row: int) -> None:
    """Make a row of a batch on the CPU as the loader makes one whose image is damaged."""
    for name, value in (("valid", False), ("negative_valid", False), ("labels", -1), ("attention_mask", 0)):
        if name in batch:
            batch[name][row] = value
    if "attention_mask" in batch:
        batch["attention_mask"][row, 0] = 1
