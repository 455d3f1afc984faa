"""Two numbers for each row of the corpus, by which the loss sogclr divides; every rank keeps a share of the rows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mmdata.config import TrainConfig
from mmdata.errors import ConfigError
from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.ranks import collectives


class RowNormalizers:
    """log u of each row as an image and as a text, float32; see `losses.sogclr_loss`.

    Of W ranks each keeps 8 / W bytes a row on its device: of 10⁹ rows on 64 ranks 125 MB. Rows are known by their
    number in the index, so a run goes on with the same values on any number of ranks.

    Args:
        rows: of the index.
        device: where the values are kept.
        trained: how many of the rows are trained on; None: all.
    """

    def __init__(self, rows: int, device: torch.device | str = "cpu", *, trained: int | None = None) -> None:
        self.rows, self.trained = rows, rows if trained is None else trained
        share = -(-rows // collectives.world_size())  # as torch's Shard(0) divides
        self._first = min(rows, collectives.rank() * share)
        self._count = min(rows, self._first + share) - self._first
        # The last place stands for the rows of other ranks, and for those that are not valid.
        self._kept = torch.full((self._count + 1, 2), -torch.inf, device=device)
        self._moves = True

    @classmethod
    def from_config(cls, config: TrainConfig, batches: Batches, device: torch.device) -> RowNormalizers | None:
        """Those of a configuration, or None.

        Raises:
            ConfigError: the batches are of no index.
        """
        if config.loss != "sogclr":
            return None
        extras = LoaderExtras.of(batches)
        index = extras.index
        if index is None:
            raise ConfigError(
                f"train.loss 'sogclr': {type(batches).__name__} has no index, whose rows it keeps two numbers for "
                "each: take another loss, or train from indexed shards"
            )
        return cls(len(index), device, trained=extras.num_rows)

    def read(self, rows: Tensor) -> Tensor:
        """Of this rank's `rows`, int64 (B,), below 0 for none: float32 (B, 2), -inf where there is none. A collective.

        Raises:
            ValueError: a row that the index does not have; on a CPU alone, since a GPU would have to be waited for.
        """
        if rows.device.type == "cpu" and bool((rows >= self.rows).any()):
            raise ValueError(f"row {int(rows.max())}: the normalizers are of an index of {self.rows} rows")
        values = self._kept[self._places(collectives.gather(rows))]
        if collectives.world_size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        first = collectives.rank() * len(rows)
        return values[first : first + len(rows)]

    @torch.no_grad()
    def write(self, rows: Tensor, values: Tensor) -> None:
        """Keep `values` (B, 2) for this rank's `rows` (B,), below 0 for none; of a row that comes twice the last.

        A collective.
        """
        if not self._moves:
            return
        rows, values = collectives.gather(rows), collectives.gather(values.to(self._kept.dtype))
        order = rows.argsort(stable=True)  # which of two equal places an assignment takes is not defined on a GPU
        rows = rows[order]
        is_last = torch.cat([rows[1:] != rows[:-1], rows.new_ones(1, dtype=torch.bool)])
        self._kept[self._places(rows).where(is_last, self._count)] = values[order]
        self._kept[-1] = -torch.inf

    @contextmanager
    def unmoved(self) -> Generator[None]:
        """Inside, nothing is written: for steps that are no updates, such as a rehearsal's."""
        before, self._moves = self._moves, False
        try:
            yield
        finally:
            self._moves = before

    def telemetry(self, step: int) -> dict[str, float | list[float]]:
        """seen_share: of the rows that are trained on, those that were in a batch."""
        seen = (self._kept[:-1, 0] > -torch.inf).sum()
        return {"seen_share": int(collectives.all_reduce_sum(seen)) / self.trained}

    def state_dict(self) -> dict[str, Tensor]:
        """All rows (rows, 2): with several ranks as a DTensor, of which each has its share."""
        local = self._kept[: self._count]
        if collectives.world_size() == 1:
            return {"log_normalizers": local}
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(local.device.type, (collectives.world_size(),))
        shape = torch.Size((self.rows, 2))
        return {"log_normalizers": DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(2, 1))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave: the whole tensor, or this rank's share of it."""
        values: Tensor = state["log_normalizers"]
        own = values.to_local() if isinstance(values, DTensor) else values[self._first : self._first + self._count]
        self._kept[: self._count] = own.to(self._kept.device)

    def _places(self, rows: Tensor) -> Tensor:
        """Where the rows lie among this rank's; the last place for those that do not."""
        own = (rows >= self._first) & (rows < self._first + self._count)
        return (rows - self._first).where(own, self._count)
