"""Where earlier versions had the trainer: `from mmdata.train.loop import Trainer` works for one more release."""

from mmdata.renamed import renamed_names

__getattr__ = renamed_names(__name__, {"Trainer": "mmdata.train.run.trainer.Trainer"})
