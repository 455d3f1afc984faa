"""What every foreign loop needs: batches that do not change, and a model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmdata.batch import Batch, model_inputs
from mmdata.loader import Loader

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of RGB values from 0 to 1, as OpenAI's CLIP and its descendants were trained. SigLIP: 0.5 for all."""


class SameEpoch:
    """A loader that gives its first epoch each time: an evaluation must not vary with captions or order.

    Args:
        loader: whose epochs otherwise differ.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self.loader.set_epoch(0)
        return iter(self.loader)


def valid_inputs(batch: Batch) -> dict[str, Tensor]:
    """A Hugging Face model's inputs from the rows of a batch that hold data.

    A batch without any keeps its first, empty row: every rank must take part in a step, and one row has no
    negatives, so that its CLIP loss and gradient are 0.

    Returns:
        pixel_values uint8 (b, 3, H, W), input_ids and attention_mask int64 (b, L), labels (b,) where there are any; at
        native resolution pixel_values uint8 (b, N, D), pixel_attention_mask (b, N) and spatial_shapes (b, 2).
    """
    valid = batch["valid"].clone()
    if not bool(valid.any()):
        valid[0] = True
    return {name: value if bool(valid.all()) else value[valid] for name, value in model_inputs(batch).items()}


def normalized(pixel_values: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """uint8 (B, 3, H, W) to float32, as a model expects them; floats pass as they are. Run it on the device.

    Patches (B, N, patch_size² · 3) of native resolution likewise.
    """
    if pixel_values.is_floating_point():
        return pixel_values
    shift = torch.tensor(mean, device=pixel_values.device).view(3, 1, 1)
    scale = torch.tensor(std, device=pixel_values.device).view(3, 1, 1)
    if pixel_values.ndim == 3:
        by_channel = pixel_values.unflatten(2, (-1, 3, 1, 1))  # (B, N, patch_size², 3, 1, 1)
        return ((by_channel.float() / 255 - shift) / scale).flatten(2)
    return (pixel_values.float() / 255 - shift) / scale
