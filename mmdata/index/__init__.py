"""The index of shards: a row a sample, a column a fact, in Arrow files beside plain WebDataset tars.

- `columns` says which columns there are, and `encode` makes those of one tar; the same rows give the same bytes.
- `manifest` lists the tars and the files of columns; `writer` writes all of them, the manifest last.
- `build` indexes `tars` of others, on a disk or behind URLs; `staging` keeps what was read of each.
- `index` numbers the rows of one or more folders; `store` reads bytes of tars by offset; `sample` shows one row.
- `side` keeps columns that are derived from an index; `verify` indexes again and compares bytes.
- Nothing is trusted. A reader compares hashes, sizes and values; an error names file, offset and remedy.
"""

from mmdata.index.build import IndexReport, build_index
from mmdata.index.index import Index
from mmdata.index.manifest import Manifest, ShardEntry
from mmdata.index.sample import IndexedSample
from mmdata.index.store import ShardStore
from mmdata.index.verify import Problem, verify

__all__ = [
    "Index",
    "IndexReport",
    "IndexedSample",
    "Manifest",
    "Problem",
    "ShardEntry",
    "ShardStore",
    "build_index",
    "verify",
]
