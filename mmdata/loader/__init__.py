"""The loader: executes a plan with workers, and owns the state.

A batch on its way, in the order of the calls:

- `corpus` opens what the settings name: index, tokenizer, joined tables, negative captions. `mmdata.plan` plans it.
- `loader`: `Loader` keeps position, ledger and clock, and asks a `source` for each batch; `identity` says which plan a
  saved state belongs to.
- `source`: the steps of one rank, made into batches by `workers/`, which know nothing of batches: threads that share
  the units of one batch, in this process or in others. `prefetch` has the shards of coming steps fetched.
- `builder` begins the batch of a step, of what its `BatchSpec` says; `unfinished` is that batch, a unit at a time:
  `reader` reads the members, and `entries/` are what a batch consists of: pixels, and what settings name.
- A row that cannot be used is masked, and the `ledger` lists it with its reason; `stats` holds the clock.

Beside it: `frameworks` is what training frameworks expect of a loader. `regrouped` is a loader that goes on with other
groups from epoch to epoch. `stream` is a loader over an index that grows: in `growing/`, `tars` indexes the tars of a
pass, and `plan` plans them.
"""

from mmdata.loader.builder import BatchBuilder, BatchSpec
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.loader import Loader
from mmdata.loader.stats import Stats

__all__ = ["BatchBuilder", "BatchSpec", "LedgerEntry", "Loader", "Stats"]
