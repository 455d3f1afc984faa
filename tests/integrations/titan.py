"""The example's loader for torchtitan, with torchtitan's own BaseDataLoader where it is installed."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_loader.py"


class BaseDataLoader(Stateful, ABC):
    """What torchtitan 0.3.0 asks of a loader; torchtitan itself needs an older `datasets` than the other trainers."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Builds the loader of the class that it stands in, with what the trainer knows."""

        owner: Any = None
        dataset_path: Any = None

        def build(self, **known: Any) -> Any:
            """Make the loader."""
            return self.owner(self, **known)

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...


def photos_loader(data: dict[str, Any], **settings: Any) -> Any:
    """The settings of the loader in the example, for a section `data`: `photos_loader(data).build(dp_rank=…, …)`."""
    try:
        import torchtitan.components.dataloader  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        package = ModuleType("torchtitan.components.dataloader")
        package.BaseDataLoader = BaseDataLoader  # type: ignore[attr-defined]
        for name in ("torchtitan", "torchtitan.components"):
            sys.modules.setdefault(name, ModuleType(name))
        sys.modules[package.__name__] = package
    spec = spec_from_file_location("torchtitan_loader", EXAMPLE)
    assert spec
    assert spec.loader
    module: Any = sys.modules.setdefault(spec.name, module_from_spec(spec))  # where dataclass looks for it
    spec.loader.exec_module(module)
    config = module.PhotosLoader.Config
    owner = {"owner": module.PhotosLoader} if "owner" in {field.name for field in fields(config)} else {}
    return config(dataset_path=data, **owner, **settings)
