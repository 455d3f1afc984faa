"""What every foreign loop needs: batches that do not change, ranks that agree, and a model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from mmdata.batch import Batch, model_inputs
from mmdata.errors import ConfigError, DataError
from mmdata.launcher import launched
from mmdata.loader import Loader
from mmdata.streaming import Stream
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather

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
        return judged_together(self.loader)


JUDGE_EVERY = 100
"""Batches after which the ranks tell each other how many rows could not be used; a GPU is waited for then."""


def judged_together(loader: Loader | Stream) -> Iterator[Batch]:
    """The batches of a loader, or of a stream with `steps_per_epoch`.

    Whether too many rows could not be used is judged over all ranks.

    It is judged at every hundredth batch and at the last one of an epoch. All ranks must iterate in step, as they do
    while training. A loader of one rank judges by itself.

    Args:
        loader: this rank's.

    Raises:
        DataError: too many rows could not be used, over all ranks; on every rank, at the same batch.
    """
    if loader.world_size == 1 or loader.world_size != collectives.world_size():
        yield from loader
        return

    # A stream on several ranks has a number of steps that is the same in each epoch.
    @cache
    def num_steps(epoch: int) -> int:
        return loader.plan.num_steps(epoch) if isinstance(loader, Loader) else len(loader)

    def judged(batch: Batch) -> Batch:
        state = loader.state_dict()
        if state["step"] % JUDGE_EVERY == 0 or state["step"] == num_steps(state["epoch"]):
            _judge(loader)
        return batch

    yield from map(judged, loader)  # no name holds a batch that the user has let go: its memory is used again


def _judge(loader: Loader | Stream) -> None:
    states = gather(loader.state_dict(), dist.group.WORLD)
    try:
        loader.check_rows(loader.merge_states(states))
    except DataError as error:
        raise DataError(f"over {len(states)} ranks, {error}") from None


def check_launched(world_size: int, *, trainer: str, remedy: str) -> None:
    """Raise where a trainer runs alone, or with other ranks, in one of several processes that a launcher has started.

    Each of them would train on the same rows and write into the same folder.

    Args:
        world_size: that the trainer has found.
        trainer: its name, for the message.
        remedy: a clause for the message.

    Raises:
        ConfigError: RANK and WORLD_SIZE in the environment say another number of processes.
    """
    found = launched()
    if found is not None and found[1] != world_size:
        raise ConfigError(
            f"this process was started as rank {found[0]} of {found[1]} (RANK and WORLD_SIZE in the environment), and "
            f"{trainer} has a world of {world_size}: every process would train on the same rows and write the same "
            f"files; {remedy}"
        )


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
