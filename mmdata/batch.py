"""The batch: the only type that the data half and the GPU half share.

Every array of a batch has the same number of rows B, whatever could or could not be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any, NamedTuple, TypedDict, TypeGuard, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from typing_extensions import NotRequired

MODEL_KEYS = ("pixel_values", "pixel_attention_mask", "spatial_shapes", "input_ids", "attention_mask", "labels")
"""Entries of a batch that a Hugging Face model takes."""


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
"""Mean of red, green and blue, from 0 to 1, with which OpenAI's CLIP and its descendants were trained; SigLIP: 0.5."""
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Their standard deviation; SigLIP: 0.5."""


class Batch(TypedDict):
    """One rank's slice of a global batch, on the CPU until the step moves it.

    Attributes:
        pixel_values: uint8 (B, 3, H, W), RGB, 0 to 255; zeros where not valid. float32 when the loader normalises. At
            native resolution (B, N, patch_size² · 3): patches from left to right and from top to bottom, the values of
            a patch in the order height, width, channel; N is the bucket's number of patches.
        pixel_attention_mask: int64 (B, N), 1 on patches, 0 after the last; the first position is 1 in every row. Only
            at native resolution (`data.image_patches`).
        spatial_shapes: int64 (B, 2), rows and columns of patches of each image; (1, 1) where not valid. Likewise,
            and on the CPU wherever the batch is.
        crop: float32 (B, 4), the part of the upright image that the pixels show: top, left, height and width, in pixels
            of the original. Of a JPEG that was decoded at a fraction of its size the edges may lie between pixels, and
            up to 7 beyond the image. Zeros where not valid, and where a transform of your own made the pixels.
        flipped: bool (B,), True where that part was then mirrored left to right.
        boxes: float32 (B, M, 4), left, top, right and bottom in pixels of the batch; M is the number of boxes of the
            batch's bucket. The entries boxes, boxes_valid, box_labels, box_input_ids, box_attention_mask,
            box_text_hash, keypoints and masks: only with `data.targets`.
        boxes_valid: bool (B, M), False where there is no box; the boxes of a row come first.
        box_labels: int64 (B, M), -1 where there is no box.
        box_input_ids: int64 (B, M, T), the phrase of each box; padding alone where there is none.
        box_attention_mask: int64 (B, M, T), as attention_mask.
        box_text_hash: int64 (B, M), equal for phrases of equal tokens, as cut; 0 where there is none.
        keypoints: float32 (B, M, K, 3), x and y in pixels of the batch, and visibility; zeros where there is no box.
        masks: uint8 (B, H, W), a class for each pixel, 255 where not valid; or (B, M, H, W), 1 where a box's object is.
        input_ids: int64 (B, L), L is the text length of the batch's bucket; padding alone where not valid. This and
            attention_mask: only with `data.tokenizer`.
        attention_mask: int64 (B, L), 1 on tokens, 0 on padding; the first position is 1 in every row.
        labels: int64 (B,), -1 where a row has none; only when the corpus has labels.
        image_hash: int64 (B,), equal for equal image bytes.
        caption_hash: int64 (B,), equal for equal captions; only with `data.tokenizer`.
        negative_input_ids: int64 (B, Lx), a negative caption for each row; Lx is the same in all
            batches. This and the three below: only with `data.negative_captions`.
        negative_attention_mask: int64 (B, Lx), as attention_mask.
        negative_valid: bool (B,), False where the row has none or is not valid itself.
        negative_caption_hash: int64 (B,), as caption_hash, 0 where there is none.
        valid: bool (B,), False where a row is padding or could not be decoded.
        rows: int64 (B,), row numbers in the index; -1 where a row is padding.
        keys: B strings; "" where a row is padding.
        captions: B strings, the text of each row's caption; "" where a row has none that can be used. Only with
            `data.tokenizer`.
        caption_numbers: int64 (B,), which caption that is: its place, from 0, among those of its source that have text;
            -1 where a row is padding. Only with `data.tokenizer`.
        caption_sources: B strings, the source that the caption was drawn from; "" where a row is padding. Only where
            `data.captions` names sources.
    """

    pixel_values: Tensor
    pixel_attention_mask: NotRequired[Tensor]
    spatial_shapes: NotRequired[Tensor]
    crop: NotRequired[Tensor]
    flipped: NotRequired[Tensor]
    boxes: NotRequired[Tensor]
    boxes_valid: NotRequired[Tensor]
    box_labels: NotRequired[Tensor]
    box_input_ids: NotRequired[Tensor]
    box_attention_mask: NotRequired[Tensor]
    box_text_hash: NotRequired[Tensor]
    keypoints: NotRequired[Tensor]
    masks: NotRequired[Tensor]
    input_ids: NotRequired[Tensor]
    attention_mask: NotRequired[Tensor]
    labels: NotRequired[Tensor]
    image_hash: NotRequired[Tensor]
    caption_hash: NotRequired[Tensor]
    negative_input_ids: NotRequired[Tensor]
    negative_attention_mask: NotRequired[Tensor]
    negative_valid: NotRequired[Tensor]
    negative_caption_hash: NotRequired[Tensor]
    valid: Tensor
    rows: Tensor
    keys: list[str]
    captions: NotRequired[list[str]]
    caption_numbers: NotRequired[Tensor]
    caption_sources: NotRequired[list[str]]


class BatchDict(dict[str, Any]):
    """The dictionary of a batch as loaders give it: its repr is a line, where a dict's would print all tensors.

    Attributes:
        moved_valid: of a batch that `to_device` has moved: `valid` as it was on the CPU, and the entry `valid` with the
            number of writes to it until then; else None. To ask a GPU for it is to wait for all that it does.
    """

    __slots__ = ("moved_valid",)

    def __init__(self, *entries: Any, moved_valid: tuple[Tensor, Tensor, int] | None = None, **named: Any) -> None:
        super().__init__(*entries, **named)
        self.moved_valid = moved_valid

    def grid(self, **options: Any) -> Any:
        """A picture of the batch as the model gets it: `mmdata.show(batch, **options)`."""
        from mmdata.picture import show  # only this method needs Pillow

        return show(cast(Batch, self), **options)

    def __repr__(self) -> str:
        entries = [
            f"{name}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"{name}: {type(value).__name__}{f' of {len(value)}' if isinstance(value, Sized) else ''}"
            for name, value in self.items()
        ]
        valid = self.get("valid")
        rows = "" if valid is None else f"{int(valid.sum())} of {len(valid)} rows valid; "
        return f"Batch({rows}{', '.join(entries)})"


def _flatten(batch: BatchDict) -> tuple[list[Any], list[str]]:
    return list(batch.values()), list(batch)


def _flatten_with_keys(batch: BatchDict) -> Any:
    return [(pytree.MappingKey(name), value) for name, value in batch.items()], list(batch)


def _unflatten(values: Iterable[Any], names: list[str]) -> BatchDict:
    return BatchDict(zip(names, values, strict=True))


# torch's tree functions (tree_map, torch.export) look into dict itself, not into classes derived from it.
pytree.register_pytree_node(
    BatchDict,
    _flatten,
    _unflatten,
    serialized_type_name="mmdata.batch.BatchDict",
    flatten_with_keys_fn=_flatten_with_keys,
)


class CaptionBatch(NamedTuple):
    """All captions of some rows, for an evaluation; a `Batch` holds one caption of each row.

    Attributes:
        input_ids: int64 (T, L).
        attention_mask: int64 (T, L), 1 on tokens, 0 on padding; the first position is 1 in every row.
        caption_hash: int64 (T,), equal for equal captions.
        rows: int64 (T,), each caption's row in the index.
    """

    input_ids: Tensor
    attention_mask: Tensor
    caption_hash: Tensor
    rows: Tensor


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """The entries a Hugging Face model takes: `model(**model_inputs(batch))`."""
    return {key: value for key, value in batch.items() if key in MODEL_KEYS and isinstance(value, Tensor)}


def valid_inputs(batch: Batch) -> dict[str, Tensor]:
    """A Hugging Face model's inputs from the rows of a batch that hold data.

    A batch without any gives one empty row: every rank must take part in a step, and one row has no negatives, so that
    its CLIP loss and gradient are 0. The pixels of this row are zeros, its label is -1, and its text is padding, of
    which the first position is attended.

    Returns:
        pixel_values uint8 (b, 3, H, W), input_ids and attention_mask int64 (b, L), labels (b,) where there are any, to
        be left out of a loss where they are -1 (`cross_entropy(…, ignore_index=-1)`, whose mean of no label is NaN); at
        native resolution pixel_values uint8 (b, N, D), pixel_attention_mask (b, N) and spatial_shapes (b, 2).
    """
    valid = _valid_on_host(batch)
    # A batch that was moved to a GPU by hand does not know it: here alone the host waits for the device.
    inputs, rows = model_inputs(batch), (batch["valid"] if valid is None else valid).nonzero().squeeze(1)
    if len(rows) == len(batch["valid"]):
        return inputs
    if len(rows):
        return {n: value.index_select(0, _copied(rows, value.device)) for n, value in inputs.items()}
    # What the first row would have been trained with, had it been usable, must not be trained on without its image.
    empty = {name: value[:1].clone() for name, value in inputs.items()}
    if "labels" in empty:
        empty["labels"].fill_(-1)
    if "attention_mask" in empty:
        empty["attention_mask"].zero_()[:, 0] = 1
    return empty


def normalized(pixel_values: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """Integer pixels to float32 as a model expects them, (value / 255 - mean) / std; floats pass as they are.

    Call it on the device: uint8 is a quarter of the bytes to copy.

    Args:
        pixel_values: (B, 3, H, W), or patches (B, N, patch_size² · 3) of native resolution.
        mean: of each channel, on the scale 0 to 1.
        std: standard deviation of each channel, likewise.
    """
    return standardized(pixel_values, *(_channels(values, pixel_values.device) * 255 for values in (mean, std)))


def _channels(values: Sequence[float], device: torch.device) -> Tensor:
    """(3, 1, 1) float32, filled on the device: to copy a list there, the host would wait for it."""
    return torch.stack([torch.full((1, 1), value, dtype=torch.float32, device=device) for value in values])


def standardized(pixel_values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """As `normalized`, with mean and std as tensors (3, 1, 1) on the scale 0 to 255; the result has their dtype."""
    if pixel_values.is_floating_point():
        return pixel_values
    if pixel_values.ndim == 4:  # (B, 3, H, W)
        return (pixel_values.to(mean.dtype) - mean) / std
    by_channel = pixel_values.unflatten(2, (-1, 3, 1, 1)).to(mean.dtype)  # (B, N, patch_size², 3, 1, 1)
    return ((by_channel - mean) / std).flatten(2)


def _copied(value: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device. Apple's GPU (mps) reads the host's memory late, when it may be of another batch."""
    return value.to(device, non_blocking=torch.device(device).type != "mps")


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The same batch with its tensors on `device`; copies are asynchronous where the memory is pinned.

    `spatial_shapes` stay where they are: a model reads their values as sizes, and would wait for the device. Of `valid`
    the host keeps a copy, for `valid_inputs`.
    """
    moved = {k: _copied(v, device) if to_move(v, k) else v for k, v in batch.items()}
    valid = _valid_on_host(batch)
    if valid is None and torch.device(device).type != "cpu" and "valid" in batch:
        valid = batch["valid"].clone() if batch["valid"].device.type == "cpu" else None  # its own memory may be lent
    now = cast(Tensor, moved.get("valid"))
    known = None if valid is None else (valid, now, _writes(now))
    return cast(Batch, BatchDict(moved, moved_valid=known))


def _valid_on_host(batch: Batch) -> Tensor | None:
    """The host's copy of `valid`; None if there is none, or the entry was replaced or written to since it was moved."""
    host, moved, writes = getattr(batch, "moved_valid", None) or (None, None, 0)
    return host if moved is not None and batch["valid"] is moved and _writes(moved) == writes else None


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # torch counts none to these


def to_move(value: object, name: str) -> TypeGuard[Tensor]:
    """Whether an entry of a batch, by its name, goes to the device."""
    return isinstance(value, Tensor) and name != "spatial_shapes"


def shown(batch: Batch) -> Batch:
    """The same entries in a `BatchDict`."""
    return cast(Batch, BatchDict(batch))
