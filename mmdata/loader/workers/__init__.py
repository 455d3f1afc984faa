"""Who makes the batches ahead. It imports nothing of the loader.

- `work`: what workers are given, a pipeline of steps whose work comes in units, and what a loader asks of them.
- `threads` share each batch in units of rows. The default. `interrupt_safe` is what they share where Ctrl-C may come.
- `process`: worker processes, each with threads of its own; batches come back in `shared` memory.
- `buffers`: memory of batches, used again when a batch is gone.
"""
