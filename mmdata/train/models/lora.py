"""LoRA with peft: two small matrices beside a linear layer learn in its place, and are merged into it afterwards."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from collections.abc import Collection, Sequence

from torch import nn

from mmdata.config.model import LoraConfig
from mmdata.errors import ConfigError

logger = logging.getLogger("mmdata")

QUERIES_KEYS_VALUES = ("*.[qkv]_proj", "*.qkv", "*.query", "*.key", "*.value", "*.[qkv]_lin")
"""Names of these layers in mmdata's own towers and in those of transformers."""


def add_adapters(model: nn.Module, config: LoraConfig, *, frozen: Collection[str] = ()) -> None:
    """Add an adapter to each linear layer of the towers that `config.match` names, in place.

    Of the towers nothing else is trained from now on; what is above them stays as it was.

    Args:
        model: a DualEncoder.
        config: which layers, and the rank.
        frozen: "image", "text": this tower gets none.

    Raises:
        ConfigError: a pattern that no layer matches; names the nearest.
        ImportError: peft is not installed.

    Source: Hu et al. 2021 (arXiv:2106.09685); queries, keys and values of both towers: Zanella and Ben Ayed 2024,
    CLIP-LoRA (arXiv:2405.18541).
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("model.lora needs peft: pip install 'mmdata[lora]'") from error
    sides = [side for side in ("image", "text") if side not in frozen]
    towers = {f"{side}_tower": model.get_submodule(f"{side}_tower") for side in sides}
    layers = [
        f"{tower}.{name}"
        for tower, module in towers.items()
        for name, part in module.named_modules()
        if type(part) is nn.Linear  # nn.MultiheadAttention reads the weights of its own kind, and would miss an adapter
    ]
    matching = _matching(layers, config.match)
    for tower, module in towers.items():
        module.requires_grad_(False)
        own = [name.removeprefix(f"{tower}.") for name in matching if name.startswith(f"{tower}.")]
        if own:
            settings = peft.LoraConfig(
                r=config.r,
                lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # a factor: any number will do
                lora_dropout=config.dropout,
                target_modules=own,
            )
            peft.inject_adapter_in_model(settings, module)
        learning = sum(p.numel() for p in module.parameters() if p.requires_grad)
        logger.info("model.lora: %s has adapters at %d layers, %s weights", tower, len(own), f"{learning:,}")


def merge_adapters(model: nn.Module) -> None:
    """Add each adapter to the layer beside it, in place: a plain model, whose features are equal up to rounding."""
    from peft.tuners.lora import LoraLayer

    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, LoraLayer):
                part.merge()
                setattr(parent, name, part.get_base_layer())
        if hasattr(parent, "peft_config"):  # it would say that there are adapters already
            del parent.peft_config
    model.requires_grad_(True)


def _matching(layers: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """The layers that patterns name; None: those of queries, keys and values."""
    found = {pattern: fnmatch.filter(layers, pattern) for pattern in patterns or QUERIES_KEYS_VALUES}
    missed = [pattern for pattern, names in found.items() if not names]
    if missed and (patterns or len(missed) == len(found)):
        kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in layers})
        near = difflib.get_close_matches(missed[0], kinds, n=3, cutoff=0.0)
        raise ConfigError(
            f"model.lora.match '{missed[0]}': no linear layer of a tower that is not frozen has such a name; the "
            f"nearest are {', '.join(near)}"
        )
    return [name for name in layers if any(name in names for names in found.values())]
