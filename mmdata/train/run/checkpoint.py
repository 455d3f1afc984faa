"""Checkpoints: all that a run needs to go on as if nothing had happened.

A checkpoint is one file, whole or absent, whatever the moment of a kill; loading one runs no code from it, and a file
that changed after it was written is refused.
"""

from __future__ import annotations

import random
import re
import struct
import zipfile
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import nn

from mmdata.atomic import write_whole
from mmdata.errors import ConfigError, DataError
from mmdata.train.ranks.sharding import shares_of

FORMAT = 1
CHECKPOINTS = "checkpoints"
LATEST = "latest"
NONE_YET = "none yet"
"""Content of `latest` while the first checkpoint is written; so a missing `latest` beside checkpoints was lost."""

NAME = re.compile(r"step-\d{10,}\.pt")
"""File names of checkpoints."""


def save_checkpoint(folder: Path, state: dict[str, Any], *, keep: int, sound_step: int | None = None) -> Path:
    """Write `step-XXXXXXXX.pt`, point `latest` at it, and delete all but the newest `keep`.

    Args:
        folder: made if missing.
        state: plain containers, numbers, strings and tensors; "step" names the file.
        keep: checkpoints to keep, this one included.
        sound_step: the newest checkpoint of this step or an earlier one is also kept; None: `keep` alone decides.

    Raises:
        OSError: the disk is full or read-only; the checkpoint before it is untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step = int(state["step"])
    path = folder / _name(step)
    for part in folder.glob(".step-*.part"):  # left by a run that was killed while writing; as large as a checkpoint
        part.unlink()
    if not (folder / LATEST).exists():
        write_whole(folder / LATEST, f"{NONE_YET}\n".encode())
    write_whole(path, lambda file: _write(state, file))
    write_whole(folder / LATEST, f"{path.name}\n".encode())
    known = sorted(folder.glob("step-*.pt"))
    # Later checkpoints were written by a run that has since been resumed from an earlier step.
    behind = [other for other in known if other.name <= path.name]
    sound = [] if sound_step is None else [other for other in behind if other.name <= _name(sound_step)]
    for old in set(known) - {*behind[-keep:], *sound[-1:]}:
        old.unlink()
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` points at, or None where no checkpoint has been written.

    Raises:
        DataError: `latest` is missing beside checkpoints, or does not name one, or the file it names is missing.
    """
    pointer = folder / LATEST
    others = ", ".join(sorted(path.name for path in folder.glob("step-*.pt")))
    remedy = f"write one of these into it to go on from there: {others or 'none is left'}"
    if not pointer.is_file():
        if not others:
            return None
        # A run that began at step 0 would delete them as later checkpoints.
        raise DataError(f"{pointer}: no such file; {remedy}; or give another train.output to start anew")
    name = pointer.read_bytes().decode(errors="replace").strip()
    if name == NONE_YET:
        return None
    if not NAME.fullmatch(name):
        raise DataError(f"{pointer}: holds {name[:40]!r}, not the name of a checkpoint; {remedy}")
    path = folder / name
    if not path.is_file():
        raise DataError(f"{pointer}: points at '{path.name}', which is missing; {remedy}")
    return path


def load_checkpoint(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint's tensors onto the CPU; nothing but tensors and plain containers is accepted.

    Args:
        path: the file.
        mapped: the tensors are the pages of the file, once its checksums have been compared: they take no memory of
            their own, the processes of a machine share them, and what is not looked at is not read again. For those
            who copy what is to stay, and drop the rest at once: to look at a page after the file was cut or overwritten
            ends the process (SIGBUS).

    Raises:
        DataError: no such file, cut, changed since it was written, of a newer format, or not a checkpoint of ours.
    """
    if not path.is_file():
        raise DataError(f"checkpoint '{path}': no such file")
    if damage := find_damage(path):
        foreign = "" if NAME.fullmatch(path.name) else "if mmdata train wrote it, "
        raise DataError(f"checkpoint '{path}': cannot be read ({damage}); {foreign}{_way_back(path)}")
    try:
        state = _load(path, mapped=mapped)
    except UnpicklingError as error:
        # torch's own message advises to load such a file unsafely.
        raise DataError(
            f"checkpoint '{path}': cannot be read (it holds Python objects, which could run code; mmdata reads tensors "
            "and plain values only); it was not written by mmdata train"
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"checkpoint '{path}': cannot be read ({reason}); {_way_back(path)}") from error
    content = cast("dict[str, Any]", state)
    if not isinstance(state, dict) or not isinstance(content.get("format"), int) or "model" not in content:
        raise DataError(f"checkpoint '{path}': not written by mmdata train")
    if content["format"] > FORMAT:
        raise DataError(f"checkpoint '{path}': format {content['format']} is newer than {FORMAT}; update mmdata")
    _name_towers(content)
    return content


def _load(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except RuntimeError as error:
        if not mapped or "unable to mmap" not in str(error):
            raise
        return _load(path, mapped=False)  # there are file systems that map no file


def _name_towers(state: dict[str, Any]) -> None:
    """Name the towers `base` that an earlier version called vit_b_16, a name that is now CLIP's."""
    model = state.get("settings", {}).get("model", {})
    if model.get("name") == "vit_b_16" and any(name.startswith("image_tower.patches.") for name in state["model"]):
        model["name"] = "base"


def find_damage(path: Path) -> str:
    """A description of a checkpoint's damage, or "".

    torch.save stores a CRC-32 of each record, and torch.load does not check it. This reads the file once more, at the
    speed of the disk or of zlib.
    """
    try:
        with zipfile.ZipFile(path) as records:
            name = records.testzip()
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError) as error:
        return str(error).strip() or type(error).__name__
    return f"the content of {name!r} does not have its checksum" if name else ""


def load_weights(model: nn.Module, state: dict[str, Any], *, origin: str) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        ConfigError: they do not fit, as when the tokenizer has another number of entries than it had.
    """
    try:
        model.load_state_dict(shares_of(state["model"], model))
    except RuntimeError as error:
        difference = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise ConfigError(
            f"checkpoint '{origin}': its weights do not fit the model ({difference}); "
            "restore the tokenizer and the section model it was made with"
        ) from error


def _write(state: dict[str, Any], file: BinaryIO) -> None:
    with_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # a program may have switched them off
    try:
        torch.save({"format": FORMAT, **state}, file)
    except RuntimeError as error:
        # On a full disk torch's writer says "unexpected pos 64 vs 0" in place of the system's error.
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    finally:
        torch.serialization.set_crc32_options(with_checksums)


def _way_back(path: Path) -> str:
    """A clause for messages: how to go on from the newest whole checkpoint before `path`."""
    older = sorted((other for other in path.parent.glob("step-*.pt") if other.name < path.name), reverse=True)
    for other in older:
        if not find_damage(other):
            return f"to go on from the one before it, write '{other.name}' into '{path.parent / LATEST}'"
    return (
        f"no whole one before it lies in '{path.parent}': put back a copy, or give another train.output to start anew"
    )


def _name(step: int) -> str:
    return f"step-{step:010d}.pt"


def seed_rank(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch, each rank differently: dropout must differ between ranks."""
    words = np.random.SeedSequence([seed, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of the generators of Python, numpy and torch (and of the GPU) in this process, as plain data."""
    keys, position, has_gauss, cached = np.random.get_state(legacy=True)[1:]  # type: ignore[misc]  # a tuple, as legacy says
    return {
        "python": random.getstate(),
        "numpy": [keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `rng_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
