"""Bytes behind URLs, read and written.

- `fetch`: a folder behind a URL: whole files, with retries and backoff, through fsspec.
- `http`: one HTTP request: what it asks for, and the bounds on the answer.
- `cache`: a bounded folder of fetched files, named by their hashes, shared by any number of processes.
- `urls`: the tars of others that `mmdata index` reads; `tar_stream`: one of them, read once;
  `resumed_http`: its bytes, over HTTP.
"""

from mmdata.storage.cache import ShardCache

__all__ = ["ShardCache"]
