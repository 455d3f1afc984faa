"""Streams: the loader's batches from shards without an index, read once from front to back.

- `shard_names` expands paths, URLs and brace patterns, and assigns the shards to ranks.
- `forward_file` opens a shard as bytes; `samples` reads those as samples. A sample that cannot be used is dropped.
- `composer` buffers samples and cuts batches of one bucket out of the buffer; `passes` does so for pass after pass.
- `prefetch` makes the batches ahead: one thread reads, the workers decode. `Stream` (`stream`) is what a user iterates.
- `position` counts epochs and passes; `state` saves both. A resumed stream reads its pass again from the start.

The package is not called `stream`: a submodule of that name would hide the function `mmdata.stream`.
"""

from mmdata.streaming.stream import Stream, stream

__all__ = ["Stream", "stream"]
