"""The kinds of source that go in with one command, each as its makers publish it.

Every kind holds the same three photos; `Expected` is what must come out, whatever the kind.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

import datasets
from mmdata.convert import ConvertConfig, convert, load_recipe
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError
from mmdata.index import Index
from tests.convert.sources.test_tables import captions

ONE = [["a red cat, asleep"], ["a dog; it runs"], ["two birds | one tree"]]
"""One caption a photo, with the delimiters of other tables in it."""
FIVE = [[f"{said[0]}, said {i}" for i in range(5)] for said in ONE]
"""Five captions a photo, as COCO and Flickr have them."""
NAMES = ["cats/1.jpg", "dogs/2.jpg", "birds/3.jpg"]
KEYS = ["1", "2", "3"]


class Given(NamedTuple):
    """A source in a folder, the settings of its command, and what must come out."""

    source: str
    settings: Mapping[str, Any] = MappingProxyType({})
    captions: list[list[str]] = ONE
    labels: list[str] | None = None


Photos = list[bytes]
Build = Callable[[Path, Photos], Given]
KINDS: dict[str, Build] = {}


def kind(name: str) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        KINDS[name] = build
        return build

    return register


def folder_of(root: Path, photos: Photos, *, below: str = "", names: list[str] = NAMES) -> list[str]:
    """Write the photos as files without their folders of classes; gives their names."""
    plain = [name.split("/")[-1] for name in names]
    for name, photo in zip(plain, photos, strict=True):
        (root / below).mkdir(parents=True, exist_ok=True)
        (root / below / name).write_bytes(photo)
    return plain


def frame(names: list[str], **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"filepath": names, **columns})


def exploded(names: list[str], image: str, caption: str) -> pd.DataFrame:
    """A row for each of the five captions."""
    return pd.DataFrame({image: names, caption: FIVE}).explode(caption)


@kind("CSV filepath, caption")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), caption=[said[0] for said in ONE]).to_csv(root / "t.csv", index=False)
    return Given("t.csv")


@kind("open_clip's TSV")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), title=[said[0] for said in ONE]).to_csv(root / "t.tsv", sep="\t", index=False)
    return Given("t.tsv")


@kind("CSV with ;")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), caption=[said[0] for said in ONE]).to_csv(root / "t.csv", sep=";", index=False)
    return Given("t.csv")


@kind("CSV with | (Kaggle's Flickr30k)")
def _(root: Path, photos: Photos) -> Given:
    names = folder_of(root, photos, below="flickr30k_images")
    lines = [f"{name}| {i}| {said.replace('|', '/')} ." for name, five in zip(names, FIVE, strict=True)
             for i, said in enumerate(five)]  # fmt: skip
    (root / "results.csv").write_text("image_name| comment_number| comment\n" + "\n".join(lines) + "\n")
    return Given("results.csv", {}, [[said.replace("|", "/") + " ." for said in five] for five in FIVE])


@kind("Latin-1")
def _(root: Path, photos: Photos) -> Given:
    said = ["un café", "l'été", "Straße"]
    table = frame(folder_of(root, photos), caption=said)
    table.to_csv(root / "t.csv", index=False, encoding="latin-1")
    return Given("t.csv", {"encoding": "latin-1"}, [[one] for one in said])


@kind("captions.txt that is a CSV (Flickr8k)")
def _(root: Path, photos: Photos) -> Given:
    exploded(folder_of(root, photos, below="Images"), "image", "caption").to_csv(root / "captions.txt", index=False)
    return Given("captions.txt", {}, FIVE)


@kind("a row for each caption")
def _(root: Path, photos: Photos) -> Given:
    table = exploded(folder_of(root, photos), "image", "caption").reset_index()
    pd.concat(table.iloc[k::5] for k in range(5)).to_csv(root / "t.csv", index=False)  # rows of an image are apart
    return Given("t.csv", {}, FIVE)


@kind("a list within a string column")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), captions=FIVE).to_csv(root / "t.csv", index=False)  # pandas writes Python's lists
    return Given("t.csv", {}, FIVE)


@kind("a JSON list within a string column")
def _(root: Path, photos: Photos) -> Given:
    names = folder_of(root, photos)
    frame(names, raw=[json.dumps(five) for five in FIVE]).to_csv(root / "t.csv", index=False)
    return Given("t.csv", {}, FIVE)


@kind("JSONL")
def _(root: Path, photos: Photos) -> Given:
    table = frame(folder_of(root, photos), caption=[said[0] for said in ONE])
    table.to_json(root / "t.jsonl", orient="records", lines=True)
    return Given("t.jsonl")


@kind("JSONL with lists")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), captions=FIVE).to_json(root / "t.jsonl", orient="records", lines=True)
    return Given("t.jsonl", {}, FIVE)


@kind("JSONL that is named .json")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), captions=FIVE).to_json(root / "t.json", orient="records", lines=True)
    return Given("t.json", {}, FIVE)


@kind("a JSON array")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), captions=FIVE).to_json(root / "t.json", orient="records", indent=1)
    return Given("t.json", {}, FIVE)


@kind("a JSON array with a row for each caption (BLIP's COCO)")
def _(root: Path, photos: Photos) -> Given:
    table = exploded(folder_of(root, photos, below="val2014"), "image", "caption")
    table["image"] = "val2014/" + table["image"]
    table.to_json(root / "coco_karpathy_train.json", orient="records")
    return Given("coco_karpathy_train.json", {}, FIVE)


@kind("JSON of names and captions")
def _(root: Path, photos: Photos) -> Given:
    (root / "t.json").write_text(json.dumps(dict(zip(folder_of(root, photos), FIVE, strict=True))))
    return Given("t.json", {}, FIVE)


@kind("JSON of columns")
def _(root: Path, photos: Photos) -> Given:
    (root / "t.json").write_text(json.dumps({"image": folder_of(root, photos), "caption": [s[0] for s in ONE]}))
    return Given("t.json")


@kind("Karpathy's dataset_coco.json")
def _(root: Path, photos: Photos) -> Given:
    names = folder_of(root, photos, below="val2014")
    parts = ["train", "restval", "train"]
    images = [
        {"filepath": "val2014", "filename": name, "split": part, "sentences": [{"raw": said} for said in five]}
        for name, part, five in zip(names, parts, FIVE, strict=True)
    ]
    (root / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return Given("dataset_coco.json", {}, FIVE)


@kind("Parquet of paths")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), caption=[said[0] for said in ONE]).to_parquet(root / "t.parquet")
    return Given("t.parquet")


@kind("Parquet with a binary column")
def _(root: Path, photos: Photos) -> Given:
    pq.write_table(pa.table({"image": photos, "caption": [said[0] for said in ONE]}), root / "t.parquet")
    return Given("t.parquet")


@kind("Parquet with {bytes, path}")
def _(root: Path, photos: Photos) -> Given:
    hugging_face(photos).to_parquet(str(root / "t.parquet"))
    return Given("t.parquet", {}, FIVE, ["cat", "dog", "bird"])


@kind("a Dataset on disk")
def _(root: Path, photos: Photos) -> Given:
    hugging_face(photos).save_to_disk(str(root), num_shards=2)
    (root / "cache-0123456789abcdef.arrow").write_bytes(b"of Dataset.map")  # beside the files of the dataset
    return Given("", {}, FIVE, ["cat", "dog", "bird"])


@kind("a DatasetDict on disk")
def _(root: Path, photos: Photos) -> Given:
    table = hugging_face(photos)
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(root / "saved"))
    return Given("saved", {"split": "train"}, FIVE, ["cat", "dog", "bird"])


@kind("Feather")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), caption=[said[0] for said in ONE]).to_feather(root / "t.feather")
    return Given("t.feather")


@kind("Parquet with {bytes, path} and a row for each caption")
def _(root: Path, photos: Photos) -> Given:
    rows = [(photo, said) for photo, five in zip(photos, FIVE, strict=True) for said in five]
    images = [{"bytes": photo, "path": "image.jpg"} for photo, _ in rows]
    pq.write_table(pa.table({"image": images, "text": [said for _, said in rows]}), root / "t.parquet")
    return Given("t.parquet", {}, FIVE)


def hugging_face(photos: Photos) -> datasets.Dataset:
    """A dataset as `datasets` pushes it to the hub, with class names in the schema."""
    features = datasets.Features(
        image=datasets.Image(),
        captions=datasets.Sequence(datasets.Value("string")),
        label=datasets.ClassLabel(names=["bird", "cat", "dog"]),
    )
    rows = [{"bytes": photo, "path": None} for photo in photos]
    return datasets.Dataset.from_dict({"image": rows, "captions": FIVE, "label": [1, 2, 0]}, features=features)


@kind("a hub folder data/*.parquet")
def _(root: Path, photos: Photos) -> Given:
    (root / "data").mkdir()
    whole = hugging_face(photos)
    whole.select([0, 1]).to_parquet(str(root / "data/train-00000-of-00002.parquet"))
    whole.select([2]).to_parquet(str(root / "data/train-00001-of-00002.parquet"))
    whole.select([1]).to_parquet(str(root / "data/validation-00000-of-00001.parquet"))
    (root / "README.md").write_text("---\nconfigs: []\n---\n")
    return Given("", {"split": "train"}, FIVE, ["cat", "dog", "bird"])


@kind("imagefolder with metadata.jsonl")
def _(root: Path, photos: Photos) -> Given:
    table = pd.DataFrame({"file_name": folder_of(root, photos), "text": [said[0] for said in ONE]})
    table.to_json(root / "metadata.jsonl", orient="records", lines=True)
    return Given("")


@kind("imagefolder with metadata.csv, in train/")
def _(root: Path, photos: Photos) -> Given:
    table = pd.DataFrame({"file_name": folder_of(root, photos, below="train"), "text": [said[0] for said in ONE]})
    table.to_csv(root / "train/metadata.csv", index=False)
    return Given("")


@kind("sidecar .txt")
def _(root: Path, photos: Photos) -> Given:
    for name, said in zip(folder_of(root, photos), ONE, strict=True):
        (root / name).with_suffix(".txt").write_text(said[0] + "\n")
    return Given("")


@kind("sidecar .json")
def _(root: Path, photos: Photos) -> Given:
    for name, five in zip(folder_of(root, photos), FIVE, strict=True):
        (root / name).with_suffix(".json").write_text(json.dumps({"captions": five}))
    return Given("", {}, FIVE)


@kind("class folders")
def _(root: Path, photos: Photos) -> Given:
    for name, photo in zip(["bird/3.jpg", "cat/1.jpg", "golden_retriever/2.jpg"], photos, strict=True):
        (root / name).parent.mkdir()
        (root / name).write_bytes(photo)
    return Given("", {}, [[], [], []], ["bird", "cat", "golden_retriever"])


@kind("class folders in train/ and val/")
def _(root: Path, photos: Photos) -> Given:
    for name, photo in zip(["cat/1.jpg", "dog/a/2.jpg", "dog/b/2.jpg"], photos, strict=True):
        for part in ("train", "val"):
            (root / part / name).parent.mkdir(parents=True)
            (root / part / name).write_bytes(photo)
    return Given("", {"split": "val"}, [[], [], []], ["cat", "dog", "dog"])


@kind("class folders with a caption template")
def _(root: Path, photos: Photos) -> Given:
    given = KINDS["class folders"](root, photos)
    said = [[f"a photo of a {name}.", f"{name}!"] for name in ("bird", "cat", "golden retriever")]
    return given._replace(settings={"caption_templates": ["a photo of a {}.", "{}!"]}, captions=said)


@kind("table of paths and labels")
def _(root: Path, photos: Photos) -> Given:
    frame(folder_of(root, photos), label=["cat", "dog", "cat"]).to_csv(root / "t.csv", index=False)
    return Given("t.csv", {}, [[], [], []], ["cat", "dog", "cat"])


@kind("COCO captions")
def _(root: Path, photos: Photos) -> Given:
    names = folder_of(root, photos, below="val2017")
    images = [{"id": 10 + i, "file_name": name, "license": 1} for i, name in enumerate(names)]
    said = [{"id": 5 * k + i, "image_id": 10 + i, "caption": FIVE[i][k]} for k in range(5) for i in range(3)]
    (root / "annotations").mkdir()
    content = {"info": {}, "licenses": [{"id": 1}], "images": images, "annotations": said}
    (root / "annotations/captions_val2017.json").write_text(json.dumps(content))
    return Given("annotations/captions_val2017.json", {}, FIVE)


@kind("img2dataset's tars")
def _(root: Path, photos: Photos) -> Given:
    with webdataset.TarWriter(str(root / "00000.tar")) as sink:
        for i, photo in enumerate(photos):
            data = {"key": f"{i:09d}", "caption": ONE[i][0], "status": "success", "width": 40, "exif": "{}"}
            sink.write({"__key__": f"{i:09d}", "jpg": photo, "txt": ONE[i][0], "json": data})
    pd.DataFrame({"key": KEYS}).to_parquet(root / "00000.parquet")
    (root / "00000_stats.json").write_text("{}")
    return Given("")


@kind("LAION-like tars (JSON key TEXT)")
def _(root: Path, photos: Photos) -> Given:
    with webdataset.TarWriter(str(root / "00000.tar")) as sink:
        for i, photo in enumerate(photos):
            data = {"SAMPLE_ID": i, "URL": "https://a.b/c.jpg", "TEXT": ONE[i][0], "NSFW": "UNLIKELY"}
            sink.write({"__key__": f"{i:09d}", "jpg": photo, "json": data})
    return Given("")


@kind("tars with members of other names")
def _(root: Path, photos: Photos) -> Given:
    with webdataset.TarWriter(str(root / "00000.tar")) as sink:
        for i, photo in enumerate(photos):
            data = {"alt": ONE[i][0], "text": "another text"}
            sink.write({"__key__": f"{i}", "mask.png": b"no image", "jpg": photo, "meta.json": data})
    return Given("00000.tar", {"image_column": "jpg", "caption_columns": ["meta.json:alt"]})


@kind("jpg + cls tars")
def _(root: Path, photos: Photos) -> Given:
    with webdataset.TarWriter(str(root / "imagenet-train-000000.tar")) as sink:
        for i, photo in enumerate(photos):
            sink.write({"__key__": f"n{i:08d}", "jpg": photo, "cls": 7 * i})
    return Given("imagenet-train-000000.tar", {}, [[], [], []], ["0", "7", "14"])


def outcome(out: Path, accounts: dict[str, Any]) -> tuple[list[list[str]], list[str] | None]:
    index = Index.open(out)
    numbers, classes = index.column("label").tolist(), accounts.get("classes")
    labels = None if max(numbers) < 0 else [classes[n] if classes else str(n) for n in numbers]
    return captions(out), labels


@pytest.mark.parametrize("name", KINDS)
def test_kind_of_source_goes_in_with_one_command(tmp_path: Path, photos: Photos, name: str) -> None:
    root, out = tmp_path / "corpus", tmp_path / "out"
    root.mkdir()
    given = KINDS[name](root, photos)
    report = convert(root / given.source, out, ConvertConfig(**given.settings), engine=threads(1))
    assert outcome(out, report.accounts) == (given.captions, given.labels)
    accounts = report.accounts
    assert accounts["rows"] == accounts["written"] + accounts["merged"]
    stored = {pixels(data) for data in images(out)}
    assert stored == {pixels(photo) for photo in photos}


def images(out: Path) -> list[bytes]:
    keys = ("jpg", "jpeg")
    samples = webdataset.WebDataset(sorted(map(str, out.glob("*.tar"))), shardshuffle=False)
    return [next(sample[key] for key in keys if key in sample) for sample in samples]


def pixels(data: bytes) -> bytes:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).tobytes()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("flickr8k", "captions.txt that is a CSV (Flickr8k)"),
        ("flickr30k", "CSV with | (Kaggle's Flickr30k)"),
        ("coco", "COCO captions"),
    ],
)
def test_recipe_fits_the_layout_of_its_corpus(tmp_path: Path, photos: Photos, recipe: str, name: str) -> None:
    root, out = tmp_path / "corpus", tmp_path / "out"
    root.mkdir()
    given = KINDS[name](root, photos)
    convert(root / given.source, out, load_recipe(recipe), engine=threads(1))
    assert captions(out) == given.captions


def test_members_named_or_guessed_are_part_of_what_was_converted(tmp_path: Path, photos: Photos) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    KINDS["LAION-like tars (JSON key TEXT)"](root, photos)
    report = convert(root, tmp_path / "out")
    assert report.source["members"] == {"caption": ["json:TEXT"]}
    with pytest.raises(ConfigError, match="member 'json:': expected the extension of a member"):
        convert(root, tmp_path / "other", ConvertConfig(caption_columns=["json:"]))
