"""One training run in one folder.

- `step` and `objective`: one update of the features: embed → mine → loss; the loss that settings name.
- `trainer`: the loop around it: batches in, updates, evaluation, checkpoints, log.
- `optimizer` and `groups`: the optimizer and its learning rate; which parameters learn at which share of it.
- `update`: an update that is finite on all ranks, or none.
- `checkpoint`: everything that a resumed run needs to make the same updates, whole or absent.
- `same_run`: whether a checkpoint belongs to the settings under which it is to go on.
- `report`: what a run says, by the parts in `mmdata.train.log`.
- `watchdog`: a rank that hangs or dies ends the run with its place, and a signal ends it with a checkpoint.
"""
