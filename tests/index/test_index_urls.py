"""An index of tars behind URLs: each is fetched once, and the index is that of the same tars on a disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

import mmdata.storage.attempts as attempts_module
import mmdata.storage.remote as remote_module
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, IndexReport, build_index, verify
from mmdata.index.staging import STAGING_NAME
from mmdata.index.store import ShardStore
from mmdata.storage import ShardCache
from mmdata.tars.foreign import MAX_SHARDS
from mmdata.tars.members import Members
from tests.programs import PATIENCE_S, Program, run_program
from tests.storage.servers import Server, serve, serve_s3
from tests.waiting import wait_until

NUM_TARS = 6


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache", max_bytes=10**7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between requests."""
    monkeypatch.setattr(attempts_module, "WAIT_S", 0.01)
    monkeypatch.setattr("tests.storage.servers.SLOW_S", 0.01)


@pytest.fixture
def tars(tmp_path: Path, tar, photo) -> Path:
    """Six tars of three samples each, x-0000.tar to x-0005.tar, with captions where LAION has them."""
    folder = tmp_path / "tars"
    folder.mkdir()
    for shard in range(NUM_TARS):
        members = []
        for i in range(3):
            members.append((f"{shard}{i}.jpg", photo(20, 30 + i, seed=3 * shard + i)))
            members.append((f"{shard}{i}.json", b'{"TEXT": "dog %d"}' % i))
        (folder / f"x-{shard:04d}.tar").write_bytes(tar(members))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """What is published in a folder, without manifest.json, which says where the tars lie."""
    return {path.name: path.read_bytes() for path in (folder / "__mmdata__").iterdir() if path.name != "manifest.json"}


def pattern(server: Server) -> str:
    return f"{server.url}/x-{{0000..{NUM_TARS - 1:04d}}}.tar"


def of_urls(server: Server, out: Path, cache: ShardCache, **settings) -> IndexReport:
    return build_index(pattern(server), out=out, cache=cache, **settings)


def asked(server: Server) -> list[int]:
    """How often each tar was asked for."""
    paths = [path for path, _ in server.requests]
    return [paths.count(f"/x-{shard:04d}.tar") for shard in range(NUM_TARS)]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


# What is read


def test_each_tar_is_read_once_with_one_request(tars, tmp_path, cache):
    here = build_index(tars, out=tmp_path / "here")
    with serve(tars) as server:
        far = of_urls(server, tmp_path / "far", cache)
        assert sorted(server.requests) == [(f"/x-{shard:04d}.tar", None) for shard in range(NUM_TARS)]
        assert server.sent == size_of(tars)
        assert far.manifest.location == server.url
    assert files(tmp_path / "far") == files(tmp_path / "here")
    assert (far.accounts, far.manifest.root, far.guessed) == (here.accounts, here.manifest.root, True)
    assert [path.name for path in cache.folder.iterdir()] == [".lock"]
    assert not (tmp_path / "far" / STAGING_NAME).exists()


def test_samples_are_fetched_from_where_they_were_indexed(tars, tmp_path, cache):
    build_index(tars, out=tmp_path / "here")
    with serve(tars) as server:
        of_urls(server, tmp_path / "far", cache)
        far, here = Index.open(tmp_path / "far", cache=cache), Index.open(tmp_path / "here")
        assert far.fingerprint == here.fingerprint
        assert [sample.captions for sample in far[:]] == [sample.captions for sample in here[:]]
        assert far.shard_path(0).read_bytes() == (tars / "x-0000.tar").read_bytes()
        assert far.shard_place(1) == f"{server.url}/x-0001.tar"
        assert verify(tmp_path / "far") == []


def test_reading_a_cached_tar_counts_as_its_use_and_one_that_was_removed_is_closed(tars, tmp_path, cache):
    with serve(tars) as server:
        of_urls(server, tmp_path / "far", cache)
        index = Index.open(tmp_path / "far", cache=cache)
        store, path = ShardStore(index), index.shard_path(0)
        store.read(0, 0, 512)
        os.utime(path, (1, 1))
        store.read(0, 0, 512)
        assert path.stat().st_mtime > 1
        path.unlink()
        store.read(1, 0, 512)
        assert store.open_shards.get(0) is None


