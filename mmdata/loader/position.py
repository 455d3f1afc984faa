"""The position of a loader, a batch sampler or a stream: its epoch, and how many batches of it have been yielded.

A state holds it, and goes on only where the batches are the same.

There is one position, and the last that moved it has it: an iteration, `set_epoch` or `load_state_dict`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from mmdata.errors import ConfigError, excerpt
from mmdata.plan.rows import MAX_EPOCH

logger = logging.getLogger("mmdata")

OF_ROWS = re.compile(r"^data\.(?:select|shards|join|row_weights|captions|fields)\b.* \(([0-9a-f]{16})\)$", re.DOTALL)
"""A value that ends in a digest of what it names: a file may have another name and the same content."""

MADE_OF = {
    "policy": " (text_buckets, max_length, image_size, image_buckets, image_patches, token_budget)",
    "mixture": " (weight and repeat of data.shards, groups)",
}
"""The settings that an entry stands for, where its name does not say it."""


@dataclass
class Position:
    """Epoch and step, and what each call does to them and to an iteration that is under way.

    - An iteration begins where `load_state_dict` has put the position, or else at the start of the current epoch: an
      epoch that was left early is given again. Where all batches of the epoch have been yielded, it begins the next
      epoch, also if the loop before it counted to `len` and never saw the iterator end.
    - `load_state_dict` always moves the position.
    - `set_epoch` moves the position to the start of another epoch. After the last batch of the current epoch it also
      moves to the start of that same epoch, which is then given again. In the middle of the current epoch, and after
      `load_state_dict` has gone to it, naming the current epoch moves nothing. A state at the end of an epoch has
      nothing left: with `set_epoch` of that epoch the next iteration is empty, without it the next epoch begins.
    - An iteration is overtaken once `set_epoch`, `load_state_dict` or a newer iteration has moved the position. It
      moves the position no more. Loader and Stream raise a RuntimeError when it is asked for another batch; after its
      last batch it ends as ever. So `set_epoch(e + 1)` may come in the last step of a loop over epoch e.

    The length of the current epoch is an argument, because it may differ between epochs and between copies of a
    sampler that share a position; None: unknown until the iteration ends.

    Attributes:
        epoch: the current one.
        step: batches of it that have been yielded.
        restores: times that a state has been loaded.
    """

    epoch: int = 0
    step: int = 0
    restores: int = 0
    _iteration: int = 0  # the number of the newest iteration; one more whenever the running one is overtaken
    _mover: str = ""  # who overtook the last iteration that was overtaken
    _resume: bool = False  # the next iteration goes on at `step`
    _stay: bool = False  # … and in this epoch, even where nothing is left of it

    def set_epoch(self, epoch: int, length: int | None) -> bool:
        """Go to the start of an epoch.

        Args:
            epoch: 0 … MAX_EPOCH.
            length: batches of the current epoch, where it is known.

        Returns:
            Whether the position has moved.

        Raises:
            ValueError: there is no such epoch.
        """
        epoch = index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more: got {epoch}")
        if epoch > MAX_EPOCH:
            raise ValueError(f"epoch must be at most {MAX_EPOCH}: got {epoch}")
        if epoch == self.epoch and self._resume:
            self._stay = True
            return False
        if epoch == self.epoch and self.step != length:
            return False
        self.overtake("set_epoch")
        self.epoch, self.step, self._resume, self._stay = epoch, 0, False, False
        return True

    def restore(self, epoch: int, step: int) -> None:
        """Go where a state was taken."""
        self.overtake("load_state_dict")
        self.epoch, self.step, self._resume, self._stay = epoch, step, True, False
        self.restores += 1

    def begin(self, length: int | None) -> int:
        """Begin an iteration; returns its number, by which it is known from here on.

        Args:
            length: batches of the current epoch, where it is known.
        """
        if self.step == length and not self._stay:
            self.epoch, self.step = self.epoch + 1, 0
        elif not self._resume:
            self.step = 0
        self._resume = self._stay = False
        self.overtake("a newer iteration")
        return self._iteration

    def overtake(self, mover: str) -> None:
        """End the running iteration; as after a loop that was left early, the next one gives the epoch again.

        Args:
            mover: who did it, for the message that the iteration raises.
        """
        self._iteration += 1
        self._mover = mover

    def is_of(self, iteration: int) -> bool:
        """Whether no one has overtaken an iteration."""
        return iteration == self._iteration

    def check(self, iteration: int, *, of: str) -> None:
        """Before another batch of an iteration; `of` names what is iterated over.

        Raises:
            RuntimeError: the iteration was overtaken; says by whom.
        """
        if not self.is_of(iteration):
            raise RuntimeError(
                f"this iteration over the {of} has ended early: {self._mover} has moved the {of}'s position to epoch "
                f"{self.epoch}, step {self.step}; iterate over the {of} again to go on from there, or make a second "
                f"{of} to iterate over two at the same time"
            )

    def advance(self, iteration: int) -> bool:
        """Count a batch that an iteration yields, unless it was overtaken; returns whether it was counted."""
        counts = self.is_of(iteration)
        self.step += counts
        return counts

    def end(self, iteration: int) -> bool:
        """After the last batch of an iteration go to the next epoch, unless it was overtaken; returns whether so."""
        ends = self.is_of(iteration)
        if ends:
            self.epoch, self.step = self.epoch + 1, 0
        return ends


def position_of(
    state: Any,
    identity: Mapping[str, Any],
    num_steps: Callable[[int], int | None],
    *,
    of: str,
    remedy: str,
) -> tuple[int, int]:
    """(epoch, step) of a state.

    Args:
        state: of a loader, a stream or a sampler.
        identity: of the one that is to go on from it.
        num_steps: gives the steps of an epoch; None: not known.
        of: "loader", "stream" or "sampler", for messages.
        remedy: for a state of other batches.

    Raises:
        ConfigError: the state belongs to other batches, and the error names what differs; or a number in the state is
            missing or impossible.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{of} state: it must be the dictionary that state_dict() returned: got {type(state).__name__}; give that "
            "dictionary, or start anew"
        )
    saved = state.get("plan")
    if not isinstance(saved, Mapping):
        raise ConfigError(
            f"{of} state: 'plan' must say what its batches depend on: got {excerpt(saved)}; give the dictionary that "
            "state_dict() returned, or start anew"
        )
    if changed := _differences(saved, identity, of=of):
        listed = ", ".join(
            f"{key}{MADE_OF.get(key, '')} was {saved.get(key)!r} and is {identity[key]!r}" for key in changed
        )
        raise ConfigError(f"this {of} state belongs to other batches: {listed}; {remedy}, or start anew")
    epoch = check_count(state, "epoch", of=of, at_most=MAX_EPOCH)
    return epoch, check_count(state, "step", of=of, at_most=num_steps(epoch))


