"""One training run in one folder.

- `trainer`: the loop: batches in, updates, evaluation, checkpoints, log.
- `optimizer` and `update`: AdamW and its learning rate; an update that is finite on all ranks, or none.
- `checkpoint` and `sharded_checkpoint`: everything that a resumed run needs to make the same updates, whole or absent.
- `find` and `same_run`: the checkpoint of a run; whether it belongs to the settings under which it is to go on.
- `log` and `meter`: metrics.jsonl and TensorBoard; the time that goes to data, step and waiting.
- `sessions`: run.json: machine, versions, commits and seconds of each start.
- `watchdog`, `heartbeat`, `presence`: a rank that hangs or dies ends the run with its name.
- `stopping`: a signal ends it with a checkpoint.
"""
