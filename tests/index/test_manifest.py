from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmdata.errors import DataError
from mmdata.index import Index, Manifest, ShardEntry
from mmdata.index.columns import aspect_bin, pack_cells, unpack_cells
from mmdata.index.manifest import FILE_SHARDS, IndexFile, ShardList, Top, encode_list
from mmdata.index.writer import ManifestWriter

sys.path.insert(0, str(Path(__file__).parent))
from rewrite import EMPTY, listed, write_manifest
from synthetic import synthetic_rows, write_synthetic_manifest

NONE = np.empty(0, np.int32)


def entry(number: int = 0, **changes) -> ShardEntry:
    """A shard of three rows with a caption each: two of 5 tokens and one of 7, under square images."""
    made = ShardEntry(
        name=f"{number}.tar",
        bytes=10240,
        sha256="00",
        rows=3,
        index_offset=0,
        index_bytes=len(EMPTY),
        index_sha256="11",
        index_xxh3=1,
        images=3,
        captions=3,
        labels=0,
        cells=pack_cells([5, 7], 128),
        counts=np.array([2, 1], np.int32),
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """200,000 shards of 1,000 rows."""
    folder = tmp_path_factory.mktemp("large")
    write_synthetic_manifest(folder, 200_000, 1000, seed=1)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """2,500 shards of 40 rows, in three pages."""
    folder = tmp_path_factory.mktemp("small")
    write_synthetic_manifest(folder, 2500, 40, seed=2)
    return folder


def edit(folder: Path, changes: dict[str, object]) -> None:
    """Change manifest.json without its hash."""
    path = folder / "__mmdata__/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rehash(folder: Path, **changes) -> None:
    """Change manifest.json as a faulty writer would: its hash agrees."""
    (folder / "__mmdata__/manifest.json").write_bytes(replace(Manifest.read(folder), **changes).to_json())


def test_a_manifest_is_read_back_as_written(tmp_path):
    entries = [entry(0), entry(1, labels=2, rows=4), entry(2, rows=0, captions=0, cells=NONE, counts=NONE)]
    written = write_manifest(tmp_path, listed(*entries), tokenizer="t", location="../tars", accounts={"rows": 3})
    manifest = Manifest.read(tmp_path)
    assert manifest == written
    assert manifest.root == written.root
    names = [vars(one)[name] for one in manifest for name in ("name", "bytes", "rows", "captions", "labels")]
    assert names == [vars(one)[name] for one in entries for name in ("name", "bytes", "rows", "captions", "labels")]
    again = [*manifest][1]
    assert (again.cells.tolist(), again.counts.tolist()) == (entries[1].cells.tolist(), [2, 1])
    assert (manifest.rows, manifest.bytes, manifest.num_shards, manifest.captions) == (7, 3 * 10240, 3, 6)
    assert (manifest.has_labels, manifest.tokenizer, manifest.location) == (True, "t", "../tars")
    assert (manifest.accounts, manifest.schema) == ({"rows": 3}, 5)
    assert manifest.shard_rows.dtype == np.int64
    assert manifest.shard_rows.tolist() == [3, 4, 0]
    assert manifest.token_histogram().tolist() == [0, 0, 0, 0, 0, 4, 0, 2]
    assert sorted(path.name for path in (tmp_path / "__mmdata__").iterdir()) == [
        "index-00000.arrow",
        "manifest.json",
    ]


def test_a_manifest_of_nothing_has_no_index_file(tmp_path):
    write_manifest(tmp_path, listed(*[]))
    manifest = Manifest.read(tmp_path)
    assert (manifest.rows, manifest.num_shards, manifest.has_labels, list(manifest)) == (0, 0, False, [])
    assert manifest.shard_rows.tolist() == []
    assert manifest.token_histogram().tolist() == []
    assert list(manifest.cells()) == []


def test_an_index_file_has_1024_shards(small):
    manifest = Manifest.read(small)
    assert manifest.files == ["index-00000.arrow", "index-00001.arrow", "index-00002.arrow"]
    for name, shards in zip(manifest.files, (1024, 1024, 452), strict=True):
        with (small / "__mmdata__" / name).open("rb") as file:
            assert sum(1 for _ in pa.ipc.open_stream(file)) == shards
            assert pa.ipc.open_stream(file).read_all().num_rows == shards
            assert file.read() == b""
    assert [manifest.listed(shard).name for shard in (0, 1023, 1024, 2499)] == [
        "000000.tar",
        "001023.tar",
        "001024.tar",
        "002499.tar",
    ]
    assert [found.name for found in manifest] == [f"{shard:06d}.tar" for shard in range(2500)]


@pytest.mark.parametrize("shard", [-1, 2500])
def test_shards_that_are_not_listed_are_refused(small, shard):
    with pytest.raises(IndexError, match=f"shard {shard} asked of a manifest of 2500"):
        Manifest.read(small).listed(shard)


def test_the_same_entries_give_the_same_bytes(tmp_path, small):
    write_synthetic_manifest(tmp_path, 2500, 40, seed=2)
    again, first = (sorted((folder / "__mmdata__").iterdir()) for folder in (tmp_path, small))
    assert [(path.name, path.read_bytes()) for path in again] == [(path.name, path.read_bytes()) for path in first]


def test_the_root_follows_the_content_and_not_the_place(tmp_path):
    def root(name: str, *entries: ShardEntry, **settings) -> str:
        (tmp_path / name).mkdir()
        return write_manifest(tmp_path / name, listed(*entries), **settings).root

    here = root("a", entry())
    assert root("b", entry(), location="/elsewhere", accounts={"rows": 3}) == here
    others = [
        root("c", entry(), tokenizer="t"),
        root("d"),
        root("e", entry(sha256="02")),
        root("f", entry(cells=pack_cells([5, 8], 128))),
        root("g", entry(labels=1)),
    ]
    assert len({here, *others}) == 6


def test_moved_tars_leave_the_index_alone(tmp_path):
    manifest = write_manifest(tmp_path, listed(entry()))
    before = (tmp_path / "__mmdata__/index-00000.arrow").stat().st_mtime_ns
    assert manifest.moved("../far") == Manifest.read(tmp_path)
    assert (Manifest.read(tmp_path).location, Manifest.read(tmp_path).root) == ("../far", manifest.root)
    assert (tmp_path / "__mmdata__/index-00000.arrow").stat().st_mtime_ns == before


# At scale


@pytest.mark.sweep
def test_opening_200_000_shards_reads_kilobytes(large):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mmdata.index import Index, Manifest\n"
        "read = lambda: int(Path('/proc/self/io').read_text().split()[1])\n"
        "own = -read() + read()\n"  # what the measurement itself reads
        "start = read()\n"
        "manifest = Manifest.read(sys.argv[1])\n"
        "index = Index.open(sys.argv[1])\n"
        "numbers = (manifest.rows, manifest.num_shards, len(index), index.fingerprint)\n"
        "used = read() - start - own\n"
        "print(*numbers, used, 'index-' in Path('/proc/self/maps').read_text())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, large], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *numbers, used, mapped = done.stdout.split()
    assert numbers == ["200000000", "200000", "200000000", Manifest.read(large).root]
    size = (large / "__mmdata__/manifest.json").stat().st_size
    assert size < 64 * 1024
    assert int(used) <= 2 * size + 1024  # read twice, and nothing else
    assert mapped == "False"


def test_what_a_manifest_says_as_a_whole_needs_no_index_file(small, tmp_path):
    (tmp_path / "__mmdata__").mkdir()
    (tmp_path / "__mmdata__/manifest.json").write_bytes((small / "__mmdata__/manifest.json").read_bytes())
    manifest, index = Manifest.read(tmp_path), Index.open(tmp_path)
    assert (manifest.num_shards, manifest.captions, manifest.has_labels) == (2500, 100_000, False)
    assert len(index) == 100_000
    with pytest.raises(DataError, match=r"index-00002\.arrow': no such file, and the manifest names it"):
        manifest.listed(2400)
    with pytest.raises(DataError, match=r"index-00000\.arrow': no such file"):
        _ = index.starts


def test_a_list_is_read_once_by_all_threads(small, monkeypatch):
    opened: Counter[str] = Counter()
    gate = threading.Barrier(8)
    open_list = ShardList.open

    def counting(path, offset, **what):
        opened[path.name] += 1
        return open_list(path, offset, **what)

    monkeypatch.setattr(ShardList, "open", counting)
    manifest = Manifest.read(small)

    def ask(shard: int) -> None:
        gate.wait()
        manifest.listed(shard)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(1024, 1032)))
    assert opened == {"index-00001.arrow": 1}

    def ask_all(number: int) -> int:
        gate.wait()
        return sum(captions.sum() for _, _, captions in manifest.cells())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask_all, range(8))) == [100_000] * 8
    assert opened == dict.fromkeys(manifest.files, 1)


