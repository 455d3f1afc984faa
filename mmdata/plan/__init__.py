"""Which rows make which batch: decided from the index, before a byte of a shard is read."""

from mmdata.plan.buckets import Bucket, BucketPolicy, LengthAspectPolicy, NativePolicy, Shapes, TokenBudgetPolicy
from mmdata.plan.choose_shapes import choose_image_shapes, choose_lengths, choose_lengths_by_shape
from mmdata.plan.deduplicate import Hashes
from mmdata.plan.groups import Groups
from mmdata.plan.mixture import BatchShare, Mixture, ShardSpan
from mmdata.plan.plan import Plan, Step, rank_slice
from mmdata.plan.rows import IndexRows, Rows, choose_captions, count_buckets
from mmdata.plan.summary import BucketCount, PlanSummary, summarize
from mmdata.shards.caption_lengths import CaptionTokens

__all__ = [
    "BatchShare",
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
    "ShardSpan",
    "Step",
    "TokenBudgetPolicy",
    "choose_captions",
    "choose_image_shapes",
    "choose_lengths",
    "choose_lengths_by_shape",
    "count_buckets",
    "rank_slice",
    "summarize",
]
