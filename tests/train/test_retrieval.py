"""Retrieval with several captions an image, against what CLIP_benchmark counts; from features, and from shards."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from mmdata import Batch, Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError
from mmdata.text.tokenizer import Tokenizer
from mmdata.train.evaluation.embedding import EvaluatedTexts, Features, embed
from mmdata.train.evaluation.evaluate import evaluate_retrieval, score_retrieval
from mmdata.train.evaluation.retrieval import retrieval

IMAGES, CAPTIONS = 24, 4


def features(images: int, image_of_text: Tensor, *, seed: int = 0, noise: float = 1.6) -> tuple[Tensor, Tensor]:
    """Images, and texts that lie near their images, (., 16)."""
    generator = torch.Generator().manual_seed(seed)
    means = F.normalize(torch.randn(images, 16, generator=generator), dim=1)
    drawn = torch.randn(len(image_of_text), 16, generator=generator)
    return means, F.normalize(means[image_of_text] + noise * F.normalize(drawn, dim=1), dim=1)


def clip_benchmark(images: Tensor, texts: Tensor, image_of_text: Tensor) -> dict[str, float]:
    """Recalls as LAION's CLIP_benchmark defines them (zeroshot_retrieval.py), from the whole matrix of scores.

    A text's positive is its one image, an image's positives are all its texts; a query counts as right where at least
    one of its positives is among the k highest of its scores.
    """
    scores = texts.double() @ images.double().T  # (M, N)
    positive = F.one_hot(image_of_text, len(images)).bool()
    found: dict[str, float] = {}
    for name, of_queries, right in (("text_to_image", scores, positive), ("image_to_text", scores.T, positive.T)):
        for k in (1, 5, 10):
            top = of_queries.topk(min(k, of_queries.shape[1]), dim=1).indices
            found[f"{name}_r{k}"] = right.gather(1, top).any(dim=1).double().mean().item()
    return found


def recalls(scores: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if "_to_" in name}


@pytest.mark.parametrize("images", [1, 7, 60])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sweep(keep=2)
def test_retrieval_counts_several_captions_as_clip_benchmark_does(images: int, seed: int):
    counts = torch.randint(1, 8, (images,), generator=torch.Generator().manual_seed(seed))
    image_of_text = torch.arange(images).repeat_interleave(counts)
    image_of_text = image_of_text[torch.randperm(len(image_of_text), generator=torch.Generator().manual_seed(seed))]
    pair = features(images, image_of_text, seed=seed)
    expected = clip_benchmark(*pair, image_of_text)
    for tile in ((1024, 65_536), (3, 5)):
        found = retrieval(*pair, image_ids=torch.arange(images), text_ids=image_of_text, tile=tile)
        assert recalls(found) == pytest.approx(expected, abs=1e-12)
    if images == 60:
        assert 0 < expected["text_to_image_r1"] < expected["text_to_image_r5"] < 1


def test_rows_of_equal_images_are_captions_of_one_image():
    """One row a caption: each image was there once a caption, and R@5 of the texts was R@1."""
    image_of_row = torch.arange(20).repeat_interleave(5)
    images, texts = features(20, image_of_row)
    expected = clip_benchmark(images, texts, image_of_row)
    assert expected["text_to_image_r1"] < expected["text_to_image_r5"]
    hashes = torch.randperm(2**20, generator=torch.Generator().manual_seed(1))[:20] - 2**19
    ids = torch.stack([hashes[image_of_row], torch.arange(100)], dim=1)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    rows = Features(images[image_of_row][order], texts[order], torch.arange(100), None, ids[order])
    scores = score_retrieval(rows)
    assert recalls(scores) == pytest.approx(expected, abs=1e-12)
    assert (scores["rows"], scores["images"], scores["texts"]) == (100, 20, 100)
    without = score_retrieval(Features(rows.image, rows.text, rows.rows, None, None))
    assert (without["images"], without["texts"]) == (100, 100)


def test_equal_captions_of_two_images_are_true_of_both():
    images = torch.eye(4)
    texts = torch.eye(4)[[1, 0, 2, 2, 3]]  # texts 0 and 1 lie at each other's image; 2 and 3 are of images 2 and 3
    captions = EvaluatedTexts(texts, torch.tensor([0, 1, 2, 3, 3]), torch.tensor([7, 7, 8, 9, 5]))
    ids = torch.tensor([[1, 7], [2, 7], [3, 8], [4, 9]])
    scores = score_retrieval(Features(images, images, torch.arange(4), None, ids, captions))
    assert (scores["images"], scores["texts"]) == (4, 5)
    # Text 3 lies at image 2, and ties there with the text of image 2.
    assert (scores["text_to_image_r1"], scores["image_to_text_r1"]) == (4 / 5, 3 / 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"image_ids": torch.tensor([0, 1]), "text_ids": torch.tensor([0, 0, 0])},
            "row 1 has no match: its ids occur on its side only",
        ),
        (
            {"image_ids": torch.tensor([0, 1]), "text_ids": torch.tensor([0.0, 1, 1])},
            "text_ids has dtype float32, expected integers",
        ),
        (
            {"image_ids": torch.tensor([0, 1, 1]), "text_ids": torch.tensor([0, 1, 1])},
            r"image_ids has shape \(3,\), expected one entry for each of 2 rows",
        ),
        (
            {"image_ids": torch.zeros(2, 2, dtype=torch.long), "text_ids": torch.tensor([0, 1, 1])},
            r"image_ids \(2, 2\) and text_ids \(3, 1\): as many ids for an image as for a text",
        ),
        ({}, "2 images and 3 texts: say with image_ids and text_ids which belong together"),
    ],
)
def test_retrieval_refuses_what_does_not_say_what_belongs_together(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        retrieval(*features(2, torch.tensor([0, 1, 1])), **arguments)


@pytest.mark.parametrize(("images", "texts"), [(0, 0), (0, 3), (3, 0)])
def test_retrieval_of_nothing_says_so(images: int, texts: int):
    with pytest.raises(ValueError, match=f"retrieval needs an image and a text at least: got {images} images and"):
        retrieval(torch.zeros(images, 4), torch.zeros(texts, 4))


def caption(image: int, number: int) -> str:
    return f"number {number} of picture {image}" + " again" * (image % 3)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images and captions twice: a row an image with all its captions, and a row a caption; by name."""
    folder = tmp_path_factory.mktemp("captions")
    lines: dict[str, list[dict[str, Any]]] = {"lists": [], "rows": []}
    for image in range(IMAGES):
        name = f"{image:02d}.png"
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16), (10 * image, 0, 0)).save(buffer, "PNG")
        (folder / name).write_bytes(buffer.getvalue())
        own = [caption(image, number) for number in range(1 + image % CAPTIONS)]
        lines["lists"].append({"path": name, "captions": own})
        lines["rows"] += [{"path": name, "caption": text} for text in own]
    for name, rows in lines.items():
        table = folder / f"{name}.jsonl"
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        convert(table, folder / name, ConvertConfig(train_tokenizer=320, keep_duplicates=True))
    return {name: folder / name for name in lines}


