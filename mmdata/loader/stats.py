"""A clock on every stage of loading, and the account of padding."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Sums over the batches of a loader; seconds are those of all workers together, but wait_s.

    Attributes:
        read_s: reading members of shards.
        decode_s: encoded images to pixels.
        transform_s: crop and resize.
        tokenize_s: captions to ids.
        wait_s: the caller waited for a batch.
        rows: valid rows.
        masked: rows that could not be used, and those that fill up the last batch.
        tokens: in valid rows, padding excluded.
        token_places: the same rows with their padding.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    tokenize_s: float = 0.0
    wait_s: float = 0.0
    rows: int = 0
    masked: int = 0
    tokens: int = 0
    token_places: int = 0

    def add(self, other: Stats) -> None:
        """Add the sums of another."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    @property
    def padding_share(self) -> float:
        """Share of the token places that hold padding."""
        return 1 - self.tokens / self.token_places if self.token_places else 0.0
