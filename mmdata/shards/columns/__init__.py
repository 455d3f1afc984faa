"""The index file of a shard: one row a sample, one Arrow column a fact.

- `columns`: which columns there are, and how they are read; `encode`: how they are written, bit for bit.
- `labels`: class numbers; `ragged`: several captions a row; `by_shard`: rows of many shards in one request.
- `values`: refuses what no row can hold. `arrow_view`: a column as a numpy array, without a copy.
"""
