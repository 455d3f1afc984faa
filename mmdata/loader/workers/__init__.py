"""Who makes the batches.

- `steps`: the steps of one rank, in order. They depend on the plan alone.
- `threads`: worker threads share each batch in units of rows. The default.
- `parent` and `child`: worker processes, each with threads of its own; batches come back in `shared_memory`, messages
  over a `channel`.
- `choose`: which of these a loader gets. All of them make the same batches.
"""
