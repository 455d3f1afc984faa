"""Where earlier versions had the trainer: `from mmdata.train.loop import Trainer` works for one more release."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from mmdata.train.run import trainer

    warnings.warn(
        "mmdata.train.loop is now mmdata.train.run.trainer; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(trainer, name)