def test_progress_knows_the_sizes_of_tars_that_are_read_before_the_first(tars, tmp_path, cache):
    others, told = size_of(tars) - (tars / "x-0000.tar").stat().st_size, list[tuple[int, int]]()
    of_all = others * NUM_TARS // (NUM_TARS - 1)
    with serve(tars) as server:
        server.held = "x-0000.tar"

        def progress(done: int, total: int) -> None:
            told.append((done, total))
            if (done, total) == (others, of_all):
                server.release.set()

        of_urls(server, tmp_path / "far", cache, members=Members.parse(caption="json:TEXT"), progress=progress)
    assert (others, of_all) in told
    assert told[-1] == (size_of(tars), size_of(tars))


def test_tars_of_s3_are_read_in_ranges(tars, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(remote_module, "RANGE_BYTES", 1000)
    build_index(tars, out=tmp_path / "here")
    with serve_s3(tars, fault_every=20) as server:
        far = build_index("s3://bucket/x-{0000..0005}.tar", out=tmp_path / "far", cache=cache)
        assert far.manifest.location == "s3://bucket"
        assert {"reset", "error", "cut", "slow"} <= set(server.faults)
        index = Index.open(tmp_path / "far", cache=cache)
        assert index.shard_path(3).read_bytes() == (tars / "x-0003.tar").read_bytes()
    assert files(tmp_path / "far") == files(tmp_path / "here")


def test_an_object_that_is_replaced_while_it_is_read_is_refused(tars, tmp_path, cache, monkeypatch):
    with serve_s3(tars):
        import boto3

        client = boto3.client("s3")
        read = remote_module._Ranges.read
        whole = (tars / "x-0001.tar").read_bytes()

        def replacing(self, most):
            if self._at:
                client.put_object(Bucket="bucket", Key="x-0001.tar", Body=whole[::-1])
            return read(self, most)

        monkeypatch.setattr(remote_module, "RANGE_BYTES", len(whole) - 512)
        monkeypatch.setattr(remote_module._Ranges, "read", replacing)
        with pytest.raises(DataError, match=r"'s3://bucket/x-0001\.tar': the file changed on the server while it was"):
            build_index("s3://bucket/x-0001.tar", out=tmp_path / "far", cache=cache)


def test_names_are_quoted_in_urls_and_not_in_the_index(tmp_path, cache, tar, photo):
    (tmp_path / "my tars").mkdir()
    for name in ("a 1%.tar", "b+2.tar"):
        (tmp_path / "my tars" / name).write_bytes(tar([("a.jpg", photo(20, 30)), ("a.txt", name.encode())]))
    with serve(tmp_path) as server:
        urls = [f"{server.url}/my%20tars/a%201%25.tar?key=secret", f"{server.url}/my%20tars/b+2.tar?key=secret"]
        report = build_index(urls, out=tmp_path / "far", cache=cache)
        assert [entry.name for entry in report.manifest] == ["a 1%.tar", "b+2.tar"]
        index = Index.open(tmp_path / "far", cache=cache)
        assert [sample.captions for sample in index[:]] == [["a 1%.tar"], ["b+2.tar"]]
        assert index.shard_place(0) == f"{server.url}/my%20tars/a%201%25.tar"
    assert report.manifest.location == f"{server.url}/my%20tars?key=secret"


# Runs that end early


PROGRAM = """
import sys
from mmdata.storage import ShardCache
from mmdata.index import build_index
build_index(sys.argv[1], out=sys.argv[2], cache=ShardCache(sys.argv[3], max_bytes=10**7), fill_cache=sys.argv[4] == "1")
"""


@pytest.mark.parametrize("fill_cache", [False, True])
def test_a_killed_run_goes_on_at_the_shard_where_it_was(tars, tmp_path, cache, fill_cache):
    build_index(tars, out=tmp_path / "here")
    far = tmp_path / "far"
    with serve(tars) as server:
        server.held = "/x-0003.tar"
        words = [pattern(server), far, cache.folder, int(fill_cache)]
        killed = Program([sys.executable, "-c", PROGRAM, *map(str, words)])
        assert server.holding.wait(PATIENCE_S)
        wait_until(lambda: len(list((far / STAGING_NAME).glob("*.scan"))) >= NUM_TARS - 1, program=killed)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert not (far / "__mmdata__").exists()
        server.held = ""
        server.release.set()
        assert asked(server) == [1] * NUM_TARS
        report = of_urls(server, far, cache, fill_cache=fill_cache)
        # The first one also says where captions are.
        assert asked(server) == [2, 1, 1, 2, 1, 1]
        assert report.cached == (NUM_TARS if fill_cache else None)
        if fill_cache:
            Index.open(far, cache=cache)[0:18]
            assert asked(server) == [2, 1, 1, 2, 1, 1]
    assert files(far) == files(tmp_path / "here")
    assert not list(cache.folder.glob("*.part"))


def test_an_interrupt_does_not_wait_for_a_server_and_leaves_no_part(tars, tmp_path, cache):
    far = tmp_path / "far"
    with serve(tars) as server:
        server.held = "/x-0003.tar"
        interrupted = Program([sys.executable, "-c", PROGRAM, *map(str, [pattern(server), far, cache.folder, 1])])
        assert server.holding.wait(PATIENCE_S)
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(PATIENCE_S) != 0
        assert not server.release.is_set()
        server.release.set()
    assert not (far / "__mmdata__").exists()
    assert not list(cache.folder.glob("*.part"))


def test_after_an_error_only_what_is_missing_is_read(tars, tmp_path, cache):
    with serve(tars) as server:
        server.answers["/x-0004.tar"] = 404
        missing = rf"'{server.url}/x-0004\.tar': no such file; upload it, or correct the URL"
        with pytest.raises(DataError, match=missing):
            of_urls(server, tmp_path / "far", cache)
        assert not (tmp_path / "far" / "__mmdata__").exists()
        server.answers.clear()
        of_urls(server, tmp_path / "far", cache)
        assert asked(server)[:5] == [2, 1, 1, 1, 2]


def test_a_tar_whose_damage_was_mended_is_read_again(tars, tmp_path, cache):
    whole = (tars / "x-0002.tar").read_bytes()
    with serve(tars) as server:
        server.answers["/x-0002.tar"] = whole[:3000]
        with pytest.raises(DataError, match=rf"shard '{server.url}/x-0002\.tar', byte \d+: .*cut; is it whole on its"):
            of_urls(server, tmp_path / "far", cache)
        server.answers.clear()
        assert of_urls(server, tmp_path / "far", cache).accounts["indexed"] == 18
        assert asked(server) == [2, 1, 2, 1, 1, 1]


# An index that exists


def test_a_known_index_is_left_alone_and_its_tars_are_not_read(tars, tmp_path, cache):
    far = tmp_path / "far"
    with serve(tars) as server:
        of_urls(server, far, cache)
        before = {path: path.read_bytes() for path in (far / "__mmdata__").iterdir()}
        for source in (pattern(server), str(far)):
            again = build_index(source, out=far, cache=cache)
            assert (again.unchanged, again.accounts["indexed"]) == (True, 18)
        assert {path: path.read_bytes() for path in (far / "__mmdata__").iterdir()} == before
        with pytest.raises(
            DataError, match=r"is of other shards \(6, and 1 are to be indexed\); read all tars again wi"
        ):
            build_index(f"{server.url}/x-0000.tar", out=far, cache=cache)


def test_the_tars_of_an_index_may_move_to_another_url(tars, tmp_path, cache):
    far = tmp_path / "far"
    build_index(tars, out=far)
    root = Index.open(far).fingerprint
    with serve(tmp_path) as server:
        moved = build_index(f"{server.url}/tars/x-{{0000..0005}}.tar", out=far, cache=cache)
        assert (moved.unchanged, moved.manifest.location) == (True, f"{server.url}/tars")
        index = Index.open(far, cache=cache)
        assert index.fingerprint == root
        assert index[17].captions == ["dog 2"]
    with serve(tars) as server:  # the index of a URL beside the tars themselves: these are meant
        of_urls(server, tars, cache)
        assert build_index(tars).manifest.location == "."
    assert build_index(tars, out=far).manifest.location == "../tars"
    assert Index.open(far)[17].captions == ["dog 2"]


def test_a_tar_of_another_size_is_told_before_anything_is_read(tars, tmp_path, cache):
    far = tmp_path / "far"
    with serve(tars) as server:
        of_urls(server, far, cache)
        before = (tars / "x-0003.tar").stat().st_size
        server.answers["/x-0003.tar"] = (tars / "x-0003.tar").read_bytes() + bytes(512)
        message = (
            f"other contents: '{server.url}/x-0003.tar' has {before + 512:,} bytes, and {before:,} were indexed; read"
        )
        with pytest.raises(DataError, match=re.escape(message)):
            of_urls(server, far, cache)
        assert of_urls(server, far, cache, overwrite=True).manifest.bytes == size_of(tars) + 512


def test_a_tokenizer_is_added_to_an_index_of_urls(tars, tmp_path, cache, count):
    far, counting = tmp_path / "far", {"count_tokens": count, "tokenizer": "characters"}
    build_index(tars, out=tmp_path / "here", **counting)
    with serve(tars) as server:
        of_urls(server, far, cache)
        assert build_index(far, cache=cache, **counting).only_counted
        assert build_index(far, cache=cache).unchanged
        with pytest.raises(
            DataError, match=r"is of another tokenizer \(fingerprint characters; of the one given: another\)"
        ):
            build_index(far, cache=cache, count_tokens=count, tokenizer="another")
        at_once = of_urls(server, tmp_path / "at once", cache, **counting)
    assert files(far) == files(tmp_path / "here") == files(tmp_path / "at once")
    assert at_once.manifest.tokenizer == "characters"


# The cache


def test_a_cache_that_is_too_small_keeps_what_it_holds(tars, tmp_path):
    one = (tars / "x-0000.tar").stat().st_size
    small = ShardCache(tmp_path / "cache", max_bytes=3 * one + 100)

    with serve(tars) as server:
        report = of_urls(server, tmp_path / "far", small, fill_cache=True)
        assert asked(server) == [1] * NUM_TARS  # none was fetched in vain
    here = [small.path(entry.sha256).exists() for entry in report.manifest]
    assert report.cached == sum(here) == 3
    assert not list(small.folder.glob("*.part"))


def test_fill_cache_is_for_urls(tars, tmp_path):
    with pytest.raises(ConfigError, match=r"--fill-cache is for the tars of URLs; these lie on this machine already"):
        build_index(tars, out=tmp_path / "here", fill_cache=True)


def test_a_cache_that_cannot_be_written_ends_the_run(tars, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with serve(tars) as server, pytest.raises(ConfigError, match=r"cache folder '.*cache': File exists, for 'http"):
        of_urls(server, tmp_path / "far", ShardCache(tmp_path / "cache"))


def test_a_cache_with_room_for_one_tar_is_enough_and_never_holds_more(tars, tmp_path):
    """All room that was taken is given back."""
    most = max(path.stat().st_size for path in tars.glob("*.tar"))
    small = ShardCache(tmp_path / "cache", max_bytes=most + most // 2)
    held: list[int] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        held.append(sum(path.stat().st_size for path in small.folder.glob("*") if path.name != ".lock"))
        data = (tars / handler.path.lstrip("/")).read_bytes()
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    build_index(tars, out=tmp_path / "here")
    with serve(tars) as server:
        server.answers |= {f"/x-{shard:04d}.tar": answer for shard in range(NUM_TARS)}
        server.answers["/x-0004.tar"] = 404
        with pytest.raises(DataError, match="no such file"):
            of_urls(server, tmp_path / "far", small)
        server.answers["/x-0004.tar"] = answer
        of_urls(server, tmp_path / "far", small)  # the first tar, which says where captions are, makes room again
    assert max(held) <= small.max_bytes
    assert [path.name for path in small.folder.iterdir()] == [".lock"]
    assert files(tmp_path / "far") == files(tmp_path / "here")


# Bad servers


def test_all_damaged_tars_are_listed_and_may_be_skipped(tars, tmp_path, cache):
    for name, size in (("x-0001.tar", 3000), ("x-0004.tar", 700)):
        os.truncate(tars / name, size)
    here = build_index(tars, out=tmp_path / "here", skip_damaged=True, max_bad_share=0.5)
    with serve(tars) as server:
        with pytest.raises(
            DataError, match=rf"2 of 6 shards are damaged: shard '{server.url}/x-0001\.tar', byte .*shard"
        ):
            of_urls(server, tmp_path / "far", cache)
        far = of_urls(server, tmp_path / "far", cache, skip_damaged=True, max_bad_share=0.5)
        assert asked(server) == [2, 1, 1, 1, 1, 1]
        assert files(tmp_path / "far") == files(tmp_path / "here")
        assert far.accounts == here.accounts
        assert verify(tmp_path / "far") == []


# Bad names


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (
            ["https://host/cc12m/"],
            "'https://host/cc12m/': not the URL of a .tar; name the tars, such as https://host/cc12m/{",
        ),
        (
            ["https://host"],
            "'https://host': not the URL of a .tar; name the tars, such as https://host/{0000..0009}.tar",
        ),
        (["https://host/x.tar.gz"], "'https://host/x.tar.gz': compressed, which has no random access; unpack it first"),
        (["https://host/{0..9.tar"], "braces that do not close"),
        (["https://host/{0..2000000}.tar"], f"the pattern stands for more than {MAX_SHARDS:,} shards"),
        (
            ["https://host/{a,b}/0.tar"],
            "'https://host/a/0.tar' and 'https://host/b/0.tar' lie in different folders: make",
        ),
        (["https://host/x.tar?a=1", "https://host/y.tar?a=2"], "lie in different folders"),
        (["https://host/{0..3}.tar", "https://host/3.tar"], "'https://host/{0..3}.tar': names '3.tar' twice"),
        (
            ["ftp://host/x.tar"],
            "'ftp://host/x.tar': tars are indexed from a folder of this machine, or from URLs of http,",
        ),
        (["zip://x.tar::https://host/x.zip"], "tars are indexed from a folder of this machine, or from URLs"),
        (["https://host/x.tar", "/data/y.tar"], "'/data/y.tar': tars are indexed from a folder of this machine, or"),
        (["https://user:password@host/cc12m?signature=s"], "'https://host/cc12m': not the URL of a .tar"),
    ],
)
def test_urls_that_name_no_tars_are_refused_without_a_request(tmp_path, urls, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        build_index(urls, out=tmp_path / "far")
    assert "password" not in str(caught.value)
    assert "signature" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_index_of_a_url_needs_a_folder():
    with pytest.raises(
        ConfigError, match=r"'https://host/0\.tar': the index of a URL lies on this machine: name its fold"
    ):
        build_index("https://host/0.tar")


def test_names_that_no_manifest_follows_are_refused(tmp_path):
    for name in ("a%2Fb.tar", "a:b.tar", ".tar", "a%5Cb.tar"):
        with pytest.raises(DataError, match="is not a plain file name; commands and paths are never followed"):
            build_index(f"https://host/{name}", out=tmp_path / "far")


def test_an_index_behind_a_url_sends_nobody_elsewhere(tars, tmp_path, cache):
    with serve(tmp_path) as server:
        build_index(f"{server.url}/tars/x-{{0000..0005}}.tar", out=tmp_path / "far", cache=cache)
        with pytest.raises(DataError, match=rf"'{server.url}/far': location '{server.url}/tars' is not a folder; comm"):
            Index.open(f"{server.url}/far", cache=cache)


def test_an_empty_tar_is_accepted_and_the_next_is_looked_at(tars, tmp_path, cache):
    with tarfile.open(tars / "x-0000.tar", "w"):
        pass
    build_index(tars, out=tmp_path / "here")
    with serve(tars) as server:
        assert of_urls(server, tmp_path / "far", cache).guessed
        assert asked(server) == [1] * NUM_TARS
    assert files(tmp_path / "far") == files(tmp_path / "here")


# The command


def program(*words: object) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-m", "mmdata", "index", *map(str, words)], capture_output=True, text=True)


def test_the_command_takes_urls_that_a_shell_has_expanded(tars, tmp_path):
    far, cache = tmp_path / "far", tmp_path / "cache"
    with serve(tars) as server:
        urls = [f"{server.url}/x-{shard:04d}.tar" for shard in range(NUM_TARS)]
        run = program(*urls, "--out", far, "--fill-cache", "--cache-dir", cache, "--cache-gb", 0.01)
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.splitlines() == [
            'captions: the .json\'s "TEXT", as no sample looked at has a .txt, or "captions" or "caption" in its JSON '
            "(--caption json:TEXT)",
            "in the loader's cache: 6 of 6 shards",
            f"18 samples in = 18 indexed + 0 quarantined; 6 shards, 0 members ignored; index in {far}",
            f"next: mmdata index {far} --tokenizer clip    # counts captions; fetches each tar again",
            f"      mmdata init {far}    # writes a config to train with",
            f"      mmdata plan {far}    # batches, shapes and padding",
        ]
        run = program(far)
        assert run.stdout.splitlines()[0] == (
            f"6 shards, the same as those of the index in {far}, which stays; --overwrite reads them again"
        )


def test_the_size_of_the_cache_is_a_number_above_0(tmp_path):
    run = program("https://host/0.tar", "--out", tmp_path, "--cache-gb", "none")
    assert run.returncode == 2
    assert run.stderr.startswith("error: --cache-dir and --cache-gb: 'cache_gb': expected number > 0; got 'none'")
