"""Losses of the first numbers of features. The oracle is sentence-transformers' MatryoshkaLoss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import Tensor, nn
from torch.nn.functional import normalize

from mmdata.errors import ConfigError
from mmdata.train import ContrastiveLoss, DualEncoder, DualEncoderOutput, losses, miners
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small
from tests.train.compare import assert_equal, features, scalar, value_and_gradients

MINER = miners.Chain([miners.FalseNegativeMargin(0.01), miners.TopK(2)])


class GivesFeatures(nn.Module):
    """A model of sentence-transformers, as MatryoshkaLoss knows it."""

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": given["features"]}

    def get_embedding_dimension(self) -> int:
        return 6


@pytest.mark.parametrize("name", ["clip", "siglip", "multi_positive", "triplet"])
@pytest.mark.parametrize("miner", [None, MINER])
def test_matryoshka_is_that_of_sentence_transformers(name: Any, miner: Any):
    inputs = (*features(7), scalar(12.0), scalar(-3.0))
    scale, bias = inputs[2:]
    images, texts = (normalize(x, dim=1) for x in inputs[:2])  # its gradient has no part along the features; nor theirs
    batch: Any = {"valid": torch.arange(7) != 4, "caption_hash": torch.tensor([0, 1, 2, 0, 4, 5, 6])}

    class Whole(nn.Module):  # the loss of whole features, which MatryoshkaLoss calls with shorter ones
        def forward(self, given: list[dict[str, Tensor]], labels: Tensor) -> Tensor:
            found = [model(each)["sentence_embedding"] for each in given]
            return ContrastiveLoss(name, miner=miner)(DualEncoderOutput(found[0], found[1], scale, bias), batch)

    model = GivesFeatures()
    theirs = MatryoshkaLoss(model, Whole(), [6, 4, 2], matryoshka_weights=[1 / 3] * 3)  # type: ignore[arg-type]
    wanted = theirs([{"features": images}, {"features": texts}], torch.empty(0))
    loss = ContrastiveLoss(name, miner=miner, matryoshka=[2, 4])(DualEncoderOutput(images, texts, scale, bias), batch)
    assert_equal(value_and_gradients(loss, *inputs), value_and_gradients(wanted, *inputs))


def test_matryoshka_shortens_queue_negative_captions_and_distills_the_whole_teacher():
    queue = FeatureQueue(4)
    own = torch.arange(4)
    hashes: Any = {"valid": own >= 0, "image_hash": own, "caption_hash": own}
    queue.keep(DualEncoderOutput(*(x.detach() for x in features(4, seed=2))), hashes, 0)
    batch: Any = {**hashes, "image_hash": own + 4, "caption_hash": own + 4, "negative_caption_hash": own + 20}
    teacher = DualEncoderOutput(*features(4, 9, seed=5), torch.tensor(30.0))
    images, texts, captions = *features(4), features(4, seed=8)[0]

    def loss_of(settings: dict[str, Any], queue: FeatureQueue, *given: Tensor) -> Tensor:
        output = DualEncoderOutput(given[0], given[1], torch.tensor(9.0), None, given[2])
        return ContrastiveLoss("clip", queue=queue, distill={"teacher": "t"}, teacher=teacher, **settings)(
            output, batch
        )

    def short(x: Tensor) -> Tensor:
        return normalize(x[:, :3], dim=1)

    shortened = FeatureQueue(4)
    shortened.keep(DualEncoderOutput(*(short(x.detach()) for x in features(4, seed=2))), hashes, 0)
    given = (images, texts, captions)
    wanted = (loss_of({}, queue, *given) + loss_of({}, shortened, *map(short, given))) / 2
    found = loss_of({"matryoshka": [3]}, queue, *given)
    assert_equal(value_and_gradients(found, *given), value_and_gradients(wanted, *given))


def test_matryoshka_longer_than_the_features_is_refused(tmp_path: Path):
    images, texts = features(3)
    with pytest.raises(ValueError, match="matryoshka: the first 7 of features that have 6 numbers; lower it"):
        ContrastiveLoss(matryoshka=[7])(DualEncoderOutput(images, texts, scalar(1.0)), {"valid": torch.ones(3) > 0})  # type: ignore[arg-type]
    model = DualEncoder.from_config({"name": "micro", "embed_dim": 32}, vocab_size=300)
    config = small.train_config(matryoshka=[8, 32])
    with pytest.raises(ConfigError, match=r"train.matryoshka \[32\]: the model's features have 32 numbers, and are"):
        Trainer(model, small.SmallBatches(), config, output=tmp_path)
    for lengths, message in (([], "'matryoshka'"), ([4, 4], r"matryoshka \[4, 4\]: give each length once")):
        with pytest.raises(ConfigError, match=message):
            small.train_config(matryoshka=lengths)


def test_matryoshka_of_one_length_is_a_loss_of_its_own():
    inputs = (*features(5), scalar(9.0))
    short = [normalize(x[:, :2], dim=1) for x in inputs[:2]]
    wanted = (losses.clip_loss(*inputs) + losses.clip_loss(*short, inputs[2])) / 2
    found = ContrastiveLoss(matryoshka=[2])(DualEncoderOutput(*inputs), {"valid": torch.ones(5) > 0})  # type: ignore[arg-type]
    assert_equal([found], [wanted])
