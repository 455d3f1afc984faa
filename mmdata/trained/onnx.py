"""A run as two ONNX models, of images and of texts, with tokenizer, image processor and model card. Any towers."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdata.errors import ConfigError
from mmdata.train import DualEncoder
from mmdata.trained.export import export_folder, save_image_processor, saved_tokenizer
from mmdata.trained.run import TrainedRun

TEXT_INPUTS = ("input_ids", "attention_mask")
MAX_FILE_BYTES = 2_000_000_000
"""A protobuf holds no more: the weights of larger models are in a file beside it."""


def export_to_onnx(run: TrainedRun, out: str | os.PathLike[str]) -> None:
    """Write image.onnx and text.onnx, whose features are L2-normalised.

    Args:
        run: a trained model. image.onnx takes pixel_values, float32 (B, 3, S, S) with S the run's image_size,
            normalised as the saved image processor does it, and gives image_embeds (B, D). text.onnx takes input_ids
            and attention_mask, int64 (B, L) of at most the run's max_length, and gives text_embeds (B, D).
        out: the folder; must not exist, or be empty.

    Raises:
        ConfigError: `out` holds files, or the image tower takes patches.
        ImportError: onnx or onnxscript is missing.
    """
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ImportError(f"--to onnx needs {' and '.join(missing)}: pip install 'mmdata[onnx]'")
    if getattr(run.model.image_tower, "takes_patches", False):
        raise ConfigError(
            f"the image tower of '{run.checkpoint}' is a SigLIP 2 NaFlex, whose patches of any shape torch.onnx does "
            "not export; use --to transformers"
        )
    size, tokenizer = run.config.data.image_size, run.tokenizer
    length = min(getattr(run.model.text_tower, "length", None) or tokenizer.max_length, tokenizer.max_length)
    images = {"pixel_values": torch.zeros(2, 3, size, size, device=run.device)}
    texts = {name: torch.ones(2, length, dtype=torch.long, device=run.device) for name in TEXT_INPUTS}
    rows = {0: torch.export.Dim.DYNAMIC}
    with export_folder(run, out, "onnx") as folder:
        _write(run, "image", images, rows, folder)
        _write(run, "text", texts, {**rows, 1: torch.export.Dim("length", max=length)}, folder)
        save_image_processor(run, folder)
        saved_tokenizer(run, max_length=length, pad_id=tokenizer.pad_id).save_pretrained(str(folder))


class Encoder(nn.Module):
    """One of a model's two functions, `encode_image` and `encode_text`, as a module."""

    def __init__(self, model: DualEncoder, function: str) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.model, self.function)(*inputs)


def _write(run: TrainedRun, kind: str, inputs: dict[str, Tensor], shape: dict[int, Any], folder: Path) -> None:
    """Write image.onnx or text.onnx.

    Args:
        run: the trained model.
        kind: "image" or "text".
        inputs: by name; examples of their shapes.
        shape: dimensions of each that may differ.
        folder: to write into.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(
            Encoder(run.model, f"encode_{kind}").eval(),
            tuple(inputs.values()),
            folder / f"{kind}.onnx",
            dynamo=True,
            dynamic_shapes=((shape,) * len(inputs),),
            input_names=list(inputs),
            output_names=[f"{kind}_embeds"],
            external_data=sum(value.nbytes for value in run.model.state_dict().values()) > MAX_FILE_BYTES,
            verbose=False,
        )
