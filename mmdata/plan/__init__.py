"""Which rows make which batch: decided from the index, before a byte of a shard is read."""

from mmdata.plan.buckets import Bucket, BucketPolicy, LengthAspectPolicy, Shapes, TokenBudgetPolicy
from mmdata.plan.choose import choose_image_shapes, choose_lengths, choose_lengths_by_shape
from mmdata.plan.groups import Groups
from mmdata.plan.mixture import Mixture, Source, Stream
from mmdata.plan.native import NativePolicy
from mmdata.plan.plan import Plan, Step, rank_slice
from mmdata.plan.rows import CaptionTokens, IndexRows, Rows, choose_captions
from mmdata.plan.summary import BucketCount, PlanSummary, summarize

__all__ = [
    "Bucket",
    "BucketCount",
    "BucketPolicy",
    "CaptionTokens",
    "Groups",
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
    "rank_slice",
    "summarize",
]
