"""The base class of the batch samplers: ranks, epochs and state.

Global batch i of an epoch depends on the arguments and the seed, never on the number of ranks; each rank takes an equal
part of it. Every row comes once an epoch over all ranks, and all ranks have the same number of batches.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler
from typing_extensions import Self

from mmdata.launcher import Ranks, resolve_ranks
from mmdata.loader.position import Position, position_of
from mmdata.plan.plan import rank_slice
from mmdata.plan.windows import KeyedPermutation

Ints = NDArray[np.int64]


class PlannedBatchSampler(BatchSampler):
    """Base class of the batch samplers: ranks, epochs, state.

    Rank and world size are arguments, or those of `sampler`: Lightning passes a `DistributedSampler` itself, and a
    DistributedSampler made by hand reads them from torch.distributed. Without either they are the launcher's (RANK and
    WORLD_SIZE in the environment), which is logged; without a launcher there is one rank.

    If the number of ranks does not divide the rows of an epoch's last global batch, up to world_size-1 of these rows
    come a second time (`repeated`), at the end of the last batch of the last ranks. There cannot be fewer with
    batches of equal size.

    A DataLoader with workers asks for batches ahead of its loop, and trainers make its iterator before they set the
    epoch. So after `set_epoch`, `load_state_dict` or a newer iteration an older iteration still gives the rest of its
    epoch, but no longer moves the position.
    """

    _position: Position  # the copies that Lightning makes of a sampler share it

    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Keep the arguments, as Lightning's hooks do for a sampler that is made in a `*_dataloader` method.

        Lightning makes a batch sampler again, to pass it a DistributedSampler. It would make the sampler of a
        DataLoader that was given to `fit` from (sampler, batch_size, drop_last) alone, and lose all other arguments.
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
            # Lightning applies this to the sampler that it makes, so a loaded state stays loaded.
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
        shuffle: bool,
        seed: int,
        rank: int | None,
        world_size: int | None,
        sampler: Sampler[Any] | None,
    ) -> None:
        # Trainers call `batch_sampler.sampler.set_epoch`.
        super().__init__(cast("Sampler[int]", self), batch_size, drop_last)
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.world_size = _ranks(sampler, rank, world_size)
        self._has_known_ranks = rank is not None or hasattr(sampler, "num_replicas")
        self._permutation = KeyedPermutation(seed, shuffle)
        self._num_rows = num_rows  # rows of an epoch, over all ranks
        self._global_rows = rows_per_batch * self.world_size  # how many of them are in a global batch
        # What the global batches depend on; a class adds its own.
        self._identity: dict[str, str | int | bool] = {
            "global_batch_size": batch_size * self.world_size,
            "drop_last": drop_last,
            "shuffle": shuffle,
            "seed": seed,
        }
        if len(self) == 0:
            raise ValueError(
                f"{'drop_last=True' if drop_last else 'leftover=drop'} leaves no batch: no {self._global_rows} of the "
                f"{num_rows} rows fill a global batch; leave it out, or set a smaller batch_size"
            )

    def __copy__(self) -> Self:
        """A copy with a position of its own; only Lightning's copies share one (`__new__`)."""
        return copy.deepcopy(self)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        """This rank's batches of an epoch, from step `start` on."""

    def __len__(self) -> int:
        """Batches of an epoch, exact, the same on every rank."""
        return self._num_rows // self._global_rows if self.drop_last else -(-self._num_rows // self._global_rows)

    @property
    def repeated(self) -> int:
        """Rows that come a second time in an epoch, over all ranks: at most world_size-1."""
        return 0 if self.drop_last else -self._num_rows % self.world_size

    @property
    def dropped(self) -> int:
        """Rows that `drop_last` leaves out of an epoch, over all ranks."""
        return self._num_rows % self._global_rows if self.drop_last else 0

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch.

        Naming the current epoch in mid-epoch changes nothing; after its last batch the epoch is given again. If
        `load_state_dict` has gone to the end of an epoch, naming that epoch does not give it again.

        Raises:
            ValueError: epoch is negative, or above 1,048,575.
        """
        self._position.set_epoch(epoch, len(self))

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in batches yielded, and what the batches depend on; JSON, under 1 KB.

        A DataLoader with workers asks for batches ahead of the loop; `state_at(epoch, step)` is the state of the loop.
        """
        return self.state_at(self._position.epoch, self._position.step)

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The state of a loop that has done `step` batches of an epoch."""
        return {"epoch": epoch, "step": step, "plan": dict(self._identity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was yielded when the state was taken.

        The number of ranks may differ, if the global batch has the same size.

        Raises:
            ConfigError: the state belongs to other batches (the message names what differs), or a number in it is
                wrong.
        """
        remedy = "resume with the arguments it was saved with (batch_size × world_size stays the same)"
        epoch, step = position_of(state, self._identity, lambda epoch: len(self), of="sampler", remedy=remedy)
        self._position.restore(epoch, step)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the current epoch: from the step that `load_state_dict` went to, or from the start."""
        # Not when it is made: in a process that Lightning has started, Lightning makes another one with its ranks.
        if not self._has_known_ranks:
            resolve_ranks(None, None)  # warns
        position = self._position
        iteration = position.begin(len(self))
        for rows in self._batches(position.epoch, position.step):
            position.advance(iteration)
            yield rows
        position.end(iteration)

    def _share(self, rows: Ints) -> list[int]:
        """This rank's part of the rows of a global batch; the first rows are repeated if world_size does not divide."""
        padded = np.resize(rows, -(-len(rows) // self.world_size) * self.world_size)
        return padded[rank_slice(len(padded), self.rank, self.world_size)].tolist()


def _ranks(sampler: Sampler[Any] | None, rank: int | None, world_size: int | None) -> Ranks:
    """Rank and world size: those of a DistributedSampler, those given, those of the launcher, or 0 of 1."""
    known = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    if isinstance(known[0], int) and isinstance(known[1], int):
        if (rank, world_size) not in ((None, None), known):
            raise ValueError(
                f"rank={rank}, world_size={world_size} were given, but the {type(sampler).__name__} is of rank "
                f"{known[0]} of {known[1]}; leave them out, or set Trainer(use_distributed_sampler=False)"
            )
        given = Ranks(known[0], known[1])
    # In a run of one process, Lightning passes the SequentialSampler that a DataLoader has by default.
    elif sampler is not None and not isinstance(sampler, SequentialSampler):
        raise ValueError(
            f"sampler may be a DistributedSampler, to take rank and world size from: got {type(sampler).__name__}, "
            "whose rows and order would not be used"
        )
    else:
        given = resolve_ranks(rank, world_size, warn=False)
    rank_slice(given.world_size, *given)  # raises if there is no such rank
    return given


def whole_numbers(name: str, values: ArrayLike) -> Ints:
    """`values` as int64 (n,), n > 0; raises a ValueError that names the argument if they are not whole numbers."""
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
