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

import mmdata.index.manifest as manifest_module
from mmdata.errors import DataError
from mmdata.index import Index, Manifest, ShardEntry
from mmdata.index.histogram import aspect_bin, pack_cells, unpack_cells
from mmdata.index.manifest_writer import ManifestWriter, write_manifest
from mmdata.index.pages import PAGE_SHARDS, PageColumns, encode_page

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import TEMPLATES, synthetic_rows, write_synthetic_manifest

NONE = np.empty(0, np.int32)


def entry(number: int = 0, **changes) -> ShardEntry:
    """A shard of three rows with a caption each: two of 5 tokens and one of 7, under square images."""
    made = ShardEntry(
        name=f"{number}.tar",
        bytes=10240,
        sha256="00",
        rows=3,
        index=f"{number}.index.arrow",
        index_sha256="11",
        index_xxh3=1,
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
    written = write_manifest(tmp_path, entries, tokenizer="t", location="../tars", accounts={"rows": 3})
    manifest = Manifest.read(tmp_path)
    assert manifest == written
    assert manifest.root == written.root
    assert list(manifest) == entries
    assert manifest.entry(1).cells.tolist() == entries[1].cells.tolist()
    assert manifest.entry(1).counts.tolist() == [2, 1]
    assert (manifest.rows, manifest.bytes, manifest.num_shards, manifest.captions) == (7, 3 * 10240, 3, 6)
    assert (manifest.has_labels, manifest.tokenizer, manifest.location) == (True, "t", "../tars")
    assert (manifest.accounts, manifest.schema) == ({"rows": 3}, 3)
    assert manifest.shard_rows.dtype == np.int64
    assert manifest.shard_rows.tolist() == [3, 4, 0]
    assert manifest.token_histogram().tolist() == [0, 0, 0, 0, 0, 4, 0, 2]
    assert sorted(path.name for path in (tmp_path / "__mmdata__").iterdir()) == [
        "manifest-00000.arrow",
        "manifest.json",
    ]


def test_a_manifest_of_nothing_has_no_page(tmp_path):
    write_manifest(tmp_path, [])
    manifest = Manifest.read(tmp_path)
    assert (manifest.rows, manifest.num_shards, manifest.has_labels, list(manifest)) == (0, 0, False, [])
    assert manifest.shard_rows.tolist() == []
    assert manifest.token_histogram().tolist() == []
    assert list(manifest.cells()) == []


def test_pages_are_cut_at_1024_shards(small):
    manifest = Manifest.read(small)
    assert [(page.file, page.shards, page.rows) for page in manifest.pages] == [
        ("manifest-00000.arrow", 1024, 40_960),
        ("manifest-00001.arrow", 1024, 40_960),
        ("manifest-00002.arrow", 452, 18_080),
    ]
    assert [manifest.entry(shard).name for shard in (0, 1023, 1024, 2499)] == [
        "000000.tar",
        "001023.tar",
        "001024.tar",
        "002499.tar",
    ]
    assert [found.name for found in manifest] == [f"{shard:06d}.tar" for shard in range(2500)]


@pytest.mark.parametrize("shard", [-1, 2500])
def test_shards_that_are_not_listed_are_refused(small, shard):
    with pytest.raises(IndexError, match=f"shard {shard} asked of a manifest of 2500"):
        Manifest.read(small).entry(shard)


def test_the_same_entries_give_the_same_bytes(tmp_path, small):
    write_synthetic_manifest(tmp_path, 2500, 40, seed=2)
    again, first = (sorted((folder / "__mmdata__").iterdir()) for folder in (tmp_path, small))
    assert [(path.name, path.read_bytes()) for path in again] == [(path.name, path.read_bytes()) for path in first]


def test_the_root_follows_the_content_and_not_the_place(tmp_path):
    def root(name: str, *entries: ShardEntry, **settings) -> str:
        (tmp_path / name).mkdir()
        return write_manifest(tmp_path / name, entries, **settings).root

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


def test_moved_tars_leave_the_pages_alone(tmp_path):
    manifest = write_manifest(tmp_path, [entry()])
    before = (tmp_path / "__mmdata__/manifest-00000.arrow").stat().st_mtime_ns
    assert manifest.moved("../far") == Manifest.read(tmp_path)
    assert (Manifest.read(tmp_path).location, Manifest.read(tmp_path).root) == ("../far", manifest.root)
    assert (tmp_path / "__mmdata__/manifest-00000.arrow").stat().st_mtime_ns == before


# At scale


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
        "print(*numbers, used, 'manifest-' in Path('/proc/self/maps').read_text())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, large], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *numbers, used, mapped = done.stdout.split()
    assert numbers == ["200000000", "200000", "200000000", Manifest.read(large).root]
    size = (large / "__mmdata__/manifest.json").stat().st_size
    assert size < 64 * 1024
    assert int(used) <= 2 * size + 1024  # read twice, and nothing else
    assert mapped == "False"


def test_what_a_manifest_says_as_a_whole_needs_no_page(large, tmp_path):
    (tmp_path / "__mmdata__").mkdir()
    (tmp_path / "__mmdata__/manifest.json").write_bytes((large / "__mmdata__/manifest.json").read_bytes())
    manifest, index = Manifest.read(tmp_path), Index.open(tmp_path)
    assert (manifest.num_shards, manifest.captions, manifest.has_labels) == (200_000, 200_000_000, False)
    assert len(index) == 200_000_000
    with pytest.raises(DataError, match=r"manifest-00097\.arrow': no such file, and the manifest names it"):
        manifest.entry(100_000)
    with pytest.raises(DataError, match=r"manifest-00000\.arrow': no such file"):
        _ = index.starts


def test_numbers_of_200_000_shards_are_right(large):
    manifest, rows = Manifest.read(large), synthetic_rows(200_000, 1000, seed=1)
    assert Index.open(large).starts[[0, 1, 199_999, 200_000]].tolist() == [0, 1000, 199_999_000, 200_000_000]
    shards_of = np.bincount(rows.template, minlength=TEMPLATES)
    expected = sum(np.bincount(rows.tokens[t], minlength=78) * shards_of[t] for t in range(TEMPLATES))
    found = manifest.token_histogram()
    assert found.tolist() == expected[: len(found)].tolist()
    assert found.sum() == manifest.captions
    for offsets, _, counts in manifest.cells():
        assert (np.add.reduceat(counts, offsets[:-1]) == 1000).all()


def test_a_page_is_read_once_by_all_threads(small, monkeypatch):
    opened: Counter[str] = Counter()
    gate = threading.Barrier(8)

    class Counting(PageColumns):
        @classmethod
        def open(cls, folder, page):
            opened[page.file] += 1
            return PageColumns.open(folder, page)

    monkeypatch.setattr(manifest_module, "PageColumns", Counting)
    manifest = Manifest.read(small)

    def ask(shard: int) -> None:
        gate.wait()
        manifest.entry(shard)

    threads = [threading.Thread(target=ask, args=(1024 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == {"manifest-00001.arrow": 1}


def test_all_pages_are_read_once_by_all_threads(small, monkeypatch):
    opened: Counter[str] = Counter()
    gate = threading.Barrier(4)
    open_page = PageColumns.open

    def counting(folder, page):
        opened[page.file] += 1
        return open_page(folder, page)

    monkeypatch.setattr(PageColumns, "open", counting)
    manifest = Manifest.read(small)

    def ask() -> int:
        gate.wait()
        return sum(captions.sum() for _, _, captions in manifest.cells())

    with ThreadPoolExecutor(4) as pool:
        assert [each.result() for each in [pool.submit(ask) for _ in range(4)]] == [100_000] * 4
    assert opened == {f"manifest-{number:05d}.arrow": 1 for number in range(3)}


def test_pages_of_a_large_corpus_leave_little_memory_in_use(large):
    on_disk = sum(path.stat().st_size for path in (large / "__mmdata__").glob("manifest-*"))
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    manifest = Manifest.read(large)
    assert sum(int(captions.sum()) for _, _, captions in manifest.cells()) == 200_000_000
    kept = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow
    tracemalloc.stop()
    assert kept < 60_000_000 < on_disk / 2  # names, hashes and numbers of 200,000 shards; no histogram
    assert manifest.entry(1500).captions == 1000


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
        ({"schema": 4}, "schema 4, and this mmdata reads 3; upgrade with `pip install -U mmdata`"),
        ({"schema": 2}, "schema 2, and this mmdata reads 3; remove manifest.json and run `mmdata index`"),
        ({"tokenizer": "other"}, "content does not match its root hash: edited or damaged; remove manifest.json and"),
        ({"rows": 4}, "content does not match its root hash"),
        ({"accounts": {"classes": ["cat"]}}, "content does not match its checksum: edited or damaged; remove manifest"),
        ({"location": ".."}, "content does not match its checksum"),
        ({"checksum": None}, "content does not match its checksum"),
        ({"pages": None}, "'pages': Input should be a valid list"),
        ({"pages": [{}]}, "'pages.0.file': Field required"),
        ({"surprise": 1}, "'surprise': Unexpected keyword argument"),
        ({"folder": "/"}, "'folder': Unexpected keyword argument"),
    ],
)
def test_a_manifest_that_is_not_as_written_is_refused(tmp_path, changes, message):
    write_manifest(tmp_path, [entry()])
    edit(tmp_path, changes)
    with pytest.raises(DataError, match=re.escape(message)):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    (tmp_path / "__mmdata__").mkdir()
    (tmp_path / "__mmdata__/manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"not JSON|expected an object, got list"):
        Manifest.read(tmp_path)


def test_pages_that_do_not_add_up_are_refused(tmp_path):
    page = write_manifest(tmp_path, [entry()]).pages[0]
    for changes, message in (
        ({"pages": [replace(page, file="../manifest-00000.arrow")]}, "page 0 is '../manifest-00000.arrow', and must"),
        ({"num_shards": 2}, "its pages do not list 2 shards, 1024 a page"),
        ({"num_shards": 0}, "its pages do not list 0 shards"),
        ({"rows": 4}, "its pages do not list 4 rows"),
    ):
        original = (tmp_path / "__mmdata__/manifest.json").read_bytes()
        rehash(tmp_path, **changes)
        with pytest.raises(DataError, match=re.escape(message)):
            Manifest.read(tmp_path)
        (tmp_path / "__mmdata__/manifest.json").write_bytes(original)


def test_a_damaged_page_is_refused_when_it_is_asked_for(tmp_path):
    write_synthetic_manifest(tmp_path, PAGE_SHARDS + 1, 3, seed=0)
    path = tmp_path / "__mmdata__/manifest-00001.arrow"
    data = bytearray(path.read_bytes())
    for damaged in (b"", data[:-1], data[:64] + b"x" + data[65:]):
        path.write_bytes(damaged)
        manifest = Manifest.read(tmp_path)
        assert manifest.entry(PAGE_SHARDS - 1).rows == 3
        with pytest.raises(DataError, match=r"manifest-00001\.arrow': SHA-256 differs from manifest\.json's; remove"):
            manifest.entry(PAGE_SHARDS)


def forge(folder: Path, data: bytes) -> Manifest:
    """A manifest of one shard whose page has these bytes, hashes and all."""
    page = write_manifest(folder, [entry()]).pages[0]
    (folder / "__mmdata__" / page.file).write_bytes(data)
    rehash(folder, pages=[replace(page, sha256=hashlib.sha256(data).hexdigest())])
    return Manifest.read(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        entry(rows=4),
        entry(captions=2),
        entry(labels=-1),
        entry(counts=np.array([3, 0], np.int32)),
        entry(cells=pack_cells([5, 7], 128) * -1),
    ],
)
def test_a_page_whose_numbers_contradict_each_other_is_refused(tmp_path, wrong):
    manifest = forge(tmp_path, encode_page([wrong]))
    with pytest.raises(DataError, match=r"manifest-00000\.arrow': its numbers contradict each other or manifest\.json"):
        manifest.entry(0)


def test_a_shard_without_captions_lends_its_sum_to_no_other(tmp_path):
    empty = entry(1, rows=0, captions=0, cells=NONE, counts=NONE)
    write_manifest(tmp_path, [empty, entry(0), empty, empty, entry(2), empty])
    assert [each.captions for each in Manifest.read(tmp_path)] == [0, 3, 0, 0, 3, 0]
    (tmp_path / "wrong").mkdir()
    write_manifest(tmp_path / "wrong", [entry(0, captions=0), replace(empty, captions=3)])
    with pytest.raises(DataError, match="its numbers contradict each other"):
        Manifest.read(tmp_path / "wrong").entry(0)


def test_a_page_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"manifest-00000\.arrow': not a page: .*; remove manifest\.json and run"):
        forge(tmp_path, b"no Arrow file").entry(0)
    (tmp_path / "__mmdata__/manifest.json").unlink()
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"name": ["0.tar"]})
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=r"manifest-00000\.arrow': expected \['name', .*\], got \['name'\]"):
        forge(tmp_path, sink.getvalue().to_pybytes()).entry(0)