@pytest.mark.sweep
def test_the_lists_of_a_large_corpus_leave_little_memory_in_use(large):
    on_disk = sum(file.bytes - file.list_offset for file in Manifest.read(large).index_files)
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    manifest = Manifest.read(large)
    assert sum(int(captions.sum()) for _, _, captions in manifest.cells()) == 200_000_000
    kept = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow
    tracemalloc.stop()
    assert kept < 60_000_000 < on_disk / 2  # names, hashes and numbers of 200,000 shards; no histogram
    assert manifest.listed(1500).captions == 1000


# Histograms


def test_cells_count_the_captions_of_each_shard(small):
    rows = synthetic_rows(2500, 40, seed=2)
    manifest, shard = Manifest.read(small), 0
    for page in manifest.cells():
        assert [part.dtype for part in page] == [np.int32] * 3
        for first, last in pairwise(page.offsets.tolist()):
            template = rows.template[shard]
            bins = aspect_bin(rows.height[template], rows.width[template])
            counted = Counter(zip(rows.tokens[template].tolist(), bins.tolist(), strict=True))
            cells = zip(*(part.tolist() for part in unpack_cells(page.cells[first:last])), strict=True)
            assert list(zip(cells, page.counts[first:last].tolist(), strict=True)) == sorted(counted.items())
            shard += 1
    assert shard == 2500


