"""Settings in words, read from the JSON schema of their classes. Nothing here is written by hand.

Names, values and defaults are those of the fields, and the meaning is the text below each field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import yaml

from mmdata.config.settings import Settings, changeable_settings

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
    "tensorboard": ("report_to", "wandb"),
}
"""What open_clip, transformers, Lightning and torchvision call a setting."""

NEAR = 0.72
"""Least similarity of two names that are alike: twice the letters in common, by the letters of both."""
MOST_NAMES = 4
"""Names that an error suggests at most."""
TRUE_OR_FALSE = "true or false"
END_OF_YAML = "\n...\n"
NUMBERED, NAMED = "N", "NAME"
"""The number of an entry in a list, in the name of a setting; and a name that the user chooses, in a value."""


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
    """A section and the sections inside it, each before those inside it."""
    schema = kind.model_json_schema()
    definitions: dict[str, Any] = schema.get("$defs", {})
    changeable = set(changeable_settings(kind))

    def setting(name: str, field: Any, *, is_required: bool) -> Setting:
        default = "required" if is_required else _default(field)
        meaning = in_one_line(field.get("description", ""))
        return Setting(name, values_in_words(field, definitions), default, meaning, _without_places(name) in changeable)

    def sections(section: Any, place: str, title: str, prefix: str, told: Iterable[str] = ()) -> Iterator[Section]:
        fields = {key: field for key, field in section["properties"].items() if key not in told}
        required = section.get("required", ())
        own = (setting(prefix + key, field, is_required=key in required) for key, field in fields.items())
        yield Section(place, title, in_one_line(section.get("description", "")), tuple(own))
        for key, field in fields.items():
            kinds = [(where, definitions[inner]) for where, inner in _sections_in(field, prefix + key)]
            common = kinds[0][1]["properties"] if len(kinds) > 1 else ()  # the first kind has what all have
            for where, inner in kinds:
                title = f"{where}, name: {inner['properties']['name']['const']}" if common else where
                told = common if inner is not kinds[0][1] else {"name"} & {*common}
                yield from sections(inner, where, title, f"{where}.", told)

    return list(sections(schema, name, name, ""))


def values_in_words(schema: Any, definitions: dict[str, Any]) -> str:
    """What values a setting takes.

    Example:
        `Annotated[int, Field(ge=1)] | None` is "integer ≥ 1 or null".
    """
    return _one_of(list(dict.fromkeys(_alternatives(schema, definitions))))


def names_alike(wrong: str, known: Iterable[str]) -> list[str]:
    """The known settings that a wrong name may mean, the likeliest first.

    Those of the same last name, of the name that mmdata has for what other programs call so, or of a near name; the
    first of these ways that finds any decides.

    Example:
        "learning_rate" is ["train.lr"], "grad_clip" is ["train.grad_clip_norm"], "mean" is [].
    """
    lasts = {one: one.rpartition(".")[2] for one in known}
    ours = next((name for name, others in OTHER_NAMES.items() if wrong in others), None)
    for same in (wrong, ours):
        if found := [one for one, last in lasts.items() if last == same]:
            return found[:MOST_NAMES]
    near = {one: _likeness(wrong, last) for one, last in lasts.items()}
    return sorted((one for one in near if near[one] >= NEAR), key=lambda one: -near[one])[:MOST_NAMES]


def rest_of(name: str, keys: Sequence[str]) -> str | None:
    """What the name of a setting has after the keys of a value; None if it does not begin with them.

    Example:
        "data.shards.N.weight" has "weight" after "data", "shards", "0".
    """
    parts = name.split(".")
    fits = len(parts) >= len(keys) and all(part in (key, NUMBERED) for part, key in zip(parts, keys, strict=False))
    return ".".join(parts[len(keys) :]) if fits else None


def in_one_line(text: str) -> str:
    """A text of several lines as one."""
    return " ".join(text.split())


def _likeness(word: str, name: str) -> float:
    """0 to 1. Names of fewer words, and of another first letter, mean something else: image_lr is not image."""
    if word[:1] != name[:1] or word.count("_") > name.count("_"):
        return 0.0
    return SequenceMatcher(None, word, name).ratio()


def _without_places(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != NUMBERED)


def _sections_in(schema: Any, place: str) -> Iterator[tuple[str, str]]:
    """Place and definition of the sections that a setting may be, or may hold."""
    if "$ref" in schema:
        yield place, schema["$ref"].rpartition("/")[2]
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _sections_in(part, place)
    if isinstance(schema.get("items"), dict):
        yield from _sections_in(schema["items"], f"{place}.{NUMBERED}")


def _default(schema: Any) -> str:
    if "default" not in schema or "$ref" in schema:
        return ""
    text = yaml.safe_dump(schema["default"], default_flow_style=True, width=1000)
    return f"default {text.removesuffix(END_OF_YAML).strip()}"


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
    """ " ≥ 1", " > 0", " from 0 to 1", " > 0 and < 2"; "" if a number has no bounds."""
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:g} to {schema['maximum']:g}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return f" {' and '.join(bounds)}" if bounds else ""
