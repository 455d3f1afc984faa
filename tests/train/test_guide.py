"""A guide, whose joined features leave false negatives out. The oracle is sentence-transformers' GISTEmbedLoss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerFast

from mmdata.config.strict_yaml import parse
from mmdata.config.train import TrainConfig
from mmdata.errors import ConfigError
from mmdata.train import DualEncoderOutput
from mmdata.train.memory.kept import RunMemory
from mmdata.train.run.objective import make_loss
from tests.train import small_run as small
from tests.train.compare import assert_equal, features, scalar, value_and_gradients

FIELDS = {"fields": {"image": "image_emb", "text": "text_emb"}}


class Gives(nn.Module):
    """A model of sentence-transformers that gives the features that it is handed under a name."""

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    max_seq_length = 1

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": given[self.name]}


@pytest.mark.parametrize("margin", [0.0, 0.1, -0.2])
def test_guided_loss_is_that_of_gist_in_both_directions(margin: float, tmp_path: Path):
    inputs = features(9)
    own = [normalize(x, dim=1) for x in inputs]  # cosines have no gradient along the features
    guide_images, guide_texts = (x.detach() for x in features(9, 4, seed=3))
    batch: Any = {"valid": torch.ones(9, dtype=torch.bool), "image_emb": 3 * guide_images, "text_emb": guide_texts / 2}
    config = parse(TrainConfig, {"steps": 1, "teacher": {**FIELDS, "margin": margin}}, origin="c")
    memory = RunMemory(config, small.small_model(), small.SmallBatches(), tmp_path)
    assert memory.teacher is None  # no moving average is kept, and no forward made
    loss = make_loss(0, config, memory.teacher_mask(batch, 0))(DualEncoderOutput(*own, scalar(25.0)), batch)
    # Pairs of two images or two texts are no pairs of CLIP.
    only_pairs: Any = {"contrast_anchors": False, "contrast_positives": False, "margin": margin, "temperature": 1 / 25}
    gist = GISTEmbedLoss(Gives("own"), Gives("guide"), **only_pairs)  # type: ignore[arg-type]
    images, texts = {"own": own[0], "guide": guide_images}, {"own": own[1], "guide": guide_texts}
    empty = torch.empty(0)
    wanted = (gist([images, texts], empty) + gist([texts, images], empty)) / 2
    assert_equal(value_and_gradients(loss, *inputs), value_and_gradients(wanted, *inputs))


def test_guide_keeps_the_negatives_of_rows_that_it_has_no_features_of(tmp_path: Path):
    guide = torch.eye(3)[[0, 0, 1]]  # the first two describe each other
    batch: Any = {"image_emb": guide.clone(), "text_emb": guide.clone(), "valid": torch.ones(3, dtype=torch.bool)}
    config = parse(TrainConfig, {"steps": 1, "teacher": FIELDS}, origin="c")
    memory = RunMemory(config, small.small_model(), small.SmallBatches(), tmp_path)

    def kept() -> list[list[bool]]:
        mask = memory.teacher_mask(batch, 0)
        assert mask is not None
        off = ~torch.eye(3, dtype=torch.bool)
        return mask.block("image", slice(0, 3))(torch.zeros(3, 3), ~off, off).tolist()

    assert kept() == [[False, False, True], [False, False, True], [True, True, False]]
    batch["text_emb"][1] = torch.nan
    assert kept() == [[False, True, True], [True, False, True], [True, True, False]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": None}, r"teacher.margin null leaves no negative out"),
        ({"decay": 0.5}, r"teacher.decay is of a moving average, and teacher.fields of a frozen guide: give one"),
    ],
)
def test_a_guide_needs_a_margin_and_has_no_decay(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(TrainConfig, {"queue": 8, "teacher": {**FIELDS, **change}}, origin="c")
