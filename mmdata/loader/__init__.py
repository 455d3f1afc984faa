"""The loader: executes a plan with workers, and owns the state.

- `corpus` opens what the settings name: index, tokenizer, cache. `Loader` gives the batches of one rank,
  and makes its state (`Loader.state_dict`) of its `position`; `identity` says which plan a saved state belongs to.
- `source` decides who makes the batches, and gives them the steps of the rank; `prefetch` fetches their shards.
- `builder` makes one rank's part of one step, of what `BatchSpec` says: `unfinished` is a batch in progress, `reader`
  reads the members, `image_buffers` holds the pixels.
- A row that cannot be used is masked, and the `ledger` lists it with its reason; `stats` holds the loader's clock.
- `workers/` does the work, in threads and in worker processes. It knows nothing of batches.
- `regrouped`: a loader that goes on with other groups from epoch to epoch.
- `stream`: a loader over an index that grows; `stream_tars` index the tars of a pass, `stream_plan` plans them, and
  `sample_buffers` make tars in memory of samples of a webdataset.
"""

from mmdata.loader.builder import BatchBuilder, BatchSpec
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.loader import Loader
from mmdata.loader.stats import Stats

__all__ = ["BatchBuilder", "BatchSpec", "LedgerEntry", "Loader", "Stats"]
