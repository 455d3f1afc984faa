"""Assets that several test folders share; all are made here, nothing is downloaded."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

pytest_plugins = ["tests.made_shards"]

# No time limit and no slowness check for examples: these tests may run beside other work. Their examples are the same
# each time, so that a failure is of what was changed; with MMDATA_EXPLORE set, each run draws others.
settings.register_profile(
    "shared",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="MMDATA_EXPLORE" not in os.environ,
)
settings.load_profile("shared")

# A test run in the background, or under nohup, is started with these ignored, and so are the programs it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-all` gives --sweeps."""
    parser.addoption("--sweeps", action="store_true", help="also run the cases that are marked as sweeps")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the sweeps, and put the files first that start processes: the last file runs on one core alone."""
    starts = {"Program", "run_program", "nothing_left"}
    items.sort(key=lambda item: not starts & vars(getattr(item, "module", item)).keys())
    if config.getoption("--sweeps") or any("::" in name for name in config.args):
        return
    left_out = _sweeps(items)
    config.hook.pytest_deselected(items=left_out)
    names = {item.nodeid for item in left_out}
    items[:] = [item for item in items if item.nodeid not in names]


def _sweeps(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of sweeps, but for as many of each test, evenly spaced, as its mark says."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for same in cases.values():
        mark = same[0].get_closest_marker("sweep")
        keep = mark.kwargs.get("keep", 0) if mark is not None else 0
        kept = {number * len(same) // keep for number in range(keep)}
        left_out += [item for number, item in enumerate(same) if number not in kept]
    return left_out


@pytest.fixture(scope="session", autouse=True)
def _one_thread_of_torch() -> None:
    """Where two pytest workers share two cores, idle threads of OpenMP spin: an operation would take up to 20 times."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def no_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without any of the decoders of images that may be missing."""
    from PIL import features

    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    check = features.check
    monkeypatch.setattr(features, "check", lambda name: name != "avif" and check(name))


@pytest.fixture(autouse=True)
def _handlers_of_signals_stay() -> Iterator[None]:
    """A test that left a handler of its own would take the signals of the tests that this process runs after it."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    changed = {number.name: now for number in HANDLED if (now := signal.getsignal(number)) != handlers[number]}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not changed


@pytest.fixture(autouse=True)
def _nothing_held_by_a_failure() -> None:
    """Python keeps the frames of the last error, and with them a loader whose threads later tests would count."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


def make_photo(height: int, width: int, *, seed: int = 0, format: str = "JPEG", mode: str = "RGB") -> bytes:
    """A smooth random picture, so that JPEG keeps it and resizing it is meaningful."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    buffer = io.BytesIO()
    coarse.convert(mode).save(buffer, format, **({"quality": 92} if format == "JPEG" else {}))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def photo():
    """`photo(height, width, seed=0, format="JPEG", mode="RGB") -> bytes`."""
    return make_photo


WORDS = [
    "a",
    "red",
    "blue",
    "green",
    "small",
    "large",
    "round",
    "dog",
    "cat",
    "tree",
    "on",
    "under",
    "the",
    "sunny",
    "two",
]


def make_raw_corpus(folder: Path, count: int = 40, *, seed: int = 0) -> Path:
    """`images/NNNN.{jpg,png,webp}` of several shapes + `captions.jsonl` (image, captions: 1 to 3 of 3 to 40 words)."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    shapes, formats = [(48, 48), (40, 64), (64, 40)], ["JPEG", "PNG", "WEBP"]
    with (folder / "captions.jsonl").open("w") as table:
        for i in range(count):
            kind = formats[i % 3]
            name = f"images/{i:04d}.{ {'JPEG': 'jpg', 'PNG': 'png', 'WEBP': 'webp'}[kind] }"
            (folder / name).write_bytes(make_photo(*shapes[int(rng.integers(3))], seed=seed * 10_000 + i, format=kind))
            lengths = rng.integers(3, 41, size=rng.integers(1, 4))
            captions = [f"picture {i} " + " ".join(rng.choice(WORDS, size=int(n))) for n in lengths]
            table.write(json.dumps({"image": name, "captions": captions}) + "\n")
    return folder


@pytest.fixture
def raw_corpus(tmp_path: Path) -> Path:
    """A raw corpus of 40 images with one to three captions each."""
    return make_raw_corpus(tmp_path / "raw")


@pytest.fixture(scope="session")
def make_corpus():
    """`make_corpus(folder, count=40, seed=0) -> folder`, as `raw_corpus`."""
    return make_raw_corpus
