"""Text–image pairs in, trained dual encoders out, with nothing lost on the way.

The names below are loaded when first used, so that `import mmdata` is quick and the GPU half (`mmdata.train`) needs
none of the data half's libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdata.batch import Batch, model_inputs
    from mmdata.config import Config, DataConfig, load_config
    from mmdata.index import Index
    from mmdata.loader import Loader
    from mmdata.loader.stream import stream
    from mmdata.picture import show
    from mmdata.samplers import BucketBatchSampler, TwoStreamBatchSampler
    from mmdata.trained import load_run

_HOME = {
    "Batch": "mmdata.batch",
    "BucketBatchSampler": "mmdata.samplers",
    "Config": "mmdata.config",
    "DataConfig": "mmdata.config.data",
    "Index": "mmdata.index",
    "Loader": "mmdata.loader",
    "TwoStreamBatchSampler": "mmdata.samplers",
    "load_config": "mmdata.config",
    "load_run": "mmdata.trained",
    "model_inputs": "mmdata.batch",
    "show": "mmdata.picture",
    "stream": "mmdata.loader.stream",
}

_ROOMS = (
    *("batch", "config", "convert", "images", "index", "integrations", "samplers", "storage"),
    *("tars", "train", "trained"),
)
"""Modules that the documentation names."""

__all__ = [
    "Batch",
    "BucketBatchSampler",
    "Config",
    "DataConfig",
    "Index",
    "Loader",
    "TwoStreamBatchSampler",
    "load_config",
    "load_run",
    "model_inputs",
    "show",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mmdata")
    if name in _ROOMS:  # `import mmdata` is enough for mmdata.train.losses
        return import_module(f"mmdata.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'mmdata' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:  # for tab completion: the names above are loaded when they are first used
    return sorted([*__all__, *_ROOMS])
