"""mmdata duplicates: near copies planted among photos are found, leaks are named, and a split keeps copies together."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from mmdata import Index, Loader
from mmdata.config import Config
from mmdata.config.data import evaluation_data
from mmdata.duplicates import find_duplicates
from mmdata.duplicates.table import Duplicates
from mmdata.errors import ConfigError
from mmdata.hashing import hash64, in_share
from mmdata.images import probe
from mmdata.tars.write import Sample
from tests.joins import join_first, load
from tests.programs import run_program
from tests.shard_writer import ShardWriter

ORIENTATION = 0x0112


def picture(seed: int, height: int = 200, width: int = 280) -> Image.Image:
    """A picture of shapes of several sizes before a smooth ground, as varied as a photo."""
    rng = np.random.default_rng(seed)
    ground = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((width, height), 3)
    for _ in range(12):
        h, w = (int(n) for n in rng.integers(15, 90, 2))
        top, left = int(rng.integers(0, height - h)), int(rng.integers(0, width - w))
        ground.paste(tuple(int(n) for n in rng.integers(0, 256, 3)), (left, top, left + w, top + h))
    return ground


def jpeg(image: Image.Image, quality: int = 90, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, **settings)
    return file.getvalue()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def resized(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float = 0.04) -> Image.Image:
    return image.crop((0, 0, round(image.width * (1 - share)), round(image.height * (1 - share))))


def turned(image: Image.Image) -> bytes:
    """The picture stored on its side, with an orientation that says so."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return jpeg(image.transpose(Image.Transpose.ROTATE_90), exif=exif)


def transparent(image: Image.Image) -> bytes:
    """The picture's dark half transparent, as a viewer shows it on white."""
    layered = image.convert("RGBA")
    layered.putalpha(Image.fromarray(np.where(np.array(image.convert("L")) > 128, 255, 0).astype(np.uint8)))
    return png(layered)


def on_white(image: Image.Image) -> Image.Image:
    light = np.array(image.convert("L"))[..., None] > 128
    return Image.fromarray(np.where(light, np.array(image), 255).astype(np.uint8))


def write(folder: Path, images: Mapping[str, bytes]) -> Path:
    """Shards of three samples each."""
    with ShardWriter(folder, shard_rows=3) as writer:
        for key, data in images.items():
            writer.write(Sample(key, data, probe(data), [f"picture {key}"]))
    return folder


