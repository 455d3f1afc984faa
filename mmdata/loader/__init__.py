"""The loader: executes a plan with workers, and owns the state.

- `corpus` opens what settings name: index, tokenizer, cache. `Loader` gives the batches of one rank, and its state.
- `batch_maker` makes one rank's part of one step; `batch_builder` does it in units of rows that threads share.
- `samples` reads the members, `image_buffers` holds the pixels, `buffer_pool` lends their memory.
- A row that cannot be used is masked and stands in the `ledger` with its reason; `stats` are the loader's clock.
- Who makes a batch, and when, is the matter of `workers/`.
"""

from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.loader import Loader
from mmdata.loader.stats import Stats
from mmdata.renamed import renamed_names

__all__ = ["BatchMaker", "LedgerEntry", "Loader", "Stats"]

__getattr__ = renamed_names(__name__, {"Worker": "BatchMaker"})
