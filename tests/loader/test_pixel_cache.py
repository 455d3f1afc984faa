"""Decoded images that are kept: the batches of a loader that keeps none, whatever becomes of the file and the disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmdata
from mmdata import Batch
from mmdata.errors import ConfigError, DataError
from mmdata.images.pixels import PixelTransform
from mmdata.loader import pixel_cache
from mmdata.loader.pixel_cache import PixelCache
from mmdata.storage import cache
from tests.flat_settings import grouped
from tests.journey import locks_of_bytes
from tests.programs import PATIENCE_S, Program

from .conftest import Corpus
from .worker_processes import ROOT, nothing_left, transforms

__all__ = ["nothing_left"]  # a fixture

Same = Callable[[Batch, Batch], bool]
SIDE: dict[str, Any] = {"shorter_side": 36}
KEPT: dict[str, Any] = {**SIDE, "cache_pixels_gb": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "crops": {},
    "exact": {"decode": "exact"},
    "evaluation": {"transform": "eval"},
    "augmentation": {"augment": {"horizontal_flip_prob": 0.5, "color_jitter": 0.4}},
    "patches": {"image_patches": [4, 9, 16], "image_buckets": None, "patch_size": 8},
    "a transform of torchvision": {"transform": "my_transforms:jittered"},
}
TRANSFORMS = """
    from torchvision.transforms import v2

    def jittered(image, size, generator):
        image -= image // 4  # in place
        return v2.Compose([v2.RandomResizedCrop(size, scale=(0.3, 1.0)), v2.RandomHorizontalFlip()])(image)
