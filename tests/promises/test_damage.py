"""A byte that is flipped, cut or replaced is an error, a masked row with a reason, or changes no row at all."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mmdata

from .conftest import GOOD, Batch, Corpus, images_in, loaders, run_mmdata

FLIPS, CUTS = 8, 3
"""Places in each file."""
MASKED = "masked"
"""In place of a row that cannot be read."""


@pytest.fixture
def folder(corpus: Corpus, tmp_path: Path) -> Path:
    """Shards to be damaged."""
    return shutil.copytree(corpus.shards, tmp_path / "shards", symlinks=True)


def rows_of_loader(corpus: Corpus, folder: Path) -> dict[int, Any]:
    """What each row has in its batch: key, caption, pixels and tokens; or that it is masked."""
    (loader,) = loaders(corpus.settings(shards=str(folder), transform="eval", loading={"max_bad_share": 1.0}))
    rows: dict[int, Any] = {}
    with loader:
        for batch in loader:
            for place, row in enumerate(batch["rows"].tolist()):
                if row >= 0:
                    rows[row] = of_row(batch, place) if batch["valid"][place] else MASKED
        reasons = {entry.key: str(entry.reason) for entry in loader.ledger}
    assert len(rows) == GOOD
    assert len(reasons) == sum(value == MASKED for value in rows.values())
    assert all(reasons.values())
    return rows


def of_row(batch: Batch, place: int) -> Any:
    tensors = ("pixel_values", "input_ids", "image_hash", "caption_hash")
    return [batch["keys"][place], batch["captions"][place], *(batch[name][place].tolist() for name in tensors)]


def rows_of_index(folder: Path) -> dict[int, Any]:
    """Key, captions and image file of each row; or that it is masked."""
    index = mmdata.Index.open(folder)
    rows: dict[int, Any] = {}
    for row in range(len(index)):
        try:
            sample = index[row]
            rows[row] = (sample.key, sample.captions, sample.image_bytes)
        except ValueError:
            rows[row] = MASKED
    return rows


def files_of(folder: Path) -> list[Path]:
    """Tars, index files and manifests."""
    return sorted([*folder.glob("*.tar"), *folder.glob("__mmdata__/*.arrow"), *folder.glob("__mmdata__/*.json")])


def damages(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Files of the folder, each with damaged content, at places that a seed chooses."""
    draw = random.Random(4)
    for path in files_of(folder):
        data = path.read_bytes()
        for place in (draw.randrange(len(data)) for _ in range(FLIPS)):
            yield path, data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
        for place in (draw.randrange(len(data)) for _ in range(CUTS)):
            yield path, data[:place]
        start = draw.randrange(len(data) - 40)
        yield path, data[:start] + draw.randbytes(40) + data[start + 40 :]
        others = [other for other in files_of(folder) if other.suffix == path.suffix and other != path]
        if others:  # the content of another file of its kind
            yield path, draw.choice(others).read_bytes()


def test_damage_is_an_error_or_a_masked_row_and_never_another_row(corpus: Corpus, folder: Path):
    of_index, of_loader = rows_of_index(folder), rows_of_loader(corpus, folder)
    assert MASKED not in [*of_index.values(), *of_loader.values()]
    outcomes: Counter[str] = Counter()
    for path, damaged in damages(folder):
        whole = path.read_bytes()
        path.write_bytes(damaged)
        for read, expected in ((rows_of_index, of_index), (partial(rows_of_loader, corpus), of_loader)):
            try:
                rows = read(folder)
            except ValueError as error:
                outcomes["an error that names the file" if path.stem in str(error) else f"of {path.name}: {error}"] += 1
                continue
            assert rows.keys() == expected.keys()
            other = {row for row, value in rows.items() if value != expected[row]}
            assert all(rows[row] == MASKED for row in other), path.name
            outcomes["masked rows" if other else "the same rows"] += 1
        path.write_bytes(whole)
    assert outcomes.keys() == {"an error that names the file", "masked rows", "the same rows"}


def test_file_that_is_gone_is_an_error_that_names_it(corpus: Corpus, folder: Path):
    for path in files_of(folder):
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises((ValueError, RuntimeError), match=path.stem):
            rows_of_loader(corpus, folder)
        path.write_bytes(whole)


def test_verify_passes_on_what_was_written_and_names_the_file_of_a_flipped_byte(corpus: Corpus, folder: Path):
    assert run_mmdata("verify", folder).stdout.startswith("ok")
    tar, index = folder / "000002.tar", next(path for path in files_of(folder) if path.suffix == ".arrow")
    filling = next(image.offset_data + image.size for image in images_in(tar) if image.size % 512)  # no reader needs it
    for path, place in ((tar, tar.stat().st_size // 2), (tar, filling), (index, index.stat().st_size // 2)):
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        done = run_mmdata("verify", folder, check=False)
        assert done.returncode != 0
        assert path.name in done.stdout + done.stderr
        path.write_bytes(whole)


def test_damaged_tar_without_an_index_is_an_error_that_names_it(folder: Path, tmp_path: Path):
    """Of a cut or flipped header Python's tar reader says nothing: samples would be lost in silence."""
    tars = tmp_path / "tars"
    tars.mkdir()
    for path in folder.glob("*.tar"):
        shutil.copy(path, tars)
    tar, member = tars / "000001.tar", images_in(tars / "000001.tar")[5]
    whole = tar.read_bytes()
    cut, flipped = whole[: member.offset], whole[: member.offset + 3] + b"#" + whole[member.offset + 4 :]
    for damaged in (cut, flipped):
        tar.write_bytes(damaged)
        done = run_mmdata("index", tars, "--out", tmp_path / "index", check=False)
        assert done.returncode != 0
        assert "000001.tar" in done.stderr
        done = run_mmdata("verify", tars, check=False)
        assert done.returncode != 0
        assert "000001.tar" in done.stdout + done.stderr
        settings = {"global_batch_size": 4, "image_size": 32, "loading": {"num_workers": 0}}
        with pytest.raises(ValueError, match=r"000001\.tar"):
            list(mmdata.stream(str(tars), settings))
