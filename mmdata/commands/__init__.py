"""What commands do once their arguments are parsed: the data half and the GPU half put together.

- `check`: what a run needs, looked at before anything slow.
- `train`: loader, model and trainer of a configuration. What follows training uses `mmdata.trained`.
- `evaluate`: retrieval and zero-shot accuracy on shards, and compositional tests.
- `neighbours`: features of a corpus, for groups of near neighbours.
- `init`: from a source to a config that trains; `look` says what a source holds, `starter` chooses the settings.
- `plan`: an epoch of a config or of a folder of shards, without training.
- `compare`: several ways to train, each from the same seeds.
- A program in tools/ parses its arguments, calls these functions and prints what they return.
"""
