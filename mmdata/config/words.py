"""Settings in words, read from the JSON schema of their classes. Nothing here is written by hand.

Names, values and defaults are those of the fields, and the meaning is the text below each field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from mmdata.config.settings import NAMED, Settings, sections_within

OTHER_NAMES = {
    "shards": ("train_data",),
    "select": ("filter", "where"),
    "global_batch_size": ("batch_size", "train_batch_size", "per_device_train_batch_size"),
    "shuffle_window_rows": ("shuffle_buffer", "shuffle_buffer_size"),
    "image_size": ("resolution",),
    "color_jitter": ("brightness", "contrast", "saturation", "hue"),
    "max_length": ("context_length", "maxlen"),
    "num_workers": ("workers",),
    "prefetch_batches": ("prefetch_factor",),
    "freeze": ("lock_image", "lock_text"),
    "match": ("target_modules",),
    "alpha": ("lora_alpha",),
    "output": ("out", "output_dir"),
    "epochs": ("num_epochs", "max_epochs", "num_train_epochs"),
    "steps": ("num_steps", "max_steps", "total_steps", "train_steps"),
    "lr": ("learning_rate",),
    "schedule": ("lr_scheduler", "lr_scheduler_type"),
    "weight_decay": ("wd",),
    "betas": ("beta2", "adam_beta2"),
    "warmup_steps": ("warmup", "warmup_epochs", "warmup_ratio"),
    "grad_clip_norm": ("clip_grad_norm", "max_grad_norm", "gradient_clip_val"),
    "precision": ("amp", "dtype", "fp16", "bf16"),
    "micro_batch_size": ("accum_freq", "gradient_accumulation_steps"),
    "checkpoint_every_steps": ("save_steps", "save_every_steps", "save_frequency"),
    "log_every_steps": ("logging_steps", "log_interval"),
    "evaluate_every_epochs": ("eval_steps", "val_frequency", "val_every_epochs"),
    "trackers": ("report_to", "tensorboard", "wandb", "trackio", "logger"),
}
"""What open_clip, transformers, Lightning and torchvision call a setting."""

NEAR = 0.72
"""Least similarity of two names that are alike: twice the letters in common, by the letters of both."""
MOST_NAMES = 4
"""Names that an error suggests at most."""
TRUE_OR_FALSE = "true or false"


@dataclass(frozen=True)
class Setting:
    """A setting in words.

    Attributes:
        name: with its sections, as on the command line: "data.loading.num_workers".
        values: what it may be: "integer ≥ 0 or auto".
        default: "default auto", "required", or "" if it is a section.
        meaning: the text below the field, in one line.
        may_change: whether a resumed run may give it another value.
    """

    name: str
    values: str
    default: str
    meaning: str
    may_change: bool


@dataclass(frozen=True)
class Section:
    """A section and its own settings; sections inside it are listed by themselves.

    Attributes:
        name: "data", "data.loading", …
        title: the name; of a section that has several kinds also the kind, as "train.miner, name: top_k".
        meaning: what it is for.
    """

    name: str
    title: str
    meaning: str
    settings: tuple[Setting, ...]


def describe(kind: type[Settings], name: str = "") -> list[Section]:
    """A section and the sections inside it, each before those inside it; `name` is that of the first."""
    found: list[Section] = []
    told: set[Setting] = set()  # the kinds of a section have some settings in common
    for place, section in sections_within(kind):
        schema = section.model_json_schema()
        definitions, required = schema.get("$defs", {}), schema.get("required", ())
        fields = {key: field for key, field in schema["properties"].items() if "const" not in field}
        own = [
            Setting(
                name=f"{place}.{key}".removeprefix("."),
                values=values_in_words(field, definitions),
                default="required" if key in required else _default(field),
                meaning=_in_one_line(field.get("description", "")),
                may_change=section.may_change(key),
            )
            for key, field in fields.items()
        ]
        of_kind = "".join(
            f", {key}: {field['const']}" for key, field in schema["properties"].items() if "const" in field
        )
        new = tuple(one for one in own if one not in told)
        found.append(Section(place or name, f"{place or name}{of_kind}", _in_one_line(schema["description"]), new))
        told.update(own)
    return found


def values_in_words(schema: Any, definitions: dict[str, Any]) -> str:
    """What values a setting takes.

    Example:
        `Annotated[int, Field(ge=1)] | None` is "integer ≥ 1 or null".
    """
    return _one_of(list(dict.fromkeys(_alternatives(schema, definitions))))


def names_alike(wrong: str, known: Iterable[str]) -> list[str]:
    """The known settings that a wrong name may mean.

    Those of the same last name, of the name that mmdata has for what other programs call so, or of the nearest name;
    the first of these ways that finds any decides.

    Example:
        "learning_rate" is ["train.lr"], "grad_clip" is ["train.grad_clip_norm"], "mean" is [].
    """
    lasts = {one: one.rpartition(".")[2] for one in known}
    ours = next((name for name, others in OTHER_NAMES.items() if wrong in others), None)
    near = max(lasts.values(), key=lambda last: _likeness(wrong, last), default="")
    for meant in (wrong, ours, near if _likeness(wrong, near) >= NEAR else None):
        if found := [one for one, last in lasts.items() if last == meant]:
            return found[:MOST_NAMES]
    return []


def probably_meant(wrong: str, known: Iterable[str]) -> str:
    """The end of a message for a name that no setting has: the settings that it may mean, or where all are listed.

    Those of its own section come first, then those of the sections inside it, then all.
    """
    place, _, last = wrong.rpartition(".")
    names = list(dict.fromkeys(known))
    if wrong in names:  # of another kind of section: a k that this miner lacks, and other miners may have
        names = [one for one in names if not one.endswith(".".join(wrong.split(".")[-2:]))]
    own = [one for one in names if one.rpartition(".")[0] == place]
    inside = [one for one in names if place and one.startswith(f"{place}.")]
    if found := next(filter(None, (names_alike(last, some) for some in (own, inside, names))), None):
        return f"did you mean {' or '.join(repr(one) for one in found)}?"
    return f"`mmdata settings {place}` lists this section" if inside else "`mmdata settings` lists all"


def _in_one_line(text: str) -> str:
    """A text of several lines as one."""
    return " ".join(text.split())


def _likeness(word: str, name: str) -> float:
    """0 to 1. Names of fewer words, and of another first letter, mean something else: image_lr is not image."""
    if word[:1] != name[:1] or word.count("_") > name.count("_"):
        return 0.0
    return SequenceMatcher(None, word, name).ratio()


def _default(schema: Any) -> str:
    if "default" not in schema or "$ref" in schema:
        return ""
    value = schema["default"]
    return f"default {value if isinstance(value, str) else json.dumps(value)}"


def _alternatives(schema: Any, definitions: dict[str, Any]) -> list[str]:
    """What a value may be, in words."""
    if "$ref" in schema:
        section = definitions[schema["$ref"].rpartition("/")[2]]
        keys = section.get("required") or list(section["properties"])[:3]
        return [f"{{{', '.join(f'{key}: …' for key in keys)}}}"]
    if "oneOf" in schema:
        return [f"{{name: {', '.join(schema['discriminator']['mapping'])}}}"]
    if "anyOf" in schema:
        return [word for part in schema["anyOf"] for word in _alternatives(part, definitions)]
    if "const" in schema or "enum" in schema:
        return [str(value) for value in schema.get("enum", [schema.get("const")])]
    if "prefixItems" in schema:
        return [f"[{', '.join(values_in_words(part, definitions) for part in schema['prefixItems'])}]"]
    if "items" in schema:
        return [f"[{values_in_words(schema['items'], definitions)}, …]"]
    if isinstance(schema.get("additionalProperties"), dict):
        names = schema.get("propertyNames", {}).get("enum", [NAMED])
        return [f"{{{_one_of(names)}: {values_in_words(schema['additionalProperties'], definitions)}, …}}"]
    if schema.get("type") == "boolean":
        return ["true", "false"]
    name: str = schema.get("format") or schema.get("type", "any value")
    return [{"object": "mapping", "string": "text"}.get(name, name) + _bounds(schema)]


def _one_of(words: list[str]) -> str:
    """ "a", "a or b", "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _bounds(schema: Any) -> str:
    """ " ≥ 1", " > 0", " from 0 to 1", " > 0 and < 2"; what a text matches; "" for a value without bounds."""
    if "pattern" in schema:
        return f" that matches {schema['pattern']}"
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:g} to {schema['maximum']:g}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return f" {' and '.join(bounds)}" if bounds else ""
