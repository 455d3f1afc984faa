"""Bytes behind URLs, read and written.

- `cache`: a bounded folder of fetched files, named by their hashes, shared by any number of processes.
- `folder`: where shards lie, on a disk or behind a URL; `urls`: the tars of others that `mmdata index` reads.
- `fetch`: a folder behind a URL, whose files come into the cache; `http`: one of its files over HTTP, within bounds.
- `attempts`: which failed requests are made again, and what is said of them.
- `s3`: a folder in a bucket, to write to.
"""

from mmdata.storage.cache import ShardCache

__all__ = ["ShardCache"]
