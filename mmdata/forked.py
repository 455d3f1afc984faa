"""What a forked child must find free: threads of the parent may hold a lock, and the child has none of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, TypeVar, cast
from weakref import ref

T = TypeVar("T")

_locks = set[ref[Lock]]()

held = set[int]()
"""Descriptors of files that this process has locked. A child would share these locks, and keep them."""


def new_lock() -> Lock:
    """A lock that is free in a forked child, whichever thread of the parent held it.

    What it guards must be of use after each single operation: the thread that held it may have been between two.
    """
    lock = Lock()
    # `discard` is C code, in which no interrupt is lost. A WeakSet would run Python code when the lock is collected.
    _locks.add(ref(lock, _locks.discard))
    return lock


class cached_property(Generic[T]):
    """`functools.cached_property` without the lock that it has before Python 3.12, one for all objects of a class."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> T:
        if instance is None:  # asked of the class, by `help` for one
            return cast("T", self)
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def _free_in_child() -> None:
    for reference in list(_locks):
        if (lock := reference()) is not None and lock.locked():
            lock.release()
    for descriptor in held:
        os.close(descriptor)
    held.clear()


os.register_at_fork(after_in_child=_free_in_child)
