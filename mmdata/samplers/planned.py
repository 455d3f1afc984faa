"""What the batch samplers share: ranks, epochs and state.

Global batch i of an epoch depends on the arguments and the seed, never on the number of ranks; each rank takes an equal
part of it. Every row comes once an epoch over all ranks, and all ranks have the same number of batches.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler
from typing_extensions import Self

from mmdata.errors import ConfigError
from mmdata.launcher import resolve_ranks
from mmdata.plan.position import Position, check_count, check_epoch, check_state

Ints = NDArray[np.int64]


class PlannedBatchSampler(BatchSampler):
    """What both samplers share: ranks, epochs, state.

    Rank and world size are arguments, or those of `sampler`: Lightning hands over a `DistributedSampler` by itself, and
    one made by hand reads them from torch.distributed. Without either they are the launcher's (RANK and WORLD_SIZE in
    the environment), which is logged; without a launcher there is one rank.

    The rows of an epoch's last global batch may not divide by the number of ranks. Then up to world_size-1 of them come
    a second time (`repeated`), at the end of the last batch of the last ranks; fewer is impossible with equal batches.

    A DataLoader with workers asks for batches ahead of its loop, and trainers make its iterator before they set the
    epoch. So an iteration that `set_epoch`, `load_state_dict` or a newer one has overtaken gives the rest of its epoch;
    it moves the position no more.
    """

    _position: Position  # the copies that Lightning makes of a sampler share it

    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Keep the arguments, as Lightning's hooks do for a sampler that is made in a `*_dataloader` method.

        Lightning makes batch samplers anew, to hand over a DistributedSampler. One in a DataLoader that was given to
        `fit` would be made of (sampler, batch_size, drop_last) alone, and lose everything else.
        """
        made = super().__new__(cls)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        names = tuple(parameter.name for parameter in parameters)[: len(positional)]
        position = Position()
        kept: dict[str, Any] = {
            "_position": position,
            "__pl_saved_args": positional,
            "__pl_saved_kwargs": named,
            "__pl_saved_arg_names": names,
            "__pl_saved_default_kwargs": {
                parameter.name: parameter.default
                for parameter in parameters
                if parameter.default is not parameter.empty and parameter.name not in {*names, *named}
            },
            # Done to the new one: a state that was loaded stays loaded.
            "__pl_attrs_record": [(("_position", position), object.__setattr__)],
        }
        made.__dict__.update(kept)
        return made

    def __init__(
        self,
        num_rows: int,
        rows_per_batch: int,
        *,
        batch_size: int,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
        sampler: Sampler[Any] | None,
    ) -> None:
        # Trainers look for `batch_sampler.sampler.set_epoch`.
        super().__init__(cast("Sampler[int]", self), batch_size, drop_last)
        self.rank, self.world_size = _rank(sampler, rank, world_size)
        self._num_rows = num_rows  # of an epoch, over all ranks
        self._global_rows = rows_per_batch * self.world_size  # of those, in a global batch
        if len(self) == 0:
            raise ValueError(
                f"drop_last=True leaves no batch: {num_rows} rows are fewer than the {self._global_rows} of a global "
                "batch; set drop_last=False or a smaller batch_size"
            )

    def __copy__(self) -> Self:
        """With a position of its own, as every copy has but Lightning's."""
        return copy.deepcopy(self)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        """This rank's batches of an epoch, from step `start` on."""

    @abstractmethod
    def _identity(self) -> dict[str, str | int | bool]:
        """What the global batches depend on."""

    def __len__(self) -> int:
        """Batches of an epoch, exact, the same on every rank."""
        return self._num_rows // self._global_rows if self.drop_last else -(-self._num_rows // self._global_rows)

    @property
    def repeated(self) -> int:
        """Rows that come a second time in an epoch, over all ranks: at most world_size-1."""
        return 0 if self.drop_last else -self._num_rows % self.world_size

    @property
    def dropped(self) -> int:
        """Rows that are left out of an epoch because of `drop_last`, over all ranks."""
        return self._num_rows % self._global_rows if self.drop_last else 0

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch.

        In mid-epoch the current epoch may be named too, which changes nothing. After its last batch it is given again,
        where it is named. Of an epoch that `load_state_dict` has put at its end nothing is left: it is not given again.

        Raises:
            ValueError: epoch is negative, or above 1,048,575.
        """
        self._position.set_epoch(epoch, len(self))

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is, counted in batches yielded, and what they depend on; JSON, under 1 KB.

        A DataLoader with workers asks for batches ahead of the loop: its loop's own place is `state_at(epoch, step)`.
        """
        return self.state_at(self._position.epoch, self._position.step)

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The state of a loop that has done `step` batches of an epoch."""
        return {"epoch": epoch, "step": step, "plan": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was yielded when the state was taken.

        The number of ranks may be another, if the global batch stays the same size.

        Raises:
            ConfigError: the state belongs to other batches, what differs is named; or a number in it is wrong.
        """
        identity = self._identity()
        saved = check_state(state, of="sampler").get("plan")
        saved = saved if isinstance(saved, Mapping) else {}
        if changed := [name for name in identity if saved.get(name) != identity[name]]:
            listed = ", ".join(f"{name} was {saved.get(name)!r} and is {identity[name]!r}" for name in changed)
            raise ConfigError(
                f"this sampler state belongs to other batches: {listed}; resume with the arguments it was saved with "
                "(batch_size × world_size stays the same), or start anew"
            )
        epoch = check_epoch(state, of="sampler")
        self._position.restore(epoch, check_count(state, "step", of="sampler", at_most=len(self)))

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the current epoch, from where `load_state_dict` put it, or from its start."""
        position = self._position
        iteration = position.begin(len(self))
        for rows in self._batches(position.epoch, position.step):
            position.advance(iteration)
            yield rows
        position.end(iteration)

    def _share(self, rows: Ints) -> list[int]:
        """This rank's part of the rows of a global batch; where they do not divide, some are repeated."""
        size = -(-len(rows) // self.world_size)
        return np.resize(rows, size * self.world_size)[self.rank * size : (self.rank + 1) * size].tolist()


def _rank(sampler: Sampler[Any] | None, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: those of a DistributedSampler, those given, those of the launcher, or 0 of 1."""
    known = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    if isinstance(known[0], int) and isinstance(known[1], int):
        if (rank, world_size) not in ((None, None), known):
            raise ValueError(
                f"rank={rank}, world_size={world_size} were given, but the {type(sampler).__name__} is of rank "
                f"{known[0]} of {known[1]}; leave them out, or set Trainer(use_distributed_sampler=False)"
            )
        given: tuple[int, int] = known[0], known[1]
    # Where nothing is distributed, Lightning hands over the SequentialSampler that a DataLoader has by default.
    elif sampler is not None and not isinstance(sampler, SequentialSampler):
        raise ValueError(
            f"sampler may be a DistributedSampler, to take rank and world size from: got {type(sampler).__name__}, "
            "whose rows and order would not be used"
        )
    else:
        given = resolve_ranks(rank, world_size)
    if not 0 <= given[0] < given[1]:
        raise ValueError(f"rank must be in 0 … {given[1] - 1} (world_size {given[1]}): got {given[0]}")
    return given


def whole_numbers(name: str, values: ArrayLike) -> Ints:
    """A list of whole numbers, (n,), n > 0."""
    numbers = np.asarray(values)
    if numbers.size == 0:
        raise ValueError(f"{name} is empty: a batch needs rows")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a list of whole numbers: got {type(values).__name__}, {numbers.dtype} of shape "
            f"{numbers.shape}"
        )
    return numbers.astype(np.int64)


def digest(numbers: Ints) -> str:
    """A fingerprint of numbers, the same on every machine."""
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()[:16]
