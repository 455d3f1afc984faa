"""Negatives from outside the batch: captions written to be hard, or features of earlier batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdata.train.keys import check_keys, check_mask
from mmdata.train.ranks import collectives


@dataclass(frozen=True)
class ExtraNegatives:
    """Images or texts that belong to no row of the batch.

    Attributes:
        features: (M, D), L2-normalised. With several ranks, each rank contrasts its own; `gather` gives each rank all.
        same: int64 (M,) each, in the order of the loss's `same`: not negatives of rows with an equal key. Empty:
            negatives of all rows.
        valid: bool (M,), False leaves a row out; None: all are valid.

    Raises:
        ValueError: counts differ, keys that are no integers, or a mask that is not bool.
    """

    features: Tensor
    same: Sequence[Tensor] = ()
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        for name, column in (*(("same", key) for key in self.same), ("valid", self.valid)):
            if column is not None and column.shape != self.features.shape[:1]:
                raise ValueError(
                    f"extra negatives: {name} has shape {tuple(column.shape)}, "
                    f"expected ({len(self.features)},): one entry a feature row"
                )
        for key in self.same:
            check_keys("same of the extra negatives", key)
        if self.valid is not None:
            check_mask("valid of the extra negatives", self.valid)

    def gather(self) -> ExtraNegatives:
        """Those of all ranks, with gradient; M is equal on all of them. A collective."""
        valid = None if self.valid is None else collectives.gather(self.valid.long()).bool()
        same = [collectives.gather(key) for key in self.same]
        return ExtraNegatives(collectives.gather_with_grad(self.features), same, valid)

    def joined(self, others: ExtraNegatives) -> ExtraNegatives:
        """These and then the others; both have the same columns in `same`."""
        valid = [
            torch.ones_like(x.features[:, 0], dtype=torch.bool) if x.valid is None else x.valid for x in (self, others)
        ]
        same = [torch.cat(both) for both in zip(self.same, others.same, strict=True)]
        dtype = torch.promote_types(self.features.dtype, others.features.dtype)
        features = torch.cat([self.features.to(dtype), others.features.to(dtype)])
        return ExtraNegatives(features, same, torch.cat(valid))

    def columns(self, dtype: torch.dtype) -> Tensor:
        """The features (M, D), with zeros in rows that are not valid: their content reaches no gradient."""
        features = self.features.to(dtype)
        return features if self.valid is None else features.where(self.valid[:, None], 0.0)
