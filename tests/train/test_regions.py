"""Regions against phrases: the towers' features, the loss, what a run without them costs, and grounding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmdata.batch import Batch
from mmdata.config import Config, ModelConfig, TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError
from mmdata.train import DualEncoder, miners, train_step
from mmdata.train.evaluation.embedding import embed
from mmdata.train.evaluation.grounding import ground_phrases, grounding_scores
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.run.objective import ContrastiveLoss, check_loss, make_loss
from mmdata.train.run.rehearsal import _with_rows
from mmdata.train.run.trainer import Trainer
from tests.rounding import rounding
from tests.train import ranks
from tests.train import small_run as small
from tests.train.test_pretrained import config_of

CASE: dict[str, Any] = {"valid": [[1, 1, 0, 1]], "regions": True}
REGIONS = {"regions": {"weight": 0.5}}
TARGETS = {"boxes": "json:boxes", "box_texts": "json:boxes.phrase"}


def towers(kind: str) -> DualEncoder:
    """Random towers with patches of 8 pixels."""
    torch.manual_seed(0)
    settings = {"name": kind} if kind == "micro" else {"name": "pretrained", "clip": config_of(kind)}
    model = DualEncoder.from_config(settings, vocab_size=ranks.VOCABULARY)
    model.compare_regions()
    return model.double()


def dense(regions: Tensor, phrases: Tensor, scale: Tensor, batch: Batch) -> Tensor:
    """InfoNCE over the boxes that count, whose equal phrases are no negatives, written out."""
    counts = (batch["boxes_valid"] & (batch["box_text_hash"] != 0)).flatten()
    images, texts, keys = (x.flatten(0, 1)[counts] for x in (regions, phrases, batch["box_text_hash"]))
    others = (keys[:, None] == keys) & ~torch.eye(len(keys), dtype=torch.bool)
    logits, targets = (scale * images @ texts.T).masked_fill(others, -torch.inf), torch.arange(len(keys))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def test_loss_is_that_of_images_plus_weight_times_that_of_regions():
    batch, model = ranks.make_batch(0, CASE), ranks.make_model(0.0)
    output = model(batch)
    loss = ContrastiveLoss("clip", mask_false_negatives=False, **REGIONS)
    alone = ContrastiveLoss("clip", mask_false_negatives=False)(output, batch)
    expected = dense(output.region_features, output.phrase_features, output.logit_scale, batch)
    torch.testing.assert_close(loss(output, batch), alone + 0.5 * expected, rtol=1e-12, atol=1e-12)
    assert loss.region_loss is not None
    torch.testing.assert_close(loss.region_loss, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
@pytest.mark.parametrize("miner", [None, miners.TopK(2)])
def test_gradients_are_those_of_the_dense_loss(micro_batch_size: int | None, miner: miners.TopK | None):
    batch, model = ranks.make_batch(0, CASE), ranks.make_model(0.0)
    loss = ContrastiveLoss("clip", mask_false_negatives=False, region_miner=miner, **REGIONS)
    output = model(batch)
    expected = loss(output, batch)
    if miner is None:
        expected = ContrastiveLoss("clip", mask_false_negatives=False)(output, batch) + 0.5 * dense(
            output.region_features, output.phrase_features, output.logit_scale, batch
        )
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if name != "logit_bias"}
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    model.zero_grad()
    train_step(model, batch, loss, micro_batch_size=micro_batch_size)
    for name, gradient in gradients.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, rtol=0, atol=1e-12)


def test_miner_of_regions_chooses_their_negatives_alone():
    batch, output = ranks.make_batch(0, CASE), ranks.make_model(0.0)(ranks.make_batch(0, CASE))
    both = [ContrastiveLoss("clip", region_miner=miner, **REGIONS) for miner in (None, miners.TopK(1))]
    losses = [loss(output, batch) for loss in both]
    assert losses[0] > losses[1]
    torch.testing.assert_close(
        losses[0] - 0.5 * both[0].region_loss, losses[1] - 0.5 * both[1].region_loss, rtol=1e-12, atol=1e-12
    )


def test_miner_of_regions_begins_with_the_others():
    config = TrainConfig.model_validate({"regions": {"miner": {"name": "top_k", "k": 3}}, "mining_after_steps": 5})
    assert make_loss(4, config).region_miner is None
    assert make_loss(5, config).region_miner == miners.TopK(3)
    with pytest.raises(ConfigError, match=r"train\.regions\.miner\.target 'none_such:A': cannot be imported"):
        check_loss(
            TrainConfig.model_validate({"regions": {"miner": {"name": "user", "target": "none_such:A"}}}),
            has_bias=False,
        )


@pytest.mark.parametrize("kind", ["micro", "clip", "siglip", "siglip2"])
def test_regions_of_towers_see_their_box_and_leave_the_image_as_it_was(kind: str):
    model, batch = towers(kind).eval(), ranks.make_batch(0, CASE)
    inputs = batch["pixel_values"]
    whole = torch.tensor([0.0, 0.0, 16.0, 16.0]).expand(ranks.ROWS, 1, 4)
    corner = torch.tensor([0.0, 0.0, 7.0, 7.0]).expand(ranks.ROWS, 1, 4)
    with torch.no_grad():
        images, regions = model.encode_regions(inputs, torch.cat([whole, corner], dim=1))
        torch.testing.assert_close(images, model.encode_image(inputs), rtol=0, atol=1e-12)
    assert regions.shape == (ranks.ROWS, 2, images.shape[1])
    torch.testing.assert_close(regions.norm(dim=2), torch.ones(ranks.ROWS, 2, dtype=torch.float64))
    assert (regions[:, 0] - regions[:, 1]).norm(dim=1).min() > 1e-3
    if kind == "micro":  # the image is the mean of its patches, and so is the box of all of it
        torch.testing.assert_close(regions[:, 0], images, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2"])
def test_regions_of_pretrained_towers_train_all_that_makes_them(kind: str):
    model, batch = towers(kind), ranks.make_batch(0, CASE)
    loss = ContrastiveLoss("siglip" if model.logit_bias is not None else "clip", **REGIONS)
    train_step(model, batch, loss, micro_batch_size=3)
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


def test_boxes_of_native_patches_are_those_of_the_same_image():
    model = towers("siglip2").eval()
    images = torch.randint(0, 256, (2, 3, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[[1.0, 2.0, 15.0, 14.0]], [[9.0, 0.0, 24.0, 8.0]]])
    patches, mask, shapes = model.image_tower._cut(images)
    padded = F.pad(patches, (0, 0, 0, 3)), F.pad(mask, (0, 3)), shapes
    with torch.no_grad():
        expected = model.encode_regions(images, boxes)
        found = model.encode_regions(padded[0], boxes, *padded[1:])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_of_an_update(batch: Batch, *, asked: bool) -> Counter[str]:
    model = ranks.make_model(0.0)
    model.compares_regions = asked
    with Operators() as counted:
        train_step(model, batch, ContrastiveLoss("clip", **(REGIONS if asked else {})))
    return counted.seen


def test_regions_cost_nothing_where_they_are_not_asked_for():
    batch, plain = ranks.make_batch(0, CASE), ranks.make_batch(0, {**CASE, "regions": False})
    expected = operators_of_an_update(plain, asked=False)
    assert operators_of_an_update(batch, asked=False) == expected
    assert operators_of_an_update(batch, asked=True).total() > expected.total()


def test_model_gives_no_regions_of_batches_without_boxes():
    output = ranks.make_model(0.0)(ranks.make_batch(0, {**CASE, "regions": False}))
    assert (output.region_features, output.phrase_features) == (None, None)


def test_output_without_regions_is_an_error():
    batch = ranks.make_batch(0, CASE)
    model = ranks.make_model(0.0)
    model.compares_regions = False
    loss = ContrastiveLoss("clip", **REGIONS)
    with pytest.raises(ValueError, match=r"train.regions: the model's output has no region_features: set data.targets"):
        loss(model(batch), batch)
    del batch["boxes_valid"]
    with pytest.raises(ValueError, match=r"train.regions: the batch has no boxes with phrases: set data.targets.boxes"):
        loss(model(batch), batch)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {}},
            "train.regions compares boxes with their phrases: set data.targets.boxes and data.targets.box_t",
        ),
        ({"data": {"targets": {"boxes": "json:boxes"}}}, "train.regions compares boxes with their phrases"),
        (
            {"data": {"targets": TARGETS}, "model": {"patch_dropout": 0.5}},
            r"train.regions pools regions from all patches, and model.patch_dropout 0.5 leaves some out: set mod",
        ),
    ],
)
def test_settings_that_regions_need_are_checked(sections: dict[str, Any], message: str):
    data = {"shards": "s", "tokenizer": "t", "global_batch_size": 4, "image_size": 16, **sections["data"]}
    with pytest.raises(ConfigError, match=message):
        parse(Config, {**sections, "data": data, "train": {"regions": {}}}, origin="x.yaml")


def test_image_tower_without_patches_is_an_error_before_the_run(tmp_path: Path):
    model = DualEncoder(torch.nn.Flatten(), torch.nn.Embedding(5, 4))
    with pytest.raises(ConfigError, match=r"train.regions: Flatten has no patches .* take a CLIP, SigLIP or SigLIP 2"):
        Trainer(model, small.SmallBatches(), small.train_config(regions={}), output=tmp_path)


def test_rehearsed_batch_has_boxes_that_count():
    batch = ranks.make_batch(0, {**CASE, "valid": [[0, 0, 0, 0]]})
    batch["boxes_valid"].zero_()
    rehearsed = _with_rows(batch)
    assert rehearsed["boxes_valid"].all()
    assert len(rehearsed["box_text_hash"].unique()) == rehearsed["box_text_hash"].numel()
    assert not (rehearsed["box_text_hash"] == 0).any()


def features_of(cosines: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Regions that are unit vectors, and phrases with these cosines to them: (1, M, D) each."""
    phrases = torch.tensor([cosines])
    rest = (1 - phrases.pow(2).sum(2, keepdim=True)).sqrt()
    regions = F.pad(torch.eye(len(cosines)), (0, 1))[None]
    return regions, torch.cat([phrases, rest], dim=2)


