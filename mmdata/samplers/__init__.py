"""Batch samplers for any Dataset: `DataLoader(dataset, batch_sampler=…)`, in any training loop.

- `BucketBatchSampler`: batches of rows of about the same length. `TwoStreamBatchSampler`: batches of two kinds of rows.
- A global batch depends on the arguments and the seed, never on the number of ranks; each rank takes an equal part.
- Every row comes once an epoch over all ranks, and all ranks have the same number of batches.
- `planned` has what both share: ranks, epochs, state. A state is saved and loaded as that of `mmdata.Loader`.
- Nothing in this package reads the dataset: row numbers and lengths are arguments.
"""

from mmdata.samplers.bucket import BucketBatchSampler
from mmdata.samplers.planned import PlannedBatchSampler
from mmdata.samplers.two_stream import TwoStreamBatchSampler

__all__ = ["BucketBatchSampler", "PlannedBatchSampler", "TwoStreamBatchSampler"]
