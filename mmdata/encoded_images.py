"""Images that travel as files and become pixels on the device: `data.decode: device`.

Workers read a file's header, choose the crop and hand the file on; `with_pixels` decodes a batch's files on the device
(nvJPEG on a GPU) and crops and resizes there. It uses torchvision alone: workers need no GPU, and the GPU half none of
the workers' decoders.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from mmdata.errors import ConfigError

logger = logging.getLogger("mmdata")

ENTRIES = ("encoded_images", "image_layout")
"""Entries of a batch whose pixels are not made yet; they stay on the CPU."""
CHUNK_BYTES = 2**28
"""Memory for decoded images and crops in float32 at a time: all of a batch may be many times as large as its pixels."""
PIXELS = 0
"""The orientation of a row that holds the pixels of its crop, not a file."""
MOST_SHRINKING = 32
"""Times that a GPU's antialiased interpolation can shrink an image: its kernel's memory ends at about 47."""

Refuse = Callable[[Any, int, str], None]
"""Takes a batch, the place of a row in it, and why its image does not decode."""


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


def with_pixels(batch: Any, device: torch.device | str, *, refuse: Refuse | None = None) -> Any:
    """The batch with its `pixel_values` uint8 (B, 3, H, W) on the device, in place of its files.

    A batch that has pixels comes back as it is. A row whose file does not decode is masked in this batch and in the
    given one: its `valid` is False, its pixels are zeros, and of its text the first position alone is
    attended; its token ids stay.

    Args:
        batch: a `Batch`, on the CPU.
        device: where to decode. Other than a GPU, the CPU decodes, with libjpeg.
        refuse: called for each such row; None: the batch's own, which tells the loader, or else a warning is logged.

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
        refuse = refuse or refuse_of(batch)
        for row, reason in _decode_into(pixels, files, places):
            refuse(batch, row, reason)
            _mask(batch, row)
    rest = {name: value for name, value in batch.items() if name not in ENTRIES}
    return type(batch)({"pixel_values": pixels, **rest})


def refuse_of(batch: Any) -> Refuse:
    """What a batch's loader is told refused rows by; a warning where it has none."""
    return getattr(batch, "refuse", None) or _warn


def _warn(batch: Any, row: int, reason: str) -> None:
    logger.warning("sample '%s' is masked: %s", batch["keys"][row], reason)


@cache
def check_decodes(device: torch.device) -> None:
    """Raise ConfigError if torchvision cannot decode a JPEG on the device."""
    from torchvision.io import encode_jpeg

    try:
        file: Any = encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
        (image,) = _decoded([file], device)
    except (RuntimeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(f"torchvision cannot decode JPEG on '{device}' ({error}): set data.decode: fast") from error
    assert image.shape == (3, 16, 16)


def orient(image: Tensor, orientation: int) -> Tensor:
    """Apply an EXIF orientation (1 to 8) to a (3, H, W) image; 5 to 8 exchange height and width."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    flips = _FLIPS.get(orientation)
    return image.flip(flips) if flips else image


_FLIPS = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}
"""Dimensions of (3, H, W) that each EXIF orientation flips, after height and width were exchanged."""


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
        region = (place.bottom - place.top) * (place.right - place.left)
        own = 3 * (place.height * place.width + 4 * region + 4 * place.rows * place.columns)
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
        if not _is_the_files(error, device):
            raise
    # The decoder of a batch does not say which of its files failed.
    found: list[Tensor | str] = []
    for file in files:
        try:
            found += _decoded([file], device)
        except RuntimeError as error:
            if not _is_the_files(error, device):
                raise
            found.append(f"its image does not decode on '{device}': {str(error).strip().splitlines()[0]}")
    return found


_OF_FILES = re.compile(r"[Dd]ecode[^:]*: (3|4|9|10)\s*$|Unknown chroma subsampling|[Uu]nsupported", re.MULTILINE)
"""What torchvision says of a file that nvJPEG refuses: the status that its message ends with (3: a bad JPEG, 4: a JPEG
that it does not support, 9: an incomplete one, 10: of an unsupported kind), or words of its own. Any other status, such
as 5 (no memory) or 6 (execution failed), says nothing of the file."""


def _is_the_files(error: RuntimeError, device: torch.device) -> bool:
    """Whether an error says that a file does not decode, not that a GPU has failed or has no memory left."""
    if device.type != "cuda":
        return not isinstance(error, torch.OutOfMemoryError)
    return _OF_FILES.search(str(error).strip().splitlines()[0]) is not None


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
    stored = (place.width, place.height) if place.orientation >= 5 else (place.height, place.width)
    if image.shape != (3, *stored):
        return f"its image has {tuple(image.shape)} values, its header {place.height} × {place.width}"
    rows, columns = _stored_part(place)
    region = orient(image[:, rows, columns], place.orientation).float()
    if region.shape != out.shape:
        region = _resized(region, (place.rows, place.columns), most=MOST_SHRINKING if out.is_cuda else None)
    out.copy_(region)
    return ""


def _stored_part(place: Place) -> tuple[slice, slice]:
    """Rows and columns, in an image as its file stores it, of the part of it that a row shows."""
    top, bottom, left, right = place.top, place.bottom, place.left, place.right
    flips = _FLIPS.get(place.orientation, ())
    if 1 in flips:
        top, bottom = place.height - bottom, place.height - top
    if 2 in flips:
        left, right = place.width - right, place.width - left
    rows, columns = slice(top, bottom), slice(left, right)
    return (columns, rows) if place.orientation >= 5 else (rows, columns)


def _resized(region: Tensor, size: tuple[int, int], *, most: int | None) -> Tensor:
    """A region float32 (3, h, w) in another size, bicubic with antialias.

    Args:
        region: of an image.
        size: (height, width) to give it.
        most: times that the interpolation may shrink it; means of whole squares of pixels do the rest. None: any.
    """
    times = max(region.shape[1] / size[0], region.shape[2] / size[1])
    if most is not None and times > most:
        squares = (math.ceil(region.shape[1] / size[0] / most), math.ceil(region.shape[2] / size[1] / most))
        region = avg_pool2d(region[None], squares, ceil_mode=True, count_include_pad=False)[0]
    return interpolate(region[None], size, mode="bicubic", antialias=True)[0]


def _mask(batch: Any, row: int) -> None:
    """Mask a row of a batch on the CPU: as the loader does, but for its token ids and fields, which stay."""
    for name, value in (("valid", False), ("negative_valid", False), ("labels", -1), ("attention_mask", 0)):
        if name in batch:
            batch[name][row] = value
    if "attention_mask" in batch:
        batch["attention_mask"][row, 0] = 1
