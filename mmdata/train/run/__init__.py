"""One training run in one folder.

- `trainer`: the loop: batches in, updates, evaluation, checkpoints, log.
- `optimizer` and `update`: AdamW and its learning rate; an update that is finite on all ranks, or none.
- `checkpoint` and `sharded_checkpoint`: everything that a resumed run needs to make the same updates, whole or absent.
- `find` and `same_run`: the checkpoint of a run; whether it belongs to the settings under which it is to go on.
- `log` and `meter`: metrics.jsonl and TensorBoard; the time that goes to data, step and waiting.
- `provenance`: machine, versions and commits of each start.
- `watchdog`: a rank that hangs ends with its stacks, and one that is ended says where it was.
- `stopping`: a signal ends it with a checkpoint.
"""
