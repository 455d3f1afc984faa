"""Set-ups with a known bottleneck: the profile names it, and the remedies are those that help. No time is asserted."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from PIL import Image

import mmdata
from mmdata.images import probe
from mmdata.images.pixels import PixelTransform
from mmdata.inspect import remedies as found_remedies
from mmdata.inspect.profile import Profile, profile
from mmdata.inspect.remedies import cores_in_words, remedies, storage_in_words
from mmdata.loader import BatchBuilder, BatchSpec, Loader, Stats
from mmdata.loader.corpus import open_index
from mmdata.loader.loader import data_config
from mmdata.plan.from_config import build_plan
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.flat_settings import grouped
from tests.shard_writer import ShardWriter
from tests.storage.servers import Answer, Server, running

ROWS = 32
CAPTION = "a small red dog and a large blue cat sit under the green tree near the street on a sunny day "


def noisy(side: int, *, seed: int) -> bytes:
    """A JPEG that takes long to decode on any processor, beside what resizing it takes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Callable[..., dict[str, Any]]:
    """`make(side, shard_rows, noise)`: settings over 32 JPEGs of that side, of noise or smooth, with long captions."""

    def written(side: int, shard_rows: int = 16, *, noise: bool = False) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"side{side}")
        train_tokenizer([CAPTION], folder / "tokenizer", vocab_size=320)
        tokenizer = Tokenizer.load(folder / "tokenizer")
        with ShardWriter(
            folder / "shards", shard_rows=shard_rows, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint
        ) as writer:
            for row in range(ROWS):
                image = noisy(side, seed=row) if noise else photo(side, side, seed=row)
                writer.write(Sample(f"{row:04d}", image, probe(image), [f"{CAPTION}{row}"]))
        return {
            "shards": str(folder / "shards"),
            "tokenizer": str(folder / "tokenizer"),
            "global_batch_size": 8,
            "image_size": 32,
            "text_buckets": [77],
            "loading": {"num_workers": 2},
        }

    return written


class SlowServer(Server):
    """HTTP whose every answer comes late."""

    def of_folder(self, path: str, range_: str | None) -> Answer:
        time.sleep(0.1)
        return super().of_folder(path, range_)


def test_diagnosis_names_a_slow_disk(make: Callable[..., dict[str, Any]], tmp_path: Path):
    settings = make(48, shard_rows=1)
    with running(SlowServer(folder=Path(settings["shards"]))) as server:
        loader = Loader.from_config(grouped(**{**settings, "shards": server.url}, cache_dir=str(tmp_path / "cache")))
        found = profile(loader, 3)
    assert found.bottleneck == "read"
    assert "read takes" in found.in_words()


