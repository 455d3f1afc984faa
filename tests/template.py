"""The template process of programs.py: imports what most programs import, then forks itself into each of them.

It runs no torch operation, since the threads of OpenMP and autograd do not outlive a fork.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import time
import warnings
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import mmdata
from tests.programs import Program, Template

LAUNCHER = "torch.distributed.run"
HEAVY = [LAUNCHER, "torch.distributed.fsdp", "torchvision", "webdataset"]
LOADED_WHEN_NAMED = ["AutoTokenizer", "PreTrainedTokenizerFast"]
"""Names of transformers that it imports at their first use."""
NOT_WITHOUT_NEED = ("mmdata.integrations", "mmdata.__main__")
"""Parts of mmdata that import other frameworks, or that run when they are imported."""


def main(descriptor: int) -> None:
    """Serve until the pytest worker ends; in each fork, go on as the program that was asked for."""
    del sys.path[:2]  # the folder of the tests and the current one
    atexit.register(leave_libraries)  # the first to be registered is the last to run
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    import_all()
    gc.freeze()
    request = serve(socket.socket(fileno=descriptor))
    if request["words"][:2] == ["-m", LAUNCHER]:
        request = serve_ranks_of(request)
    become(request)


def import_all() -> None:
    """Import the heavy modules and all of mmdata."""
    for name in HEAVY:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(mmdata.__path__, "mmdata."):
        if not module.name.startswith(NOT_WITHOUT_NEED):
            importlib.import_module(module.name)
    for name in LOADED_WHEN_NAMED:
        getattr(transformers, name)


def leave_libraries() -> None:
    """Have the end of a program free what is its own: to free the libraries as well takes 0.4 s.

    The interpreter would clear each of their modules, then the C library would run their destructors.
    """
    own = (*sys.stdlib_module_names, "mmdata", "__main__")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] not in own}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    c_library = ctypes.CDLL(None)
    c_library.fflush(None)
    c_library.on_exit(c_library._exit, None)


def serve(connection: socket.socket) -> dict[str, Any]:
    """Answer requests with the pid of a program; returns only in the program."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 16)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        between = fork()
        if between == 0:
            between = os.getpid()
            pid = fork()
            if pid == 0:
                for number in (read, write, connection.detach()):
                    os.close(number)
                request = json.loads(message)
                take_over(request, descriptors, between)
                return request
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(read, 32))
        for number in (read, write, *descriptors):
            os.close(number)


def serve_ranks_of(launcher: dict[str, Any]) -> dict[str, Any]:
    """Give torchrun, the parent of its ranks, a template of its own; returns in the launcher and in each rank."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = fork()
    if pid:
        theirs.close()
        template = Template(ours, os.environ, pid)
        rank = type("Rank", (Program,), {"template": staticmethod(lambda: template)})
        setattr(subprocess_handler, "Popen", rank)  # noqa: B010  a name that the module imports
        return launcher
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "r+b") as nothing:  # it must not hold the pipes of the launcher
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    return serve(theirs)


def fork() -> int:
    """`os.fork` without its warning of other threads: numpy's and pyarrow's are idle, and both start them anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def take_over(request: dict[str, Any], descriptors: list[int], between: int) -> None:
    """Give this process the descriptors, group, folder, environment and signals of a program.

    Args:
        request: see `Program.request`.
        descriptors: for numbers 0, 1, 2 and `pass_fds`.
        between: pid of the process that ends so that the test becomes the parent.
    """
    numbers = [0, 1, 2, *request["pass_fds"]]
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(numbers, above, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    elif request["process_group"] != -1:
        os.setpgid(0, request["process_group"])
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    named_before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = named + [entry for entry in sys.path if entry not in named_before]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    open_streams(unbuffered=request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED")))
    show_command(request["command"])
    while os.getppid() == between:
        time.sleep(0.0005)


def open_streams(*, unbuffered: bool) -> None:
    """Open sys.stdin, sys.stdout and sys.stderr anew: those of the template are for files of another kind."""
    for number, name in enumerate(["stdin", "stdout", "stderr"]):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        raw.name = f"<{name}>"
        file = raw if unbuffered and number else io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        before, lines = getattr(sys, name), not unbuffered and (name == "stderr" or raw.isatty())
        stream = io.TextIOWrapper(file, before.encoding, before.errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def show_command(words: list[str]) -> None:
    """Write the command line that ps and /proc show over that of the template, as far as there is room."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])  # arg_start and arg_end of proc(5)
    line = os.fsencode("\0".join(words))[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def become(request: dict[str, Any]) -> None:
    """Run the program as the interpreter would: in the module `__main__`, whose names live until the process ends."""
    np.random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    first, *rest = request["words"]
    sys.orig_argv = request["command"]
    names = vars(sys.modules["__main__"])
    names.clear()
    names.update(vars(ModuleType("__main__")), __builtins__=builtins, __annotations__={})
    if first == "-m":
        sys.argv, sys.path[:0] = rest, [os.getcwd()]
        sys.modules.pop(rest[0], None)  # runpy warns of a module that is imported before it is run
        runpy._run_module_as_main(rest[0])  # pyright: ignore[reportAttributeAccessIssue]
    elif first == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        names["__loader__"] = BuiltinImporter
        exec(compile(rest[0], "<string>", "exec"), names)
    else:
        sys.argv, sys.path[:0] = [first, *rest], [os.path.dirname(os.path.realpath(first))]
        loader = SourceFileLoader("__main__", os.path.abspath(first))
        names |= {"__file__": loader.path, "__cached__": None, "__loader__": loader}
        exec(compile(loader.get_data(first), loader.path, "exec"), names)