@pytest.mark.parametrize("name", ["../a.tar", "/etc/passwd", "pipe:cat a.tar", "http://x/a.tar", ".hidden", ""])
@pytest.mark.parametrize("column", ["name", "index"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name, column):
    wrong = entry(**{column: name})
    message = f"'{name}' is not a plain file name; commands and paths are never followed"
    with pytest.raises(DataError, match=message):
        write_manifest(tmp_path, [wrong])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=message):
        forge(tmp_path, encode_page([wrong])).entry(0)


@pytest.mark.parametrize("location", ["pipe:cat", "pipe:cat http://x", "ftp://example.org/tars", "zip://x::https://y"])
def test_locations_that_are_no_folder_are_refused(tmp_path, location):
    write_manifest(tmp_path, [entry()], location=location)
    with pytest.raises(DataError, match=f"location '{location}' is not a folder; commands and URLs are never followed"):
        Manifest.read(tmp_path)


# Writing


def test_a_published_manifest_is_never_written_over(tmp_path):
    write_manifest(tmp_path, [entry()])
    with pytest.raises(DataError, match=r"already holds __mmdata__/manifest\.json; remove it first"):
        ManifestWriter(tmp_path)
    assert Manifest.read(tmp_path).entry(0) == entry()


def test_pages_that_a_killed_run_left_are_cleared_and_nothing_else(tmp_path):
    inner = tmp_path / "__mmdata__"
    inner.mkdir()
    for name in ("manifest-00000.arrow", "manifest-00007.arrow", "manifest-00001.index.arrow", "manifest-a.arrow"):
        (inner / name).write_bytes(b"")
    write_manifest(tmp_path, [entry()])
    assert sorted(path.name for path in inner.iterdir()) == [
        "manifest-00000.arrow",
        "manifest-00001.index.arrow",
        "manifest-a.arrow",
        "manifest.json",
    ]


def test_a_failure_leaves_no_page(tmp_path):
    def failing():
        for number in range(PAGE_SHARDS + 1):
            yield entry(number)
        assert (tmp_path / "__mmdata__/manifest-00000.arrow").exists()
        raise RuntimeError("the caller's")

    with pytest.raises(RuntimeError, match="the caller's"):
        write_manifest(tmp_path, failing())
    assert list(tmp_path.iterdir()) == []
