"""Shares a folder of shards: to a bucket of S3, or as a dataset of the Hugging Face hub.

`files` says which files a folder has, with the hash of each. `card` and `croissant` describe it, from its manifests. A
`store` is the place that files go to: `s3` (with `s3_parts` for large files) or `hub`. `push` compares the folder with
what is there, and sends the rest: shards and index files first, manifests last. Nothing is remembered between two runs
but what lies at the place itself.
"""

from mmdata.push.push import PushConfig, PushPlan, plan_push, push
from mmdata.push.store import open_store

__all__ = ["PushConfig", "PushPlan", "open_store", "plan_push", "push"]