def check_count(state: Mapping[str, Any], name: str, *, of: str, at_most: int | None = None) -> int:
    """A whole number of a state; raises a ConfigError that says whose (`of`), where it is none that it can be."""
    value = state.get(name)
    if type(value) is not int or value < 0 or (at_most is not None and value > at_most):
        most = "" if at_most is None else f", at most {at_most}"
        raise ConfigError(
            f"{of} state: '{name}' must be a whole number from 0 on{most}: got {value!r}; "
            "give the dictionary that state_dict() returned, or start anew"
        )
    return value


def _differences(saved: Mapping[str, Any], identity: Mapping[str, Any], *, of: str) -> list[str]:
    """The names of the entries in which the identity of a state differs from this one.

    Only logs a change in the file of a user's transform or text_transform, which may be a comment.

    Args:
        saved: identity in the state.
        identity: of the loader or stream.
        of: "loader" or "stream", for the log.
    """
    for name, entries in (("transform", "pixels"), ("text_transform", "texts")):
        before, now = saved.get(f"{name}_source"), identity.get(f"{name}_source")
        if saved.get(name) == identity.get(name) and None not in (before, now) and before != now:
            logger.warning(
                "%s '%s': its file is not what it was when this %s state was taken; if more than comments have "
                "changed, %s are not those of an undisturbed run",
                name,
                identity[name],
                of,
                entries,
            )
    compared = [name for name in identity if not name.endswith("transform_source")]
    return [name for name in compared if _compared(saved.get(name)) != _compared(identity[name])]


def _compared(value: Any) -> Any:
    found = OF_ROWS.search(value) if isinstance(value, str) else None
    return found[1] if found else value
