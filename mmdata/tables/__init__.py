"""Tables and their rows beside those of an index: columns come to a sample by its key, and no shard is rewritten.

A table is one or more files (Parquet, CSV, TSV) with a column of keys, in any order. It is matched with an index once:
the result says for each row of the index which row of the table belongs to it, or that none does.
"""
