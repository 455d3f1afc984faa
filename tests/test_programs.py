"""Programs forked from the template are those that a new interpreter would run: each test compares with subprocess."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Program, run_program, template

SEEN = r"""
import json, os, signal, sys
main = sys.modules["__main__"]
print(json.dumps({
    "names": sorted(name for name in vars(main) if name.startswith("__")), "file": getattr(main, "__file__", None),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "environment": dict(os.environ),
    "parent": os.getppid(), "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "signals": {str(one): str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)},
    "files": sorted(os.listdir("/proc/self/fd")), "command": open("/proc/self/cmdline").read().rstrip("\0"),
    "streams": [[one.name, one.errors, one.line_buffering] for one in (sys.stdin, sys.stdout, sys.stderr)],
    "input": sys.stdin.read(),
}, indent=0))
"""
WAYS = [["-c", SEEN, "a", "-b"], ["seen.py", "--c"], ["-u", "seen.py"], ["-m", "seen", "d"]]


def pytest_environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}


@pytest.mark.parametrize("words", WAYS)
@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.sweep(keep=3)
def test_program_sees_what_it_would_in_a_new_interpreter(words: list[str], new_session: bool, tmp_path: Path):
    (tmp_path / "seen.py").write_text(SEEN)
    settings: dict[str, Any] = {"cwd": tmp_path, "start_new_session": new_session, "capture_output": True}
    settings |= {"env": pytest_environment(NEW="é", PYTHONPATH="/nowhere"), "input": "é".encode()}
    command = [sys.executable, *words]
    forked, started = run_program(command, **settings), subprocess.run(command, **settings, check=False)
    assert (forked.returncode, forked.stderr) == (0, b"")
    assert forked.stdout.decode().splitlines() == started.stdout.decode().splitlines()


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit()",
        "sys.exit(300)",
        "sys.exit('why')",
        "os._exit(5)",
        "os.abort()",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "signal.raise_signal(signal.SIGINT)",
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "class Last:\n  def __del__(self): print('freed')\nlast = Last()",
    ],
)
@pytest.mark.sweep(keep=4)
def test_program_ends_as_a_new_interpreter_does(end: str):
    code = f"import atexit, os, signal, sys, threading, time\natexit.register(print, 'exit')\nprint('begun')\n{end}"
    command = [sys.executable, "-c", code]
    forked, started = (run(command, capture_output=True, text=True) for run in (run_program, subprocess.run))
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_program_is_a_child_that_can_be_stopped_and_killed():
    with Program([sys.executable, "-c", "print('begun', flush=True)\nimport time\ntime.sleep(600)"], stdout=-1) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"begun\n"
        assert one.poll() is None
        one.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(one.pid, os.WUNTRACED)[1])
        one.kill()
    assert one.returncode == -signal.SIGKILL


def test_program_gets_descriptors_under_their_numbers():
    ours, theirs = socket.socketpair()
    code = f"import socket\nsocket.socket(fileno={theirs.fileno()}).send(b'here')"
    with ours, theirs:
        assert run_program([sys.executable, "-c", code], pass_fds=[theirs.fileno()]).returncode == 0
        assert ours.recv(9) == b"here"


@pytest.mark.skipif(sys.platform != "linux", reason="without prctl all programs get a new interpreter")
def test_program_has_the_imports_unless_its_start_is_its_own():
    code = "import sys; print('torch' in sys.modules)"

    def imported(*flags: str, **changes: str) -> str:
        done = run_program([sys.executable, *flags, "-c", code], env=pytest_environment(**changes), capture_output=True)
        return done.stdout.decode().strip()

    assert template() is not None
    assert imported() == imported(OMP_NUM_THREADS="2", CUDA_VISIBLE_DEVICES="") == "True"
    assert imported(TORCHINDUCTOR_CACHE_DIR="/nowhere") == imported(PYTHONBREAKPOINT="0") == "True"
    assert imported("-O") == imported(PYTHONHASHSEED="1") == imported(HF_HUB_OFFLINE="0") == "False"


def test_program_threads_of_torch_are_those_of_its_environment():
    code = "import torch; print(torch.get_num_threads())"
    for number in ("1", "3"):
        done = run_program([sys.executable, "-c", code], env=pytest_environment(OMP_NUM_THREADS=number), stdout=-1)
        assert done.stdout.decode().strip() == number


def test_programs_draw_other_random_numbers():
    code = "import random, tempfile, numpy; print(random.random(), numpy.random.rand(), tempfile.mktemp())"
    drawn = [run_program([sys.executable, "-c", code], stdout=-1, text=True).stdout.split() for _ in range(2)]
    assert all(first != second for first, second in zip(*drawn, strict=True))
