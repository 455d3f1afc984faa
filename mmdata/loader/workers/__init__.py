"""Who makes the batches.

- `steps`: what one rank has to make, in order: it follows from the plan alone.
- `threads`: worker threads share each batch in units of rows. The default.
- `parent` and `child`: worker processes, each with threads of its own; a batch comes back in `shared_memory`, told
  over a `channel`.
- `handover`: threads make the first batches while the worker processes start.
- `choose`: which of them a loader gets. Whoever makes a batch, the batch is the same.
"""
