"""Columns of tables beside the rows of an index, and conditions on them; no shard is rewritten.

A table is one or more files (Parquet, CSV, TSV) with a column of keys, in any order. `mmdata join` matches it with an
index once, and writes its columns in the order of the rows. All others read what was written.
"""
