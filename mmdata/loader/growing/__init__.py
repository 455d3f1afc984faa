"""The rows of a stream: an index that grows while its tars are read, and the plan over it."""
