"""Batch samplers for a Dataset of one's own: `DataLoader(dataset, batch_sampler=…)`, in any loop."""

from mmdata.samplers.bucket import BucketBatchSampler
from mmdata.samplers.planned import PlannedBatchSampler
from mmdata.samplers.two_stream import TwoStreamBatchSampler

__all__ = ["BucketBatchSampler", "PlannedBatchSampler", "TwoStreamBatchSampler"]
