"""Near copies among the images of a corpus: found in one pass, written as columns; no row is dropped.

`signature` makes a thumbnail and a perceptual hash of an image; `sign` does so for all rows of an index. `candidates`
finds the pairs of images whose hashes are close, and `confirm` compares the thumbnails of such a pair. `groups` makes
groups of the pairs that are left, and `table` writes the columns.
"""

from mmdata.duplicates.table import Duplicates, find_duplicates

__all__ = ["Duplicates", "find_duplicates"]
