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
    from mmdata.loader import Loader
    from mmdata.samplers import BucketBatchSampler, TwoStreamBatchSampler
    from mmdata.shards import Index
    from mmdata.streaming import stream
    from mmdata.trained import load_run

_HOME = {
    "Batch": "mmdata.batch",
    "BucketBatchSampler": "mmdata.samplers",
    "Config": "mmdata.config",
    "DataConfig": "mmdata.config.data",
    "Index": "mmdata.shards",
    "Loader": "mmdata.loader",
    "TwoStreamBatchSampler": "mmdata.samplers",
    "load_config": "mmdata.config",
    "load_run": "mmdata.trained",
    "model_inputs": "mmdata.batch",
    "stream": "mmdata.streaming",
}

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
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mmdata' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