def loader_over(shards: Path, **changes: Any) -> Loader:
    data = {"shards": str(shards), "tokenizer": str(shards / "tokenizer"), "global_batch_size": 7, "image_size": 16}
    data |= {
        "transform": "eval",
        "shuffle": False,
        "loading": {"num_workers": 0},
        "text_buckets": 2,
    }
    return Loader.from_config(data | changes)


class Known(nn.Module):
    """Has a feature for each image and each caption of the corpora, so that the test knows them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        texts = [(image, caption(image, n)) for image in range(IMAGES) for n in range(1 + image % CAPTIONS)]
        self.image_of_text = torch.tensor([image for image, _ in texts])
        self.images, self.texts = features(IMAGES, self.image_of_text)
        self.number = {(): 0}  # a row that fills a batch up
        for i, (_, text) in enumerate(texts):
            self.number[self.words(tokenizer.encode([text], 77)[0][0], tokenizer.pad_id)] = i
        self.pad_id = tokenizer.pad_id
        self.scale = nn.Parameter(torch.ones(()))
        self.most_texts = 0

    @staticmethod
    def words(ids: Any, pad_id: int) -> tuple[int, ...]:
        return tuple(int(i) for i in ids if i != pad_id)

    def encode_text(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.most_texts = max(self.most_texts, len(ids))
        return torch.stack([self.texts[self.number[self.words(row, self.pad_id)]] for row in ids.tolist()])

    def forward(self, batch: Batch) -> tuple[Tensor | None, ...]:
        images = self.images[batch["pixel_values"][:, 0, 0, 0].long() // 10]
        return images, self.encode_text(batch["input_ids"], batch["attention_mask"]), self.scale


class OnlyForward(nn.Module):
    """A model that has no other method."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        return self.model(batch)


