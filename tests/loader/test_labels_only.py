"""Corpora of images and labels without captions, from the tars to zero-shot classification."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import webdataset

import mmdata
from mmdata.config import Config
from mmdata.config.corpus import ValConfig
from mmdata.config.data import evaluation_data
from mmdata.config.strict_yaml import parse
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError, DataError
from mmdata.images import probe
from mmdata.index import Index, build_index, verify
from mmdata.loader import Loader
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, need_tokenizer, train_tokenizer
from mmdata.train import DualEncoder
from mmdata.train.evaluation.prompts import Classes
from mmdata.trained import TrainedRun
from mmdata.trained.evaluation import evaluate_shards, named_classes
from tests.joins import join_first
from tests.logs import messages
from tests.made_shards import make_tar
from tests.programs import run_program
from tests.shard_writer import ShardWriter

CLASSES = ["dog", "cat", "tree"]
NUM_IMAGES = 20


@pytest.fixture(scope="module")
def images(photo) -> list[bytes]:
    return [photo(*((24, 24) if i % 2 else (20, 32)), seed=i) for i in range(NUM_IMAGES)]


@pytest.fixture
def folder(tmp_path: Path, images: list[bytes]) -> Path:
    """jpg + cls tars, as webdataset's users write them."""
    for number in range(2):
        with webdataset.TarWriter(str(tmp_path / "tars" / f"{number}.tar"), mtime=0) as sink:
            for i in range(10 * number, 10 * number + 10):
                sink.write({"__key__": f"{i:03d}", "jpg": images[i], "cls": i % 3})
    return tmp_path / "tars"


