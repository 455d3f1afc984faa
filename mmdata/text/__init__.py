"""Captions to token ids. What a caption becomes depends on (row, epoch, seed) alone.

- `tokenizer` is the tokenizer; `tokenizer_names` says what a name of one means.
- `transform` makes a caption the text that is tokenized: a user's function, under the row's own random numbers.
"""
