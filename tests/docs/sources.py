"""The data that walk-through pages begin with: `<!-- setup: NAME -->` calls the function NAME with an empty folder."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw
from transformers import CLIPConfig, CLIPModel
from webdataset import TarWriter  # pyright: ignore

from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from tests.storage.servers import serve, serve_s3

BALLS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 210), "yellow": (230, 200, 40)}
WALLS = {"white": 230, "black": 30}


class Scene(NamedTuple):
    """A picture of a ball before a wall; no two are equal."""

    number: int
    ball: str
    wall: str
    jpeg: bytes

    @property
    def captions(self) -> list[str]:
        return [f"a {self.ball} ball before a {self.wall} wall", f"the ball is {self.ball} and the wall is {self.wall}"]


def scenes(count: int) -> Iterator[Scene]:
    """Pictures of 48 x 48 pixels, each ball as often as any other."""
    rng = np.random.default_rng(0)
    for number in range(count):
        ball, wall = list(BALLS)[number % 4], list(WALLS)[number // 4 % 2]
        image = Image.fromarray(rng.normal(WALLS[wall], 12, (48, 48, 3)).clip(0, 255).astype(np.uint8))
        left, top = (int(x) for x in rng.integers(2, 18, 2))
        ImageDraw.Draw(image).ellipse((left, top, left + 26, top + 26), BALLS[ball])
        file = io.BytesIO()
        image.save(file, "JPEG", quality=92)
        yield Scene(number, ball, wall, file.getvalue())


def photos(folder: Path) -> None:
    """`photos/BALL-WALL-NN.jpg`, and `photos/captions.csv` with columns filepath, caption."""
    (folder / "photos").mkdir()
    with (folder / "photos" / "captions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filepath", "caption"])
        for scene in scenes(80):
            name = f"{scene.ball}-{scene.wall}-{scene.number:02d}.jpg"
            (folder / "photos" / name).write_bytes(scene.jpeg)
            table.writerow([name, scene.captions[0]])


def coco(folder: Path) -> None:
    """`coco/val2017/*.jpg` and `coco/annotations/captions_val2017.json`, as COCO's archives unpack."""
    (folder / "coco" / "val2017").mkdir(parents=True)
    (folder / "coco" / "annotations").mkdir()
    images, annotations = [], []
    for scene in scenes(80):
        name = f"{scene.number:012d}.jpg"
        (folder / "coco" / "val2017" / name).write_bytes(scene.jpeg)
        images.append({"id": scene.number, "file_name": name, "height": 48, "width": 48, "license": 1})
        for caption in scene.captions:
            annotations.append({"image_id": scene.number, "id": len(annotations), "caption": caption})
    content = {"info": {"year": 2017}, "licenses": [{"id": 1}], "images": images, "annotations": annotations}
    (folder / "coco" / "annotations" / "captions_val2017.json").write_text(json.dumps(content))


def parquet(folder: Path) -> None:
    """`balls/data/train-*.parquet` and `test-*.parquet`, written by `datasets` as for the Hugging Face hub."""
    (folder / "balls" / "data").mkdir(parents=True)
    features = Features({"image": ImageFeature(), "caption": Value("string")})
    rows = [
        {"image": {"bytes": scene.jpeg, "path": f"{scene.number}.jpg"}, "caption": scene.captions[0]}
        for scene in scenes(80)
    ]
    parts = {"train-00000-of-00002": rows[:36], "train-00001-of-00002": rows[36:72], "test-00000-of-00001": rows[72:]}
    for name, part in parts.items():
        Dataset.from_list(part, features=features).to_parquet(folder / "balls" / "data" / f"{name}.parquet")


