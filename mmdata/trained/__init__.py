"""Runs: from settings to a trained model, and the model in use: applied to images and texts, evaluated, exported.

- `run`: `load_run` gives a `TrainedRun`: model, tokenizer, preprocessing, settings; features and zero-shot classes.
- `preprocess`: any image to the pixels that the evaluation's loader makes of it.
- `pairs`: compositional test sets and their scores.
- `export`: a run as a folder for transformers.
- `training`: loader, model and trainer of a config, after `check` has looked at all that needs no image.
- `evaluation`: scores of a run on shards.
"""

from mmdata.trained.preprocess import Preprocess
from mmdata.trained.run import TrainedRun, ZeroShot, load_run

__all__ = ["Preprocess", "TrainedRun", "ZeroShot", "load_run"]
