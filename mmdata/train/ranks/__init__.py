"""Training on several ranks: the only part of mmdata that uses torch.distributed.

- `collectives`: joins the process group, gathers features with exact gradients, wraps the model in DDP.
- `parallel`: how a model is made ready: compiled, in DDP, or sharded (`sharding`: FSDP2).
- `lockstep`: the ranks take each batch together, so that a rank without data stops all of them.
- Alone, without a process group, every function here does what one rank of one would do.
"""
