"""The queue: features of earlier batches as further negatives.

Every rank holds all rows of the global batches, so a run resumes on any number of ranks with the same queue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.train.accelerator import widest
from mmdata.train.keys import check_keys
from mmdata.train.losses.pairs import ExtraNegatives
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.ranks import collectives


class FeatureQueue:
    """The last rows of global batches: features without gradient, keys, and the step that made each.

    Args:
        rows: kept of images and of texts; 2 · `rows` · D · 4 bytes on each device.
        after_steps: updates before the first batch is kept: the features of a young model are soon out of date.
        device: where `load_state_dict` puts them.

    Example:
        With rows=8 and batches of 6 the third batch is contrasted with rows 4 and 5 of the first and all 6 of the
        second.

    Source: Wang et al. 2020, cross-batch memory (arXiv:1912.06798).
    """

    def __init__(self, rows: int, after_steps: int = 0, *, device: torch.device | str = "cpu") -> None:
        self.rows, self.after_steps, self.device = rows, after_steps, device
        self._next = 0  # slot of the next row
        self._kept: dict[str, Tensor] = {}

    def negatives(self) -> tuple[ExtraNegatives, ExtraNegatives] | None:
        """Images and texts, each with `image_hash` and `caption_hash` as `same`; None before there are any."""
        if not self._kept:
            return None
        same, valid = self._kept["keys"].unbind(1), self._kept["valid"]
        return ExtraNegatives(self._kept["images"], same, valid), ExtraNegatives(self._kept["texts"], same, valid)

    @torch.no_grad()
    def keep(self, output: DualEncoderOutput, batch: Batch, step: int) -> None:
        """Add a batch after its update; the oldest rows leave. A collective.

        Rows with features that are not finite (of an update that a scaler leaves out) are kept as not valid.

        Args:
            output: what the model made of this rank's rows.
            batch: this rank's rows; B equal on all ranks.
            step: updates made before this one.

        Raises:
            ValueError: the batch has no hashes, or hashes that are no integers.
        """
        if step < self.after_steps:
            return
        keys = torch.stack(keys_of(batch), dim=1)  # (B, 2)
        features = torch.cat(output[:2], dim=1)  # (B, 2 D)
        valid = batch["valid"] & features.isfinite().all(1)
        keys = collectives.gather(torch.cat([keys, valid.long()[:, None]], dim=1))  # (N, 3)
        precise = torch.promote_types(features.dtype, torch.float32)
        images, texts = collectives.gather(features.to(precise)).chunk(2, dim=1)  # (N, D) each
        new = {"images": images, "texts": texts, "keys": keys[:, :2], "valid": keys[:, 2].bool()}
        new["written"] = torch.full_like(keys[:, 0], step)
        if not self._kept:
            self._kept = {name: value.new_zeros(self.rows, *value.shape[1:]) for name, value in new.items()}
        count = min(len(keys), self.rows)
        slots = (self._next + torch.arange(count, device=keys.device)) % self.rows
        for name, value in new.items():
            self._kept[name][slots] = value[-count:]
        self._next = (self._next + count) % self.rows

    def telemetry(self, step: int) -> dict[str, float | list[float]]:
        """The number of valid rows, and their mean age in steps after `step` updates."""
        valid, written = (self._kept.get(name, torch.zeros(0)) for name in ("valid", "written"))
        rows = int(valid.sum())
        ages = (step - written).to(widest(written.device)).where(valid.bool(), 0.0)
        return {"rows": rows, "age_steps": float(ages.sum()) / rows if rows else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """The whole queue; the same on every rank."""
        return {"next": self._next, "kept": dict(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, as copies."""
        self._next = int(state["next"])
        self._kept = {name: value.to(self.device, copy=True) for name, value in state["kept"].items()}


def keys_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """image_hash and caption_hash, (B,) each: rows of two batches that are equal in one are not negatives."""
    if "image_hash" not in batch or "caption_hash" not in batch:
        raise ValueError(
            "queue: the batch has no image_hash or no caption_hash, and earlier rows with the same image "
            "or caption would count as negatives: add them to your batches"
        )
    for name in ("image_hash", "caption_hash"):
        check_keys(name, batch[name])
    return batch["image_hash"], batch["caption_hash"]