def img2dataset(folder: Path) -> None:
    """`laion/`: two shards with table and statistics each, as img2dataset writes them; some downloads had failed."""
    (folder / "laion").mkdir()
    found = list(scenes(80))
    for shard in range(2):
        rows = []
        with TarWriter(str(folder / "laion" / f"{shard:05d}.tar")) as tar:
            for scene in found[shard * 40 : shard * 40 + 40]:
                failed = scene.number % 10 == 9
                key = f"{shard:05d}{scene.number % 40:04d}"
                row = {
                    "url": f"https://example.com/{scene.number}.jpg",
                    "caption": scene.captions[0],
                    "key": key,
                    "status": "failed_to_download" if failed else "success",
                    "error_message": "HTTP Error 404: Not Found" if failed else None,
                    "width": None if failed else 48,
                    "height": None if failed else 48,
                    "original_width": None if failed else 48,
                    "original_height": None if failed else 48,
                    "exif": None if failed else "{}",
                    "sha256": None if failed else hashlib.sha256(scene.jpeg).hexdigest(),
                }
                rows.append(row)
                if not failed:
                    tar.write({"__key__": key, "jpg": scene.jpeg, "json": row, "txt": row["caption"]})
        pq.write_table(pa.Table.from_pylist(rows), folder / "laion" / f"{shard:05d}.parquet")
        stats = {"count": 40, "successes": 36, "failed_to_download": 4, "failed_to_resize": 0, "duration": 1.5}
        (folder / "laion" / f"{shard:05d}_stats.json").write_text(json.dumps(stats))


def datacompdr(folder: Path) -> None:
    """`datacomp/`: images by img2dataset's keys, and tables of uids; `dr/`: a tar of DataCompDR, by uid."""
    rng = np.random.default_rng(0)
    for name in ("datacomp", "dr"):
        (folder / name).mkdir()
    uids = [hashlib.md5(f"{number}".encode()).hexdigest() for number in range(80)]
    found = list(scenes(80))
    for shard in range(2):
        part = found[shard * 40 : shard * 40 + 40]
        keys = [f"{shard:05d}{number:04d}" for number in range(40)]
        with TarWriter(str(folder / "datacomp" / f"{shard:05d}.tar")) as tar:
            for key, scene in zip(keys, part, strict=True):
                tar.write({"__key__": key, "jpg": scene.jpeg, "txt": scene.captions[0]})
        table = {"key": keys, "uid": [uids[scene.number] for scene in part]}
        pq.write_table(pa.table(table), folder / "datacomp" / f"{shard:05d}.parquet")
    with TarWriter(str(folder / "dr" / "00000000.tar")) as tar:
        for number in rng.permutation(78).tolist():  # two images have none
            synthetic = [
                f"{caption}, {word}" for caption in found[number].captions for word in ("a photo", "a picture")
            ]
            tar.write(
                {
                    "__key__": uids[number],
                    "url.txt": f"https://example.com/{number}.jpg",
                    "syn.json": {"syn_text": synthetic},
                    "paug.json": {"param_aug": [[["RandomCrop", 1, 2]]]},
                    "npz": {
                        "image_emb": rng.normal(size=(3, 16)).astype(np.float32),
                        "text_emb": rng.normal(size=(5, 16)).astype(np.float32),
                    },
                    "json": {"uid": uids[number], "sha256": "0" * 64},
                }
            )


@contextmanager
def served(folder: Path) -> Generator[dict[str, str], None, None]:
    """`folder` on a server in place of https://host, and a folder of caches of its own."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder / "caches")
    try:
        with serve(folder) as server:
            yield {"https://host": server.url}
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


@contextmanager
def bucket(folder: Path) -> Generator[dict[str, str], None, None]:
    """An empty s3://bucket."""
    with serve_s3(folder / "bucket"):
        yield {}


def classes(folder: Path) -> None:
    """`balls/COLOUR/NN.jpg`: a folder for each class."""
    for scene in scenes(160):
        file = folder / "balls" / scene.ball / f"{scene.number:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(scene.jpeg)


def clip_folder(folder: Path) -> None:
    """`photos/`, and `clip-small/`: a small CLIPModel with the vocabulary of OpenAI's, saved by transformers."""
    photos(folder)
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=tower, vision_config=vision, projection_dim=32)  # pyright: ignore
    CLIPModel(config).save_pretrained(folder / "clip-small")
