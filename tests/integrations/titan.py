"""The page's loader for torchtitan, with torchtitan's own BaseDataLoader where it is installed."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


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
    """The settings of the loader in the page, for a section `data`: `photos_loader(data).build(dp_rank=…, …)`."""
    try:
        import torchtitan.components.dataloader  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        package = ModuleType("torchtitan.components.dataloader")
        package.BaseDataLoader = BaseDataLoader  # type: ignore[attr-defined]
        for name in ("torchtitan", "torchtitan.components"):
            sys.modules.setdefault(name, ModuleType(name))
        sys.modules[package.__name__] = package
    (code,) = re.findall(r"```python\n(# photos_loader\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    module: Any = sys.modules.setdefault("photos_loader", ModuleType("photos_loader"))
    exec(code, vars(module))
    config = module.PhotosLoader.Config
    owner = {"owner": module.PhotosLoader} if "owner" in {field.name for field in fields(config)} else {}
    return config(dataset_path=data, **owner, **settings)
