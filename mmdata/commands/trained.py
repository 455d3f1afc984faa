"""The model of a run, with its settings and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from mmdata.config import Config
from mmdata.config.settings import without_removed
from mmdata.config.strict_yaml import parse
from mmdata.train import DualEncoder
from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint, load_weights
from mmdata.train.step import AUTOCAST
from mmdata.transform.text import Tokenizer, need_tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """A model as a checkpoint has it.

    Attributes:
        model: in eval mode.
        config: settings of the run.
        tokenizer: of the run.
        checkpoint: the file.
        step: updates made.
        epoch: of those updates.
    """

    model: DualEncoder
    config: Config
    tokenizer: Tokenizer
    checkpoint: Path
    step: int
    epoch: int

    @classmethod
    def load(cls, run: Path, device: torch.device | str = "cpu") -> Self:
        """From a checkpoint, or the newest checkpoint of a run's folder.

        Raises:
            DataError: no such run, or a damaged checkpoint.
            ConfigError: the weights do not fit the settings.
        """
        path = find_checkpoint(run)
        state: dict[str, Any] = load_checkpoint(path)
        config = parse(Config, without_removed(Config, state["settings"]), origin=f"settings in '{path}'")
        tokenizer = need_tokenizer(config.data, to="use a dual encoder")
        model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size)
        load_weights(model, state, origin=str(path))
        return cls(model.to(device).eval(), config, tokenizer, path, state["step"], state["epoch"])

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type of the towers' autocast while the model was trained."""
        return AUTOCAST[self.config.train.precision]
