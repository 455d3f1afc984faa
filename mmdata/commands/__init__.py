"""What commands do once their arguments are parsed: the data half and the GPU half put together.

- `check`: what a run needs, looked at before anything slow.
- `train`: loader, model and trainer of a configuration. What follows training uses `mmdata.trained`.
- `evaluate`: retrieval and zero-shot accuracy on shards, and compositional tests.
- `neighbours`: features of a corpus, for groups of near neighbours.
- `init`: from a source to a config that trains; `look` says what a source holds, `starter` chooses the settings.
- `next_commands`: what to type next, once shards have been made or indexed.
- `preview_lines`: what a preview of a conversion says, for `mmdata convert --plan`.
- `parts`: the folders `train` and `val` of a conversion.
- `join`: columns of tables written beside an index, before a run asks for them.
- `plan`: an epoch of a config or of a folder of shards, without training.
- `report`: what the model of a run finds, for the page of `mmdata report`.
- `compare`: several ways to train, each from the same seeds.
- A program in tools/ parses its arguments, calls these functions and prints what they return.
"""
