"""The index of shards: plain WebDataset tars, an index file for each tar, and a manifest that lists them.

Writing: `ShardWriter` (samples) and `build_index` (foreign tars) write tars or index files first, the manifest last.
Finding: a `LocalFolder` or a `RemoteFolder` with its `ShardCache` opens files; only `find_folder` knows which it is.
Rows: a `Manifest` lists the shards of a folder; an `Index` numbers the rows of one or more manifests.
Reading: `ShardStore` reads members by offset; `captions_of` and `probe` say what they are.
Checking: nothing is trusted. A reader compares hashes, sizes and values; an error names file, offset and remedy.
"""

from mmdata.index.build import IndexReport, build_index
from mmdata.index.index import Index
from mmdata.index.manifest import Manifest
from mmdata.index.pages import ShardEntry
from mmdata.index.sample import IndexedSample
from mmdata.index.store import ShardStore
from mmdata.index.tar_writer import Sample
from mmdata.index.verify import Problem, verify
from mmdata.index.writer import ShardWriter

__all__ = [
    "Index",
    "IndexReport",
    "IndexedSample",
    "Manifest",
    "Problem",
    "Sample",
    "ShardEntry",
    "ShardStore",
    "ShardWriter",
    "build_index",
    "verify",
]
