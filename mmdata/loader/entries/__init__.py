"""The entries of a batch while it is made: pixels, negative captions, and what settings name."""
