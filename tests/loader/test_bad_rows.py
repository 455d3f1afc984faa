"""Rows that cannot be used are masked with a reason, and nothing else changes; shards that changed are errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from torchvision.transforms import v2

from mmdata import Batch
from mmdata.batch import valid_inputs
from mmdata.errors import DataError
from mmdata.images.pixels import PixelTransform
from mmdata.index import ShardStore, verify
from mmdata.inspect.gallery import _card
from mmdata.inspect.replay import find_step, replay
from mmdata.loader.ledger import Ledger, LedgerEntry
from mmdata.text.tokenizer import train_tokenizer
from tests.images.placed import pixels, png

from .conftest import Corpus

ZEROS = bytes(400)


@pytest.fixture
def damaged(corpus: Corpus, tmp_path: Path) -> Corpus:
    return corpus.copy(tmp_path / "corpus")


def first_row(corpus: Corpus, choose: Callable[[int], bool]) -> int:
    return next(row for row in range(50) if choose(row))


def compare(damaged: Corpus, corpus: Corpus, bad: set[int], **settings: object) -> list[LedgerEntry]:
    """Load both; all rows but the bad ones must be equal bit for bit. The ledger of the damaged one."""
    loader = damaged.loader(max_bad_share=0.5, **settings)
    for batch, clean in zip(loader, corpus.loader(**settings), strict=True):
        assert torch.equal(batch["rows"], clean["rows"])
        is_bad = torch.tensor([int(row) in bad for row in batch["rows"]])
        assert torch.equal(batch["valid"], clean["valid"] & ~is_bad)
        for key in ("pixel_values", "input_ids", "attention_mask", "labels"):
            assert batch[key].shape == clean[key].shape
            assert torch.equal(batch[key][~is_bad], clean[key][~is_bad])
        assert (batch["pixel_values"][is_bad] == 0).all()
        assert (batch["attention_mask"][:, 0] == 1).all()
    assert loader.stats.rows == 50 - len(bad)
    assert loader.stats.masked == 6 + len(bad)
    return loader.ledger


def test_loader_ledger_names_epoch_and_step(corpus: Corpus, damaged: Corpus):
    damaged.overwrite(3, "image", ZEROS)
    loader = damaged.loader(max_bad_share=0.5)
    steps = [
        [step for step, batch in enumerate(loader) if 3 in batch["rows"]],
        [step for step, batch in enumerate(loader) if 3 in batch["rows"]],
    ]
    assert [(entry.epoch, [entry.step]) for entry in loader.ledger] == [(0, steps[0]), (1, steps[1])]


def test_loader_masks_a_row_once_however_much_of_it_is_bad(corpus: Corpus, damaged: Corpus):
    damaged.overwrite(3, "image", ZEROS)
    damaged.overwrite(3, "caption", b"\xff")
    assert [entry.row for entry in compare(damaged, corpus, {3})] == [3]


def test_loader_masks_a_caption_that_is_not_the_one_indexed(corpus: Corpus, damaged: Corpus):
    one = first_row(corpus, lambda row: len(corpus.samples[row].captions) == 1)
    longest = max(
        (row for row in range(50) if len(corpus.samples[row].captions) == 1),
        key=lambda row: len(corpus.samples[row].captions[0]),
    )
    damaged.overwrite(one, "caption", b"\xc3\x28")
    # A byte a token: far more tokens than the bucket holds, which was chosen by what the index says.
    text = corpus.samples[longest].captions[0].encode()
    damaged.overwrite(longest, "caption", b"!?" * (len(text) // 2))
    entries = {entry.row: entry for entry in compare(damaged, corpus, {one, longest})}
    assert (entries[one].reason, entries[one].detail) == ("bad_caption", "not UTF-8 at byte 0")
    assert entries[longest].reason == "file_changed"
    assert entries[longest].detail == "caption is not the one indexed; `mmdata verify` tells what changed"


def test_loader_masks_a_row_that_has_fewer_captions_than_indexed(corpus: Corpus, damaged: Corpus):
    three = first_row(corpus, lambda row: len(corpus.samples[row].captions) == 3)
    size = int(damaged.index.take(np.array([three]), ["caption_bytes"])["caption_bytes"][0])
    damaged.overwrite(three, "caption", b'{"captions":["one left"]'.ljust(size - 1) + b"}")
    for epoch in range(3):
        loader = damaged.loader(max_bad_share=0.5)
        loader.set_epoch(epoch)
        list(loader)
        assert [(entry.row, entry.reason) for entry in loader.ledger] == [(three, "file_changed")]


def test_loader_that_must_count_lengths_refuses_a_changed_caption(damaged: Corpus, corpus: Corpus):
    three = first_row(corpus, lambda row: len(corpus.samples[row].captions) == 3)
    size = int(damaged.index.take(np.array([three]), ["caption_bytes"])["caption_bytes"][0])
    damaged.overwrite(three, "caption", b'{"captions":["one left"]'.ljust(size - 1) + b"}")
    # Another tokenizer than the index was made with: all captions are read and counted, and decide the plan.
    train_tokenizer([c for s in corpus.samples for c in s.captions], damaged.folder / "other", vocab_size=350)
    with pytest.raises(DataError, match=r"sample '\d+': the captions are not those that were indexed; `mmdata verify`"):
        damaged.loader(tokenizer=str(damaged.folder / "other"))


def test_loader_masks_a_row_whose_transform_fails(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "picky_transform.py").write_text(
        "def picky(image, shape, generator):\n"
        "    if image.shape[1] == image.shape[2]:\n"
        "        raise RuntimeError('no squares')\n"
        "    return image[:, : shape[0], : shape[1]]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loader = corpus.loader(transform="picky_transform:picky", max_bad_share=0.9)
    squares = {row for row, sample in enumerate(corpus.samples) if sample.info.height == sample.info.width}
    masked = {int(row) for batch in loader for row in batch["rows"][~batch["valid"]] if row >= 0}
    assert masked == squares == {entry.row for entry in loader.ledger}
    assert {(entry.stage, entry.reason, entry.detail) for entry in loader.ledger} == {
        ("transform", "transform_failed", "RuntimeError: no squares")
    }


def test_loader_raises_at_the_end_of_an_epoch_where_a_transform_fails_on_all_rows(corpus: Corpus):
    floats = v2.Compose([v2.Resize((32, 32)), v2.ToDtype(torch.float32, scale=True)])
    loader = corpus.loader(transform=floats, image_buckets=[[32, 32]])
    message = (
        r"^50 of 50 rows could not be used \(transform_failed 50\), more than max_bad_share 5\.0%; the first: shard "
        r"'.*', sample '.*': returned torch\.float32 .* leave ToDtype.*; `mmdata replay CONFIG \d+ --epoch 0` makes "
        r"this row alone\. data\.transform raised .*; data\.loading\.max_bad_share sets the limit$"
    )
    with pytest.raises(DataError, match=message):
        list(loader)


def test_batch_gives_no_text_of_a_row_without_its_image(damaged: Corpus):
    for row in range(50):
        damaged.overwrite(row, "image", ZEROS)
    loader = damaged.loader(max_bad_share=1.0)
    batch = next(iter(loader))
    inputs = valid_inputs(batch)
    assert not batch["valid"].any()
    assert len(inputs["input_ids"].unique()) == 1  # the padding
    assert inputs["attention_mask"].sum() == 1
    assert inputs["labels"].tolist() == [-1]


def test_loader_logs_each_reason_once(damaged: Corpus, caplog: pytest.LogCaptureFixture):
    for row in (3, 5, 22):
        damaged.overwrite(row, "image", ZEROS)
    list(damaged.loader(max_bad_share=0.5))
    (message,) = [record.getMessage() for record in caplog.records if "masked, as" in record.getMessage()]
    assert message.startswith("shard '00000")
    assert "file_changed (" in message
    assert message.endswith("; masked, as later rows like it will be: `.ledger` lists them")


def test_loader_ends_when_too_many_rows_are_bad(damaged: Corpus):
    for row in (3, 5, 22):
        damaged.overwrite(row, "image", ZEROS)
    with pytest.raises(
        DataError,
        match=r"^3 of 50 rows could not be used \(file_changed 3\), more than max_bad_share 5\.0%; the first: "
        r"shard '00000\d\.tar', sample '000\d\d': image is not the one indexed; `mmdata verify` tells what changed; "
        r"`mmdata replay CONFIG \d+ --epoch 0` makes this row alone\. data\.loading\.max_bad_share sets",
    ):
        list(damaged.loader(max_bad_share=0.05))
    assert len(list(damaged.loader(max_bad_share=0.06))) == 7


def entry(reason: str) -> LedgerEntry:
    return LedgerEntry(0, 0, 0, "s.tar", "k", 512, "decode", reason, "d")


def test_ledger_a_share_of_one_accepts_all():
    ledger = Ledger(1.0)
    ledger.add([entry("a")] * 2000, 2000)
    ledger.check()


# Shards that are not those that were indexed


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_names_a_shard_that_was_replaced(damaged: Corpus, num_workers: int):
    path = damaged.index.shard_path(1)
    size = path.stat().st_size
    shutil.copy(damaged.index.shard_path(2), path)
    assert path.stat().st_size != size
    message = f"^shard '{path}': {path.stat().st_size} bytes, and its index was made of {size}; "
    with pytest.raises(DataError, match=message):
        list(damaged.loader(num_workers=num_workers))


JPEG_ROW = 3
"""One of JPEG: its decoder does not notice the changed bit, as that of PNG would."""


def flip(damaged: Corpus, row: int, bit: int) -> None:
    """Change one bit of a JPEG, which still decodes, to other pixels."""
    image = damaged.samples[row].image
    damaged.overwrite(row, "image", image[:-3] + bytes([image[-3] ^ bit]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_masks_an_image_of_which_one_bit_changed(corpus: Corpus, damaged: Corpus, num_workers: int):
    flip(damaged, JPEG_ROW, 1)
    (entry,) = compare(damaged, corpus, {JPEG_ROW}, num_workers=num_workers)
    assert (entry.row, entry.stage, entry.reason) == (JPEG_ROW, "read", "file_changed")
    assert entry.detail == "image is not the one indexed; `mmdata verify` tells what changed"
    assert len(verify(damaged.folder / "shards")) > 0


def test_replay_and_report_see_an_image_that_changed(damaged: Corpus):
    flip(damaged, JPEG_ROW, 1)
    loader = damaged.loader(shuffle=False)
    made = replay(loader.builder, find_step(loader.plan, JPEG_ROW, 0))
    assert made.crop is None
    assert [(entry.row, entry.reason) for entry in made.made.masked] == [(JPEG_ROW, "file_changed")]
    store = ShardStore(damaged.index)
    for found in (None, made):
        card = _card(damaged.index, store, JPEG_ROW, found)
        assert card.problem.startswith("file_changed: image is not the one")


def test_batch_of_the_loader_holds_the_image_that_webdataset_gives(corpus: Corpus):
    shard = corpus.index.shard_path(0)
    theirs = next(iter(webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False).decode("torchrgb8")))
    loader = corpus.loader(transform="eval", shuffle=False, image_buckets=None, image_size=48, text_buckets=[32])
    batch: Batch = next(iter(loader))
    (image,) = [value for key, value in theirs.items() if key in ("jpg", "png", "webp")]
    # webdataset leaves the EXIF orientation alone, which is 6 here.
    expected = pixels(PixelTransform("eval"), png(image.transpose(1, 2).flip(2)), (48, 48))
    assert batch["keys"][0] == theirs["__key__"]
    assert (batch["pixel_values"][0].int() - expected.int()).abs().max() <= 3  # two builds of libjpeg-turbo
