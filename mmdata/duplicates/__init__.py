"""Near copies among the images of a corpus: found in one pass, written as columns; no row is dropped.

`signature` makes a thumbnail and a perceptual hash of each image of an index. `search` finds the pairs of images whose
hashes are close, and compares the thumbnails of such a pair. `groups` makes groups of the pairs that are left, and
`table` writes the columns.
"""

from mmdata.duplicates.table import Duplicates, find_duplicates

__all__ = ["Duplicates", "find_duplicates"]
