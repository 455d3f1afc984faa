"""Scores of a trained model.

- `embedding`: features of every row and caption of a loader, over all ranks, each row once.
- `retrieval`: recall and ranks, exact with ties, duplicates and several captions.
- `evaluate`: retrieval of a corpus, zero-shot classification, compositional tests.
"""
