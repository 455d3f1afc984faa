"""LoRA with peft: two small matrices beside a linear layer learn in its place, and are merged into it afterwards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn

from mmdata.config.model import LoraConfig
from mmdata.errors import ConfigError
from mmdata.train.models.weights import nearest_patterns

QUERIES_KEYS_VALUES = (
    *("*.[qkv]", "*.[qkv]_proj", "*.[qkv]_lin", "*.query", "*.key", "*.value", "*.query_proj", "*.key_proj"),
    *("*.value_proj", "*.qkv", "*.Wqkv", "*.in_proj", "*.query_key_value"),
)
"""Names of these layers in mmdata's own towers and in those of transformers."""


def add_adapters(model: nn.Module, config: LoraConfig, *, frozen: Collection[str] = ()) -> None:
    """Add an adapter to each linear layer of the towers that `config.match` names, in place.

    Of the towers nothing else is trained from now on, also of one in which no pattern matches; what is above them stays
    as it was.

    Args:
        model: a DualEncoder.
        config: which layers, and the rank.
        frozen: "image", "text": this tower gets none.

    Raises:
        ConfigError: a pattern that no layer matches; or, without patterns, a tower without such layers.
        ImportError: peft is not installed.

    Source: Hu et al. 2021 (arXiv:2106.09685); queries, keys and values of both towers: Zanella and Ben Ayed 2024,
    CLIP-LoRA (arXiv:2405.18541).
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("model.lora needs peft: pip install 'mmdata[lora]'") from error
    towers = {side: model.get_submodule(f"{side}_tower") for side in ("image", "text") if side not in frozen}
    layers = {
        side: [f"{side}_tower.{name}" for name, part in tower.named_modules() if type(part) is nn.Linear]
        for side, tower in towers.items()  # nn.MultiheadAttention's kind of nn.Linear would miss an adapter
    }
    everywhere = [name for names in layers.values() for name in names]
    for pattern in config.match or ():
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            raise ConfigError(
                f"model.lora.match '{pattern}': no linear layer of a tower that is not frozen has such a name; the "
                f"nearest are {nearest_patterns(pattern, everywhere)}"
            )
    for side, tower in towers.items():
        patterns = config.match or QUERIES_KEYS_VALUES
        own = [name for name in layers[side] if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not own and config.match is None:
            raise ConfigError(
                f"model.lora: no linear layer of the {side} tower is named as those of queries, keys and values are; "
                f"name some in model.lora.match (there are {', '.join(_kinds(layers[side]))}), or leave the "
                f"tower as it is with model.freeze=[{side}]"
            )
        tower.requires_grad_(False)
        if own:
            settings = peft.LoraConfig(
                r=config.r,
                lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # a factor: any number will do
                lora_dropout=config.dropout,
                target_modules=[name.removeprefix(f"{side}_tower.") for name in own],
            )
            peft.inject_adapter_in_model(settings, tower)


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


def _kinds(layers: Iterable[str]) -> list[str]:
    """Patterns that name the layers, such as text_tower.*.fc1."""
    return sorted({re.sub(r"\..*\.", ".*.", name) for name in layers}) or ["none"]
