"""The errors of validation in words: which key, what was expected, what was given, which name was probably meant."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import ValidationError

from mmdata.config.settings import Settings, sections_of, type_in_words
from mmdata.errors import SHORT, did_you_mean, excerpt, nearest

OTHER_NAMES = {
    "batch_size": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "num_steps": "steps",
    "total_steps": "steps",
    "train_steps": "steps",
    "warmup_epochs": "warmup_steps",
    "warmup_ratio": "warmup_steps",
    "shuffle_buffer": "shuffle_window_rows",
    "prefetch_factor": "prefetch_batches",
    "save_every_steps": "checkpoint_every_steps",
    "log_interval": "log_every_steps",
    "val_every_epochs": "evaluate_every_epochs",
    "out": "output",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "amp": "precision",
    "dtype": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "max_grad_norm": "grad_clip_norm",
    "gradient_clip_val": "grad_clip_norm",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "save_steps": "checkpoint_every_steps",
    "save_frequency": "checkpoint_every_steps",
    "logging_steps": "log_every_steps",
    "per_device_train_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "micro_batch_size",
    "lock_image": "freeze",
    "lock_text": "freeze",
    "output_dir": "output",
    "accum_freq": "micro_batch_size",
    "train_data": "shards",
    "context_length": "max_length",
    "maxlen": "max_length",
    "learningrate": "lr",
    "shuffle_buffer_size": "shuffle_window_rows",
    "resolution": "image_size",
    "workers": "num_workers",
    "arch": "name",
    "eval_steps": "evaluate_every_epochs",
    "val_frequency": "evaluate_every_epochs",
    "steps_per_epoch": "steps",
    "beta2": "betas",
    "adam_beta2": "betas",
    "queue_size": "queue",
    "report_to": "tensorboard",
    "wandb": "tensorboard",
}
"""What open_clip, transformers and Lightning call a setting, and what it is called here."""

OF_TYPES = ("bool_parsing", "bool_type", "tuple_type", "dict_type")
"""Errors of pydantic for which the whole setting is told, once: what else it may be stands in other errors, or
nowhere."""


_OTHER_NAMES = {"data.filter": "data.select", "data.where": "data.select"}
"""Settings by the names that they have elsewhere, which are not near to ours."""


class Told(NamedTuple):
    """An error in words, and the dotted key of the setting that it is about; "" if it is about several."""

    key: str
    text: str


def explain_errors(kind: type[Settings], error: ValidationError) -> list[Told]:
    """Each error of a validation of settings of `kind`, in words."""
    errors = [(_locate(kind, e), e) for e in error.errors()]
    # Of a value that may be of several types, that it is none of one of them; what is wrong inside it says more.
    telling = [(at, e) for at, e in errors if not any(_is_inside(other.keys, at.keys) for other, _ in errors)]
    told: list[Told] = []
    unknown = {at.keys[0] for at, e in telling if e["type"] == "extra_forbidden" and len(at.keys) == 1}
    for section in [at for at, e in telling if e["type"] == "missing" and len(at.keys) == 1]:
        # A file without sections, which has the settings of the missing one at its top.
        names = [name for name in unknown if any(name in part.model_fields for part in section.values)]
        if names:
            text = (
                f"{', '.join(map(repr, sorted(names)))}: settings of the section {section.keys[0]}; write them below "
                f"`{section.keys[0]}:`, indented"
            )
            told.append(Told("", text))
            told_of = {section.keys[0], *names}
            telling = [(at, e) for at, e in telling if "".join(at.keys[:1]) not in told_of]
    told_whole: set[str] = set()
    for at, e in sorted(telling, key=lambda one: one[1]["type"] not in OF_TYPES):
        setting = ".".join(key for key in at.keys if not key.isdecimal())
        if setting in told_whole:
            continue
        if e["type"] in OF_TYPES:
            told_whole.add(setting)
            told.append(Told(setting, _expected(at, e)))
        else:
            told.append(Told(".".join(at.keys), _explain(kind, at, e)))
    return told


class _Place(NamedTuple):
    """Where an error is: keys and positions, the section that the last key is in, and those that its value may be."""

    keys: list[str]
    section: type[Settings]
    values: list[type[Settings]]


def _locate(kind: type[Settings], error: Any) -> _Place:
    place = _Place([], kind, [])
    for part in error["loc"]:
        # pydantic puts in the name of a type where there are several, as "list[SourceConfig]"
        is_type = part in ("str", "bool", "constrained-int") or part in {value.__name__ for value in place.values}
        if is_type or "[" in str(part):
            continue
        if isinstance(part, int):
            place.keys.append(str(part))
        elif len(place.values) > 1:  # and here the name of the one that was meant, as "top_k"
            place = _Place(place.keys, next(v for v in place.values if part in _names(v)), [])
        else:
            section = place.values[0] if place.values else place.section
            field = section.model_fields.get(part)
            place = _Place([*place.keys, part], section, [] if field is None else sections_of(field.annotation))
    return place


def _is_inside(place: list[str], other: list[str]) -> bool:
    return len(place) > len(other) and place[: len(other)] == other


def _explain(kind: type[Settings], place: _Place, error: Any) -> str:
    dotted = ".".join(place.keys)
    if error["type"] == "extra_forbidden":
        wrong, own = place.keys[-1], list(place.section.model_fields)
        if _names(place.section) and not nearest(wrong, own):  # of another kind, perhaps
            return f"unknown key '{dotted}': {_names(place.section)[0]} has {', '.join(own)}"
        if near := _OTHER_NAMES.get(dotted) or _nearest(kind, place):
            return f"unknown key '{dotted}'; did you mean '{near}'?"
        if len(place.keys) == 1:
            return f"unknown key '{dotted}'; the sections are {', '.join(kind.model_fields)}"
        return f"unknown key '{dotted}'; `mmdata settings {place.keys[0]}` lists the settings of this section"
    if error["type"] == "missing":
        return f"'{dotted}' is required and missing"
    if error["type"] == "union_tag_not_found":
        names = ", ".join(name for value in place.values for name in _names(value))
        return f"'{dotted}.name' is required and missing; known: {names}"
    if error["type"] == "union_tag_invalid":
        names = ", ".join(name for value in place.values for name in _names(value))
        tag = error["ctx"]["tag"]
        return f"'{dotted}.name': known are {names}; got {tag!r}{did_you_mean(tag, names.split(', '))}"
    if error["type"] == "value_error":  # from a validator of ours, which says what it got
        return f"'{dotted}': {error['ctx']['error']}" if dotted else str(error["ctx"]["error"])
    if error["type"] in ("model_type", "model_attributes_type") or (error["type"] == "list_type" and place.values):
        fields = (place.values or [place.section])[0].model_fields
        needed = [name for name, field in fields.items() if field.is_required()] or list(fields)[:3]
        keys = ", ".join(f"{name}: …" for name in needed)
        field = place.section.model_fields.get(place.keys[-1])
        null = " or null" if field is not None and types.NoneType in get_args(field.annotation) else ""
        section = f"[{{{keys}}}]" if error["type"] == "list_type" else f"{{{keys}}}"
        return f"'{dotted}': expected {section}{null}; got {_short(error['input'])}"
    return f"'{dotted}': {error['msg']}; got {_short(error['input'])}{_meant(error)}"


def _expected(place: _Place, error: Any) -> str:
    """What the whole setting may be, in words."""
    names = [key for key in place.keys if not key.isdecimal()]
    field = place.section.model_fields.get(names[-1])
    wanted = type_in_words(field) if field is not None else error["msg"]
    where = "".join(f", in entry {key}" for key in place.keys if key.isdecimal())
    return f"'{'.'.join(names)}': expected {wanted}; got {_short(error['input'])}{where}"


def _meant(error: Any) -> str:
    """The end of a message for a wrong value: what was probably meant, or ""."""
    given = error["input"]
    if error["type"] == "literal_error" and isinstance(given, str):
        return did_you_mean(given, re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    if error["type"] == "int_type" and isinstance(given, str) and given.isdecimal():
        return "; write it without quotation marks"
    if error["type"] == "string_type" and error["loc"][-1] == "order":
        return "; save it with numpy.save and give the path, or Loader.from_config(…, order=rows)"
    return ""


def _short(value: object) -> str:
    """A value for a message: as it is written in Python, or what it is if that is long."""
    text = repr(value)
    return text if len(text) <= 80 else excerpt(value)


def _nearest(kind: type[Settings], place: _Place) -> str | None:
    """The known key that was probably meant by the last of `place`; None if none is near.

    The same name in another section (data.lr is train.lr), the name that other programs use (learning_rate), a name in
    this section or a group of it that is alike, a name of several words in another section that is alike, the second
    word of two (image_lr), and the group that is the first one (queue_size).
    """
    wrong, section, everywhere = place.keys[-1], _keys_of(place.section), _keys_of(kind)
    own = {name: ".".join([*place.keys[:-1], key]) for name, key in section.items()}
    for name in (wrong, OTHER_NAMES.get(wrong, wrong)):
        if name in own or name in everywhere:
            return own.get(name) or everywhere[name]
    if found := names_alike(wrong, own):
        return own[found[0]]
    words, fields = wrong.split("_"), place.section.model_fields
    if found := [name for name in names_alike(wrong, everywhere) if len(words) > 1 or _is_misspelt(wrong, name)]:
        return everywhere[found[0]]
    if len(words) != 2:
        return None
    is_group = {name: bool(sections_of(fields[name].annotation)) for name in words if name in fields}
    if is_group.get(words[1]) is False:
        return own[words[1]]
    return own[words[0]] if is_group.get(words[0]) else None


def names_alike(wrong: str, known: Iterable[str]) -> list[str]:
    """The known names that may be meant by a wrong one, the nearest first: it is misspelt, or lacks some words.

    Letters in common are not enough: mean is not margin, and image_lr is not image.

    Example:
        "num_worker" is "num_workers", "grad_clip" is "grad_clip_norm", "max_len" is "max_length".
    """
    ours = wrong.lower().split("_")
    found = list[str]()
    for name in known:
        theirs = name.split("_")
        has_all = all(any(_is_misspelt(one, other) for other in theirs) for one in ours)
        are_short = 1 < len(ours) == len(theirs) and all(
            any(_is_misspelt(one, other) or (len(one) >= SHORT and other.startswith(one)) for other in theirs)
            for one in ours
        )
        is_one = "".join(ours) == "".join(theirs) or (len(ours) == len(theirs) and _is_misspelt(wrong, name))
        if is_one or (has_all and len(wrong) > SHORT) or are_short:
            found.append(name)
    return sorted(found, key=lambda name: -SequenceMatcher(None, wrong, name).ratio())


def _is_misspelt(word: str, name: str) -> bool:
    """Whether a word is a name with a slip of the finger: the first letter, most letters and the length agree."""
    word, name = (one.lower().replace("_", "").replace("-", "") for one in (word, name))
    near = 0.66 if len(name) <= SHORT + 1 else 0.8
    is_long = abs(len(word) - len(name)) <= 1 + len(name) // 8
    return word[:1] == name[:1] and is_long and SequenceMatcher(None, word, name).ratio() >= near


def _keys_of(kind: type[Settings], prefix: str = "") -> dict[str, str]:
    """Name to dotted key of all settings of a section and of the groups in it; the outermost of equal names."""
    keys: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        several = get_origin(field.annotation) in (list, dict)
        for part in () if several else (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Settings):
                keys = _keys_of(part, f"{prefix}{name}.") | keys
    return keys | {name: prefix + name for name in kind.model_fields}


def _names(section: type[Settings]) -> tuple[str, ...]:
    """Of a section of which there are several kinds: what its key `name` may be."""
    field = section.model_fields.get("name")
    return get_args(field.annotation) if field is not None and field.is_required() else ()
