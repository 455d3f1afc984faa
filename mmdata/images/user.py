"""Runs users' transforms under the row's own random numbers: equal rows give equal pixels, in any thread or process."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmdata.config.settings import name_of
from mmdata.errors import BadSample, ConfigError, Reason, where_to_look
from mmdata.images.regions import Followed
from mmdata.images.user_regions import NO_REGIONS, check_regions, followed_of, sample_of, tv_tensors

Transform = Callable[[Any, tuple[int, int], torch.Generator], Any]
"""(uint8 (3, h, w) image, (height, width) of the result, the row's generator) -> uint8 (3, height, width).

The size is the bucket's; at native resolution the size that the whole image would get. With `data.targets` the image is
in a dictionary with its regions, see `sample_of`, and so is the result."""

CHECKED_ROWS = 4
"""The first rows of each process that are transformed twice, to check that the results are equal."""

_LEAVE_FLOATS_OUT = (
    "leave ToDtype, ToTensor and Normalize out of the transform: pixels stay uint8, and mmdata.batch.normalized, or "
    "the model, makes floats of them on the device"
)


class UserTransform:
    """A user's transform; safe to call from many threads concurrently, if the transform itself is.

    If the transform draws with torch's functions without a generator, as all of torchvision's transforms do, it draws
    from the row's generator, not from the process's.

    Args:
        transform: a function or object (image, size, generator), or a transform of torchvision.transforms.v2, which
            gets the image alone; or the name of one of these, "module:attribute".
        with_regions: whether it gets, and returns, a dictionary of the image and its regions.

    Attributes:
        source: 16 hexadecimal digits, equal for equal content of the file that defines the transform; None if there is
            no such file, or if the transform is an object made when the program runs.

    Raises:
        ConfigError: the name cannot be imported, or the object takes other arguments; or torchvision, which regions
            need, is not installed.
    """

    def __init__(self, transform: str | Callable[..., Any], *, with_regions: bool = False) -> None:
        self._name = name_of(transform)
        found = imported(transform, of=f"transform '{self._name}'", expected="train, eval, or 'module:callable'")
        self._transform = _adapted(self._name, found)
        self.source = source_of(transform)
        self._rows_to_check = CHECKED_ROWS
        self._with_regions = with_regions
        if with_regions:
            tv_tensors()

    def __call__(self, image: Tensor, out: Tensor, *, seed: int, regions: Followed | None = None) -> Followed | None:
        """Transform an image.

        Args:
            image: uint8 (3, h, w).
            out: uint8 (3, H, W), overwritten.
            seed: of the row.
            regions: of the image, in its pixels; used where the transform gets them.

        Returns:
            The regions that are left; None where the transform gets none.

        Raises:
            BadSample: the transform raised, or returned another shape or dtype, or regions that are not those of a part
                of the image.
            ConfigError: a second call for the same row gave other pixels or regions.
        """
        regions = (regions or NO_REGIONS) if self._with_regions else None
        # A transform that keeps state or draws from other generators breaks resume and world-size independence
        # silently, so the first rows are made twice. The clone protects the image from transforms that change it.
        checked = self._rows_to_check > 0
        result = self._result(image.clone() if checked else image, out, seed, regions)
        if checked:
            self._rows_to_check -= 1
            again = self._result(image, out, seed, regions)
            if differing := [name for name, value in result.items() if not torch.equal(value, again[name])]:
                other = "pixels" if differing[0] == "image" else differing[0]
                raise ConfigError(
                    f"transform '{self._name}': called again with the same row and generator, it gave other {other}: "
                    "it keeps a state, or draws from random, numpy or a generator of its own; draw with torch's "
                    "functions (torch.rand), or from a generator that is seeded from the third argument"
                )
        out.copy_(result["image"])
        return None if regions is None else followed_of(result, regions)

    def _result(self, image: Tensor, out: Tensor, seed: int, regions: Followed | None) -> dict[str, Tensor]:
        """What the transform makes of an image: "image", and its regions where it gets them."""
        generator = torch.Generator().manual_seed(seed)
        height, width = int(out.shape[1]), int(out.shape[2])
        sample = None if regions is None else sample_of(image, regions)
        try:
            with _DrawFrom(generator):
                result: Any = self._transform(image if sample is None else {**sample}, (height, width), generator)
        except Exception as error:
            raise BadSample(Reason.TRANSFORM_FAILED, f"{type(error).__name__}: {error}") from error
        if regions is None or sample is None:
            return {"image": _checked(result, out)}
        if not isinstance(result, dict) or sample.keys() - result.keys():
            returned = f"a dictionary of {', '.join(result)}" if isinstance(result, dict) else type(result).__name__
            detail = f"returned {returned}, not a dictionary of {', '.join(sample)}"
            raise BadSample(Reason.TRANSFORM_FAILED, detail)
        return {"image": _checked(result["image"], out), **check_regions(result, sample, (height, width))}


def _checked(result: Any, out: Tensor) -> Tensor:
    """The pixels that a transform has returned, which are to be written into `out`."""
    wanted = f"{out.dtype} {tuple(out.shape)}"
    if not isinstance(result, Tensor):
        raise BadSample(Reason.TRANSFORM_FAILED, f"returned {type(result).__name__}, not a tensor {wanted}")
    if result.shape != out.shape or result.dtype != out.dtype:
        floats = f"; {_LEAVE_FLOATS_OUT}" if result.is_floating_point() else ""
        returned = f"returned {result.dtype} {tuple(result.shape)}, not {wanted}{floats}"
        raise BadSample(Reason.TRANSFORM_FAILED, returned)
    return result.as_subclass(Tensor)


_DRAWING = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
}
"""torch's functions that draw random numbers and take a generator."""


class _DrawFrom(TorchFunctionMode):
    """Passes a generator to torch's functions that draw, in this thread only.

    Seeding the process's generator would not work: other threads, such as the training loop, draw from it concurrently.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _DRAWING and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def imported(given: str | Callable[..., Any], *, of: str, expected: str) -> Any:
    """A callable, or that of a name "module:attribute"; raises a ConfigError that begins with `of` if there is none."""
    if not isinstance(given, str):
        if not callable(given):
            raise ConfigError(f"{of}: expected {expected}")
        return given
    module, colon, attribute = given.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{of}: {error}{where_to_look(error, module)}") from error
    if not callable(found):
        raise ConfigError(f"{of}: expected {expected}")
    return found


def source_of(given: str | Callable[..., Any]) -> str | None:
    """16 hexadecimal digits, equal for equal content of the file that defines a callable, or its name.

    None if there is no such file, or if the callable is an object made when the program runs.
    """
    if not isinstance(given, str) and not inspect.isroutine(given):
        return None
    module: Any = sys.modules.get(name_of(given).partition(":")[0])
    try:
        return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:16]
    except (AttributeError, TypeError, OSError):  # a notebook, a builtin, an archive
        return None


def _adapted(name: str, found: Any) -> Transform:
    # Not imported, because that takes long; it is loaded already if `found` is one of its transforms.
    v2: Any = sys.modules.get("torchvision.transforms.v2")
    if v2 is not None and isinstance(found, v2.Transform):
        return lambda image, size, generator: cast(Tensor, found(image))
    called = found.forward if isinstance(found, torch.nn.Module) else found
    if not takes(called, 3):
        raise ConfigError(
            f"transform '{name}': takes {inspect.signature(called)}; expected (image, size, generator), or a transform "
            "of torchvision.transforms.v2"
        )
    return cast(Transform, found)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a callable takes this many positional arguments; True if it has no signature."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # a builtin
        return True
    except TypeError:
        return False
    return True
