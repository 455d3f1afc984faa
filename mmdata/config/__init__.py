"""Settings: one YAML file with the sections data, model and train.

- A section is a class of `Settings` (settings.py); `Config` is the whole YAML file.
- The section data has a class a concern (corpus, batches, images, texts, rows): a room takes the one that it needs.
- `load_config` (strict_yaml.py) reads a file, and the command line overrides values: "data.loading.num_workers=4".
- An unknown key is an error that names the nearest known one.
- A resumed run may change `data.loading` and the settings marked `MayChange`, and nothing else.
- This package neither opens a shard nor imports torch: settings are checked before anything is built from them.
"""

from mmdata.config.config import Config, load_config
from mmdata.config.data import DataConfig, LoadingConfig, evaluation_data
from mmdata.config.model import ModelConfig
from mmdata.config.train import TrainConfig

__all__ = [
    "Config",
    "DataConfig",
    "LoadingConfig",
    "ModelConfig",
    "TrainConfig",
    "evaluation_data",
    "load_config",
]
