"""Which rows make which batch: decided from the index, before a byte of a shard is read."""

from mmdata.plan.buckets import Bucket, BucketPolicy, LengthAspectPolicy, Shapes, TokenBudgetPolicy
from mmdata.plan.choose import choose_image_shapes, choose_lengths, choose_lengths_by_shape
from mmdata.plan.groups import Groups
from mmdata.plan.mixture import Mixture, Source, Stream
from mmdata.plan.native import NativePolicy
from mmdata.plan.plan import Plan, Step, rank_slice
from mmdata.plan.rows import CaptionTokens, IndexRows, Rows, choose_captions, count_buckets
from mmdata.plan.summary import BucketCount, PlanSummary, summarize
from mmdata.plan.unique import Hashes

__all__ = [
    "Bucket",
    "BucketCount",
    "BucketPolicy",
    "CaptionTokens",
    "Groups",
    "Hashes",
    "IndexRows",
    "LengthAspectPolicy",
    "Mixture",
    "NativePolicy",
    "Plan",
    "PlanSummary",
    "Rows",
    "Shapes",
    "Source",
    "Step",
    "Stream",
    "TokenBudgetPolicy",
    "choose_captions",
    "choose_image_shapes",
    "choose_lengths",
    "choose_lengths_by_shape",
    "count_buckets",
    "rank_slice",
    "summarize",
]