@pytest.fixture(autouse=True)
def _tars(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()


def settings(folder: Path, **changes: object) -> dict[str, object]:
    return {"shards": str(folder), "global_batch_size": 4, "image_size": 16, "transform": "eval", "seed": 3, **changes}


def pixels_of(image: bytes) -> torch.Tensor:
    """The image as `transform: eval` makes it, by Pillow's decoder."""
    from mmdata.images.pixels import EncodedImage, PixelTransform

    transform = PixelTransform.from_config(parse(Config, {"data": settings(Path("x"))}, origin="test").data)
    made = torch.zeros(3, 16, 16, dtype=torch.uint8)
    info = probe(image)
    decoded = transform.decode(EncodedImage(image, info.format, 1, 0), shape=(16, 16), patches=0, epoch=0)
    transform.write(decoded, made, number=0, epoch=0)
    return made


def test_tars_of_labels_are_indexed_loaded_and_verified(folder, images):
    report = build_index(folder)
    assert report.accounts == {"samples": 20, "indexed": 20, "quarantined": 0, "ignored_members": 0}
    index = Index.open(folder)
    assert (len(index), index.captions, index.has_captions, index.has_labels) == (20, 0, False, True)
    assert verify(folder) == []
    seen: dict[int, int] = {}
    with Loader.from_config(settings(folder)) as loader:
        assert len(loader) == 5
        for batch in loader:
            assert set(batch) == {"pixel_values", "crop", "flipped", "labels", "valid", "rows", "keys", "image_hash"}
            for row, label, made in zip(batch["rows"].tolist(), batch["labels"], batch["pixel_values"], strict=True):
                seen[row] = int(label)
                assert torch.equal(made, pixels_of(images[row]))
        assert loader.stats.padding_share == 0.0
    assert seen == {i: i % 3 for i in range(20)}


def test_a_stream_without_a_tokenizer_gives_labels(folder):
    batches = list(mmdata.stream(folder, settings(folder, shuffle=False)))
    found = {key: int(label) for b in batches for key, label in zip(b["keys"], b["labels"], strict=True)}
    assert found == {f"{i:03d}": i % 3 for i in range(20)}
    assert all("input_ids" not in batch and "labels" in batch for batch in batches)


def test_a_stream_with_a_tokenizer_still_needs_captions(folder, tmp_path):
    train_tokenizer(CLASSES, tmp_path / "tokenizer", vocab_size=300)
    with pytest.raises(ValueError, match=r"none of 20 samples of 2 shards can be used: .*: missing_caption \(no \.txt"):
        mmdata.stream(folder, settings(folder, tokenizer=str(tmp_path / "tokenizer"), loading={"num_workers": 0}))


def test_the_writer_writes_labels_as_cls_members(tmp_path, images):
    with ShardWriter(tmp_path / "out", shard_rows=3) as writer:
        for i in range(5):
            extra = {"source": "x"} if i == 4 else None
            writer.write(Sample(f"{i}", images[i], probe(images[i]), [], label=i % 3, extra=extra))
    members = [dict(s) for s in webdataset.WebDataset(str(tmp_path / "out/000001.tar"), shardshuffle=False)]
    assert [sorted(name for name in member if name[0] != "_") for member in members] == [
        ["cls", "jpg"],
        ["cls", "jpg", "json"],
    ]
    assert verify(tmp_path / "out") == []
    rebuilt = build_index(tmp_path / "out", out=tmp_path / "again").manifest
    assert [entry.index_sha256 for entry in rebuilt] == [
        e.index_sha256 for e in Index.open(tmp_path / "out").manifests[0]
    ]


def test_one_caption_in_the_corpus_makes_labels_alone_too_little(tmp_path, images):
    def sample(key: str, **members: bytes) -> list[tuple[str, bytes]]:
        return [(f"{key}.{extension}", data) for extension, data in members.items()]

    (tmp_path / "tars/0.tar").write_bytes(
        make_tar(sample("a", jpg=images[0], cls=b"1") + sample("b", jpg=images[1], cls=b"2"))
    )
    (tmp_path / "tars/1.tar").write_bytes(make_tar(sample("c", jpg=images[2], txt=b"a dog", cls=b"0")))
    report = build_index(tmp_path / "tars", max_bad_share=1.0)
    assert [(line["key"], line["reason"]) for line in report.quarantined] == [
        ("a", "missing_caption"),
        ("b", "missing_caption"),
    ]
    assert Index.open(tmp_path / "tars").keys(np.arange(1)) == ["c"]
    assert verify(tmp_path / "tars") == []


def test_a_sample_without_caption_and_label_is_quarantined(tmp_path, images):
    members = [("a.jpg", images[0]), ("a.cls", b"1"), ("b.jpg", images[1])]
    (tmp_path / "tars/0.tar").write_bytes(make_tar(members))
    report = build_index(tmp_path / "tars", max_bad_share=1.0)
    assert [(line["key"], line["reason"]) for line in report.quarantined] == [("b", "missing_caption")]


def test_a_tokenizer_for_labels_only_is_an_error_that_says_both_ways(folder, tmp_path):
    build_index(folder)
    train_tokenizer(CLASSES, tmp_path / "tokenizer", vocab_size=300)
    tokenizer = str(tmp_path / "tokenizer")
    ways = 'leave data.tokenizer out for batches of images and labels.*--caption-template "a photo of a {}."'
    with pytest.raises(ConfigError, match=f"data.tokenizer: shards '.*' hold labels and no captions: {ways}"):
        Loader.from_config(settings(folder, tokenizer=tokenizer))
    count = Tokenizer.load(tokenizer).count
    for out in (folder, tmp_path / "out"):  # an index that exists, and a new one
        with pytest.raises(ConfigError, match="so there is nothing to tokenize: leave --tokenizer out"):
            build_index(folder, out=out, count_tokens=count, tokenizer="any")


@pytest.mark.parametrize(
    "changes",
    [{}, {"image_buckets": [[16, 16], [16, 24]]}, {"image_buckets": 3, "image_size": 32}],
)
@pytest.mark.parametrize("captions", [False, True])
def test_without_a_tokenizer_no_batch_has_texts(folder, images, tmp_path, captions, changes):
    if captions:  # captions of any length must not decide the buckets
        with ShardWriter(tmp_path / "out", count_tokens=lambda c: [len(x) for x in c], tokenizer="any") as writer:
            for i in range(20):
                writer.write(Sample(f"{i:03d}", images[i], probe(images[i]), ["a dog" * (i + 1)], label=i % 3))
        folder = tmp_path / "out"
    else:
        build_index(folder)
    loader = Loader.from_config(settings(folder, **changes))
    assert {bucket.length for bucket in loader.plan.policy.buckets} == {0}
    rows = [row for batch in loader for row in batch["rows"].tolist() if row >= 0]
    assert sorted(rows) == list(range(20))
    state = Loader.from_config(settings(folder, **changes)).state_dict()
    assert state["plan"] == loader.state_dict()["plan"]


@pytest.mark.parametrize("given", [{"text_buckets": [8, 77]}, {"negative_captions": "x.parquet"}])
def test_settings_of_texts_without_a_tokenizer_are_refused(folder, given):
    with pytest.raises(ConfigError, match=f"without it batches have no texts, which {next(iter(given))} are about"):
        Loader.from_config(settings(folder, **given))


def test_what_needs_texts_says_so(folder):
    config = parse(Config, {"data": settings(folder)}, origin="test").data
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer is not set, and to train a dual encoder captions must be tok"
    ):
        need_tokenizer(config, to="train a dual encoder")