"""


def epochs(corpus: Corpus, count: int = 2, **settings: Any) -> tuple[list[Batch], int]:
    """The batches of some epochs, and the bytes of images that were read for the last one."""
    batches: list[Batch] = []
    before = 0
    with corpus.loader(**settings) as loader:
        for _ in range(count):
            before = loader.stats.read_bytes
            batches += list(loader)
        return batches, loader.stats.read_bytes - before


def files(folder: Path) -> list[Path]:
    return sorted((folder / "pixels").glob("*.pixels"))


def all_same(same: Same, given: list[Batch], expected: list[Batch]) -> bool:
    return len(given) == len(expected) > 2 and all(map(same, given, expected))


@pytest.fixture(scope="module")
def expected(corpus: Corpus) -> list[Batch]:
    """The batches of two epochs, nothing kept."""
    return epochs(corpus, **SIDE, num_workers=0)[0]


@pytest.fixture
def filled(corpus: Corpus, tmp_path: Path) -> Path:
    """A folder in which all images are kept."""
    epochs(corpus, 1, **KEPT, cache_dir=str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_loader_that_keeps_nothing(
    corpus: Corpus,
    same: Same,
    join: Callable[[list[Batch]], Batch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
):
    transforms(tmp_path, monkeypatch, TRANSFORMS)
    changes = {**SIDE, **KINDS[kind]}
    expected, read = epochs(corpus, **changes, num_workers=0)
    assert read > 0
    changes |= {"cache_pixels_gb": 1.0, "cache_dir": str(tmp_path)}
    given, read = epochs(corpus, **changes, num_workers=4)
    assert all_same(same, given, expected)
    assert read == 0  # in the second epoch
    # From what is kept, in other processes: on two ranks, one with a worker process, from a state in mid-epoch.
    with corpus.loader(**changes) as loader:
        given = list(islice(loader, 2))
        state = loader.state_dict()
        assert loader.stats.read_bytes == 0
    ranks = [corpus.loader(**changes, rank=rank, world_size=2, num_processes=rank) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    given += [join(list(parts)) for parts in zip(*ranks, strict=True)]
    assert [loader.stats.read_bytes for loader in ranks] == [0, 0]
    for loader in ranks:
        loader.close()
    assert all_same(same, given, expected[: len(expected) // 2])
    assert len(files(tmp_path)) == 1


def test_a_state_fits_a_loader_that_keeps_images_or_none(
    corpus: Corpus, expected: list[Batch], same: Same, filled: Path
):
    with corpus.loader(**SIDE) as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
    with corpus.loader(**KEPT, cache_dir=str(filled)) as loader:
        loader.load_state_dict(state)
        assert same(next(iter(loader)), expected[3])
        state = loader.state_dict()
    with corpus.loader(shorter_side=37) as loader, pytest.raises(ConfigError, match="shorter_side"):
        loader.load_state_dict(state)


def test_rows_that_cannot_be_used_are_masked_in_each_epoch(corpus: Corpus, same: Same, tmp_path: Path):
    bad = corpus.copy(tmp_path / "corpus")
    for row in (3, 20, 41):
        bad.overwrite(row, "image", bytes(300))
    expected, _ = epochs(bad, **SIDE, max_bad_share=1.0)
    given, read = epochs(bad, **KEPT, cache_dir=str(tmp_path), max_bad_share=1.0)
    assert all_same(same, given, expected)
    assert sum(int((~batch["valid"]).sum()) for batch in given[len(given) // 2 :]) >= 3
    assert read == 0  # bytes of images that are not those indexed are not counted


def test_an_image_that_is_kept_is_not_read_from_its_shard(
    corpus: Corpus, expected: list[Batch], same: Same, tmp_path: Path
):
    copy = corpus.copy(tmp_path / "corpus")
    epochs(copy, 1, **KEPT, cache_dir=str(tmp_path))
    for row in range(50):
        copy.overwrite(row, "image", bytes(300))
    assert all_same(same, epochs(copy, **KEPT, cache_dir=str(tmp_path))[0], expected)


def test_the_first_rows_are_kept_that_fit(
    corpus: Corpus, expected: list[Batch], same: Same, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    given, read = epochs(corpus, 2, **{**KEPT, "cache_pixels_gb": 1e-4}, cache_dir=str(tmp_path))
    assert all_same(same, given, expected)
    with corpus.loader(**SIDE) as loader:
        list(loader)
        assert 0 < read < loader.stats.read_bytes
    (file,) = files(tmp_path)
    assert 90_000 < file.stat().st_size <= 100_000
    (message,) = [record.getMessage() for record in caplog.records if "decoded images" in record.getMessage()]
    rows = int(message.split()[4])
    assert 10 < rows < 30
    assert message == (
        f"data.loading.cache_pixels_gb: decoded images of {rows} rows of 50 ({2 * rows} %) are kept in '{file}', "
        f"{file.stat().st_size / 1e9:.3g} GB; others are decoded in each epoch"
    )


def test_a_larger_bound_keeps_what_there_is(corpus: Corpus, tmp_path: Path):
    _, without = epochs(corpus, 1, **KEPT, cache_dir=str(tmp_path / "other"))
    _, before = epochs(corpus, 2, **{**KEPT, "cache_pixels_gb": 1e-4}, cache_dir=str(tmp_path))
    _, after = epochs(corpus, 1, **KEPT, cache_dir=str(tmp_path))
    assert 0 < after == before < without
    assert epochs(corpus, 1, **KEPT, cache_dir=str(tmp_path))[1] == 0


@pytest.mark.parametrize(
    "changes", [{"shorter_side": 40}, {"decode": "exact"}, {"shards": "second"}], ids=["side", "decode", "index"]
)
def test_other_settings_and_another_index_have_another_file(
    corpus: Corpus, second: Path, same: Same, filled: Path, changes: dict[str, Any]
):
    changes = {**changes, "shards": str(second)} if "shards" in changes else changes
    expected, _ = epochs(corpus, **{**SIDE, **changes})
    given, _ = epochs(corpus, **{**KEPT, **changes}, cache_dir=str(filled))
    assert len(given) == len(expected)
    assert all(map(same, given, expected))
    assert len(files(filled)) == 2


def test_another_version_of_a_decoder_has_another_file(corpus: Corpus, filled: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pixel_cache, "version", str.upper)
    assert epochs(corpus, 1, **KEPT, cache_dir=str(filled))[1] > 0
    assert len(files(filled)) == 2


def test_training_and_validation_rows_of_the_same_shards_share_a_file(corpus: Corpus, tmp_path: Path):
    share: dict[str, Any] = {"val": {"share": 0.3}, "cache_dir": str(tmp_path)}
    epochs(corpus, 1, **KEPT, **share)
    epochs(corpus, 1, **KEPT, **share, split="val", transform="eval")
    assert len(files(tmp_path)) == 1
    assert epochs(corpus, 1, **KEPT, cache_dir=str(tmp_path))[1] == 0


def test_files_that_no_process_uses_make_room_the_least_recently_used_first(corpus: Corpus, tmp_path: Path):
    bound: dict[str, Any] = {"cache_pixels_gb": 9e-4, "cache_dir": str(tmp_path)}
    for side in (36, 35, 34):  # 0.25 to 0.28 MB each
        epochs(corpus, 1, **bound, shorter_side=side)
    of_36, of_35, of_34 = (file_of(corpus, tmp_path, side) for side in (36, 35, 34))
    for age, path in enumerate((of_35, of_36, of_34)):
        os.utime(path, (1000 + age, 1000 + age))
    (tmp_path / "pixels" / "notes.txt").write_text("of a person")
    with corpus.loader(**{**bound, "shorter_side": 36}) as in_use:
        list(islice(in_use, 1))
        epochs(corpus, 1, **bound, shorter_side=33)
        assert set(files(tmp_path)) == {of_36, of_34, file_of(corpus, tmp_path, 33)}
        with corpus.loader(**{**bound, "shorter_side": 40}) as larger:
            list(larger)
            taken = sum(path.stat().st_size for path in files(tmp_path))
            assert of_36 in files(tmp_path)
            assert taken <= 900_000
    assert (tmp_path / "pixels" / "notes.txt").exists()


def file_of(corpus: Corpus, folder: Path, side: int) -> Path:
    with corpus.loader(shorter_side=side, cache_pixels_gb=1.0, cache_dir=str(folder / "elsewhere")) as loader:
        assert loader.index
    newest = max(files(folder / "elsewhere"), key=lambda path: path.stat().st_mtime_ns)
    return folder / "pixels" / newest.name


def test_files_in_use_leave_no_room_and_images_are_decoded(
    corpus: Corpus, expected: list[Batch], same: Same, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    bound: dict[str, Any] = {"cache_pixels_gb": 2e-4, "cache_dir": str(tmp_path)}
    with corpus.loader(**bound, shorter_side=44) as in_use:
        list(in_use)
        assert all_same(same, epochs(corpus, **bound, **SIDE)[0], expected)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 200_000
    assert re.search(r"decoded images of [01] rows of 50 \([02] %\)", caplog.text)


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[PixelCache, bytes, list[Any]]:
    """A cache, the content of its file, and the images in it."""
    folder = tmp_path_factory.mktemp("whole")
    epochs(corpus, 1, **KEPT, cache_dir=str(folder))
    kept = PixelCache(corpus.index, PixelTransform("train", shorter_side=36), folder / "pixels", max_bytes=10**9)
    images = [kept.read(row) for row in range(50)]
    assert None not in images
    return kept, kept.path.read_bytes(), images


@given(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=40)), max_size=6),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 20_000)), max_size=2),
    st.floats(0.5, 1.2),
)
@settings(max_examples=200)
def test_a_damaged_file_never_gives_other_pixels(
    whole: tuple[PixelCache, bytes, list[Any]],
    writes: list[tuple[float, bytes]],
    moves: list[tuple[float, float, int]],
    end: float,
):
    kept, content, images = whole
    damaged = bytearray(content)
    for place, data in writes:
        begin = int(place * (len(content) - len(data)))
        damaged[begin : begin + len(data)] = data
    for source, target, length in moves:
        begin = int(target * (len(content) - length))
        damaged[begin : begin + length] = content[int(source * (len(content) - length)) :][:length]
    kept.path.write_bytes(damaged[: int(end * len(content))])
    for row, image in enumerate(images):
        found = kept.read(row)
        assert found is None or torch.equal(found.image, image.image)
        assert damaged != content or end < 1 or found is not None


@pytest.mark.parametrize("damage", ["cut", "flipped", "zeros"])
def test_damage_is_made_good(corpus: Corpus, expected: list[Batch], same: Same, filled: Path, damage: str):
    (file,) = files(filled)
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[::5000] = bytes(byte ^ 1 for byte in content[::5000])
    file.write_bytes({"cut": content[:100_001], "flipped": content, "zeros": bytes(len(content))}[damage])
    given, read = epochs(corpus, **KEPT, cache_dir=str(filled))
    assert all_same(same, given, expected)
    assert read == 0


def test_records_of_another_place_are_not_taken(corpus: Corpus, same: Same, filled: Path):
    # Another corpus of images of the same sizes, and this file under its name.
    (file,) = files(filled)
    with corpus.loader(**KEPT, decode="exact", cache_dir=str(filled)) as loader:
        (other,) = set(files(filled)) - {file}
        other.write_bytes(file.read_bytes())
        given = list(loader)
    assert len(given) > 2
    assert all(map(same, given, epochs(corpus, 1, **SIDE, decode="exact")[0]))


def test_something_else_in_the_place_of_the_file_is_refused(corpus: Corpus, filled: Path):
    (file,) = files(filled)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match=r"^cache of pixels '.*': is a FIFO, and only regular files are read"):
        corpus.loader(**KEPT, cache_dir=str(filled))


def test_without_pwrite_and_locks_of_files_it_keeps_images_too(
    corpus: Corpus, expected: list[Batch], same: Same, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (pixel_cache, cache):
        monkeypatch.setattr(module, "IS_POSIX", False)
    monkeypatch.delattr(os, "pwrite")
    monkeypatch.setitem(sys.modules, "msvcrt", locks_of_bytes())
    monkeypatch.setitem(sys.modules, "fcntl", None)
    given, read = epochs(corpus, **KEPT, cache_dir=str(tmp_path), num_workers=4)
    assert all_same(same, given, expected)
    assert read == 0
    epochs(corpus, 1, **{**KEPT, "shorter_side": 40, "cache_pixels_gb": 4e-4}, cache_dir=str(tmp_path))
    assert len(files(tmp_path)) == 1  # the first one made room


def test_it_needs_a_shorter_side_and_an_index(corpus: Corpus):
    with pytest.raises(ConfigError, match=r"loading\.cache_pixels_gb keeps images of data\.shorter_side, which is not"):
        corpus.loader(cache_pixels_gb=1.0)
    asked = grouped(**{**corpus.settings, **KEPT})
    with pytest.raises(ConfigError, match=r"a stream has no index of all rows, and cannot do loading\.cache_pixels_gb"):
        mmdata.stream(corpus.folder / "shards", asked)


PROGRAM = """
import json, os, sys, torch
import mmdata
torch.set_num_threads(1)
loader = mmdata.Loader.from_config(json.loads(sys.argv[1]))
batches = [batch["pixel_values"] for epoch in range(2) for batch in loader]
print(loader.stats.read_bytes)
"""

SAVED = """
torch.save(batches, sys.argv[2])
"""

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
"""

