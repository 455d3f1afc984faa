"""What a run remembers beyond its batch.

- `kept`: all of it behind one interface, of which the settings ask for each part.
- `queue`: features of earlier batches as further negatives.
- `feature_cache`: the features of every row, written to disk as training goes on, for later runs.
- `ema`: an exponential moving average of the weights, for evaluation and as a teacher.
- `neighbours`: groups of similar rows, made of such features; a plan puts them into one batch.
"""
