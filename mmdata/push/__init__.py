"""Shares a folder of shards, to a bucket of S3 or the Hugging Face hub; and an exported model, to the hub.

`files` says which files a folder has, with the hash of each. `card` and `croissant` describe it, from its manifests.
`push` compares the folder with what is at a place, `s3` or `hub`, and sends the rest: manifests last. Nothing is
remembered between two runs but what lies at the place itself.
"""

from mmdata.push.push import PushConfig, PushPlan, open_store, plan_push, push

__all__ = ["PushConfig", "PushPlan", "open_store", "plan_push", "push"]
