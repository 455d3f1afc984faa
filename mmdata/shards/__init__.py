"""What lies on disk: plain WebDataset tars, an index beside them, a manifest over both."""

from mmdata.shards.build import IndexReport, build_index
from mmdata.shards.cache import ShardCache
from mmdata.shards.captions import captions_of, clean_caption
from mmdata.shards.index import Index
from mmdata.shards.manifest import Manifest
from mmdata.shards.pages import ShardEntry
from mmdata.shards.probe import EXTENSIONS, FORMATS, ImageInfo, Limits, probe
from mmdata.shards.store import ShardStore
from mmdata.shards.tar import Member, read_members
from mmdata.shards.verify import Problem, verify
from mmdata.shards.writer import Sample, ShardWriter

__all__ = [
    "EXTENSIONS",
    "FORMATS",
    "ImageInfo",
    "Index",
    "IndexReport",
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
