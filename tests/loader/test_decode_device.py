"""Files that become pixels on the device (`data.decode: device`), with the CPU as the device."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmdata
from mmdata import Batch, encoded_images
from mmdata.batch import model_inputs, to_device
from mmdata.encoded_images import with_pixels
from mmdata.errors import ConfigError, DataError
from mmdata.inspect.replay import find_step, replay
from mmdata.train import ContrastiveLoss, DevicePrefetcher, DualEncoder, train_step
from tests.loader.conftest import Corpus
from tests.programs import PATIENCE_S

MOST = 2
"""Levels between a crop resized as floats and one resized in uint8, which rounds after each of two passes."""


def pixels_of(batch: Any) -> torch.Tensor:
    return with_pixels(batch, "cpu")["pixel_values"]


@pytest.mark.parametrize("changes", [{}, {"transform": "eval"}, {"worker_type": "process"}, {"num_workers": 0}])
def test_device_has_the_pixels_of_exact_decoding(corpus: Corpus, changes: dict[str, Any]):
    on_device, exact = corpus.loader(decode="device", **changes), corpus.loader(decode="exact", **changes)
    kinds: set[int] = set()
    batch: Any
    expected: Any
    for batch, expected in zip(on_device, exact, strict=True):
        assert batch["rows"].tolist() == expected["rows"].tolist()
        assert torch.equal(batch["valid"], expected["valid"])
        assert torch.equal(batch["input_ids"], expected["input_ids"])
        assert "pixel_values" not in batch
        kinds |= set(batch["image_layout"][:, 2].tolist())
        decoded = batch["image_layout"][:, 2] == encoded_images.PIXELS
        pixels = pixels_of(batch)
        assert pixels.dtype == torch.uint8
        assert torch.equal(pixels[decoded], expected["pixel_values"][decoded])
        difference = (pixels.int() - expected["pixel_values"].int()).abs()
        assert difference.max() <= MOST
        assert difference.float().mean() < 0.5
    assert kinds == {0, 1, 6}  # other formats, upright JPEGs, turned ones


def test_device_decodes_the_same_pixels_in_chunks_and_through_processes(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    expected = [pixels_of(batch) for batch in corpus.loader(decode="device", num_workers=0)]
    monkeypatch.setattr(encoded_images, "CHUNK_BYTES", 1)  # one file at a time
    found = [pixels_of(batch) for batch in corpus.loader(decode="device", worker_type="process")]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_device_prefetcher_and_to_device_decode(corpus: Corpus):
    expected = [pixels_of(batch) for batch in corpus.loader(decode="device")]
    came: list[Exception | None] = []
    for took in (None, came.append):
        loader = corpus.loader(decode="device")
        found = [batch["pixel_values"] for batch in DevicePrefetcher(loader, "cpu", took=took)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(came) == len(expected) + 1
    batch: Batch = next(iter(corpus.loader(decode="device")))
    with pytest.raises(ValueError, match=r"^the batch holds files \(data.decode is device\), and no pixels yet: take"):
        model_inputs(batch)
    model: Any = DualEncoder.from_config({"name": "micro"}, vocab_size=400)
    for call in (lambda: model(batch), lambda: train_step(model, batch, ContrastiveLoss(), micro_batch_size=2)):
        with pytest.raises(
            ValueError, match=r"^the batch holds files \(data.decode is device\), and no pixels yet: take"
        ):
            call()
    assert set(model_inputs(to_device(batch, "cpu"))) == {"pixel_values", "input_ids", "attention_mask", "labels"}


def test_device_resumes_with_a_batch_decoded_ahead(corpus: Corpus):
    expected = [pixels_of(batch) for batch in corpus.loader(decode="device")]
    first = DevicePrefetcher(corpus.loader(decode="device"), "cpu", took=lambda _: None)
    batches = iter(first)
    next(batches)
    next(batches)
    second = DevicePrefetcher(corpus.loader(decode="device"), "cpu", took=lambda _: None)
    second.load_state_dict(first.state_dict())
    found = [batch["pixel_values"] for batch in second]
    assert len(found) == len(expected) - 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected[2:], strict=True))


def test_device_prefetcher_decodes_in_a_thread_and_left_in_the_middle_leaves_none(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    names: list[str] = []
    decoded = encoded_images._decoded

    def noting(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        names.append(threading.current_thread().name)
        return decoded(files, device)

    monkeypatch.setattr(encoded_images, "_decoded", noting)
    for _ in DevicePrefetcher(corpus.loader(decode="device", num_workers=0), "cpu", took=lambda _: None):
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("mmdata")]
        break
    assert names
    assert all(name.startswith("mmdata-decode") for name in names)
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("mmdata-decode"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def jpeg_row(corpus: Corpus) -> int:
    return next(row for row, sample in enumerate(corpus.samples) if sample.image[:2] == b"\xff\xd8")


def masked_in(corpus: Corpus, row: int, **changes: Any) -> tuple[Any, int, mmdata.Loader]:
    """The batch of a row, its place there, and the loader."""
    loader = corpus.loader(decode="device", check_images="never", transform="eval", **changes)
    for batch in loader:
        if row in batch["rows"]:
            return batch, batch["rows"].tolist().index(row), loader
    raise AssertionError(row)


@pytest.mark.parametrize(("kept", "reason"), [(0.5, "it has no scan"), (0.95, "its end is missing")])
def test_device_masks_a_file_that_was_cut_in_the_worker(corpus: Corpus, tmp_path: Path, kept: float, reason: str):
    copy = corpus.copy(tmp_path / "corpus")
    row = jpeg_row(copy)
    image = copy.samples[row].image
    copy.overwrite(row, "image", image[: int(kept * len(image))].ljust(len(image), b"\0"))
    batch, place, loader = masked_in(copy, row)
    assert not batch["valid"][place]
    (entry,) = loader.ledger
    assert (entry.row, entry.stage, entry.reason) == (row, "decode", "corrupt_image")
    assert entry.detail == f"JPEG does not decode: {reason}"
    assert not pixels_of(batch)[place].any()


def test_device_masks_a_file_that_its_decoder_refuses(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    copy, row = refused_by_the_decoder(corpus, tmp_path / "corpus")
    batch, place, loader = masked_in(copy, row)
    others = [i for i, valid in enumerate(batch["valid"].tolist()) if valid and i != place]
    assert batch["valid"][place]  # its header says nothing of it
    with caplog.at_level(logging.WARNING, "mmdata"):
        made: Any = to_device(batch, "cpu")
    key = copy.samples[row].key
    assert f"sample '{key}': device_decoder (its image does not decode on 'cpu': " in caplog.records[0].getMessage()
    (entry,) = loader.ledger
    assert (entry.row, entry.key, entry.stage, entry.reason) == (row, key, "decode", "device_decoder")
    assert loader.state_dict()["rows_masked"] == {"device_decoder": 1}
    assert not made["valid"][place]
    assert not batch["valid"][place]  # also in the batch that was moved
    assert made["valid"][others].all()
    assert not made["pixel_values"][place].any()
    assert made["pixel_values"][others].flatten(1).any(1).all()
    assert made["attention_mask"][place].tolist() == [1] + [0] * (made["attention_mask"].shape[1] - 1)
    assert made["labels"][place] == -1


def test_device_that_cannot_decode_is_a_config_error(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    def none(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        raise RuntimeError("not compiled with nvJPEG support")

    monkeypatch.setattr(encoded_images, "_decoded", none)
    encoded_images.check_decodes.cache_clear()
    batch = next(iter(corpus.loader(decode="device")))
    with pytest.raises(ConfigError, match=r"^torchvision cannot decode JPEG on 'cpu' \(not compiled with nvJPEG supp"):
        to_device(batch, "cpu")


@pytest.mark.parametrize(
    ("words", "is_the_files"),
    [
        ("Failed to decode jpeg stream: 3", True),  # a bad JPEG
        ("Failed to decode batch: 9", True),  # an incomplete one
        ("nvjpegDecode failed: 10", True),
        ("Failed to decode batch: 1", False),  # nvJPEG's library is not initialized
        ("Failed to decode batch: 5", False),  # no memory
        ("Failed to decode jpeg stream: 6", False),  # execution failed
        ("Failed to decode jpeg stream: 8", False),  # internal error
        ("Failed to synchronize CUDA stream: 700", False),
        ("Failed to synchronize CUDA stream: 4", False),  # a number of CUDA, not of nvJPEG
        ("CUDA out of memory. Tried to allocate 3 MiB", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_only_what_a_gpus_decoder_says_of_a_file_masks_its_row(words: str, is_the_files: bool):
    error = RuntimeError(f"{words}\nException raised from decode at decode_jpegs_cuda.cpp:1")
    assert encoded_images._is_the_files(error, torch.device("cuda", 0)) == is_the_files


def test_device_out_of_memory_masks_no_row(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    batch = next(iter(corpus.loader(decode="device")))
    encoded_images.check_decodes(torch.device("cpu"))

    def fail(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(encoded_images, "_decoded", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        to_device(batch, "cpu")
    assert batch["valid"].any()


def refused_by_the_decoder(corpus: Corpus, folder: Path) -> tuple[Corpus, int]:
    """A copy in which the decoder refuses the file of a row whose header is in order; and the row."""
    copy = corpus.copy(folder)
    row = jpeg_row(copy)
    image = bytearray(copy.samples[row].image)
    image[image.index(b"\xff\xdb") + 4] = 3  # the first quantization table under a number that no component uses
    copy.overwrite(row, "image", bytes(image))
    return copy, row


@pytest.mark.parametrize("ahead", [False, True])
def test_device_prefetcher_has_refused_rows_in_ledger_and_state_with_their_batch(
    corpus: Corpus, tmp_path: Path, ahead: bool
):
    copy, row = refused_by_the_decoder(corpus, tmp_path / "corpus")
    loader = copy.loader(decode="device", check_images="never")
    seen = False
    batches = DevicePrefetcher(loader, "cpu", took=(lambda _: None) if ahead else None)
    for step, batch in enumerate(batches):
        seen = seen or row in batch["rows"]
        if row in batch["rows"]:
            assert not batch["valid"][batch["rows"].tolist().index(row)]
            assert [(entry.row, entry.step) for entry in loader.ledger] == [(row, step)]
        assert batches.state_dict()["rows_masked"] == ({"device_decoder": 1} if seen else {})
    assert seen


def test_too_many_rows_that_the_device_refuses_end_the_run(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    def refuse(image: torch.Tensor, place: encoded_images.Place, out: torch.Tensor) -> str:
        return "refused"

    monkeypatch.setattr(encoded_images, "_crop", refuse)
    loader = corpus.loader(decode="device")
    with pytest.raises(DataError, match=r"rows could not be used \(device_decoder \d+\), more than max_bad_share"):
        for _ in DevicePrefetcher(loader, "cpu", took=lambda _: None):
            pass


def test_a_batch_that_was_copied_or_sent_is_entries_alone(corpus: Corpus):
    batch: Any = next(iter(corpus.loader(decode="device")))
    assert batch.refuse is not None
    for other in (pickle.loads(pickle.dumps(batch)), deepcopy(batch)):
        assert (other.refuse, type(other)) == (None, type(batch))
        assert torch.equal(other["encoded_images"], batch["encoded_images"])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_part_of_an_image_is_cut_before_it_is_turned(orientation: int):
    stored = torch.arange(3 * 20 * 30, dtype=torch.int32).view(3, 20, 30).to(torch.uint8)
    displayed = encoded_images.orient(stored, orientation)
    height, width = displayed.shape[1:]
    place = encoded_images.Place(0, 1, orientation, height, width, 3, 17, 4, 19, 14, 15)
    out = torch.empty(3, 14, 15)
    assert encoded_images._crop(stored, place, out) == ""
    assert torch.equal(out, displayed[:, 3:17, 4:19].float())


def test_an_image_too_large_for_the_gpus_interpolation_is_shrunk_in_two_passes():
    image = torch.nn.functional.interpolate(torch.rand(1, 3, 8, 9), (700, 900), mode="bicubic")[0] * 255
    exact = encoded_images._resized(image, (16, 20), most=None)
    assert torch.equal(encoded_images._resized(image, (16, 20), most=64), exact)  # 45 times: one pass
    twice = encoded_images._resized(image, (16, 20), most=10)
    assert twice.shape == exact.shape
    assert (twice - exact).abs().max() < 4


@pytest.mark.parametrize(("field", "value"), [("sampling", 0x31), ("height", 0), ("bits", 12)])
def test_device_masks_or_leaves_odd_headers_to_the_worker_as_exact_does(
    corpus: Corpus, tmp_path: Path, field: str, value: int
):
    copy = corpus.copy(tmp_path / "corpus")
    row = jpeg_row(copy)
    image = bytearray(copy.samples[row].image)
    frame = image.index(b"\xff\xc0")  # FF C0, length (2), bits (1), height (2), width (2), components (1), id, sampling
    if field == "height":
        image[frame + 5 : frame + 7] = b"\0\0"
    else:
        image[frame + (11 if field == "sampling" else 4)] = value
    copy.overwrite(row, "image", bytes(image))
    entries: dict[str, list[tuple[int, str]]] = {}
    for decode in ("exact", "device"):
        loader = copy.loader(decode=decode, check_images="never", transform="eval")
        for batch in loader:
            with_pixels(batch, "cpu")
        entries[decode] = [(entry.row, entry.reason) for entry in loader.ledger]
    assert entries["exact"] == entries["device"]
    assert [row for row, _ in entries["exact"]] == [row]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"augment": {"horizontal_flip_prob": 0.5}}, "augment"),
        ({"image_patches": [16], "image_buckets": None}, "image_patches"),
        ({"transform": "tests.loader.test_decode_device:pixels_of"}, "transform tests.loader.test_decode_device:pix"),
    ],
)
def test_device_is_refused_with(corpus: Corpus, changes: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=f"decode device crops and resizes, and no more: it does not go with {named}"):
        corpus.loader(decode="device", **changes)


def test_device_decodes_a_stream(corpus: Corpus):
    shards = [str(path) for path in sorted((corpus.folder / "shards").glob("*.tar"))]
    data = {name: value for name, value in corpus.settings.items() if name != "shards"}
    both = [mmdata.stream(shards, {**data, "decode": decode}) for decode in ("device", "exact")]
    count = 0
    for batch, expected in zip(*both, strict=True):
        count += 1
        assert batch["keys"] == expected["keys"]
        assert (pixels_of(batch).int() - expected["pixel_values"].int()).abs().max() <= MOST
    assert count > 1


def test_device_gives_a_rehearsal_blank_pixels(corpus: Corpus):
    blanks = corpus.loader(decode="device").blank_batches()
    of_pixels = corpus.loader().blank_batches()
    assert [words for words, _ in blanks] == [words for words, _ in of_pixels]
    for (_, make), (_, expected) in zip(blanks, of_pixels, strict=True):
        assert torch.equal(to_device(make(), "cpu")["pixel_values"], expected()["pixel_values"])


def test_device_is_part_of_what_a_state_belongs_to(corpus: Corpus):
    loader = corpus.loader(decode="device")
    next(iter(loader))
    with pytest.raises(ConfigError, match="decode"):
        corpus.loader(decode="exact").load_state_dict(loader.state_dict())


def test_replay_of_a_row_shows_the_pixels_that_a_cpu_makes_of_its_file(corpus: Corpus, tmp_path: Path):
    loader = corpus.loader(decode="device", transform="eval")
    replayed = replay(loader.builder, find_step(loader.plan, jpeg_row(corpus), 0))
    replayed.save(tmp_path / "row.png")
    assert Image.open(tmp_path / "row.png").size == (replayed.step.bucket.width, replayed.step.bucket.height)
    assert "pixels" in [stage for stage, *_ in replayed.stages()]
