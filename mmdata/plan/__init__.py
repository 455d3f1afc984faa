"""Which rows make which batch: decided from the index, before a byte of a shard is read.

- `rows` is what a plan knows of the corpus, `captions` which caption a row has in a pass.
- `buckets` are the shapes of batches; a policy gives each row its bucket, and `choose` makes the policy of settings.
- `mixture` says which datasets fill a batch, `groups` which rows stand together in one.
- `windows` assigns shards to lanes and cuts them into windows; the rows of windows wait in `queues`
  by bucket; `schedule` says from counts alone when they become a batch.
- `plan` runs these steps from any step of any epoch, for any rank; `summary` counts an epoch.
- `weights` and `ordered` are plans of rows that come more or less often, and of an order that is given.
- `from_config` makes a plan of settings. Nothing in this package reads an image.
"""

from mmdata.plan.buckets import Bucket, BucketPolicy, LengthAspectPolicy, NativePolicy, Shapes
from mmdata.plan.captions import CaptionSources, NoTexts, ShardCaptions, choose_captions
from mmdata.plan.groups import Groups
from mmdata.plan.mixture import Mixture, ShardSpan
from mmdata.plan.ordered import OrderedPlan
from mmdata.plan.plan import Plan, Step, rank_slice
from mmdata.plan.rows import Hashes, IndexRows, Rows
from mmdata.plan.summary import BucketCount, PlanSummary, count_duplicates, duplicates_in_words, summarize

__all__ = [
    "Bucket",
    "BucketCount",
    "BucketPolicy",
    "CaptionSources",
    "Groups",
    "Hashes",
    "IndexRows",
    "LengthAspectPolicy",
    "Mixture",
    "NativePolicy",
    "NoTexts",
    "OrderedPlan",
    "Plan",
    "PlanSummary",
    "Rows",
    "Shapes",
    "ShardCaptions",
    "ShardSpan",
    "Step",
    "choose_captions",
    "count_duplicates",
    "duplicates_in_words",
    "rank_slice",
    "summarize",
]
