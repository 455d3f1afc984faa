"""Set-ups with a known bottleneck: the profile names it, and the remedies are those that help. No time is asserted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

from mmdata.inspect.profile import profile
from mmdata.inspect.remedies import remedies
from mmdata.loader import Loader, Worker
from mmdata.loader.loader import data_config
from mmdata.loader.planning import build_plan
from mmdata.shards import Sample, ShardWriter, probe
from mmdata.transform.text import Tokenizer, train_tokenizer
from tests.shards.servers import Answer, Server, running

ROWS = 32
CAPTION = "a small red dog and a large blue cat sit under the green tree near the street on a sunny day "


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Callable[..., dict[str, Any]]:
    """`make(side, shard_rows)`: settings over 32 JPEGs of that side, with long captions."""

    def written(side: int, shard_rows: int = 16) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"side{side}")
        train_tokenizer([CAPTION], folder / "tokenizer", vocab_size=320)
        tokenizer = Tokenizer.load(folder / "tokenizer")
        with ShardWriter(
            folder / "shards", shard_rows=shard_rows, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint
        ) as writer:
            for row in range(ROWS):
                image = photo(side, side, seed=row)
                writer.write(Sample(f"{row:04d}", image, probe(image), [f"{CAPTION}{row}"]))
        return {
            "shards": str(folder / "shards"),
            "tokenizer": str(folder / "tokenizer"),
            "global_batch_size": 8,
            "image_size": 32,
            "text_buckets": [77],
            "num_workers": 2,
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
        loader = Loader.from_config({**settings, "shards": server.url, "cache_dir": str(tmp_path / "cache")})
        found = profile(loader, 3)
    assert found.bottleneck == "read"
    assert "read takes" in found.in_words()


def test_diagnosis_names_slow_decoding_and_what_helps(make: Callable[..., dict[str, Any]]):
    data = data_config({**make(1500), "decode": "exact"})
    loader = Loader.from_config(data)
    found = profile(loader, 4)
    assert found.bottleneck == "decode"
    listed = [str(remedy) for remedy in remedies(loader, data, found)]
    command = f"mmdata convert {data.shards} {data.shards}-64 --resize 64"
    assert any(line.startswith(f"shrink to 64 with `{command}` (") for line in listed)
    assert any(line.startswith("data.decode=fast (") for line in listed)
    assert all(line.endswith(("decoding and cropping 8 of your images)", " cores)")) for line in listed)


class PythonTokenizer(Tokenizer):
    """Looks every piece of a caption up in the vocabulary, in Python, with the interpreter's lock in hand."""

    def encode(self, captions: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        for caption in captions:
            pieces = {caption[i:j] for i in range(len(caption)) for j in range(i, len(caption))}
            assert pieces
        return super().encode(captions, length)


def test_diagnosis_names_a_slow_tokenizer_though_its_lock_slows_all_else(make: Callable[..., dict[str, Any]]):
    data = data_config(make(48))
    worker = Worker.from_config(data)
    backend = tokenizers.Tokenizer.from_file(f"{data.tokenizer}/tokenizer.json")
    slow = PythonTokenizer(backend, max_length=77, pad_id=0)
    loader = Loader(build_plan(data, worker.index, slow), Worker(worker.index, slow, worker.transform), num_workers=2)
    found = profile(loader, 6)
    assert found.bottleneck == "tokenize"
    best = remedies(loader, data, found)[0]
    assert best.words == f"the fast tokenizer of '{data.tokenizer}' in place of PythonTokenizer"
    assert best.gain > 2


def test_diagnosis_names_a_slow_device(make: Callable[..., dict[str, Any]]):
    data = data_config(make(48))
    loader = Loader.from_config(data)
    found = profile(loader, 3, step_s=0.5)
    assert found.bottleneck == "device"
    assert "the loader keeps up, and there is nothing to do" in found.in_words()
    assert remedies(loader, data, found) == []
