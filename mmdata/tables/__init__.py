"""Columns beside the rows of an index, and conditions on them; no shard is rewritten.

- `table` reads users' files: tables with a column of keys, lines of text, arrays of numpy.
- `join` matches tables and tars in other folders with the rows, by key. `mmdata join` does it once, and writes columns
  in the order of the rows into side files of the index. All others read these.
- `joined` has all columns of the rows: those of the index, and joined ones. `captions` and `values` are joined columns
  as batches take them.
- `condition` is a condition on columns; `select` makes a `selection` of rows of what the settings say.
"""