@pytest.mark.parametrize(
    ("cosines", "valid", "hashes", "expected"),
    [
        ([[0.9, 0.1], [0.2, 0.8]], [1, 1], [5, 6], (2, 1.0, 2)),
        ([[0.1, 0.9], [0.2, 0.8]], [1, 1], [5, 6], (1, 1.0, 2)),
        ([[0.5, 0.5], [0.5, 0.5]], [1, 1], [5, 6], (0, 1.0, 2)),  # a tie is no answer
        ([[float("nan"), 0.1], [0.2, 0.8]], [1, 1], [5, 6], (1, 1.0, 2)),
        ([[0.9, 0.1], [0.2, 0.8]], [1, 0], [5, 0], (0, 0.0, 0)),  # an only box cannot fail
        ([[0.1, 0.9], [0.9, 0.1]], [1, 1], [5, 5], (0, 0.0, 0)),  # nor can equal phrases
        ([[0.1, 0.7, 0.2], [0.6, 0.1, 0.2], [0.1, 0.1, 0.5]], [1, 1, 1], [5, 5, 6], (3, 5 / 3, 3)),
        ([[0.3, 0.7, 0.2], [0.1, 0.2, 0.3], [0.1, 0.1, 0.5]], [1, 1, 1], [5, 0, 6], (1, 2 / 3, 2)),  # no phrase
    ],
)
def test_grounding_counts_phrases_that_find_their_box(
    cosines: list[list[float]], valid: list[int], hashes: list[int], expected: tuple[float, float, float]
):
    given = (torch.tensor([valid]).bool(), torch.tensor([hashes]))
    regions, phrases = features_of(cosines)
    counts = ground_phrases(regions, phrases, *given)
    torch.testing.assert_close(counts, torch.tensor([expected]), rtol=0, atol=rounding(3.0, sums=8))


