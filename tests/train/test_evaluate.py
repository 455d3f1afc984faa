from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdata.batch import Batch
from mmdata.train.evaluation.embedding import embed
from mmdata.train.evaluation.evaluate import compositional, evaluate_retrieval, zero_shot
from mmdata.train.evaluation.retrieval import retrieval


def random_features(rows: int, seed: int, dim: int = 16) -> Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def recall_by_sorting(scores: np.ndarray, true: np.ndarray, k: int) -> float:
    """Share of rows with a true column among the k highest, by a full sort."""
    order = np.argsort(-scores, axis=1)[:, :k]
    return float(np.take_along_axis(true, order, axis=1).any(axis=1).mean())


@pytest.mark.parametrize("tile", [(1, 1000), (7, 5), (1000, 1), (1000, 1000)])
def test_retrieval_equals_a_full_sort(tile: tuple[int, int]):
    images, texts = random_features(60, 0), random_features(60, 1)
    texts = F.normalize(texts + 0.6 * images, dim=1)
    result = retrieval(images, texts, tile=tile)
    scores, true = (images @ texts.T).numpy(), np.eye(60, dtype=bool)
    for k in (1, 5, 10):
        assert result[f"image_to_text_r{k}"] == pytest.approx(recall_by_sorting(scores, true, k), abs=1e-12)
        assert result[f"text_to_image_r{k}"] == pytest.approx(recall_by_sorting(scores.T, true, k), abs=1e-12)
        assert result[f"chance_r{k}"] == pytest.approx(k / 60, abs=1e-12)


def test_retrieval_with_several_captions_an_image_equals_torchmetrics():
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    images, texts = random_features(20, 0), random_features(50, 1)
    image_ids, text_ids = torch.arange(20), torch.arange(50) % 20
    result = retrieval(images, texts, image_ids=image_ids, text_ids=text_ids)
    scores, true = images @ texts.T, image_ids[:, None] == text_ids[None, :]
    for k in (1, 5, 10):
        forth = [functional.retrieval_hit_rate(scores[i], true[i], top_k=k).item() for i in range(20)]
        back = [functional.retrieval_hit_rate(scores[:, j], true[:, j], top_k=k).item() for j in range(50)]
        assert result[f"image_to_text_r{k}"] == pytest.approx(np.mean(forth), abs=1e-6)
        assert result[f"text_to_image_r{k}"] == pytest.approx(np.mean(back), abs=1e-6)


def test_retrieval_chance_is_that_of_random_orders():
    image_ids, text_ids = torch.arange(20), torch.arange(60) % 20
    result = retrieval(random_features(20, 0), random_features(60, 1), image_ids=image_ids, text_ids=text_ids)
    # An image has 3 of 60 texts: 1 - (57 56 55 54 53) / (60 59 58 57 56); a text has 1 of 20 images: 5 / 20.
    assert result["chance_r1"] == pytest.approx(3 / 60)
    assert result["chance_r5"] == pytest.approx(max(1 - (55 * 54 * 53) / (60 * 59 * 58), 5 / 20))


def test_retrieval_literal_example():
    images = torch.eye(3)
    texts = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.8, 0.6]])  # the third is nearer to image 1
    result = retrieval(images, texts)
    assert result["image_to_text_r1"] == pytest.approx(1.0)  # image 2: 0.6 against 0 and 0
    assert result["text_to_image_r1"] == pytest.approx(2 / 3)
    assert result["text_to_image_r5"] == 1.0


