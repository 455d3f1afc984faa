"""Compares tars without images with their index: every header is read, and every member that has a hash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from mmdata.errors import DamagedShard, DataError, counted, excerpt
from mmdata.index.keys_index import HEAD_NAME, KeysIndex
from mmdata.index.member_hashes import hash_in_file
from mmdata.index.verify import Problem
from mmdata.storage.folder import INNER, local_folder
from mmdata.tars.samples import SampleReader
from mmdata.tars.scan import Progress, steps
from mmdata.tars.tar import read_members


def has_members_index(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an index that `mmdata index --members-only` made."""
    return "://" not in str(folder) and (local_folder(folder) / INNER / HEAD_NAME).is_file()


def verify_members(folder: str | os.PathLike[str], progress: Progress | None = None) -> tuple[KeysIndex, list[Problem]]:
    """Check every tar of an index without images: size, strict tar, keys, places, and the hash of each member.

    Returns:
        The index, and what is wrong.

    Raises:
        DataError: the index itself is missing or damaged.
    """
    index = KeysIndex.read(folder, of="verify")
    problems: list[Problem] = []
    if index.hashes is not None and index.hashes.checksum() != index.hashes_checksum:
        problems.append(Problem(HEAD_NAME, f"{index.hashes.path.name} is not the one that it names; {index.remedy}"))
    for name in index.captions:
        try:
            index.captions_of(name, of="captions")
        except DataError as error:
            problems.append(Problem(HEAD_NAME, str(error)))
    total, done = sum(tar.bytes for tar in index.tars), 0
    for number, tar in enumerate(index.tars):
        try:
            problems += [Problem(tar.name, what) for what in _wrong(index, number, steps(progress, done, total))]
        except OSError as error:
            problems.append(Problem(tar.name, f"cannot be read: {error.strerror or error}"))
        done += tar.bytes
        if progress is not None:
            progress(done, total)
    listed = {tar.name for tar in index.tars}
    tars = (index.folder / index.location).glob("*.tar")
    more = sorted(path.name for path in tars if path.name not in listed and not path.name.startswith("."))
    return index, problems + [Problem(name, f"is not in the index; {index.remedy}") for name in more]


def _wrong(index: KeysIndex, tar: int, step: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with a tar."""
    name, size, _ = index.tars[tar]
    path = index.path(tar)
    if not path.is_file():
        yield f"no such file: '{path}'"
        return
    if (found := path.stat().st_size) != size:
        yield f"{found} bytes, and its index was made of {size}"
    first, last = index.firsts[tar : tar + 2].tolist()
    keys = index.keys.slice(first, last - first).to_pylist()
    changed: list[str] = []
    samples = 0
    with path.open("rb") as file:
        try:
            for group in SampleReader(read_members(file, name=name), name=name):
                place = first + samples
                if place >= last or (group.key, group.start) != (keys[samples], int(index.starts[place])):
                    yield f"sample {excerpt(group.key)} at byte {group.start} is not there in the index; {index.remedy}"
                    return
                if index.hashes is not None:
                    hashes = {hash_in_file(file, *member): member[1].name for member in group.members.items()}
                    known = index.hashes.of(place)
                    changed += [member for digest, member in hashes.items() if digest not in known]
                    if known - hashes.keys() and len(hashes) < len(known):
                        changed.append(f"{group.key}.*")  # one is gone
                samples += 1
                step(group.start)
        except DamagedShard as error:
            yield str(error).removeprefix(f"shard '{name}', ").removeprefix(f"shard '{name}': ")
            return
    if samples != last - first:
        yield f"{counted(samples, 'sample')}, and its index has {last - first:,}; {index.remedy}"
    if changed:
        yield (
            f"{counted(len(changed), 'member')} changed since they were indexed; the first is '{changed[0]}'; "
            f"{index.remedy}"
        )
