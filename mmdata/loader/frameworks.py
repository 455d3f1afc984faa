"""What training frameworks expect of a Loader or a Stream: a sampler with `set_epoch`, and clear errors.

It does not depend on how batches are made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar, cast

from typing_extensions import Self

from mmdata.config import Config, DataConfig
from mmdata.errors import excerpt

Initializer = TypeVar("Initializer", bound=Callable[..., None])


class Interoperable:
    """The part of a Loader or a Stream that training frameworks use."""

    _how_to_skip: ClassVar[str] = (
        "to begin an epoch at its batch 3, loader.load_state_dict({**loader.state_dict(), 'step': 3}), which reads "
        "nothing of the others. It need not go through Accelerator.prepare: its batches are already those of this rank"
    )
    _how_to_look: ClassVar[str] = "`loader.index[3]` is one row to look at. "
    _how_to_make: ClassVar[str] = "Loader.from_config(config, rank=rank, world_size=world_size)"

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch."""
        raise NotImplementedError

    def close(self) -> None:
        """End what runs between iterations, and drop what it has made; iterating again is possible."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """`with loader:` closes the loader at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Lets Lightning set the epoch; it samples nothing.

        Lightning calls `batch_sampler.sampler.set_epoch` before each epoch. Without it a run that resumes at the end of
        an epoch would begin with the first epoch again, and a run with `limit_train_batches` would never leave it. With
        a `sampler` of the loader itself, Lightning says under `overfit_batches` that it has turned the shuffling off,
        which it does for DataLoaders only.
        """
        return SimpleNamespace(sampler=SimpleNamespace(set_epoch=self.set_epoch))

    @property
    def dataset(self) -> NoReturn:
        """Raises AttributeError with the remedy; `accelerate.skip_first_batches` reads it, for one."""
        raise AttributeError(
            f"a {type(self).__name__} is no torch DataLoader and has no `dataset`: {self._how_to_skip}"
        )

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse `DataLoader(loader)`, which asks its dataset for rows by number."""
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} gives whole batches when it is iterated (`for batch in …`), and has no rows to ask for: use it "
            f"in place of torch's DataLoader, not inside one. {self._how_to_look}In the Hugging Face Trainer use "
            "mmdata.integrations.huggingface.LoaderTrainer"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy`, `deepcopy` and `pickle`."""
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled: it has threads, open files and the position of one rank. Make "
            f"another from the same settings, in the process that uses it ({self._how_to_make}), and give it the "
            "position with load_state_dict(state_dict())"
        )


def refuses_settings(initialize: Initializer) -> Initializer:
    """A decorator of `Loader.__init__`: `Loader("shards/photos")` is an error that says what to write.

    Without it Python would say that an argument `builder` is missing. The signature stays as it is, for `help`.
    """

    @wraps(initialize)
    def check(self: object, *positional: Any, **named: Any) -> None:
        given = positional[0] if positional else named.get("plan")
        if isinstance(given, (str, os.PathLike, dict, DataConfig, Config)):
            settings = '{"shards": "FOLDER", "tokenizer": "FOLDER/tokenizer", "global_batch_size": 256}'
            raise TypeError(
                f"Loader takes a plan and a BatchBuilder; got {excerpt(given)}. To make a loader of settings: "
                f"Loader.from_config('CONFIG.yaml') or Loader.from_config({settings})"
            )
        initialize(self, *positional, **named)

    return cast(Initializer, check)
