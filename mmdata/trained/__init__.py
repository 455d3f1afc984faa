"""A trained model in use: loaded from its run, applied to images and texts, exported for other libraries.

- `run`: `load_run` gives a `TrainedRun`: model, tokenizer, preprocessing, settings; features and zero-shot classes.
- `preprocess`: any image to the pixels that the evaluation's loader makes of it.
- `pairs`: compositional test sets as batches.
- `export`: a run as a folder for transformers; `modeling_mmdata` is the code that goes into it with built-in towers.
- Nothing here trains: `model.init_from` in a config begins a training with a run's weights.
"""

from mmdata.trained.preprocess import Preprocess
from mmdata.trained.run import TrainedRun, ZeroShot, load_run

__all__ = ["Preprocess", "TrainedRun", "ZeroShot", "load_run"]
