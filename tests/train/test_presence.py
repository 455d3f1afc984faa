"""Which ranks are gone, over real connections: the end of one, and nothing else, is noticed by all."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from mmdata.train.run.presence import Hub, Presence, Spoke
from tests.programs import PATIENCE_S, run_program
from tests.waiting import wait_until


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Presence]]:
    """Rank 0, and two others that are connected to it."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    hub = Hub(lambda rank: f"step {rank}")
    spokes = [Spoke(rank, lambda rank: f"step {rank}") for rank in (1, 2)]
    for each in spokes:
        each.connect(hub.address)
    wait_until(lambda: len(hub._ranks) == 2)
    yield [hub, *spokes]
    for each in (*spokes, hub):
        each.leave("")


def words(presence: Presence) -> list[str]:
    return [gone.words for gone in presence.gone()]


def test_connection_that_ends_without_a_word_is_a_rank_that_is_gone(ranks: list[Presence]):
    hub, first, second = ranks
    for each in list(first._sockets):
        each.shutdown(socket.SHUT_RDWR)  # as the kernel does when a process ends
    wait_until(lambda: hub.gone() and second.gone())
    said = ["rank 1 is gone (killed?), last heard of at step 1"]
    assert (words(hub), words(second)) == (said, said)
    assert not hub.gone()[0].ended


def test_rank_that_leaves_with_an_error_is_gone_and_one_that_has_done_its_part_is_not(ranks: list[Presence]):
    hub, first, second = ranks
    first.leave("")
    wait_until(lambda: len(hub._ranks) == 1)
    second.leave("step 7, computing: OSError: disk full")
    wait_until(hub.gone)
    assert words(hub) == ["rank 2 ended at step 7, computing: OSError: disk full"]
    assert hub.gone()[0].ended


def test_rank_0_is_gone_if_its_connections_end_without_a_word(ranks: list[Presence]):
    hub, first, second = ranks
    hub._left.set()  # its thread closes the connections, as the kernel does when a process ends
    wait_until(lambda: first.gone() and second.gone())
    assert words(first) == words(second) == ["rank 0 is gone (killed?), last heard of at step 0"]


def test_rank_0_that_leaves_tells_why(ranks: list[Presence]):
    hub, first, second = ranks
    hub.leave("step 7, computing: OSError: disk full")
    wait_until(lambda: first.gone() and second.gone())
    assert words(first) == words(second) == ["rank 0 ended at step 7, computing: OSError: disk full"]


def test_stranger_is_not_listened_to(ranks: list[Presence]):
    hub = ranks[0]
    assert isinstance(hub, Hub)
    _, port, token = json.loads(hub.address)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b'{"token": "guessed", "rank": 1}\n{"ended": "a lie"}\n')
        assert stranger.recv(1) == b"", "closed"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b"\xff[1]\n")
        assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
        stranger.sendall('{"token": "é", "rank": 1}\n'.encode())
        assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as late:
        late.sendall(json.dumps({"token": token, "rank": 3}).encode() + b"\n")
        late.sendall(b'{"ended": "step 1: ValueError: x"}\n')
        wait_until(hub.gone)
    assert words(hub) == ["rank 3 ended at step 1: ValueError: x"]


def test_rank_that_cannot_connect_says_so(caplog: pytest.LogCaptureFixture):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "mmdata"):
            Spoke(3, str).connect(json.dumps([["127.0.0.1"], port, "token"]))
            wait_until(lambda: caplog.messages)
    assert caplog.messages == [
        f"rank 3 cannot connect to rank 0 at 127.0.0.1, port {port}: if a rank's process ends, this one learns of it "
        "by the watchdog's time limit only; let ranks connect to each other on all ports"
    ]


def test_forked_child_that_outlives_its_rank_does_not_hold_the_connection():
    program = (
        "import os, signal, time\n"
        "from mmdata.train.run.presence import Hub, Spoke\n"
        "hub = Hub(str)\n"
        "reading, writing = os.pipe()\n"
        "if not os.fork():\n"
        "    spoke = Spoke(1, str)\n"
        "    spoke.connect(hub.address)\n"
        "    while not spoke._sockets: time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"  # the token is sent, and the thread reads
        "    child = os.fork()\n"
        "    if not child: signal.pause()\n"
        "    os.write(writing, str(child).encode())\n"
        "    os._exit(0)\n"
        "child = int(os.read(reading, 20))\n"
        "while not hub.gone(): time.sleep(0.01)\n"
        "print(hub.gone()[0].words, flush=True)\n"
        "os.kill(child, signal.SIGKILL)\n"
        "os._exit(0)\n"
    )
    done = run_program(
        [sys.executable, "-c", program],
        env=os.environ | {"MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == "rank 1 is gone (killed?), last heard of at 1\n", done.stderr
    assert done.returncode == 0
