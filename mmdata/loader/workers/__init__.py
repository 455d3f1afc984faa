"""Who makes the batches ahead. It imports nothing of the loader.

- `threads` share the work on each batch, which comes in units.
- `process`: worker processes, each with threads of its own; batches come back in `shared` memory.
- `buffers`: memory of batches, used again when a batch is gone.
"""
