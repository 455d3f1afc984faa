"""Old public names, kept for one release: each still works, and warns with the new one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def renamed_names(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that gives what a name was changed to, with a DeprecationWarning.

    Args:
        module: `__name__` of the module.
        names: old name to new name, of this module, or with its module: "mmdata.train.run.trainer.Trainer".

    Example:
        __getattr__ = renamed_names(__name__, {"Worker": "BatchMaker"})
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home, _, new = names[name].rpartition(".")
        home = home or module
        warnings.warn(
            f"{module}.{name} is now called {home}.{new}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(home), new)

    return get


def renamed_attribute(old: str, new: str) -> property:
    """A property for the old name of an attribute: it gives the new one, with a DeprecationWarning.

    Example:
        streams = renamed_attribute("streams", "shares")
    """

    def get(self: object) -> Any:
        name = type(self).__name__
        warnings.warn(
            f"{name}.{old} is now called {name}.{new}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)

    return property(get)


def renamed_arguments(**names: str) -> Callable[[Function], Function]:
    """A decorator: the function also takes keyword arguments by their old names, with a DeprecationWarning.

    Args:
        names: old name to new name.

    Example:
        @renamed_arguments(positive_share="prior")
    """

    def decorate(function: Function) -> Function:
        # Of a constructor, the name that users type is the class's.
        typed = function.__qualname__.split(".")[-2] if function.__name__ == "__init__" else function.__name__

        @wraps(function)
        def call(*positional: Any, **named: Any) -> Any:
            for old, new in names.items():
                if old in named:
                    if new in named:
                        raise TypeError(f"{typed} got both {old} and {new}, its new name")
                    warnings.warn(
                        f"{typed}'s argument {old} is now called {new}; the old name goes with the next release",
                        DeprecationWarning,
                        stacklevel=2,
                    )
                    named[new] = named.pop(old)
            return function(*positional, **named)

        return cast(Function, call)

    return decorate
