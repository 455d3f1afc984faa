"""Settings: one YAML file with the sections data, model, train and compare.

- A section is a class of `Settings` (strict_yaml): an unknown key is an error that names the nearest known one.
- Each class lies in the file of its section; `Config` is the whole file.
- `load_config` reads a file and lets the command line override single values, "data.num_workers=4".
- Nothing here opens a shard or imports torch: a setting is checked before anything is built of it.
"""

from mmdata.config.compare import CompareConfig
from mmdata.config.config import Config, load_config
from mmdata.config.data import DataConfig
from mmdata.config.model import ModelConfig
from mmdata.config.train import TrainConfig

__all__ = ["CompareConfig", "Config", "DataConfig", "ModelConfig", "TrainConfig", "load_config"]
