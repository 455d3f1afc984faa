"""Which rows of an index a plan plans: a condition on columns, a file of keys, a mask, or a share kept for evaluation.

`data.select` and `data.val.share` become filters, one function (shard) -> bool (rows,) each; a row is planned if all of
them let it pass. What passes is a `Selection`: one bit a row.
"""
