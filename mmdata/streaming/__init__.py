"""The same batches as the loader's, from shards without an index.

The package is not called `stream`: a submodule of that name would hide the function `mmdata.stream`.
"""

from mmdata.streaming.stream import Stream, stream

__all__ = ["Stream", "stream"]