def test_zero_shot_classification_of_shards_of_labels(folder, tmp_path, images):
    build_index(folder)
    train_tokenizer([f"a photo of a {name}" for name in CLASSES], tmp_path / "tokenizer", vocab_size=300)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    data = settings(tmp_path / "elsewhere", tokenizer=str(tmp_path / "tokenizer"))
    config = parse(Config, {"data": data, "model": {"name": "small"}}, origin="test")
    torch.manual_seed(0)
    model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size).eval()
    trained = TrainedRun(model, config, tokenizer, Path("x.pt"), 0, 0)
    classes = Classes(classes=CLASSES, templates=["a photo of a {}"])
    scores = evaluate_shards(trained, ValConfig(shards=str(folder)), classes)
    assert scores["rows"] == 20
    assert "image_to_text_r1" not in scores
    some = evaluate_shards(trained, ValConfig(shards=str(folder), select="label in [0, 2]"), classes)
    assert some["rows"] == sum(row % 3 != 1 for row in range(20))
    # by hand: features of each image against those of each class
    with torch.no_grad():
        ids, mask = tokenizer.encode([f"a photo of a {name}" for name in CLASSES], 12)
        texts = model.encode_text(torch.from_numpy(ids), torch.from_numpy(mask))
        pixels = torch.cat([b["pixel_values"] for b in Loader.from_config(settings(folder, shuffle=False))])
        nearest = (model.encode_image(pixels) @ texts.T).argmax(dim=1)
    expected = float((nearest == torch.arange(20) % 3).double().mean())
    assert scores["zero_shot_top1"] == pytest.approx(expected)
    with pytest.raises(
        ConfigError,
        match="so there is nothing to retrieve: give --classes FILE for zero-shot accuracy, the run.s classes.json or "
        r'JSON such as {"classes": \["dog", "cat"\], "templates"',
    ):
        evaluate_shards(trained, ValConfig(shards=str(folder)))
    val, other = (ValConfig(shards=str(shards)) for shards in (folder, tmp_path / "named"))
    assert named_classes(config.data.model_copy(update={"val": val})) is None  # numbers without names
    (tmp_path / "named").mkdir()
    members = [(f"{i}.{e}", d) for i in range(3) for e, d in (("jpg", images[i]), ("cls", CLASSES[i].encode()))]
    (tmp_path / "named/0.tar").write_bytes(make_tar(members))
    build_index(tmp_path / "named")
    assert named_classes(config.data.model_copy(update={"val": other})) == Classes(classes=CLASSES)


def test_retrieval_of_captions_that_a_table_gives_shards_of_labels(folder, tmp_path):
    build_index(folder)
    keys = [f"{i:03d}" for i in range(20)]
    table = pa.table({"key": keys, "recap": [f"a {CLASSES[i % 3]} number {i}" for i in range(20)]})
    pyarrow.parquet.write_table(table, tmp_path / "recaps.parquet")
    train_tokenizer(table.column("recap").to_pylist(), tmp_path / "tokenizer", vocab_size=300)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    tables: dict[str, object] = {
        "tokenizer": str(tmp_path / "tokenizer"),
        "join": [{"table": str(tmp_path / "recaps.parquet")}],
        "captions": {"join:recap": 1.0},
        "val": {"share": 0.5},
    }
    config = parse(Config, {"data": settings(folder, **tables), "model": {"name": "small"}}, origin="test")
    join_first(config.data)
    model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size).eval()
    scores = evaluate_shards(TrainedRun(model, config, tokenizer, Path("x.pt"), 0, 0), None, None)
    assert scores["texts"] == scores["rows"] == Loader.from_config(evaluation_data(config.data)).plan.num_rows
    assert "image_to_text_r1" in scores


def test_prompts_of_a_conversion_are_made_as_its_captions_were(tmp_path, images):
    for i, name in enumerate(CLASSES):
        (tmp_path / "raw" / name).mkdir(parents=True)
        (tmp_path / "raw" / name / "0.jpg").write_bytes(images[i])
    convert(tmp_path / "raw", tmp_path / "out", ConvertConfig(caption_templates=["a photo of a {}."]))
    data = {"shards": str(tmp_path / "out"), "image_size": 32, "global_batch_size": 2}
    config = parse(Config, {"data": data, "model": {"name": "micro"}}, origin="test")
    of_val = config.data.model_copy(update={"val": ValConfig(shards=str(tmp_path / "out"))})
    assert named_classes(of_val) == Classes(classes=sorted(CLASSES), templates=["a photo of a {}."])
    convert(tmp_path / "raw", tmp_path / "other", ConvertConfig(caption_templates=["a {}."]))
    mixed = [{"shards": str(tmp_path / name)} for name in ("out", "other")]  # no template is that of both
    config = parse(
        Config, {**config.model_dump(), "data": {**data, "shards": mixed, "val": {"share": 0.9}}}, origin="test"
    )
    assert named_classes(config.data) == Classes(classes=sorted(CLASSES), templates=["{}"])


