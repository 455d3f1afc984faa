"""Shards on disk: plain WebDataset tars, an index file for each tar, and a manifest that lists them.

Writing: `ShardWriter` (samples) and `build_index` (foreign tars) write tars or index files first, the manifest last.
Finding: a `LocalFolder` or a `RemoteFolder` with its `ShardCache` opens files; only `find_folder` knows which it is.
Rows: a `Manifest` lists the shards of a folder; an `Index` numbers the rows of one or more manifests.
Reading: `ShardStore` reads members by offset; `captions_of` and `probe` say what they are.
Checking: nothing is trusted. A reader compares hashes, sizes and values; an error names file, offset and remedy.
"""

from mmdata.shards.build import IndexReport, build_index
from mmdata.shards.captions import captions_of, clean_caption
from mmdata.shards.images.probe import EXTENSIONS, FORMATS, ImageInfo, Limits, probe
from mmdata.shards.index import Index
from mmdata.shards.indexed_sample import IndexedSample
from mmdata.shards.manifest.manifest import Manifest
from mmdata.shards.manifest.pages import ShardEntry
from mmdata.shards.open_shard import Sample
from mmdata.shards.remote.cache import ShardCache
from mmdata.shards.store import ShardStore
from mmdata.shards.tar import Member, read_members
from mmdata.shards.verify import Problem, verify
from mmdata.shards.writer import ShardWriter

__all__ = [
    "EXTENSIONS",
    "FORMATS",
    "ImageInfo",
    "Index",
    "IndexReport",
    "IndexedSample",
    "Limits",
    "Manifest",
    "Member",
    "Problem",
    "Sample",
    "ShardCache",
    "ShardEntry",
    "ShardStore",
    "ShardWriter",
    "build_index",
    "captions_of",
    "clean_caption",
    "probe",
    "read_members",
    "verify",
]
