"""One per cent of damaged photos: each is masked once with its reason, and no other row changes by a bit."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmdata.errors import DataError
from mmdata.images import probe
from mmdata.tars.write import Sample

from .conftest import FORMATS, SHAPES, Corpus

ROWS = 500
CORRUPT, TOO_LARGE = "corrupt_image", "image_too_large"


def cut(image: bytes) -> bytes:
    return image[: len(image) // 2]


def jpeg_bomb(image: bytes) -> bytes:
    """The same file, claiming 65,000 × 65,000 pixels."""
    size = image.index(b"\xff\xc0") + 5
    return image[:size] + struct.pack(">HH", 65_000, 65_000) + image[size + 4 :]


def png_bomb(image: bytes) -> bytes:
    """The same file, claiming 40,000 × 40,000 pixels, with a sound check sum."""
    header = image[12:16] + struct.pack(">II", 40_000, 40_000) + image[24:29]
    return image[:12] + header + struct.pack(">I", zlib.crc32(header)) + image[33:]


DAMAGE: dict[int, tuple[Callable[[bytes], bytes], str]] = {
    33: (cut, CORRUPT),  # JPEG
    151: (cut, CORRUPT),  # PNG
    242: (lambda image: bytes(len(image)), CORRUPT),  # WEBP
    300: (jpeg_bomb, TOO_LARGE),
    400: (png_bomb, TOO_LARGE),
}
"""Row: what is done to it, and the reason in the ledger."""


@pytest.fixture(scope="module")
def clean(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Corpus:
    folder = tmp_path_factory.mktemp("clean")
    samples: list[Sample] = []
    for row in range(ROWS):
        image = photo(*SHAPES[row % 7 % 3], seed=row, format=FORMATS[row % 3])
        samples.append(Sample(f"{row:05d}", image, probe(image), [f"picture {row}" + " a dog" * (row % 11)]))
    return copy_of(corpus, folder, samples)


def copy_of(corpus: Corpus, folder: Path, samples: list[Sample]) -> Corpus:
    corpus.write_beside(folder / "shards", samples)
    (folder / "tokenizer").symlink_to(corpus.folder / "tokenizer")
    return Corpus(folder, samples)


def damaged_copy(clean: Corpus, folder: Path, images: dict[int, bytes]) -> Corpus:
    """Indexed as if the images were sound, as those are that go bad later or are known by their headers only."""
    samples = [replace(s, image=images.get(row, s.image)) for row, s in enumerate(clean.samples)]
    return copy_of(clean, folder, samples)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_per_cent_damaged_each_counted_once_and_no_other_row_changes(
    clean: Corpus, tmp_path: Path, num_workers: int
):
    assert len(DAMAGE) == ROWS // 100
    images = {row: damage(clean.samples[row].image) for row, (damage, _) in DAMAGE.items()}
    assert all(clean.samples[row].info.format == FORMATS[row % 3] for row in DAMAGE)
    damaged = damaged_copy(clean, tmp_path, images)
    loader, expected = damaged.loader(num_workers=num_workers, max_bad_share=0.01), clean.loader(num_workers=2)
    seen: list[int] = []
    for batch, sound in zip(loader, expected, strict=True):
        assert torch.equal(batch["rows"], sound["rows"])
        is_bad = torch.tensor([int(row) in DAMAGE for row in batch["rows"]])
        assert torch.equal(batch["valid"], sound["valid"] & ~is_bad)
        for name, value in sound.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(batch[name][~is_bad], value[~is_bad]), name  # type: ignore[literal-required]
        seen += batch["rows"][batch["valid"]].tolist()
    assert sorted(seen) == sorted(set(range(ROWS)) - set(DAMAGE))
    assert {(e.row, e.stage, e.reason) for e in loader.ledger} == {(r, "decode", d[1]) for r, d in DAMAGE.items()}
    assert len(loader.ledger) == len(DAMAGE)
    assert loader.ledger.masked == {CORRUPT: 3, TOO_LARGE: 2}


def test_wrong_types_are_corrupt_images(clean: Corpus, tmp_path: Path, photo: Callable[..., bytes]):
    wrong = {
        3: photo(48, 48, format="PNG"),  # in a .jpg
        4: photo(48, 48),  # in a .png
        5: b"<html><body>404 Not Found</body></html>",
        6: b"%PDF-1.7\n" + bytes(99),
        7: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    }
    loader = damaged_copy(clean, tmp_path, wrong).loader(max_bad_share=0.01)
    list(loader)
    assert {(entry.row, entry.reason) for entry in loader.ledger} == {(row, CORRUPT) for row in wrong}
    with pytest.raises(
        DataError, match=r"^5 of 500 rows could not be used \(corrupt_image 5\), more than max_bad_share"
    ):
        list(damaged_copy(clean, tmp_path / "again", wrong).loader(max_bad_share=0.009))
