"""Bytes behind URLs, read and written.

- `cache`: a bounded folder of fetched files, named by their hashes, shared by any number of processes.
- `urls` lists the protocols that are followed, and the tars of others that `mmdata index` reads.
- `folder`: where shards lie, with the same methods on a disk and behind a URL, whose files come into the cache.
- `remote`: a file behind a URL, read within bounds: HTTP by our own requests, all others by fsspec.
- `attempts`: which failed requests are made again, and what is said of them.
- `s3`: a folder in a bucket, to write to.
"""

from mmdata.storage.cache import ShardCache

__all__ = ["ShardCache"]
