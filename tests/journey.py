"""Convert, index, load and train, as one program that tests start with modules and functions hidden.

python journey.py FOLDER '["fcntl", "os.pread", …]' [windows]

Ten images become shards, their tars are indexed again, a loader with threads gives two epochs, and a run makes ten
updates. Prints one JSON object: digests of the batches, and the losses of the run. What is hidden is missing from then
on, as on a system or an installation that does not have it; "windows" adds how files behave there.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def hide(names: list[str]) -> None:
    """Remove functions from their modules, and make modules impossible to import."""
    for name in names:
        module, dot, attribute = name.partition(".")
        if dot and hasattr(importlib.import_module(module), attribute):
            delattr(importlib.import_module(module), attribute)
        elif not dot:
            sys.modules[name] = None  # type: ignore[assignment]


def locks_of_bytes() -> Any:
    """In place of Python's module msvcrt. Windows' locks belong to a handle; Linux has such locks of bytes, too."""
    import fcntl
    import struct

    def locking(descriptor: int, action: int, count: int) -> None:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        kind = fcntl.F_UNLCK if action == 0 else fcntl.F_WRLCK
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, start, count, 0))
        except OSError as error:
            raise PermissionError(errno.EACCES, "Permission denied") from error

    return SimpleNamespace(locking=locking, LK_UNLCK=0, LK_NBLCK=2)


def be_windows() -> None:
    """Locks of bytes, and its rules: no folder is opened, nothing open is renamed or removed or takes a new name."""
    import fcntl
    import select

    sys.modules["msvcrt"] = locks_of_bytes()
    true = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace", "unlink", "symlink")}

    def is_open(path: Any) -> bool:
        real = os.path.realpath(path)
        names = set()
        for one in os.listdir("/proc/self/fd"):
            try:
                names.add(os.readlink(f"/proc/self/fd/{one}"))
            except OSError:  # closed meanwhile, by another thread
                continue
        return any(name == real or name.startswith(f"{real}/") for name in names)

    def refuse(path: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    def open_(path: Any, *given: Any, **named: Any) -> int:
        if os.path.isdir(path):
            refuse(path)
        return true["open"](path, *given, **named)

    def fsync(descriptor: int) -> None:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EBADF, "Bad file descriptor")
        true["fsync"](descriptor)

    def rename(source: Any, target: Any, **named: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists", os.fspath(target))
        replace(source, target, **named)

    def replace(source: Any, target: Any, **named: Any) -> None:
        if is_open(source) or (os.path.lexists(target) and (os.path.isdir(target) or is_open(target))):
            refuse(source)
        true["replace"](source, target, **named)

    def unlink(path: Any, *given: Any, **named: Any) -> None:
        if not named.get("dir_fd") and stat.S_ISREG(os.lstat(path).st_mode) and is_open(path):
            refuse(path)
        true["unlink"](path, *given, **named)

    def symlink(source: Any, target: Any, *given: Any, **named: Any) -> None:
        raise OSError(errno.EPERM, "A required privilege is not held by the client", os.fspath(target))

    select_ = select.select

    def sockets_only(*lists: Any) -> Any:
        for one in (one for given in lists[:3] for one in given):
            descriptor = one if isinstance(one, int) else one.fileno()
            assert stat.S_ISSOCK(os.fstat(descriptor).st_mode), "select: not a socket"
        return select_(*lists)

    select.select = sockets_only
    shutil._use_fd_functions = False  # as it is there
    os.open, os.fsync, os.rename, os.replace = open_, fsync, rename, replace
    os.unlink, os.remove, os.symlink = unlink, unlink, symlink


def make_corpus(folder: Path) -> Path:
    """Ten pictures in three shapes, and a table of them."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    lines = ["filepath,caption"]
    for number in range(10):
        size = [(32, 32), (24, 40), (40, 24)][number % 3]
        pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        name = f"{number}.{('png', 'jpg')[number % 2]}"
        Image.fromarray(pixels).resize(size).save(folder / name)
        lines.append(f"{name},picture {number} {'again ' * (number % 3)}".strip())
    (folder / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "table.csv"


def run(*words: object) -> None:
    """A command of mmdata, in this process."""
    from mmdata.cli import main as command

    assert command([*map(str, words)]) == 0, words


def digests(config: dict[str, Any]) -> list[str]:
    """One digest for each batch of two epochs."""
    import numpy as np

    import mmdata

    loader, found = mmdata.Loader.from_config(config), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            digest = hashlib.sha256()
            for name in ("pixel_values", "input_ids", "attention_mask", "rows", "valid"):
                digest.update(np.ascontiguousarray(batch[name].numpy()).tobytes())
            found.append(digest.hexdigest())
    loader.close()
    return found


def main() -> None:
    folder, hidden = Path(sys.argv[1]), json.loads(sys.argv[2])
    table = make_corpus(folder / "raw")
    import torch.distributed.checkpoint  # other libraries find what they need before it is hidden
    import transformers  # noqa: F401

    hide(hidden)
    if sys.argv[3:] == ["windows"]:
        be_windows()
        hide(["fcntl"])
    torch.set_num_threads(1)
    sys.stdout, printed = sys.stderr, sys.stdout
    converted = folder / "shards"
    run("convert", table, converted, "--train-tokenizer", 300, "--workers", 2, "--shard-rows", 4)
    tars = folder / "tars"
    tars.mkdir()
    for tar in converted.glob("*.tar"):
        (tars / tar.name).write_bytes(tar.read_bytes())
    run("index", tars, "--tokenizer", converted / "tokenizer")
    data = {
        "shards": str(tars),
        "tokenizer": str(converted / "tokenizer"),
        "global_batch_size": 5,
        "seed": 3,
        "image_buckets": [[32, 32]],
        "text_buckets": 1,
        "max_length": 40,
        "crop_scale": [0.5, 1.0],
        "loading": {"num_workers": 2},
    }
    found: dict[str, Any] = {"batches": digests(data)}
    (folder / "run.yaml").write_text(json.dumps({"data": data}))
    limits = ["train.epochs=5", "train.log_every_steps=1", "train.warmup_steps=1", "train.checkpoint_every_steps=4"]
    limits += ["train.feature_cache=pair"]
    run("train", folder / "run.yaml", f"train.output={folder / 'run'}", "model.name=micro", *limits)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found["losses"] = [line["loss"] for line in lines if "loss" in line]
    run("doctor")
    print(json.dumps(found), file=printed)


if __name__ == "__main__":
    main()
