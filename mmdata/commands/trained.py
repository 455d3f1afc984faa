"""The old place of `mmdata.trained`."""

from mmdata.renamed import renamed_names

__getattr__ = renamed_names(__name__, {"TrainedModel": "mmdata.trained.run.TrainedRun"})