def test_retrieval_ties_count_against_the_model():
    same = F.normalize(torch.randn(1, 512), dim=1).expand(37, -1)
    result = retrieval(same.clone(), same.clone())
    assert [result[f"{way}_r{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)] == [0.0] * 6


def test_retrieval_nan_counts_against_the_model():
    result = retrieval(torch.full((12, 4), torch.nan), random_features(12, 0, 4))
    assert result["image_to_text_r10"] == result["text_to_image_r10"] == 0.0


def test_retrieval_equal_captions_and_equal_images_are_no_mistakes():
    images = torch.eye(4)
    texts = torch.eye(4)[[1, 0, 3, 2]]  # each text is nearest to its neighbour's image
    assert retrieval(images, texts)["image_to_text_r1"] == 0.0
    ids = torch.tensor([[10, 7], [11, 7], [12, 8], [12, 9]])  # rows 0, 1: same caption; rows 2, 3: same image
    assert retrieval(images, texts, image_ids=ids, text_ids=ids)["image_to_text_r1"] == 1.0


def test_retrieval_refuses_ids_of_one_side():
    with pytest.raises(ValueError, match="image_ids and text_ids belong together: got one of them"):
        retrieval(random_features(2, 0), random_features(2, 0), image_ids=torch.arange(2))


def test_zero_shot_equals_nearest_mean_prompt():
    images, prompts = random_features(40, 0), random_features(12, 1).reshape(6, 2, 16)
    labels = torch.arange(40) % 7 - 1  # -1 … 5
    means = F.normalize(prompts.mean(1), dim=1).numpy()
    order = np.argsort(-images.numpy() @ means.T, axis=1)
    known = labels.numpy() >= 0
    hits = order == labels.numpy()[:, None]
    assert zero_shot(images, labels, prompts) == {
        "zero_shot_top1": pytest.approx(hits[known, :1].any(1).mean()),
        "zero_shot_top5": pytest.approx(hits[known, :5].any(1).mean()),
        "zero_shot_chance": pytest.approx(1 / 6),
    }


def test_zero_shot_ties_and_bad_labels():
    same = torch.ones(8, 4) / 2
    assert zero_shot(same, torch.arange(8), same.unsqueeze(1))["zero_shot_top5"] == 0.0
    with pytest.raises(ValueError, match="no row has a label"):
        zero_shot(same, torch.full((8,), -1), same.unsqueeze(1))
    with pytest.raises(ValueError, match="label 7 has no class: 3 classes were given, 0 to 2"):
        zero_shot(same, torch.arange(8), same[:3].unsqueeze(1))
    with pytest.raises(ValueError, match="labels has dtype float32, expected integers"):
        zero_shot(same, torch.arange(8.0), same.unsqueeze(1))
    for images, labels, prompts in ((8, 8, (0, 1, 4)), (8, 8, (8, 0, 4)), (8, 7, (8, 1, 4)), (8, 9, (8, 1, 4))):
        with pytest.raises(ValueError, match="needs a label for each image, and a prompt for each class at least: got"):
            zero_shot(same[:images], torch.zeros(labels, dtype=torch.long), torch.zeros(prompts))


def features_with_scores(scores: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Images and texts of one pair with image i · text j = scores[i][j]."""
    return torch.tensor(scores), torch.eye(2)


@pytest.mark.parametrize(
    ("scores", "accuracy", "text", "image", "group"),
    [
        ([[0.9, 0.1], [0.2, 0.8]], 1.0, 1, 1, 1),
        ([[0.9, 0.8], [0.1, 0.7]], 1.0, 1, 0, 0),  # text: .9>.8, .7>.1; image: .9>.1, but .7<.8
        ([[0.5, 0.6], [0.4, 0.9]], 0.5, 0, 1, 0),  # text: .5<.6; image: .5>.4, .9>.6
        ([[0.1, 0.9], [0.8, 0.2]], 0.0, 0, 0, 0),
        ([[0.5, 0.5], [0.5, 0.5]], 0.0, 0, 0, 0),  # ties
        ([[0.7, 0.3], [0.7, 0.3]], 0.5, 0, 0, 0),  # a text-only model: one image right, one wrong
    ],
)
def test_compositional_scores_of_literal_pairs(
    scores: list[list[float]], accuracy: float, text: int, image: int, group: int
):
    expected = {"accuracy": accuracy, "text": text, "image": image, "group": group, "pairs": 1}
    assert compositional(*features_with_scores(scores), ["swap"]) == {"swap": expected, "mean": expected}


def test_compositional_mean_weighs_types_alike():
    right, wrong = features_with_scores([[0.9, 0.1], [0.2, 0.8]]), features_with_scores([[0.1, 0.9], [0.8, 0.2]])
    images, texts = (torch.cat(parts) for parts in zip(right, wrong, wrong, strict=True))
    result = compositional(images, texts, ["size", "colour", "colour"])
    assert (result["size"]["accuracy"], result["colour"]["accuracy"], result["mean"]["accuracy"]) == (1.0, 0.0, 0.5)
    assert (result["colour"]["pairs"], result["mean"]["pairs"]) == (2, 3)
    assert list(result) == ["colour", "size", "mean"]
    with pytest.raises(ValueError, match="2 pairs need 4 images and captions: got 6 and 6"):
        compositional(images, texts, ["size", "colour"])


def test_compositional_with_one_image_counts_the_true_caption():
    right, wrong = features_with_scores([[0.9, 0.1], [0.9, 0.1]]), features_with_scores([[0.1, 0.9], [0.1, 0.9]])
    images, texts = (torch.cat(parts) for parts in zip(right, right, wrong, strict=True))
    result = compositional(images, texts, ["swap_att", "swap_att", "add_att"], one_image=True)
    assert result == {
        "add_att": {"accuracy": 0.0, "pairs": 1},
        "swap_att": {"accuracy": 1.0, "pairs": 2},
        "mean": {"accuracy": 0.5, "pairs": 3},
    }


def test_compositional_of_no_pair_says_so():
    with pytest.raises(ValueError, match="compositional scores of 0 pairs: give at least one pair"):
        compositional(torch.zeros(0, 4), torch.zeros(0, 4), [])


class FirstPixels(nn.Module):
    """Features are read off the batch, so that the test knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch["pixel_values"][:, :, 0, 0].float() * self.scale, batch["input_ids"].float() * self.scale


def make_batch(rows: list[int], valid: list[bool]) -> Batch:
    numbers = torch.tensor(rows)
    vectors = F.one_hot(numbers.clamp(min=0) % 3, 3)
    return Batch(
        pixel_values=vectors[:, :, None, None].to(torch.uint8),
        input_ids=vectors,
        attention_mask=torch.ones(len(rows), 3, dtype=torch.long),
        image_hash=numbers,
        caption_hash=numbers % 3,
        labels=numbers,
        valid=torch.tensor(valid),
        rows=numbers,
        keys=[str(row) for row in rows],
    )


def test_embed_leaves_masked_rows_out():
    batches = [make_batch([0, 1, 2], [True, True, False]), make_batch([3, 4, -1], [True, True, False])]
    features = embed(FirstPixels(), batches)
    assert features.rows.tolist() == [0, 1, 3, 4]
    assert features.image.tolist() == features.text.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert features.labels is not None
    assert features.labels.tolist() == [0, 1, 3, 4]
    assert features.ids is not None
    assert features.ids.tolist() == [[0, 0], [1, 1], [3, 0], [4, 1]]
    assert not features.image.requires_grad
    scores = evaluate_retrieval(FirstPixels(), batches)
    assert (scores["rows"], scores["image_to_text_r1"]) == (4, 1.0), "rows 0 and 3 have the same caption"
    with pytest.raises(ValueError, match="no batches to evaluate on"):
        embed(FirstPixels(), [])
    with pytest.raises(ValueError, match="retrieval over 0 rows: no row of the batches is valid"):
        evaluate_retrieval(FirstPixels(), [make_batch([0, 1], [False, False])])


@pytest.mark.parametrize("name", ["labels", "image_hash", "caption_hash"])
def test_embed_refuses_keys_that_are_no_integers(name: str):
    batch = make_batch([0, 1, 2], [True, True, True])
    batch[name] = batch[name].float()
    with pytest.raises(ValueError, match=f"{name} has dtype float32, expected integers: as float32, different hashes"):
        embed(FirstPixels(), [batch])
