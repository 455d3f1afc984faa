"""Captions to token ids. What a caption becomes depends on (row, epoch, seed) alone.

- `tokenizer` is the tokenizer, by the name of a folder or on the hub, and trains one.
- `transform` makes a caption the text that is tokenized: a user's function, under the row's own random numbers.
"""
