"""The loader: executes a plan with workers, and owns the state.

- `corpus` opens what the settings name: index, tokenizer, cache. `Loader` gives the batches of one rank,
  and its state; `state` says which plan a saved state belongs to.
- `regrouped`: a loader that goes on with other groups from epoch to epoch.
- `batch_maker` makes one rank's part of one step; `batch_builder` splits it into units of rows, which threads share.
- `samples` reads the members, `image_buffers` holds the pixels, `buffer_pool` lends their memory.
- A row that cannot be used is masked, and the `ledger` lists it with its reason; `stats` holds the loader's clock.
- `workers/` decides who makes a batch, and when.
"""

from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.loader import Loader
from mmdata.loader.stats import Stats

__all__ = ["BatchMaker", "LedgerEntry", "Loader", "Stats"]
