"""What a bucket policy is, in a few characters: plans whose policies differ must not be taken for each other."""

from __future__ import annotations

import hashlib

import numpy as np

from mmdata.plan.buckets import BucketPolicy
from mmdata.plan.rows import Rows

PROBED_ROWS = 4096


def fingerprint_policy(policy: BucketPolicy, rows: Rows) -> str:
    """Equal for policies of the same class with the same buckets that treat the first rows of a corpus alike.

    So a user's own policy needs no number of its version: where a change of its code shows in the first 4,096 rows, it
    shows here.
    """
    sizes = list(getattr(policy, "batch_sizes", []))
    named = f"{type(policy).__qualname__} {[tuple(bucket) for bucket in policy.buckets]} {sizes}"
    digest = hashlib.sha256(named.encode())
    if not getattr(policy, "uses_cells", False):
        first = np.arange(min(PROBED_ROWS, int(rows.starts[-1])))
        digest.update(np.asarray(policy.assign(rows.shapes(first, 0)), np.int64).tobytes())
    return digest.hexdigest()[:16]