def test_grounding_scores_are_shares_of_the_phrases():
    counts = torch.tensor([[1.0, 0.5, 2.0], [2.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    assert grounding_scores(counts) == {"grounding_accuracy": 0.75, "grounding_chance": 0.375, "phrases": 4}
    assert grounding_scores(torch.zeros(2, 3)) == {}


def test_embedding_grounds_the_phrases_of_valid_rows():
    model, batches = (
        ranks.make_model(0.0).float().eval(),
        [ranks.make_batch(rank, CASE | {"valid": CASE["valid"] * 2}) for rank in range(2)],
    )
    found = embed(model, batches).grounding
    assert found is not None
    assert found.shape == (6, 3)
    with torch.no_grad():
        outputs = [model(batch) for batch in batches]
    expected = torch.cat(
        [
            ground_phrases(o.region_features, o.phrase_features, b["boxes_valid"], b["box_text_hash"])[b["valid"]]
            for o, b in zip(outputs, batches, strict=True)
        ]
    )
    assert found.equal(expected)
    model.compares_regions = False
    assert embed(model, batches).grounding is None


def test_output_of_a_model_of_ones_own_may_have_no_regions():
    features = F.normalize(torch.ones(2, 3), dim=1)
    assert DualEncoderOutput(features, features)[5:] == (None, None)


@pytest.mark.parametrize("kind", ["micro", "clip", "siglip", "siglip2"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.01), (torch.float16, 0.001)])
def test_autocast_gives_regions_and_losses_near_those_of_float32(kind: str, dtype: torch.dtype, bound: float):
    model, batch = towers(kind).float(), ranks.make_batch(0, CASE)
    loss = ContrastiveLoss("clip" if model.logit_bias is None else "siglip", **REGIONS)
    exact = loss(model(batch), batch).detach(), loss.region_loss
    step = train_step(model, batch, loss, autocast_dtype=dtype)
    assert step.output.region_features.dtype == step.output.phrase_features.dtype == torch.float32
    for found, expected in zip((step.loss, loss.region_loss), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=0)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["micro", "clip", "siglip", "siglip2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_batch_without_a_box_trains_on_its_images_alone(kind: str, dtype: torch.dtype | None):
    model, batch = towers(kind).float(), ranks.make_batch(0, CASE)
    for name in ("boxes", "boxes_valid", "box_input_ids", "box_attention_mask", "box_text_hash"):  # as the loader's
        batch[name].zero_()
    loss = ContrastiveLoss("clip" if model.logit_bias is None else "siglip", **REGIONS)
    step = train_step(model, batch, loss, autocast_dtype=dtype)
    assert loss.region_loss == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())
    alone = ContrastiveLoss(loss.config.loss)
    torch.testing.assert_close(step.loss, alone(step.output, batch).detach(), rtol=rounding(1.0, sums=64), atol=0)


def test_model_config_needs_no_new_weights():
    assert (
        towers("micro").state_dict().keys()
        == DualEncoder.from_config(ModelConfig(name="micro"), vocab_size=ranks.VOCABULARY).state_dict().keys()
    )
