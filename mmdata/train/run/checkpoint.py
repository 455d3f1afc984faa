"""Checkpoints: all that a run needs to go on as if nothing had happened.

    step-0000001000/
        __0_0.distcp, __1_0.distcp, …   tensors of `TENSORS`, a file a rank (torch.distributed.checkpoint, "DCP")
        .metadata                       which part of which tensor lies where, as DCP writes it
        run.pt                          all else, such as counters and random states
        files.json                      size and CRC-32 of each file; written last

One process, DDP and FSDP2 write the same folder, and each reads those of the others. A folder with this name is whole,
whatever the moment of a kill. One that has changed since is refused, and reading one runs no code from it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from mmdata.config.wrong_place import not_a_run
from mmdata.errors import ConfigError, DataError
from mmdata.files import naming, remove, sync_folder, write_whole
from mmdata.recognize import CHECKPOINT_NAME as NAME
from mmdata.recognize import CHECKPOINTS, Kind, recognize
from mmdata.train.models.weights import difference
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather, on_all, on_first

FORMAT = 1
TENSORS = ("model", "optimizer", "memory")
"""Entries of a state whose tensors DCP writes. It turns keys into strings; those of other entries may be any."""
RUN, FILES, METADATA = "run.pt", "files.json", ".metadata"
CHUNK_BYTES = 1 << 22

KeyPath = tuple[str, ...]

# A process that writes or reads without others is what is meant.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


@dataclass(frozen=True)
class Share:
    """What this rank writes of a checkpoint.

    Attributes:
        step: updates made.
        tensors: nested dicts as in the state: its shards, and of what all ranks have equal about one in `world_size`
            bytes. What may differ, such as statistics of batch norms, is rank 0's.
        run: the content of run.pt.
    """

    step: int
    tensors: dict[str, Any]
    run: bytes

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """The share of a state of nested dicts, plain values and tensors; its "step" names the checkpoint.

        Raises:
            ConfigError: a value that `load_checkpoint` would refuse.
        """
        tensors: dict[str, Any] = {}
        dealt = [0] * collectives.world_size()
        learning = state.get("optimizer", {}).keys()
        for path, tensor in _tensors(state):
            is_equal = path[0] == "optimizer" or path[-1] in learning  # also the teacher's of that name
            writer = dealt.index(min(dealt)) if is_equal else 0
            if not isinstance(tensor, DTensor):
                dealt[writer] += tensor.nbytes
            if isinstance(tensor, DTensor) or writer == collectives.rank():
                _put(tensors, path, tensor)
        rest = {key: _without_tensors(value) if key in TENSORS else value for key, value in state.items()}
        if refused := _refused(rest):
            raise ConfigError(
                f"checkpoint: the value of {refused} cannot be read back: give tensors, numbers, strings, and dicts, "
                "lists and tuples of these; torch.from_numpy makes a tensor of a numpy array"
            )
        run = io.BytesIO()
        torch.save({"format": FORMAT, **rest}, run)
        return cls(int(state["step"]), tensors, run.getvalue())


def save_checkpoint(
    folder: Path,
    share: Share,
    *,
    keep: int,
    sound_step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `step-XXXXXXXXXX`, and delete all but the newest `keep`. A collective.

    Args:
        folder: seen by all ranks; made if missing.
        share: this rank's.
        keep: checkpoints to keep, this one included.
        sound_step: the newest checkpoint of this step or an earlier one is also kept; None: `keep` alone decides.
        group: the ranks (gloo), which nothing else uses meanwhile; None: this process alone.

    Raises:
        OSError: the disk is full or read-only; on all ranks. The checkpoint before it is untouched.
    """
    path = folder / checkpoint_name(share.step)
    aside = folder / f".{path.name}.part"

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".step-*.part"):  # of a run that was killed; as large as a checkpoint
            remove(part)

    on_first(begin, group)
    with naming(path):
        try:
            save(share.tensors, storage_writer=_Writer(aside), process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise _first_failure(error) from None
        own = f"__{collectives.rank()}_*.distcp"
        sums = on_all(lambda: {file.name: _sum_of(file) for file in aside.glob(own)}, group)

    def publish() -> None:
        write_whole(aside / RUN, share.run)
        files = {name: one for part in sums for name, one in part.items()}
        files |= {name: _sum_of(aside / name) for name in (METADATA, RUN)}
        write_whole(aside / FILES, (json.dumps({"files": files}, indent=1) + "\n").encode())
        if path.exists():  # the run was stopped before an update of its own, and has the state that it resumed from
            remove(aside)
        else:
            os.replace(aside, path)
        sync_folder(folder)
        known = known_checkpoints(folder)
        sound = [other for other in known if sound_step is not None and step_of(other) <= sound_step]
        for old in set(known) - {*known[-keep:], *sound[-1:]}:
            remove(old.replace(folder / f".{old.name}.part"))  # a kill leaves no half one under its name

    on_first(publish, group)
    return path


def known_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step, or None. To go back in a run, delete those after the one wanted."""
    return max(known_checkpoints(folder), key=step_of, default=None)


def find_checkpoint(run: Path) -> Path:
    """The checkpoint itself, or the newest checkpoint of a run's folder.

    Raises:
        DataError: `run` is neither; says what it is, and what to give instead.
    """
    if recognize(run) is Kind.CHECKPOINT:
        return run
    if (path := latest_checkpoint(run / CHECKPOINTS)) is not None:
        return path
    raise DataError(f"'{run}': {not_a_run(run)}")


def step_of(path: Path) -> int:
    """Updates made before a checkpoint, by its name; -1 where it has a name of its own."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def checkpoint_name(step: int) -> str:
    """The name of a checkpoint after `step` updates."""
    return f"step-{step:010d}"


def load_checkpoint(
    path: Path, *, parts: Collection[str] | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; nothing but tensors and plain containers is accepted.

    Args:
        path: its folder.
        parts: those of `TENSORS` whose tensors are read; None: all. In the others there are none yet, see
            `read_tensors`.
        group: ranks that share out the reading of checksums. Then this is a collective.

    Raises:
        DataError: no such folder, changed since it was written, of a newer format, or not a checkpoint of mmdata.
    """
    if not path.is_dir():
        raise DataError(f"checkpoint '{path}': no such folder")
    if damage := find_damage(path, group):
        raise DataError(f"checkpoint '{path}': cannot be read ({damage}); {_way_back(path)}")
    with _readable(path):
        state: dict[str, Any] = torch.load(path / RUN, map_location="cpu", weights_only=True)
        is_newer = state["format"] > FORMAT
    if is_newer:
        raise DataError(f"checkpoint '{path}': format {state['format']} is newer than {FORMAT}; update mmdata")
    read_tensors(path, state, parts=parts)
    return state


def read_tensors(
    path: Path, state: dict[str, Any], *, parts: Collection[str] | None = None, like: Mapping[str, Any] | None = None
) -> None:
    """Put the tensors of a checkpoint into its state.

    Args:
        path: without damage, see `load_checkpoint`.
        state: from `load_checkpoint`; changed in place.
        parts: those of `TENSORS` whose tensors are read, or entries of those, as "memory.queue"; None: all.
        like: nested dicts as in the state. A tensor that is there with the same shape is written to, and becomes that
            of the state; of a DTensor this rank reads its share alone. Others are read whole, onto the CPU.

    Raises:
        DataError: the tensors are not those of this state.
    """
    into = {".".join(keys): tensor for keys, tensor in _tensors(like or {})}
    with _readable(path):
        reader = _Reader(path)
        metadata = reader.read_metadata()
        if strangers := {info.relative_path for info in metadata.storage_data.values()} - set(_listed(path)):
            raise ValueError(f"{METADATA} names a file that {FILES} does not list: {sorted(strangers)[0]!r}")
        paths: dict[str, KeyPath] = metadata.planner_data
        wanted: dict[str, Any] = {
            name: _target(metadata.state_dict_metadata[name], into.get(name))
            for name, keys in paths.items()
            if parts is None or {keys[0], ".".join(keys[:2])} & {*parts}
        }
        try:
            load(wanted, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise _first_failure(error) from None
        for name, tensor in wanted.items():
            _put(state, paths[name], tensor)


def load_trained(path: Path, *, ema: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint's weights, which are then its "model", and of other tensors none; "is_average" tells which.

    Args:
        path: its folder.
        ema: True: the averaged weights (`train.ema`). False: those that were trained. None: the averaged ones where
            the checkpoint has them.

    Raises:
        DataError: see `load_checkpoint`.
        ConfigError: there are no averaged weights.
    """
    state = load_checkpoint(path, parts=())
    has_average = "ema" in state.get("memory", {})
    if ema and not has_average:
        raise ConfigError(f"checkpoint '{path}': has no averaged weights: the run was trained without train.ema")
    is_average = has_average and ema is not False
    read_tensors(path, state, parts=("memory.ema" if is_average else "model",))
    return {**state, "model": state["memory"]["ema"] if is_average else state["model"], "is_average": is_average}


def load_weights(model: nn.Module, state: dict[str, Any], *, origin: str) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        ConfigError: they do not fit, as when the tokenizer has another number of entries than it had.
    """
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        shapes = [{name: value.shape for name, value in each.items()} for each in (model.state_dict(), state["model"])]
        settings: dict[str, dict[str, Any]] = state.get("settings", {})
        model_settings = {name: value for name, value in settings.get("model", {}).items() if value}
        raise ConfigError(
            f"checkpoint '{origin}': its weights do not fit the model ({difference(*shapes)}); set the section model "
            f"and the tokenizer to those it was made with: model {json.dumps(model_settings)}, data.tokenizer "
            f"{settings.get('data', {}).get('tokenizer')!r}"
        ) from error


def find_damage(path: Path, group: dist.ProcessGroup | None = None) -> str:
    """A description of the damage of a checkpoint's files, or "". With `group` a collective: the ranks share them."""
    first, step = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def own() -> str:
        listed = _listed(path)
        for name in sorted(listed)[first::step]:
            file = path / name
            if not file.is_file():
                return f"its file {name!r} is missing"
            if (found := file.stat().st_size) != listed[name][0]:
                return f"its file {name!r} has {found} bytes in place of {listed[name][0]}"
            if _sum_of(file) != listed[name]:
                return f"the content of {name!r} does not have its checksum"
        return ""

    try:
        damage = own()
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        damage = str(error).strip() or type(error).__name__
    return next(filter(None, gather(damage, group)), "")


def _way_back(path: Path) -> str:
    """A clause for messages: how to go on from the newest whole checkpoint before `path`."""
    for other in reversed(known_checkpoints(path.parent)):
        if step_of(other) < step_of(path) and not find_damage(other):
            return f"to go on from '{other.name}', delete the checkpoints after it"
    return (
        f"no whole one before it lies in '{path.parent}': put back a copy, or give another train.output to start anew"
    )


@contextmanager
def _readable(path: Path) -> Generator[None]:
    """Turn what torch raises for a strange file into a DataError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        # torch's own message advises to load such a file unsafely.
        raise DataError(
            f"checkpoint '{path}': cannot be read (it holds Python objects, which could run code; mmdata reads tensors "
            "and plain values only); it was not written by mmdata train"
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"checkpoint '{path}': cannot be read ({reason}); {_way_back(path)}") from error


def _listed(path: Path) -> dict[str, list[int]]:
    """Size and checksum of each file, as `files.json` has them."""
    if not (path / FILES).is_file():
        raise ValueError(f"it has no {FILES}, which is written last: it was never complete, or a copy of it is not")
    listed = cast("dict[str, list[int]]", json.loads((path / FILES).read_bytes())["files"])
    if strange := [name for name in listed if name != os.path.basename(name)]:
        raise ValueError(f"{FILES} lists {strange[0]!r}, which is no file of its folder")
    if missing := [name for name in (METADATA, RUN) if name not in listed]:
        raise ValueError(f"{FILES} does not list {missing[0]!r}")
    return listed


def _sum_of(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _tensors(state: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Tensor]]:
    """The tensors that DCP writes of a state's nested dicts, each with the keys that lead to it."""
    for key, value in state.items():
        if isinstance(value, Tensor) and above:
            yield (*above, key), value
        elif isinstance(value, Mapping) and (above or key in TENSORS):
            yield from _tensors(cast("Mapping[str, Any]", value), (*above, key))


def _refused(value: object, name: str = "") -> str:
    """The keys that lead to a value which is not read back without running code, and its type; "" if there is none."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, map_location="cpu", weights_only=True)
        return ""
    except (pickle.PickleError, AttributeError, TypeError):
        inner = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {}
        found = (_refused(one, f"{name}.{key}" if name else str(key)) for key, one in inner.items())
        return next(filter(None, found), f"{name!r} ({type(value).__name__})")


def _without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts without their tensors."""
    rest = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    return {key: _without_tensors(value) if isinstance(value, Mapping) else value for key, value in rest.items()}


def _put(state: dict[str, Any], keys: KeyPath, tensor: Tensor) -> None:
    for key in keys[:-1]:
        state = state.setdefault(key, {})
    state[keys[-1]] = tensor


def _target(saved: object, into: Tensor | None) -> Tensor:
    """The tensor that one of a checkpoint is read into."""
    if not isinstance(saved, TensorStorageMetadata):
        raise TypeError(f"{METADATA} has {type(saved).__name__} where a tensor is expected")
    if into is not None and into.shape == saved.size:
        return into
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _first_failure(error: CheckpointException) -> Exception:
    """The error of the first rank that has one; DCP wraps it into one that `except Exception` does not catch."""
    causes = [failure for _, (failure, _) in sorted(error.failures.items())]
    # On a full disk torch's writer says "unexpected pos 64 vs 0" in place of the system's error.
    causes = [cause.__context__ if isinstance(cause.__context__, OSError) else cause for cause in causes]
    return next((cause for cause in causes if isinstance(cause, Exception)), RuntimeError(str(error)))


class _Writer(FileSystemWriter):
    """Writes metadata without the path, which is another one when they are read."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _Reader(FileSystemReader):
    """Reads DCP's metadata without running what a pickle may hold."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"{METADATA} holds {type(metadata).__name__}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""What the metadata of tensors consist of, besides types of numbers."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or global_name in _CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{METADATA} names {module_name}.{global_name}, which DCP does not write")