def test_diagnosis_names_the_server_of_a_slow_stream(
    make: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("mmdata.loader.growing.tars.FIRST_ROWS", 4)
    # A first window of 8 rows, four tars: those after it are fetched while batches are taken.
    settings = make(48, shard_rows=2) | {"shuffle_window_rows": 4, "global_batch_size": 2}
    settings["loading"] = {**settings.get("loading", {}), "cache_dir": str(tmp_path / "cache")}
    with running(SlowServer(folder=Path(settings["shards"]))) as server:
        urls = [f"{server.url}/{path.name}" for path in sorted(Path(settings["shards"]).glob("*.tar"))]
        assert profile(mmdata.stream(urls, settings), 12).bottleneck == "read"


def test_diagnosis_names_slow_decoding(make: Callable[..., dict[str, Any]]):
    loader = Loader.from_config({**make(1000, noise=True), "decode": "exact"})
    assert profile(loader, 4).bottleneck == "decode"


def test_diagnosis_says_what_helps_with_large_images(make: Callable[..., dict[str, Any]]):
    data = data_config({**make(1500), "decode": "exact"})
    loader = Loader.from_config(data)
    found = profile(loader, 4)
    assert found.bottleneck in ("decode", "transform")  # without vector instructions resizing takes longer
    listed = [str(remedy) for remedy in remedies(loader, data, found)]
    command = f"mmdata convert {data.shards} {data.shards}-64 --resize 64 --tokenizer {data.tokenizer}"
    why = "2 x the 32 pixels of a batch: room for crops"
    assert any(line.startswith(f"shrink to 64 with `{command}`, {why} (") for line in listed)
    assert any(line.startswith("data.decode=fast (") for line in listed)
    shrunk = r"\([\d.]+x, estimated: [\d.]+x in decoding and cropping 8 of your images\)$"
    whole = r"\([\d.]+x, measured; this machine has \d+ cores\)$"
    assert all(re.search(f"{shrunk}|{whole}", line) for line in listed)


def test_diagnosis_never_offers_to_shrink_what_is_small(make: Callable[..., dict[str, Any]]):
    data = data_config({**make(64), "decode": "exact"})  # 64 is what 32 would be shrunk to
    loader = Loader.from_config(data)
    found = profile(loader, 2)
    assert found_remedies._shrink(loader, data, found) is None
    assert not any(remedy.words.startswith("shrink") for remedy in remedies(loader, data, found))


def test_shrinking_what_is_behind_a_url_names_no_folder(make: Callable[..., dict[str, Any]]):
    data = data_config({**make(48), "shards": "https://example.org/web", "tokenizer": "my tokenizer"})
    command = "mmdata convert SOURCE OUT --resize 64 --tokenizer 'my tokenizer'"
    assert found_remedies._shrink_command(data, 64) == command


class PythonTokenizer(Tokenizer):
    """Looks every piece of a caption up in the vocabulary, in Python, with the interpreter's lock in hand."""

    def encode(self, captions: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        for caption in [*captions] * 3:
            pieces = {caption[i:j] for i in range(len(caption)) for j in range(i, len(caption))}
            assert pieces
        return super().encode(captions, length)


def test_diagnosis_names_a_slow_tokenizer_though_its_lock_slows_all_else(
    make: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(found_remedies, "num_cores", lambda: 2)  # as many as workers: others are no remedy
    data = data_config(make(48))
    index = open_index(data)
    backend = tokenizers.Tokenizer.from_file(f"{data.tokenizer}/tokenizer.json")
    slow = PythonTokenizer(backend, max_length=77, pad_id=0)
    builder = BatchBuilder(index, BatchSpec(PixelTransform.from_config(data), slow))
    loader = Loader(build_plan(data, index, slow), builder, num_workers=2)
    found = profile(loader, 6)
    assert found.bottleneck == "tokenize"
    assert remedies(loader, data, found) == []


def test_diagnosis_names_a_slow_device(make: Callable[..., dict[str, Any]]):
    data = data_config(make(48))
    loader = Loader.from_config(data)
    found = profile(loader, 2, step_s=2.0)
    assert found.bottleneck == "device"
    assert "the loader keeps up" in found.in_words()
    assert remedies(loader, data, found) == []


def test_storage_in_words_says_what_came_and_what_the_loop_would_take():
    stats = Stats(rows=80, read_bytes=80 * 50_000)  # 0.05 MB a row
    remedy = (
        "; a fast local disk helps: a URL in data.shards (file:///mnt/slow) and data.loading.cache_dir keep the "
        "shards on one"
    )
    came = storage_in_words(Profile(10, 80, 4.0, 0.1, 1.0, 0.0, stats))
    assert came == f"the shards gave 1.0 MB/s of images{remedy}"
    asked = storage_in_words(Profile(10, 80, 4.0, 0.1, 0.9, 0.1, stats))
    assert asked == f"the shards gave 1.0 MB/s of images, and the loop would take 4.0 MB/s{remedy}"
    assert storage_in_words(Profile(10, 80, 4.0, 0.1, 1.0)) == ""


@pytest.mark.parametrize(
    ("load", "workers", "words"),
    [
        (9.0, 2, "the load of this machine is 9.0 on 2 cores: end what else runs, or lower data.loading.num_workers"),
        (
            1.5,
            8,
            "a tokenizer or transform that is Python code holds the interpreter's lock: "
            "data.loading.num_processes=4 gives it several",
        ),
        (
            1.5,
            2,
            "a tokenizer or transform that is Python code holds the interpreter's lock: "
            "data.loading.num_processes=2 gives it several",
        ),
        (
            1.5,
            1,
            "a tokenizer or transform that is Python code holds the interpreter's lock: "
            "data.loading.num_processes=1 gives it one of its own",
        ),
        (1.5, 0, ""),
    ],
)
def test_cores_in_words_tells_a_busy_machine_from_the_lock(
    load: float, workers: int, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(found_remedies, "num_cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    waiting = Stats()
    waiting.wall_s |= {"decode": 10.0, "transform": 10.0}
    waiting.cpu_s |= {"decode": 5.0, "transform": 5.0}
    assert cores_in_words(Profile(1, 1, 1.0, 0.1, 1.0, 0.0, waiting), workers) == words
    working = Stats()
    working.wall_s["decode"] = working.cpu_s["decode"] = 1.0
    assert cores_in_words(Profile(1, 1, 1.0, 0.1, 1.0, 0.0, working), workers) == ""
