"""Text–image pairs in, trained dual encoders out, with nothing lost on the way.

The names below are loaded when first used, so that `import mmdata` is quick and the GPU half (`mmdata.train`) needs
none of the data half's libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdata.batch import Batch as Batch
    from mmdata.batch import model_inputs as model_inputs
    from mmdata.config import Config as Config
    from mmdata.config import DataConfig as DataConfig
    from mmdata.config import load_config as load_config
    from mmdata.index import Index as Index
    from mmdata.loader import Loader as Loader
    from mmdata.loader.stream import stream as stream
    from mmdata.picture import show as show
    from mmdata.samplers import BucketBatchSampler as BucketBatchSampler
    from mmdata.samplers import TwoStreamBatchSampler as TwoStreamBatchSampler
    from mmdata.trained import load_run as load_run

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

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]  # the imports above are named for it


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from mmdata.version import VERSION

        return VERSION
    if name in _ROOMS:  # `import mmdata` is enough for mmdata.train.losses
        return import_module(f"mmdata.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'mmdata' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:  # for tab completion: the names above are loaded when they are first used
    return sorted([*__all__, *_ROOMS])
