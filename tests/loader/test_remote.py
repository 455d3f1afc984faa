"""Remote is local: epochs from servers that fail now and then, through a cache of a tenth of the corpus."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata import Index, Loader
from mmdata.errors import DataError
from mmdata.loader.corpus import open_index
from mmdata.loader.loader import data_config
from mmdata.loader.prefetch import ShardPrefetcher
from mmdata.text.tokenizer import Tokenizer
from tests.flat_settings import grouped
from tests.programs import PATIENCE_S, Program
from tests.shard_writer import ShardWriter
from tests.storage.servers import Server, running, serve, serve_s3
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def far(corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus in 50 shards."""
    folder = tmp_path_factory.mktemp("far")
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer")
    with ShardWriter(folder, shard_rows=1, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint) as writer:
        for sample in corpus.samples:
            writer.write(sample)
    return folder


@pytest.fixture
def config(corpus, far: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings with a cache of a tenth of the corpus, in windows that fit into half of that."""
    room = Index.open(far).bytes // 10
    changes = {"cache_dir": str(tmp_path / "cache"), "cache_gb": room / 1e9, "shuffle_window_rows": 2}
    return grouped(**corpus.settings, **changes)


def digest(loader: Loader) -> str:
    """Of all that is in the batches of an epoch."""
    found = hashlib.sha256()
    for batch in loader:
        for name, value in sorted(batch.items()):
            found.update(name.encode())
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else json.dumps(value).encode())
    return found.hexdigest()


def check_clean(folder: Path, room: int) -> None:
    """No locks, no more bytes than allowed; a part, of a fetch that was stopped, counts as the whole file."""
    files = [path for path in folder.iterdir() if path.name != ".lock"]
    assert sum(int(path.suffixes[0][1:]) if path.suffixes else path.stat().st_size for path in files) <= room
    for path in folder.iterdir():
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def room_of(config: dict[str, Any]) -> int:
    return int(config["loading"]["cache_gb"] * 1e9)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.sweep(keep=1)
def test_epochs_from_http_are_the_local_ones(config, far: Path, num_workers: int):
    here = Loader.from_config(grouped(**{**config, "shards": str(far), "num_workers": 0}))
    with serve(far, fault_every=20) as server:
        loader = Loader.from_config(grouped(**{**config, "shards": server.url, "num_workers": num_workers}))
        assert [digest(loader) for _ in range(2)] == [digest(here) for _ in range(2)]
        assert set(server.faults) == {"reset", "error", "cut", "slow"}
        del loader  # or it fetches what the next epoch begins with
    check_clean(Path(config["loading"]["cache_dir"]), room_of(config))


def test_an_epoch_from_s3_is_the_local_one(config, far: Path):
    here = Loader.from_config(grouped(**{**config, "shards": str(far), "num_workers": 0}))
    with serve_s3(far, fault_every=20) as server:
        loader = Loader.from_config({**config, "shards": "s3://bucket"})
        assert digest(loader) == digest(here)
        assert set(server.faults) == {"reset", "error", "cut", "slow"}
        del loader  # or it fetches what the next epoch begins with
    check_clean(Path(config["loading"]["cache_dir"]), room_of(config))


PROCESS = """
import json, sys
sys.path.insert(0, "tests/loader")
from test_remote import Loader, digest
print(digest(Loader.from_config(json.loads(sys.argv[1]))))
"""


def start(config: dict[str, Any], server: Server) -> subprocess.Popen[str]:
    url = "s3://bucket" if server.behind else server.url
    command = [sys.executable, "-c", PROCESS, json.dumps({**config, "shards": url})]
    environment = {**os.environ, "AWS_ENDPOINT_URL": server.url}
    return Program(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("serve", [serve, serve_s3])
@pytest.mark.sweep
def test_four_processes_share_a_cache_and_one_is_killed_in_mid_download(config, far: Path, serve):
    here = digest(Loader.from_config(grouped(**{**config, "shards": str(far), "num_workers": 0})))
    with (
        serve(far, fault_every=20) as server,
        running(Server(folder=server.folder, behind=server.behind)) as held,
    ):
        held.held = "/000030.tar"
        killed = start(config, held)
        assert held.holding.wait(PATIENCE_S)
        assert list(Path(config["loading"]["cache_dir"]).glob("*.part"))
        processes = [start(config, server) for _ in range(3)]
        killed.kill()
        killed.wait()
        held.release.set()
        processes.append(start(config, held))
        assert [process.communicate(timeout=PATIENCE_S)[0] for process in processes] == [f"{here}\n"] * 4
    check_clean(Path(config["loading"]["cache_dir"]), room_of(config))


def test_shards_are_fetched_before_a_worker_asks(config, far: Path):
    with serve(far) as server:
        loader = Loader.from_config(grouped(**{**config, "cache_gb": 1.0, "shards": server.url, "num_workers": 1}))
        batches = iter(loader)
        next(batches)
        # The rest of the epoch comes by itself, while nobody asks for a batch.
        every, folder = {f"/{i:06d}.tar" for i in range(50)}, Path(config["loading"]["cache_dir"])
        wait_until(lambda: every <= {path for path, _ in server.requests})
        wait_until(lambda: not list(folder.glob("*.part")))  # what is under way when the last step is taken is given up
        asked = [path for path, _ in server.requests if path.endswith(".tar")]
        assert sorted(asked) == sorted(every)
        list(batches)
        assert len([path for path, _ in server.requests if path.endswith(".tar")]) == 50


def test_a_local_corpus_starts_no_thread(corpus):
    before = {thread.name for thread in threading.enumerate()}
    batches = iter(corpus.loader())
    next(batches)
    assert {thread.name for thread in threading.enumerate()} - before <= {
        f"mmdata-worker_{one}" for one in ("steps", 0, 1)
    }


def test_a_loop_that_is_left_leaves_no_part_and_no_thread(config, far: Path):
    with serve(far) as server:
        loader = Loader.from_config({**config, "shards": server.url})
        for _ in loader:
            break
        for thread in threading.enumerate():
            if thread.name == "mmdata-fetch":
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
    check_clean(Path(config["loading"]["cache_dir"]), room_of(config))


def test_what_the_plan_raises_ends_the_loop(config, far: Path):
    loader = Loader.from_config({**config, "shards": f"file://{far}"})

    def steps():
        yield from ()
        raise DataError("the plan broke")

    ahead = ShardPrefetcher(steps(), loader.index, loader.builder.store)
    with pytest.raises(DataError, match="the plan broke"):
        list(ahead)
    ahead.close()


def test_a_cache_smaller_than_a_window_is_told(config, far: Path, caplog):
    with caplog.at_level(logging.WARNING, "mmdata"):
        open_index(data_config({**config, "shards": f"file://{far}"}))
        assert caplog.text == ""
        open_index(data_config({**config, "shards": f"file://{far}", "shuffle_window_rows": 40}))
    assert "a window of 40 rows has 0.00" in caplog.text
    assert "shards are fetched again and again. Set data.loading.cache_gb to 0.0" in caplog.text
    assert "or data.shuffle_window_rows to 2 (less mixed)" in caplog.text