# What is not as it must be


def test_a_missing_manifest_names_the_remedy(tmp_path):
    with pytest.raises(DataError, match=re.escape(f"no manifest.json; `mmdata index {tmp_path}` makes one")):
        Manifest.read(tmp_path)


def test_a_tar_in_place_of_a_folder_names_the_remedy(tmp_path):
    (tmp_path / "raw.tar").write_bytes(b"")
    tar = tmp_path / "raw.tar"
    tar.write_bytes(b"")
    message = re.escape(f"'{tar}': a file, and a folder with a manifest.json is needed; `mmdata index {tar}`")
    with pytest.raises(DataError, match=rf"{message} makes one .* then give its folder, '{tmp_path}'"):
        Manifest.read(tar)


def test_what_is_no_folder_of_shards_is_said_to_be_that(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {}")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    needed = "a folder of shards (with a manifest.json) is needed"
    config = tmp_path / "run" / "config.yaml"
    for name, message in (
        ("c.yaml", f"'{tmp_path / 'c.yaml'}' is a YAML file; {needed}"),
        (
            "run",
            f"'{tmp_path / 'run'}' is the folder of a run; {needed}; its config '{config}' names them",
        ),
    ):
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            Manifest.read(tmp_path / name)
    message = re.escape(f", `mmdata convert {tmp_path} OUT` shards of images and captions")
    with pytest.raises(DataError, match=f"{message}$"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 6}, "schema 6, and this mmdata reads 5; upgrade with `pip install -U mmdata`"),
        ({"schema": 4}, "schema 4, and this mmdata reads 5; remove manifest.json and run `mmdata index`"),
        ({"tokenizer": "other"}, "content does not match its checksum: edited or damaged; remove manifest.json and"),
        ({"accounts": {"classes": ["cat"]}}, "content does not match its checksum"),
        ({"location": ".."}, "content does not match its checksum"),
        ({"checksum": None}, "content does not match its checksum"),
        ({"folder": "/"}, "content does not match its checksum"),
    ],
)
def test_a_manifest_that_is_not_as_written_is_refused(tmp_path, changes, message):
    write_manifest(tmp_path, listed(entry()))
    edit(tmp_path, changes)
    with pytest.raises(DataError, match=re.escape(message)):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_files": None}, "'index_files': Input should be a valid list"),
        ({"index_files": [{}]}, "'index_files.0.bytes': Field required"),
        (
            {"index_files": [{"bytes": 1000, "list_offset": 1001, "sha256": ""}]},
            "manifest.json': the list of 'index-00000.arrow' begins behind its end; remove manifest.json",
        ),
        ({"rows": -1}, "'rows': Input should be greater than or equal to 0"),
        ({"surprise": 1}, "'surprise': Unexpected keyword argument"),
        ({"folder": "/"}, "'folder': Unexpected keyword argument"),
    ],
)
def test_a_manifest_of_a_faulty_writer_is_refused(tmp_path, monkeypatch, changes, message):
    manifest, content = write_manifest(tmp_path, listed(entry())), Top.content
    monkeypatch.setattr(Top, "content", lambda self: {**content(self), **changes})
    (tmp_path / "__mmdata__/manifest.json").write_bytes(manifest.to_json())
    with pytest.raises(DataError, match=re.escape(message)):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    (tmp_path / "__mmdata__").mkdir()
    (tmp_path / "__mmdata__/manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"not JSON|expected an object, got list"):
        Manifest.read(tmp_path)


def test_lists_that_do_not_add_up_are_refused(tmp_path):
    write_manifest(tmp_path, listed(entry()))
    original = (tmp_path / "__mmdata__/manifest.json").read_bytes()
    for changes, message in (
        ({"num_shards": 1025}, "1 index files for 1025 shards, 1024 a file"),
        ({"num_shards": 0}, "1 index files for 0 shards"),
        ({"num_shards": 2}, "its numbers contradict each other or manifest.json"),
        ({"rows": 4}, "its shards have not 4 rows"),
    ):
        rehash(tmp_path, **changes)
        with pytest.raises(DataError, match=re.escape(message)):
            _ = Index.open(tmp_path).starts
        (tmp_path / "__mmdata__/manifest.json").write_bytes(original)


def test_a_damaged_list_is_refused_when_it_is_asked_for(tmp_path):
    write_synthetic_manifest(tmp_path, FILE_SHARDS + 1, 3, seed=0)
    path = tmp_path / "__mmdata__/index-00001.arrow"
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data[:-64] + b"x" + data[-63:]):
        path.write_bytes(damaged)
        manifest = Manifest.read(tmp_path)
        assert manifest.listed(FILE_SHARDS - 1).rows == 3
        with pytest.raises(DataError, match=r"index-00001\.arrow', list of shards: SHA-256 differs from"):
            manifest.listed(FILE_SHARDS)


