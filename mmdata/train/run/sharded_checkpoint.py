"""Checkpoints that are folders: each rank writes its shards of the tensors (torch.distributed.checkpoint, "DCP").

    __0_0.distcp, __1_0.distcp, …   tensors, a file a rank
    .metadata                       which part of which tensor lies where, as DCP writes it
    run.pt                          all that is no tensor of weights, averages, teacher or queue
    files.json                      size and CRC-32 of each file; written last

Reading one runs no code from it: of DCP's metadata, which is a pickle, only the classes that DCP puts there are taken.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from mmdata.files import sync_folder, write_whole
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import on_all, on_first
from mmdata.train.ranks.sharding import is_shard

PARTS = ("model", "optimizer", "teacher", "memory")
"""Entries of a state whose tensors are sharded out."""
REST = "run.pt"
FILES = "files.json"
METADATA = ".metadata"
PATHS = "tensor_paths"
"""Entry of `run.pt`: for each name of a tensor in DCP's files the keys that lead to it in the state."""
CHUNK_BYTES = 1 << 22

KeyPath = tuple[Any, ...]
Like = Callable[[KeyPath], Tensor | None]


def split(state: Mapping[str, Any]) -> tuple[dict[KeyPath, Tensor], dict[str, Any]]:
    """The tensors of `PARTS` by the keys that lead to them, and the state without them."""
    tensors: dict[KeyPath, Tensor] = {}
    rest = {
        name: _without_tensors(value, (name,), tensors) if name in PARTS else value for name, value in state.items()
    }
    return tensors, rest


def _without_tensors(value: Any, path: KeyPath, tensors: dict[KeyPath, Tensor]) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept: dict[Any, Any] = {}
    for key, entry in cast("Mapping[Any, Any]", value).items():
        if isinstance(entry, Tensor):
            tensors[(*path, key)] = entry
        else:
            kept[key] = _without_tensors(entry, (*path, key), tensors)
    return kept


def own_part(tensors: Mapping[KeyPath, Tensor], rank: int, world_size: int) -> dict[KeyPath, Tensor]:
    """What a rank writes: its shares, and of the tensors that all ranks have whole about one in `world_size` bytes."""
    own: dict[KeyPath, Tensor] = {}
    dealt = [0] * world_size
    for path, tensor in tensors.items():
        if is_shard(tensor):
            own[path] = tensor
            continue
        writer = dealt.index(min(dealt))
        dealt[writer] += tensor.nbytes
        if writer == rank:
            own[path] = tensor
    return own


def write_shards(
    folder: Path,
    own: Mapping[KeyPath, Tensor],
    rest: bytes,
    *,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a checkpoint into a folder that is there and empty. A collective.

    Args:
        folder: seen by all ranks.
        own: what this rank writes, see `own_part`.
        rest: the content of `run.pt`; rank 0's is written.
        group: of these ranks, gloo, and of this thread alone while it writes.

    Raises:
        OSError: the disk is full or read-only; on all ranks.
    """
    nested: dict[str, Any] = {}
    for path, tensor in own.items():
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(str(key), {})
        inner[str(path[-1])] = tensor
    try:
        save(nested, storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as error:
        raise _first_failure(error) from None
    mine = f"__{collectives.rank()}_*.distcp"
    sums = on_all(lambda: {path.name: _sum_of(path) for path in sorted(folder.glob(mine))}, group)

    def complete() -> None:
        write_whole(folder / REST, rest)
        files = {name: one for part in sums for name, one in part.items()}
        files |= {name: _sum_of(folder / name) for name in (METADATA, REST)}
        sync_folder(folder)
        write_whole(folder / FILES, (json.dumps({"files": files}, indent=1) + "\n").encode())

    on_first(complete, group)


def paths_by_name(tensors: Collection[KeyPath]) -> dict[str, list[Any]]:
    """The entry `PATHS` of `run.pt`."""
    return {_name(path): list(path) for path in tensors}


def read_shards(
    folder: Path, rest: dict[str, Any], *, parts: Collection[str] | None = None, like: Like | None = None
) -> None:
    """Put the tensors of a checkpoint into its state.

    Args:
        folder: without damage, see `find_damage`.
        rest: the content of `run.pt`; changed in place.
        parts: the tensors of these entries only; None: all of them.
        like: gives a tensor that is sharded as the one at these keys shall be, or None: then it is read whole, onto the
            CPU. So a rank reads its shares alone, whatever the number of ranks that wrote them.

    Raises:
        pickle.UnpicklingError: the metadata hold something that DCP does not write.
        ValueError, LookupError, TypeError: they are not DCP's, or not those of this state.
        RuntimeError: there is too little memory.
    """
    reader = _MetadataReader(folder)
    metadata = reader.read_metadata()
    listed = _listed(folder)
    if strangers := {info.relative_path for info in metadata.storage_data.values()} - set(listed):
        raise ValueError(f"{METADATA} names a file that {FILES} does not list: {sorted(strangers)[0]!r}")
    wanted: dict[str, Any] = {}
    paths: dict[str, list[Any]] = rest.pop(PATHS)
    for name, path in paths.items():
        if parts is None or path[0] in parts:
            wanted[name] = _empty(metadata.state_dict_metadata[name], like and like(tuple(path)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled": each rank reads by itself
            load(wanted, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise _first_failure(error) from None
    for name, tensor in wanted.items():
        inner: Any = rest
        for key in paths[name][:-1]:
            inner = inner[key]
        inner[paths[name][-1]] = tensor


def find_damage(folder: Path, *, rank: int = 0, world_size: int = 1) -> str:
    """A description of the damage of a checkpoint's files, or "".

    Args:
        folder: of the checkpoint.
        rank: which share of the files is read, about one in `world_size`.
        world_size: number of shares; each is to be asked for.
    """
    try:
        listed = _listed(folder)
        for name in sorted(listed)[rank::world_size]:
            path = folder / name
            if not path.is_file():
                return f"its file {name!r} is missing"
            found = path.stat().st_size
            if found != listed[name][0]:
                return f"its file {name!r} has {found} bytes in place of {listed[name][0]}"
            if _sum_of(path) != listed[name]:
                return f"the content of {name!r} does not have its checksum"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return str(error).strip() or type(error).__name__
    return ""


def _name(path: Sequence[Any]) -> str:
    """The name that DCP gives a tensor in nested dicts."""
    return ".".join(map(str, path))


def _empty(saved: object, like: Tensor | None) -> Tensor:
    if not isinstance(saved, TensorStorageMetadata):
        raise TypeError(f"{METADATA} has {type(saved).__name__} where a tensor is expected")
    dtype = saved.properties.dtype
    if isinstance(like, DTensor) and like.shape == saved.size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype)


def _listed(folder: Path) -> dict[str, list[int]]:
    """Size and checksum of each file, as `files.json` has them."""
    if not (folder / FILES).is_file():
        raise ValueError(f"it has no {FILES}, which is written last: it was never complete, or a copy of it is not")
    listed = cast("dict[str, list[int]]", json.loads((folder / FILES).read_bytes())["files"])
    if strange := [name for name in listed if name != os.path.basename(name)]:
        raise ValueError(f"{FILES} lists {strange[0]!r}, which is no file of its folder")
    return listed


def _sum_of(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    with path.open("rb") as file:
        size = checksum = 0
        for chunk in _chunks(file):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


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


class _MetadataReader(FileSystemReader):
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
