"""How tests start programs: `Program` is `subprocess.Popen` and `run_program` is `subprocess.run`, without the imports.

Most programs of the tests would first import torch, which takes 2 to 5 s. A template process (template.py), one for
each pytest worker, imports the heavy modules once and forks each program from itself. A program is then a child of the
test as any other: own pid, descriptors, session, environment and folder, real signals, a real end of the interpreter.

A program gets a new interpreter if it is not Python, or if something decides its start that a fork cannot repeat (see
`Program.request`). Tests of the start itself (what is imported, memory, flags of the interpreter) call `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PATIENCE_S = 1800
"""How long a test waits for what should come: on a busy machine all is ten times slower, and only a hang is not."""
SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphaned descendants become children of this process."""
READ_AT_IMPORT = (
    *("PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "HF_", "TRANSFORMERS_"),
    *("TORCH_LOGS", "TORCH_COMPILE", "TORCHDYNAMO", "TORCHINDUCTOR"),
)
"""Beginnings of the variables that libraries read once: a program that changes one gets an interpreter of its own."""
SET_LATER = ("PYTHONPATH", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "PYTHONBREAKPOINT")
"""Variables of those that the template sets after the fork. torch sets the cache folder itself when it first compiles,
ray.init the last one, which Python reads at a breakpoint()."""
UNUSUAL = ("preexec_fn", "shell", "executable", "gid", "gids", "uid")
"""Arguments of Popen that the template leaves to an interpreter."""
PORTS_A_WORKER = 250
_DRAWN = itertools.count(os.getpid())
"""Numbers of ports; suites that run at the same time begin at different ones."""


class Template:
    """A process with the imports, which forks programs.

    Args:
        connection: a socket of packets, to it.
        environment: that it was started with.
        pid: of the process.
    """

    def __init__(self, connection: socket.socket, environment: Mapping[str, str], pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.environment = dict(environment)
        self.owner = os.getpid()
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Start a program with these as its descriptors 0, 1, 2 and `pass_fds`; returns its pid.

        The template forks twice and its child ends, so that the program loses its parent. Its next ancestor that adopts
        orphans becomes its parent: this process, for as long as it waits for the answer.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with self._lock:
            prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)
                answer = self.connection.recv(32)
            finally:
                prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the template process of tests/programs.py has ended; its stderr says why")
        return int(answer)

    def imports_the_same(self, environment: Mapping[str, str]) -> bool:
        """Whether a new interpreter with `environment` would import the same modules with the same settings."""

        def of_imports(variables: Mapping[str, str]) -> dict[str, str]:
            return {k: v for k, v in variables.items() if k.startswith(READ_AT_IMPORT) and k not in SET_LATER}

        return of_imports(environment) == of_imports(self.environment)


@cache
def template() -> Template | None:
    """This process's template, started at the first call; None on systems without prctl."""
    if sys.platform != "linux":
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = "import sys; sys.path.insert(0, sys.argv[1]); from tests.template import main; main(int(sys.argv[2]))"
    room = " " * 16_000  # for the command lines of programs
    command = [sys.executable, "-c", program, str(Path(__file__).parents[1]), str(theirs.fileno()), room]
    nothing = subprocess.DEVNULL
    with theirs:
        process = subprocess.Popen(command, stdin=nothing, stdout=nothing, pass_fds=[theirs.fileno()])
    started = Template(ours, os.environ, process.pid)

    def end() -> None:
        if started.owner == os.getpid():  # not in a forked child of this process
            ours.shutdown(socket.SHUT_RDWR)
            process.wait()

    atexit.register(end)
    return started


class Program(subprocess.Popen[Any]):
    """A started program: `subprocess.Popen`, of which only the start differs."""

    template = staticmethod(template)

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        in_interpreter = super()._execute_child  # pyright: ignore[reportAttributeAccessIssue]
        # Versions of Python differ in the order of the arguments, not in their names.
        given = inspect.signature(in_interpreter).bind(*args, **kwargs).arguments
        request = self.request(given)
        template = self.template() if request else None
        if request is None or template is None:
            in_interpreter(*args, **kwargs)
            return
        pipes = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        descriptors = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        self.pid = template.fork(request, descriptors + request["pass_fds"])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))  # pyright: ignore[reportAttributeAccessIssue]

    def request(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the template needs to become the program; None if a new interpreter must."""
        words = given["args"]
        if isinstance(words, str | bytes | os.PathLike) or any(given.get(name) for name in UNUSUAL):
            return None
        words = [os.fsdecode(word) for word in words]
        if words[0] == str(Path(sys.executable).with_name("mmdata")):
            words.insert(0, sys.executable)
        environment = dict(os.environ if given["env"] is None else given["env"])
        template = self.template() if words[0] == sys.executable else None
        if template is None or template.owner != os.getpid() or not template.imports_the_same(environment):
            return None
        unbuffered = words[1:2] == ["-u"]
        command, words = words, words[1 + unbuffered :]
        if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
            return None
        return {
            "command": command,
            "words": words,
            "unbuffered": unbuffered,
            "environment": environment,
            "cwd": None if given["cwd"] is None else os.fsdecode(given["cwd"]),
            "pass_fds": list(given["pass_fds"]),
            "new_session": bool(given["start_new_session"]),
            "process_group": given.get("process_group", -1),
        }


def run_program(
    command: list[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = PATIENCE_S,
    check: bool = False,
    **settings: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with a `Program`; `settings` are those of Popen."""
    if capture_output:
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        settings["stdin"] = subprocess.PIPE
    with Program(command, **settings) as program:
        try:
            output, errors = program.communicate(input, timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(command, program.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def run_ranks(program: Path, folder: Path, count: int = 2) -> None:
    """Run `program FOLDER RANK`, a file in a folder of tests/, in `count` processes of one thread; all must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(program.parents[2])}
    processes = [Program([sys.executable, program, folder, str(rank)], env=environment) for rank in range(count)]
    try:
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    """A port that is free, and that no other pytest worker of this run draws.

    It is below those that the system itself gives out (from 32,768 on, in some sandboxes from 16,000): one of these
    could be taken before the program that is told of it listens.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 10_000 + PORTS_A_WORKER * (worker % 24)
    for number in itertools.islice(_DRAWN, PORTS_A_WORKER):
        port = first + number % PORTS_A_WORKER
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            return port
    raise RuntimeError(f"none of the {PORTS_A_WORKER} ports from {first} on can be bound")