def forge(folder: Path, data: bytes) -> Manifest:
    """A manifest of one shard whose list has these bytes, hashes and all."""
    (file,) = write_manifest(folder, listed(entry())).index_files
    path = folder / "__mmdata__/index-00000.arrow"
    path.write_bytes(path.read_bytes()[: file.list_offset] + data)
    wrong = IndexFile(file.list_offset + len(data), file.list_offset, hashlib.sha256(data).hexdigest())
    rehash(folder, index_files=[wrong])
    return Manifest.read(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        entry(captions=2),
        entry(labels=-1),
        entry(index_bytes=2**40),
        entry(counts=np.array([3, 0], np.int32)),
        entry(cells=pack_cells([5, 7], 128) * -1),
    ],
)
def test_a_list_whose_numbers_contradict_each_other_is_refused(tmp_path, wrong):
    manifest = forge(tmp_path, encode_list([wrong]))
    with pytest.raises(DataError, match=r"index-00000\.arrow', list of shards: its numbers contradict"):
        manifest.listed(0)


def test_a_shard_without_captions_lends_its_sum_to_no_other(tmp_path):
    empty = entry(1, rows=0, captions=0, cells=NONE, counts=NONE)
    write_manifest(tmp_path, listed(*[empty, entry(0), empty, empty, entry(2), empty]))
    assert [each.captions for each in Manifest.read(tmp_path)] == [0, 3, 0, 0, 3, 0]
    (tmp_path / "wrong").mkdir()
    write_manifest(tmp_path / "wrong", listed(*[entry(0, captions=0), replace(empty, captions=3)]))
    with pytest.raises(DataError, match="its numbers contradict each other"):
        Manifest.read(tmp_path / "wrong").listed(0)


def test_a_list_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"index-00000\.arrow', list of shards: cannot be read: .*; remove"):
        forge(tmp_path, b"no Arrow file").listed(0)
    (tmp_path / "__mmdata__/manifest.json").unlink()
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"name": ["0.tar"]})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=r"index-00000\.arrow', list of shards: expected .*, got \['name'\]"):
        forge(tmp_path, sink.getvalue().to_pybytes()).listed(0)


@pytest.mark.parametrize("name", ["../a.tar", "/etc/passwd", "pipe:cat a.tar", "http://x/a.tar", ".hidden", ""])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    wrong = entry(name=name)
    message = f"'{name}' is not a plain file name; commands and paths are never followed"
    with pytest.raises(DataError, match=message):
        write_manifest(tmp_path, listed(wrong))
    with pytest.raises(DataError, match=message):
        forge(tmp_path, encode_list([wrong])).listed(0)


@pytest.mark.parametrize("location", ["pipe:cat", "pipe:cat http://x", "ftp://example.org/tars", "zip://x::https://y"])
def test_locations_that_are_no_folder_are_refused(tmp_path, location):
    write_manifest(tmp_path, listed(entry()), location=location)
    with pytest.raises(DataError, match=f"location '{location}' is not a folder; commands and URLs are never followed"):
        Manifest.read(tmp_path)


# Writing


def test_a_published_manifest_is_never_written_over(tmp_path):
    manifest = write_manifest(tmp_path, listed(entry()))
    with pytest.raises(DataError, match=r"already holds __mmdata__/manifest\.json; remove it first"):
        ManifestWriter(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_index_files_that_a_killed_run_left_are_cleared_and_nothing_else(tmp_path):
    inner = tmp_path / "__mmdata__"
    inner.mkdir()
    for name in ("index-00000.arrow", "index-00007.arrow", "index-00001.other.arrow", "index-a.arrow"):
        (inner / name).write_bytes(b"")
    write_manifest(tmp_path, listed(entry()))
    assert sorted(path.name for path in inner.iterdir()) == [
        "index-00000.arrow",
        "index-00001.other.arrow",
        "index-a.arrow",
        "manifest.json",
    ]