def table_of(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a table, by key."""
    return {row["key"]: row for row in pyarrow.parquet.read_table(path).to_pylist()}


def groups_of(folder: Path, images: Mapping[str, bytes], **settings: Any) -> tuple[dict[str, str], Duplicates]:
    """The key of the first row of each row's group."""
    found = find_duplicates(write(folder / "shards", images), folder / "copies.parquet", **settings)
    rows = table_of(folder / "copies.parquet")
    keys = list(rows)
    assert [row["first"] for row in rows.values()] == [row["group"] == i for i, row in enumerate(rows.values())]
    return {key: keys[row["group"]] for key, row in rows.items()}, found


COPIES = {
    "q50": lambda: jpeg(picture(0), 50),
    "q95": lambda: jpeg(picture(0), 95),
    "png": lambda: png(picture(0)),
    "half": lambda: jpeg(resized(picture(0), 0.5)),
    "double": lambda: jpeg(resized(picture(0), 2)),
    "crop": lambda: jpeg(cropped(picture(0))),
    "turned": lambda: turned(picture(0)),
    "same": lambda: jpeg(picture(0)),
}


def test_near_copies_join_the_first_row_and_others_stay_alone(tmp_path: Path):
    images = {"a": jpeg(picture(0)), "b": jpeg(picture(1)), **{key: make() for key, make in COPIES.items()}}
    images["c"] = jpeg(picture(2))
    groups, found = groups_of(tmp_path, images)
    assert groups == {"a": "a", "b": "b", "c": "c", **dict.fromkeys(COPIES, "a")}
    assert (found.rows, found.exact, found.near, found.groups, found.largest_group) == (11, 1, 7, 1, 9)


def test_a_transparent_picture_is_compared_as_it_looks_on_white(tmp_path: Path):
    images = {"a": transparent(picture(3)), "b": jpeg(on_white(picture(3))), "c": jpeg(picture(3))}
    assert groups_of(tmp_path, images)[0] == {"a": "a", "b": "a", "c": "c"}


def test_mirrored_copies_are_copies_with_flipped_only(tmp_path: Path):
    mirrored = picture(0).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    images = {"a": jpeg(picture(0)), "mirror": jpeg(mirrored, 70), "crop": jpeg(cropped(mirrored))}
    assert groups_of(tmp_path / "without", images)[0] == {"a": "a", "mirror": "mirror", "crop": "mirror"}
    assert groups_of(tmp_path / "with", images, flipped=True)[0] == dict.fromkeys(images, "a")


def test_pictures_that_differ_in_one_small_thing_are_no_copies(tmp_path: Path):
    sibling = picture(0)
    sibling.paste((250, 220, 190), (100, 80, 130, 110))
    other = picture(0)
    other.paste((90, 50, 30), (100, 80, 130, 110))
    images = {"light": jpeg(sibling), "dark": jpeg(other), "dark-q60": jpeg(other, 60)}
    assert groups_of(tmp_path, images)[0] == {"light": "light", "dark": "dark", "dark-q60": "dark"}


def test_pictures_of_one_colour_are_copies_if_the_colour_is_the_same(tmp_path: Path):
    red, blue = (Image.new("RGB", (90, 60), colour) for colour in ((200, 30, 30), (30, 30, 200)))
    images = {"red": png(red), "blue": png(blue), "red-jpeg": jpeg(red), "blue-jpeg": jpeg(blue, 60)}
    assert groups_of(tmp_path, images)[0] == {"red": "red", "blue": "blue", "red-jpeg": "red", "blue-jpeg": "blue"}


def damage(shards: Path, key: str) -> None:
    """Change a byte in the middle of an image, in its tar."""
    index = Index.open(shards)
    row = index.sample(key).row
    columns = index.take(np.array([row]), ["image_offset", "image_bytes"])
    with index.shard_path(int(index.locate(np.array([row]))[0][0])).open("r+b") as file:
        file.seek(int(columns["image_offset"][0]) + int(columns["image_bytes"][0]) // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_a_damaged_image_has_a_reason_and_no_hash(tmp_path: Path):
    images = {"a": jpeg(picture(0)), "b": jpeg(picture(1)), "b2": jpeg(picture(1)), "b3": jpeg(picture(1), 60)}
    shards = write(tmp_path / "shards", images)
    damage(shards, "a")
    damage(shards, "b")
    found = find_duplicates(shards, tmp_path / "copies.parquet")
    rows = table_of(tmp_path / "copies.parquet")
    assert dict(found.problems) == {"file_changed": 3}
    assert {key: row["problem"] for key, row in rows.items()} == {
        **dict.fromkeys(("a", "b", "b2"), "file_changed"),
        "b3": None,
    }
    assert rows["a"]["phash"] is None
    assert rows["a"]["first"]
    assert [rows[key]["group"] for key in ("b", "b2", "b3")] == [1, 1, 3]
    assert not [path for path in tmp_path.iterdir() if path.name not in ("shards", "copies.parquet")]


def test_leaks_name_the_other_row_exact_before_near(tmp_path: Path):
    train = {f"t{i}": jpeg(picture(i)) for i in range(6)}
    shards = write(tmp_path / "train", train)
    val = write(
        tmp_path / "val", {"v1": jpeg(resized(picture(1), 0.5)), "v2": jpeg(picture(2)), "v9": jpeg(picture(9))}
    )
    coco = write(tmp_path / "coco", {"c2": jpeg(picture(2), 60), "c4": jpeg(cropped(picture(4)))})
    found = find_duplicates(shards, tmp_path / "copies.parquet", against=[val, coco])
    rows = table_of(tmp_path / "copies.parquet")
    assert {key: (row["leak"], row["leak_shards"], row["leak_key"]) for key, row in rows.items() if row["leak"]} == {
        "t1": ("near", str(val), "v1"),
        "t2": ("exact", str(val), "v2"),
        "t4": ("near", str(coco), "c4"),
    }
    assert list(rows) == list(train)
    assert dict(found.leaks) == {"near": 2, "exact": 1}
    assert found.near == 0  # copies in the other shards make no groups


def test_a_split_parts_no_copies_and_agrees_with_the_share_of_single_rows(tmp_path: Path):
    images = {f"{i:02d}-{quality}": jpeg(picture(i), quality) for i in range(30) for quality in (90, 60)}
    shards = write(tmp_path / "shards", images)
    found = find_duplicates(shards, tmp_path / "copies.parquet", val_share=0.3)
    split = {key: row["split"] for key, row in table_of(tmp_path / "copies.parquet").items()}
    for key, part in split.items():
        first = images[f"{key[:2]}-90"]
        assert part == ("val" if in_share(hash64(first), 0.3) else "train")
    assert list(split.values()).count("val") == found.val
    assert found.val in range(1, 60)


def test_the_loader_takes_the_columns(tmp_path: Path):
    images = {f"{i:02d}-{quality}": jpeg(picture(i), quality) for i in range(12) for quality in (90, 60)}
    shards = write(tmp_path / "shards", images)
    find_duplicates(
        shards, tmp_path / "copies.parquet", val_share=0.4, against=[write(tmp_path / "val", {"v": jpeg(picture(5))})]
    )
    data = {
        "shards": str(shards),
        "global_batch_size": 4,
        "image_size": 32,
        "tokenizer": "clip",
        "join": [{"table": str(tmp_path / "copies.parquet")}],
        "caption_hash": "group",
        "loading": {"num_workers": 1, "num_processes": 0},
    }

    def keys(**settings: Any) -> set[str]:
        with load({**data, **settings}, rank=0, world_size=1) as loader:
            return {key for batch in loader for key, valid in zip(batch["keys"], batch["valid"], strict=True) if valid}

    assert keys(select="first and leak is None") == {f"{i:02d}-90" for i in range(12) if i != 5}
    train, val = keys(select="split == 'train'"), keys(select="split == 'val'")
    assert train | val == set(images)
    assert {key[:2] for key in train}.isdisjoint(key[:2] for key in val)
    config = Config.model_validate({"data": {**data, "val": {"shards": str(shards), "select": "split == 'val'"}}})
    join_first(config.data)
    with Loader.from_config(evaluation_data(config.data), rank=0, world_size=1) as loader:
        found = {key for batch in loader for key, valid in zip(batch["keys"], batch["valid"], strict=True) if valid}
    assert found == val


def test_the_table_is_the_same_with_any_number_of_workers(tmp_path: Path):
    shards = write(tmp_path / "shards", {f"{i}-{q}": jpeg(picture(i), q) for i in range(40) for q in (90, 70)})
    for workers in (1, 3):
        find_duplicates(shards, tmp_path / f"{workers}.parquet", num_workers=workers)
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "3.parquet").read_bytes()


def program(*words: object) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-m", "mmdata", "duplicates", *map(str, words)], capture_output=True, text=True)


def test_program_prints_accounts_and_strict_fails_on_a_leak(tmp_path: Path):
    shards = write(tmp_path / "shards", {"a": jpeg(picture(0)), "b": jpeg(picture(0), 60), "c": jpeg(picture(1))})
    val = write(tmp_path / "val", {"v": jpeg(picture(1))})
    out = tmp_path / "new" / "copies.parquet"
    done = program(shards, "--out", out, "--against", val)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "3 rows: 2 first + 0 exact copies + 1 near copies",
        "1 group of more than one row; the largest has 2",
        f"1 row also in {val}: 1 exact, 0 near",
        f"{out}; to use it: data.join: [{{table: {out}}}], data.select: first and leak is None; then `mmdata "
        "join CONFIG`",
    ]
    assert program(shards, "--out", out, "--against", val, "--strict").returncode == 1
    assert program(shards, "--out", out, "--strict").returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "copies.csv"], "--out 'copies.csv': the table is a Parquet file; end its name with .parquet"),
        (["--out", "c.parquet", "--val-share", "1"], "--val-share 1: must be above 0 and below 1, such as 0.01"),
        (["--out", "c.parquet", "--workers", "0"], "--workers 0: must be at least 1"),
        (
            ["--out", "c.parquet", "--cache-gb", "-1"],
            "--cache-dir and --cache-gb: 'cache_gb': expected number > 0; got -1",
        ),
    ],
)
def test_program_refuses_what_cannot_end_well(words: list[str], message: str):
    done = program("shards", *words)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_a_key_that_comes_twice_is_an_error_before_the_pass(tmp_path: Path):
    shards = tmp_path / "shards"
    with ShardWriter(shards, shard_rows=1) as writer:
        for seed in range(2):
            data = jpeg(picture(seed))
            writer.write(Sample("same", data, probe(data), ["a"]))
    with pytest.raises(ConfigError, match=r"2 rows have the key 'same', and a table is joined by key"):
        find_duplicates(shards, tmp_path / "copies.parquet")


def test_program_overwrites_its_own_table_and_no_other_file(tmp_path: Path):
    shards = write(tmp_path / "shards", {"a": jpeg(picture(1))})
    out = tmp_path / "scores.parquet"
    for content in (b"my own table", b""):
        out.write_bytes(content)
        done = program(shards, "--out", out)
        assert done.returncode == 2
        assert f"--out '{out}': exists, and is no table of this program, so it is not overwritten" in done.stderr
        assert out.read_bytes() == content
    pyarrow.parquet.write_table(pyarrow.table({"key": ["a"], "score": [1.0]}), out)
    assert program(shards, "--out", out).returncode == 2
    out.unlink()
    assert [program(shards, "--out", out).returncode for _ in range(2)] == [0, 0]