def named(folder: Path, images: list[bytes], classes: list[str]) -> str:
    """An index of tars whose labels are names, numbered as they come; a row for each class."""
    folder.mkdir()
    members = [(f"{i}.{e}", d) for i, c in enumerate(classes) for e, d in (("jpg", images[i]), ("cls", c.encode()))]
    (folder / "0.tar").write_bytes(make_tar(members))
    build_index(folder)
    return str(folder)


def test_a_mixture_in_which_a_label_means_two_classes_is_refused(tmp_path, images):
    first = named(tmp_path / "a", images, ["clock", "flag", "hand"])
    more = named(tmp_path / "b", images, ["clock", "flag", "hand", "moon"])
    other = named(tmp_path / "c", images, ["clock", "hand"])
    both = [{"shards": first}, {"shards": more}]
    assert len(Loader.from_config(settings(tmp_path, shards=both)).index) == 7
    with pytest.raises(
        ConfigError, match=r"^label 1 is 'flag' in '.*a' and 'hand' in '.*c': convert both sources toge"
    ):
        Loader.from_config(settings(tmp_path, shards=[*both, {"shards": other}]))


def test_classes_are_taken_by_the_names_of_the_labels_or_refused(tmp_path, images, caplog):
    train_tokenizer([f"a photo of a {name}" for name in CLASSES], tmp_path / "tokenizer", vocab_size=300)
    data = {**settings(tmp_path), "tokenizer": str(tmp_path / "tokenizer"), "max_length": 12}
    config = parse(Config, {"data": data, "model": {"name": "micro"}}, origin="test")
    tokenizer = need_tokenizer(config.data, to="test")
    model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size).eval()
    trained = TrainedRun(model, config, tokenizer, tmp_path / "x.pt", 1, 1)
    shards = named(tmp_path / "a", images, ["clock", "flag", "hand"])

    def scores(*classes: str) -> dict[str, Any]:
        return evaluate_shards(trained, ValConfig(shards=shards), Classes(classes=list(classes)))

    in_order = scores("clock", "flag", "hand", "moon")
    assert messages(caplog) == []
    assert scores("moon", "hand", "clock", "flag") == in_order
    assert "zero_shot_top1" in scores("Hand", "flag", "clock")
    assert "number their classes otherwise than --classes, which is taken by name" in messages(caplog)[-1]
    assert "zero_shot_top1" in scores("a clock", "a flag", "a hand")
    listed = "of other names or in another order: list the classes in the order of the shards: 'clock, flag, hand'$"
    with pytest.raises(DataError, match=rf"--classes has 3 classes, and shards '.*a' have 3, {listed}"):
        scores("flag", "clock", "a hand")
    with pytest.raises(DataError, match=rf"--classes has 4 classes, and shards '.*a' have 3, {listed}"):
        scores("a clock", "a flag", "a hand", "a moon")

    shards = named(tmp_path / "alike", images, ["Polar_bear", "cat", "polar bear"])
    assert "zero_shot_top1" in scores("Polar_bear", "cat", "polar bear")
    with pytest.raises(DataError, match="of other names or in another order: list the classes in the order of"):
        scores("polar bear", "cat", "dog")


def test_folders_with_and_without_captions_are_counted_by_rows(tmp_path, images):
    """Two captions for each row of one folder and none in the other are as many captions as rows."""
    for name, captions, label in (("captions", ["a cat", "a dog"], None), ("labels", [], 1)):
        with ShardWriter(tmp_path / name) as writer:
            for i in range(6):
                writer.write(Sample(f"{i}", images[i], probe(images[i]), captions, label))
    both = [{"shards": str(tmp_path / name), "weight": 1} for name in ("captions", "labels")]
    with Loader.from_config(settings(tmp_path, shards=both, image_buckets=[[16, 16], [16, 32]])) as loader:
        counts = loader.plan.rows.bucket_counts(loader.plan.policy, 0, np.arange(2))
        assert counts.sum(axis=1).tolist() == [6, 6]


def test_index_command_says_that_a_corpus_is_one_of_labels(tmp_path, photo):
    """Samples with a label are a corpus of labels, though their JSON may hold captions under another name."""
    members = [("0.jpg", photo(24, 24)), ("0.cls", b"1"), ("0.json", b'{"TEXT": "a dog"}')]
    (tmp_path / "tars/0.tar").write_bytes(make_tar(members))
    command = [sys.executable, "-m", "mmdata", "index", str(tmp_path / "tars")]
    done = run_program(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == (
        "captions: none, a corpus of labels; leave data.tokenizer out, or name their member with --caption"
    )
