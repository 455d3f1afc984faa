"""Who makes the batches ahead. It imports nothing of the loader.

- `threads` share the work on each batch, which comes in units. `interrupt_safe` is what they share where Ctrl-C may
  come.
- `process`: worker processes, each with threads of its own; batches come back in `shared` memory.
- `buffers`: memory of batches, used again when a batch is gone.
"""