UNLIMITED = """
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""

KILLED = """
import os, signal, sys
write, left = os.pwrite, int(sys.argv[2])

def killed(descriptor, data, offset):
    global left
    if left < len(data):
        write(descriptor, data[:left], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    left -= len(data)
    return write(descriptor, data, offset)

os.pwrite = killed
"""


def program(corpus: Corpus, code: str, *arguments: Any, before: list[str] | None = None, **changes: Any) -> Any:
    """A process of a program, which gets the settings as its first argument."""
    asked = grouped(**{**corpus.settings, **KEPT, **changes})
    return Program(
        [*(before or []), sys.executable, "-c", textwrap.dedent(code), json.dumps(asked), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def equal_pixels(path: Path, expected: list[Batch]) -> bool:
    given = torch.load(path)
    return len(given) == len(expected) and all(
        torch.equal(one, batch["pixel_values"]) for one, batch in zip(given, expected, strict=True)
    )


def test_four_processes_fill_it_at_once(corpus: Corpus, expected: list[Batch], tmp_path: Path):
    started = [
        program(corpus, PROGRAM + SAVED, tmp_path / f"{i}.pt", cache_dir=str(tmp_path), num_workers=2) for i in range(4)
    ]
    for i, process in enumerate(started):
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        assert equal_pixels(tmp_path / f"{i}.pt", expected)
    assert epochs(corpus, 1, **KEPT, cache_dir=str(tmp_path))[1] == 0


@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize("moment", range(50))
def test_killed_at_any_moment_it_gives_the_right_pixels(
    corpus: Corpus, expected: list[Batch], same: Same, tmp_path: Path, moment: int
):
    written = int(np.random.default_rng(moment).integers(0, 220_000))  # bytes, of about 230,000
    process = program(corpus, KILLED + PROGRAM, written, cache_dir=str(tmp_path), num_workers=moment % 4)
    assert process.wait(PATIENCE_S) == -9
    given, read = epochs(corpus, **KEPT, cache_dir=str(tmp_path))
    assert all_same(same, given, expected)
    assert read == 0


def test_at_the_limit_on_the_size_of_files_it_goes_on_without_keeping(
    corpus: Corpus, expected: list[Batch], tmp_path: Path
):
    code = LIMITED + PROGRAM + UNLIMITED + SAVED
    process = program(corpus, code, tmp_path / "batches.pt", cache_dir=str(tmp_path))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert equal_pixels(tmp_path / "batches.pt", expected)
    assert errors.count("No more decoded images are kept there") == 1
    assert "file too large" in errors


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts need root")
def test_on_a_full_disk_it_goes_on_without_keeping(corpus: Corpus, expected: list[Batch], tmp_path: Path):
    (tmp_path / "cache").mkdir()
    mount = f"mount -t tmpfs -o size=100k tmpfs {tmp_path / 'cache'}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    before = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    process = program(
        corpus, PROGRAM + SAVED, tmp_path / "batches.pt", before=before, cache_dir=str(tmp_path / "cache")
    )
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert equal_pixels(tmp_path / "batches.pt", expected)
    assert errors.count("No more decoded images are kept there") == 1
    assert "no space left on device" in errors
    assert int(out) < sum(len(sample.image) for sample in corpus.samples) * 2  # what is there is read


def test_where_no_folder_can_be_made_it_goes_on_without_keeping(
    corpus: Corpus, expected: list[Batch], same: Same, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "pixels").write_bytes(b"of a person")
    assert all_same(same, epochs(corpus, **KEPT, cache_dir=str(tmp_path))[0], expected)
    (message,) = [record.getMessage() for record in caplog.records if "No more" in record.getMessage()]
    assert re.match(
        r"data\.loading\.cache_pixels_gb: '.*\.pixels': '.*pixels': file exists; .*decoded in each epoch$", message
    )


@pytest.mark.sweep
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts need root")
def test_a_file_on_a_read_only_disk_is_read(corpus: Corpus, expected: list[Batch], filled: Path, tmp_path: Path):
    mount = f"mount --bind {filled} {filled} && mount -o remount,bind,ro {filled}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    before = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    process = program(corpus, PROGRAM, before=before, cache_dir=str(filled))
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert out == "0\n", errors
    assert errors.count("read-only file system") == 1
