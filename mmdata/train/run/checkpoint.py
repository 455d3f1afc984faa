"""Checkpoints: all that a run needs to go on as if nothing had happened.

A checkpoint is one file, or under FSDP2 one folder (`sharded_checkpoint`), whole or absent, whatever the moment of a
kill; loading one runs no code from it, and one that changed after it was written is refused.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mmdata.errors import ConfigError, DataError
from mmdata.files import sync_folder, write_whole
from mmdata.recognize import CHECKPOINT_NAME as NAME
from mmdata.recognize import LATEST
from mmdata.train.ranks.lockstep import gather
from mmdata.train.ranks.sharding import shares_of
from mmdata.train.run import sharded_checkpoint
from mmdata.train.run.sharded_checkpoint import PATHS, REST, Like, read_shards

FORMAT = 1
NONE_YET = "none yet"
"""Content of `latest` while the first checkpoint is written; so a missing `latest` beside checkpoints was lost."""


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
    begin_checkpoint(folder)
    path = folder / checkpoint_name(int(state["step"]))
    write_whole(path, lambda file: write_state(state, file))
    point_at(path, keep=keep, sound_step=sound_step)
    return path


def begin_checkpoint(folder: Path) -> None:
    """Make the folder of checkpoints if it is missing, and remove what a run that was killed left half written."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob(".step-*.part"):  # as large as a checkpoint
        _remove(part)
    if not (folder / LATEST).exists():
        write_whole(folder / LATEST, f"{NONE_YET}\n".encode())


def publish_folder(aside: Path, path: Path) -> None:
    """Give a checkpoint that is whole its name.

    A folder cannot be replaced in one move. Where one of this step is there and is the newest, it stays: a run that
    was stopped before an update of its own has the state that it resumed from.
    """
    pointer = path.parent / LATEST
    if path.is_dir() and pointer.is_file() and pointer.read_text().strip() == path.name:
        _remove(aside)
        return
    if path.is_dir():  # by a run that has since been resumed from an earlier step
        _remove(path)
    os.replace(aside, path)
    sync_folder(path.parent)


def point_at(path: Path, *, keep: int, sound_step: int | None = None) -> None:
    """Point `latest` at a checkpoint that is whole, and delete others; see `save_checkpoint`."""
    folder, step = path.parent, step_of(path)
    write_whole(folder / LATEST, f"{path.name}\n".encode())
    others = [other for other in known_checkpoints(folder) if other != path]
    # Those of later steps, or of this one in another form, were written before the run was resumed from an earlier one.
    behind = [*(other for other in others if step_of(other) < step), path]
    sound = [] if sound_step is None else [other for other in behind if step_of(other) <= sound_step]
    for old in set(others) - {*behind[-keep:], *sound[-1:]}:
        _remove(old)


def known_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Updates made before a checkpoint, by its name; -1 where it has a name of its own."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def checkpoint_name(step: int, *, sharded: bool = False) -> str:
    """The name of a checkpoint after `step` updates."""
    return f"step-{step:010d}{'' if sharded else '.pt'}"


def _remove(path: Path) -> None:
    """Delete a checkpoint; a kill leaves no folder with its name and only some of its files."""
    if not path.is_dir():
        path.unlink()
        return
    part = path if path.name.endswith(".part") else path.with_name(f".{path.name}.old.part")
    if part != path:
        os.replace(path, part)
    shutil.rmtree(part)


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` points at, or None where no checkpoint has been written.

    Raises:
        DataError: `latest` is missing beside checkpoints, or does not name one, or the file it names is missing.
    """
    pointer = folder / LATEST
    others = ", ".join(path.name for path in known_checkpoints(folder))
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
    if not path.exists():
        raise DataError(f"{pointer}: points at '{path.name}', which is missing; {remedy}")
    return path


def load_checkpoint(
    path: Path,
    *,
    mapped: bool = False,
    parts: Collection[str] | None = None,
    like: Like | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read a checkpoint's tensors onto the CPU; nothing but tensors and plain containers is accepted.

    Args:
        path: the file, or the folder of a sharded one.
        mapped: the tensors are the pages of the file, once its checksums have been compared: they take no memory of
            their own, the processes of a machine share them, and what is not looked at is not read again. For those
            who copy what is to stay, and drop the rest at once: to look at a page after the file was cut or overwritten
            ends the process (SIGBUS). A folder is always copied.
        parts: of a folder, read the tensors of these entries only; None: all.
        like: of a folder, read some tensors as shares, see `read_shards`.
        group: ranks that share out the reading of a folder's checksums, each a part. Then this is a collective.

    Raises:
        DataError: no such file, cut, changed since it was written, of a newer format, or not a checkpoint of ours.
    """
    if not path.exists():
        raise DataError(f"checkpoint '{path}': no such file")
    if damage := find_damage(path, group):
        foreign = "" if NAME.fullmatch(path.name) else "if mmdata train wrote it, "
        raise DataError(f"checkpoint '{path}': cannot be read ({damage}); {foreign}{_way_back(path)}")
    try:
        state = _load(path / REST if path.is_dir() else path, mapped=mapped and not path.is_dir())
        if path.is_dir():
            read_shards(path, state, parts=parts, like=like)
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
    if path.is_file() and PATHS in content:
        raise DataError(f"checkpoint '{path}': a part of a sharded checkpoint; give its folder, '{path.parent}'")
    if content["format"] > FORMAT:
        raise DataError(f"checkpoint '{path}': format {content['format']} is newer than {FORMAT}; update mmdata")
    return content


def _load(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except RuntimeError as error:
        if not mapped or "unable to mmap" not in str(error):
            raise
        return _load(path, mapped=False)  # there are file systems that map no file


def find_damage(path: Path, group: dist.ProcessGroup | None = None) -> str:
    """A description of a checkpoint's damage, or "".

    torch.save stores a CRC-32 of each record, and torch.load does not check it. This reads the file once more, at the
    speed of the disk or of zlib. The files of a folder are shared out over `group`; then this is a collective.
    """
    if path.is_dir():
        ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        damages = gather(sharded_checkpoint.find_damage(path, rank=rank, world_size=ranks), group)
        return next(filter(None, damages), "")
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


def write_state(state: dict[str, Any], file: BinaryIO) -> None:
    """Write a state as torch.save does, with checksums."""
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
    older = [other for other in known_checkpoints(path.parent) if step_of(other) < step_of(path)]
    for other in reversed(older):
        if not find_damage(other):
            return f"to go on from the one before it, write '{other.name}' into '{path.parent / LATEST}'"
    return (
        f"no whole one before it lies in '{path.parent}': put back a copy, or give another train.output to start anew"
    )


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
