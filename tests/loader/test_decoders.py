"""Images of unusual kinds through shards, index and loader: turned as their EXIF data says."""

from __future__ import annotations

import io
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mmdata.images import probe
from mmdata.tars.write import Sample
from tests.images.by_hand import png_chunk
from tests.loader.conftest import Corpus


def test_loader_turns_by_raw_profile(corpus: Corpus, tmp_path: Path):
    upright = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    exif, stored = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(upright)).save(stored, "PNG")  # 6: to be turned clockwise
    profile = b"\nexif\n%8d\n%s\n" % (len(exif.tobytes()), exif.tobytes().hex().encode())
    chunk = png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile))
    turned = stored.getvalue()[:33] + chunk + stored.getvalue()[33:]

    copy = corpus.copy(tmp_path / "corpus")
    shutil.rmtree(copy.folder / "shards")
    samples = [Sample(f"{i}", turned, probe(turned), ["a dog"]) for i in range(8)]
    corpus.write_beside(copy.folder / "shards", samples)
    (batch,) = copy.loader(image_buckets=[[32, 32]], transform="eval", num_workers=2)
    assert batch["valid"].all()
    expected = torch.from_numpy(upright).permute(2, 0, 1)
    for pixels in batch["pixel_values"]:
        assert torch.equal(pixels, expected)


def test_loader_compares_checksums_only_where_the_fast_hash_was_not(corpus: Corpus):
    samples = corpus.loader(num_workers=0).builder.read(np.array([1]), np.array([0]))
    assert (samples.image(0).checked, samples.stored_image(0).checked) == (True, False)
