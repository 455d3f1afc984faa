"""Settings of `mmdata compare`, which trains several ways from the same seeds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from mmdata.config.settings import Integer, Location, Settings


class ArmConfig(Settings):
    """One of the ways to train that `mmdata compare` compares."""

    settings: tuple[str, ...] = ()
    """What it changes, as on the command line: "train.loss=hard_negative"."""
    neighbours: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Rows of a group: of near neighbours in the eyes of the baseline's finished model of the same seed."""


class CompareConfig(Settings):
    """Several ways to train, each from the same seeds, and what they are measured by."""

    output: Location
    """Folder of the runs and of results.jsonl."""
    arms: dict[str, ArmConfig]
    baseline: str
    """The arm that the others are compared with; it runs first."""
    seeds: Annotated[list[Integer], Field(min_length=2)]
    """Of the weights and of the order of the data; the same for all arms."""
    pairs: Location | None = None
    """JSONL of a compositional test (see mmdata.compositional); None: only retrieval on `data.val`."""
    primary: str = "r1"
    """What decides: a type of swap in `pairs`, their "mean", or "r1", retrieval."""
    tuning: Annotated[tuple[tuple[str, ...], ...], Field(min_length=1)] = ((),)
    """Settings that each arm is tried with."""
    tuning_seed: Integer | None = None
    """From this seed; what retrieves best on `data.val` an arm keeps. Needed where there is something to try."""

    @model_validator(mode="after")
    def _check(self) -> CompareConfig:
        if self.baseline not in self.arms or self.arms[self.baseline].neighbours is not None:
            raise ValueError(f"baseline '{self.baseline}' must be one of the arms, without neighbours of its own")
        if len(self.tuning) > 1 and self.tuning_seed is None:
            raise ValueError(f"tuning has {len(self.tuning)} settings to try: give tuning_seed, none of {self.seeds}")
        if self.pairs is None and self.primary != "r1":
            raise ValueError(f"primary '{self.primary}' is a type of swap: give pairs, or let r1 (retrieval) decide")
        if self.tuning_seed in self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ, also from tuning_seed ({self.tuning_seed}): got {self.seeds}")
        return self