@pytest.mark.parametrize("shape", ["lists", "rows"])
def test_evaluation_counts_all_captions_of_both_shapes_of_data(corpora: dict[str, Path], shape: str):
    loader = loader_over(corpora[shape])
    model = Known(loader.builder.spec.tokenizer)
    expected = clip_benchmark(model.images, model.texts, model.image_of_text)
    assert 0 < expected["text_to_image_r1"] < expected["text_to_image_r5"] < 1
    scores = evaluate_retrieval(model, loader)
    assert recalls(scores) == pytest.approx(expected, abs=1e-12)
    texts = len(model.texts)
    assert (scores["rows"], scores["images"], scores["texts"]) == (IMAGES if shape == "lists" else texts, IMAGES, texts)
    assert model.most_texts <= 7, "no more texts at a time than a batch has rows"


def test_evaluation_counts_all_captions_in_any_epoch_and_without_hashes(corpora: dict[str, Path]):
    loader = loader_over(corpora["lists"])
    model = Known(loader.builder.spec.tokenizer)
    expected = clip_benchmark(model.images, model.texts, model.image_of_text)
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        hashes = ("image_hash", "caption_hash")  # a loader of your own has none
        wrapped = ({name: value for name, value in batch.items() if name not in hashes} for batch in loader)
        assert recalls(evaluate_retrieval(model, wrapped, source=loader)) == pytest.approx(expected, abs=1e-12)
    assert embed(model, iter(loader)).captions is None, "batches alone know of one caption a row"


def test_evaluation_needs_a_model_that_embeds_further_captions(corpora: dict[str, Path]):
    model = OnlyForward(Known(loader_over(corpora["lists"]).builder.spec.tokenizer))
    with pytest.raises(ValueError, match=r"several captions, and OnlyForward has no method encode_text\(input_ids, "):
        evaluate_retrieval(model, loader_over(corpora["lists"]))
    assert evaluate_retrieval(model, loader_over(corpora["rows"]))["images"] == IMAGES


def test_evaluation_refuses_a_caption_that_changed(corpora: dict[str, Path], tmp_path: Path):
    shards = shutil.copytree(corpora["lists"], tmp_path / "changed")
    for tar in shards.rglob("*.tar"):
        tar.write_bytes(tar.read_bytes().replace(b"number 2 of picture 3", b"number 2 of picture 4"))
    loader = loader_over(shards)
    with pytest.raises(DataError, match=r"sample '.*': file_changed: .*; an evaluation needs all captions of the rows"):
        evaluate_retrieval(Known(loader.builder.spec.tokenizer), loader)


def test_evaluation_of_no_valid_row_says_so():
    nothing = Features(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), None, None)
    with pytest.raises(ValueError, match="retrieval over 0 rows: no row of the batches is valid"):
        score_retrieval(nothing)
