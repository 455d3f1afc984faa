"""Which rows make which batch: decided from the index, before a byte of a shard is read.

- `rows` is what a plan knows of the corpus. `buckets` are the shapes of batches; a policy gives each row its bucket.
- `mixture` says which datasets fill a batch; `windows` assigns their shards to lanes and cuts them into windows.
- `bucket_queues` hold the rows of windows by bucket; the `schedule`, from counts alone, turns them into batches.
- `plan` runs these steps from any step of any epoch, for any rank; `summary` counts an epoch.
- `from_config` makes a plan of settings. Nothing in this package reads an image, and only `rows` reads the index.
"""

from mmdata.index.caption_lengths import CaptionTokens
from mmdata.length_bounds import choose_lengths
from mmdata.plan.buckets import (
    Bucket,
    BucketPolicy,
    LengthAspectPolicy,
    NativePolicy,
    Shapes,
    TextMarginPolicy,
    TokenBudgetPolicy,
)
from mmdata.plan.captions import CaptionSources, choose_captions
from mmdata.plan.choose_shapes import choose_image_shapes, choose_lengths_by_shape
from mmdata.plan.groups import Groups
from mmdata.plan.mixture import BatchShare, Mixture, ShardSpan
from mmdata.plan.plan import Plan, Step, rank_slice
from mmdata.plan.rows import Hashes, IndexRows, Rows, count_buckets
from mmdata.plan.summary import BucketCount, PlanSummary, count_duplicates, duplicates_in_words, summarize

__all__ = [
    "BatchShare",
    "Bucket",
    "BucketCount",
    "BucketPolicy",
    "CaptionSources",
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
    "TextMarginPolicy",
    "TokenBudgetPolicy",
    "choose_captions",
    "choose_image_shapes",
    "choose_lengths",
    "choose_lengths_by_shape",
    "count_buckets",
    "count_duplicates",
    "duplicates_in_words",
    "rank_slice",
    "summarize",
]
