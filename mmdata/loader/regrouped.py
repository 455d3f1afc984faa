"""A loader whose groups change between epochs: neighbours among the features that the run itself computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.config.batches import BatchesConfig
from mmdata.errors import ConfigError
from mmdata.launcher import Ranks
from mmdata.loader.loader import Loader, open_parts
from mmdata.plan.groups import save_groups


class RegroupedLoader(Loader):
    """A `Loader` that goes on with other groups from some epochs on, as `data.groups.source: run` asks.

    Each epoch's groups lie in a file of their own. A run that is resumed takes those that are there, so that it has the
    batches of one that was not: what has been computed since would give others.

    Args:
        data: settings; `groups` has the source "run".
        folder: of the files epoch-N.npy.
        rank: of this process.
        world_size: processes that share each global batch.

    Attributes:
        group_size: rows of a group.
    """

    def __init__(self, data: DataConfig, folder: Path, *, rank: int, world_size: int) -> None:
        assert data.groups is not None, "the source is 'run'"
        assert data.groups.size is not None, "checked with the settings"
        plan, builder, source = open_parts(data, Ranks(rank, world_size))
        max_bad_share = data.loading.max_bad_share
        super().__init__(plan, builder, rank=rank, world_size=world_size, max_bad_share=max_bad_share, source=source)
        self._data, self._folder, self._groups = data, folder, data.groups
        self.group_size = data.groups.size
        self._groups_of: int | None = None  # epoch that the groups were made for

    @property
    def regroups(self) -> RegroupedLoader:
        """Itself: what the training loop looks for."""
        return self

    def is_due(self, epoch: int) -> bool:
        """Whether an epoch begins with groups of its own."""
        return epoch > 0 and epoch % self._groups.every_epochs == 0

    def has_groups(self, epoch: int) -> bool:
        """Whether the file of an epoch is there already."""
        return self._file(epoch).is_file()

    def write_groups(self, epoch: int, of_rows: NDArray[np.int64]) -> None:
        """Write the groups of an epoch, int64 (rows of the index,), -1 for rows without one; rank 0 alone."""
        self._folder.mkdir(parents=True, exist_ok=True)
        save_groups(self._file(epoch), of_rows, self.index)

    def use_groups(self, epoch: int) -> None:
        """Go on with the groups of an epoch, which `write_groups` has written, at the start of that epoch."""
        self._go_on_with(epoch)
        self.set_epoch(epoch)

    def forget_groups(self) -> None:
        """Remove the files of a run that ended before its first checkpoint; rank 0 alone."""
        for path in self._folder.glob("epoch-*.npy"):
            path.unlink()

    def state_dict(self) -> dict[str, Any]:
        """As the loader's, and which groups it has."""
        return {**super().state_dict(), "groups_of": self._groups_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the loader's, with the groups of the state.

        Raises:
            ConfigError: the file of the groups is gone, or the state is of other batches.
        """
        rest = dict(state)
        if (groups_of := rest.pop("groups_of", None)) != self._groups_of:
            self._go_on_with(groups_of)
        super().load_state_dict(rest)

    def _go_on_with(self, groups_of: int | None) -> None:
        """Go on with the groups of an epoch, or without any."""
        source = "run" if groups_of is None else str(self._file(groups_of))
        if groups_of is not None and not self._file(groups_of).is_file():
            raise ConfigError(
                f"'{source}': the run's groups of epoch {groups_of} are gone, and others would give other batches: "
                "put the file back, or begin a new run (another train.output)"
            )
        self.close()
        data = self._data.model_copy(update={"groups": self._groups.model_copy(update={"source": source})})
        self.plan, self.builder, self._source = open_parts(data, Ranks(self.rank, self.world_size))
        vars(self).pop("identity", None)  # it names the plan
        self._groups_of = groups_of

    def _file(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch}.npy"


def is_of_run(data: BatchesConfig) -> bool:
    """Whether the groups are made by the run."""
    return data.groups is not None and data.groups.source == "run"
