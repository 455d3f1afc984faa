"""CLIP's and SigLIP's losses against implementations that are not ours; what a step's loss is, in test_objective.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.losses import NTXentLoss
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel
from transformers.models.clip.modeling_clip import image_text_contrastive_loss

from mmdata.train import losses, miners
from mmdata.train.losses import tiles
from tests.train.compare import assert_equal, features, scalar, value_and_gradients


def symmetric_cross_entropy(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    logits = scale * images @ texts.T
    targets = torch.arange(len(images))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def sigmoid_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = texts @ images.T * scale + bias
    signs = 2 * torch.eye(len(images), dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_clip_loss_equals_cross_entropy(scale: float, dtype: torch.dtype, tolerance: float):
    inputs = (*features(9, dtype=dtype), scalar(scale, dtype))
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    ours = value_and_gradients(losses.clip_loss(*inputs), *inputs)
    expected = value_and_gradients(symmetric_cross_entropy(*exact), *exact)
    assert_equal([x.double() for x in ours], expected, tolerance)


def test_clip_loss_equals_ntxent_of_pytorch_metric_learning():
    raw = tuple(x.detach().mul(3).requires_grad_() for x in features(8))
    images, texts = (F.normalize(x, dim=-1) for x in raw)  # as the oracle does inside
    labels, partners = torch.arange(8), torch.arange(8)  # two tensors: of one and the same it drops the diagonal
    oracle = NTXentLoss(temperature=1 / 14.0)
    image_to_text = oracle(images, labels, ref_emb=texts, ref_labels=partners)
    text_to_image = oracle(texts, labels, ref_emb=images, ref_labels=partners)
    expected = (image_to_text + text_to_image) / 2
    ours = losses.clip_loss(images, texts, scalar(14.0))
    assert_equal(value_and_gradients(ours, *raw), value_and_gradients(expected, *raw))


def test_clip_loss_equals_that_of_transformers():
    images, texts = features(9)
    scale = scalar(14.3)
    inputs = (images, texts, scale)
    ours = value_and_gradients(losses.clip_loss(*inputs), *inputs)
    assert_equal(ours, value_and_gradients(image_text_contrastive_loss(texts @ images.T * scale), *inputs))


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**SMALL, "image_size": 8, "patch_size": 4}
TEXT = {**SMALL, "vocab_size": 20, "max_position_embeddings": 6, "eos_token_id": 19, "projection_size": 8}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_losses_equal_those_of_whole_models_of_transformers(kind: str):
    torch.manual_seed(0)
    settings = {"text_config": TEXT, "vision_config": VISION}
    model = CLIPModel(CLIPConfig(**settings)) if kind == "clip" else SiglipModel(SiglipConfig(**settings))
    model = model.double().eval()
    if kind == "siglip":
        with torch.no_grad():
            model.logit_scale.fill_(2.0)
            model.logit_bias.fill_(-3.0)
    output = model(
        input_ids=torch.randint(0, 19, (5, 6)), pixel_values=torch.rand(5, 3, 8, 8).double(), return_loss=True
    )
    if kind == "clip":
        ours = losses.clip_loss(output.image_embeds, output.text_embeds, model.logit_scale.exp())
        parameters = dict(model.named_parameters())
    else:
        ours = losses.siglip_loss(
            output.image_embeds, output.text_embeds, model.logit_scale.exp(), model.logit_bias.squeeze()
        )
        parameters = dict(model.named_parameters())
        assert {"logit_scale", "logit_bias"} < parameters.keys()
    assert_equal(
        value_and_gradients(ours, *parameters.values()), value_and_gradients(output.loss, *parameters.values())
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (100.0, 3.0), (1.0, 40.0)])
def test_siglip_loss_equals_the_whole_matrix(scale: float, bias: float, dtype: torch.dtype, tolerance: float):
    inputs = (*features(7, dtype=dtype), scalar(scale, dtype), scalar(bias, dtype))
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    ours = value_and_gradients(losses.siglip_loss(*inputs), *inputs)
    expected = value_and_gradients(sigmoid_loss(*exact), *exact)
    assert_equal([x.double() for x in ours], expected, tolerance)


def test_equal_hashes_are_not_negatives():
    images, texts = features(4)
    s, b = scalar(7.0), scalar(-2.0)
    # Rows 0 and 2 share an image, rows 2 and 3 a caption.
    image_hash, caption_hash = torch.tensor([5, 6, 5, 7]), torch.tensor([1, 2, 3, 3])
    same = (image_hash, caption_hash)
    logits = s * images @ texts.T
    banned = torch.zeros(4, 4, dtype=torch.bool)
    for i, j in ((0, 2), (2, 3)):
        banned[i, j] = banned[j, i] = True
    masked, targets = logits.masked_fill(banned, -1e30), torch.arange(4)
    expected = (F.cross_entropy(masked, targets) + F.cross_entropy(masked.T, targets)) / 2
    inputs = (images, texts, s)
    ours = losses.clip_loss(*inputs, same=same)
    assert_equal(value_and_gradients(ours, *inputs), value_and_gradients(expected, *inputs))
    signs = 2 * torch.eye(4, dtype=torch.float64) - 1
    expected = -F.logsigmoid(signs * (logits + b)).masked_fill(banned, 0.0).sum() / 4
    ours = losses.siglip_loss(*inputs, b, same=same)
    assert_equal(value_and_gradients(ours, *inputs, b), value_and_gradients(expected, *inputs, b))


def masked_cross_entropy(images: Tensor, texts: Tensor, scale: Tensor, valid: Tensor, same: list[Tensor]) -> Tensor:
    """Of the valid rows alone, with the logits of false negatives far below all others."""
    logits = scale * images[valid] @ texts[valid].T
    targets = torch.arange(len(logits))
    for key in same:
        equal = (key[valid][:, None] == key[valid]) & (targets[:, None] != targets)
        logits = logits.masked_fill(equal, -1e30)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


@given(data=st.data(), rows=st.integers(1, 9), elements=st.integers(1, 90), scale=st.sampled_from([0.1, 5.0, 100.0]))
@settings(max_examples=60)
def test_clip_loss_is_the_masked_cross_entropy_for_any_masks_and_tiles(
    data: st.DataObject, rows: int, elements: int, scale: float
):
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows).filter(any)))
    keys = st.lists(st.integers(0, 4), min_size=rows, max_size=rows).map(torch.tensor)
    same = data.draw(st.lists(keys, max_size=2))
    inputs = (*features(rows, 3), scalar(scale))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
        ours = value_and_gradients(losses.clip_loss(*inputs, valid=valid, same=same), *inputs)
        mined = losses.clip_loss(*inputs, valid=valid, same=same, miner=miners.TopK(rows))
        by_rows = value_and_gradients(mined, *inputs)
    expected = value_and_gradients(masked_cross_entropy(*inputs, valid, same), *inputs)
    assert_equal(ours, expected, 1e-11)
    assert_equal(by_rows, expected, 1e-11)


def test_top_k_of_all_negatives_changes_nothing():
    images, texts = features(6)
    s, b = scalar(9.0), scalar(-4.0)
    for k in (5, 6, 1000):
        # Rows one by one with a miner, tiles without: the sums have another order.
        mined = losses.clip_loss(images, texts, s, miner=miners.TopK(k))
        torch.testing.assert_close(mined, losses.clip_loss(images, texts, s), rtol=0, atol=1e-12)
        mined = losses.siglip_loss(images, texts, s, b, miner=miners.TopK(k))
        torch.testing.assert_close(mined, losses.siglip_loss(images, texts, s, b), rtol=0, atol=1e-12)


def test_weight_two_counts_as_two_negatives():
    images, texts = features(3)
    s, b = scalar(3.0), scalar(-1.0)

    def twice(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return torch.full_like(scores, 2.0)

    logits = s * images @ texts.T
    off = ~torch.eye(3, dtype=torch.bool)
    own = logits.diagonal()

    def rows(logits: Tensor) -> Tensor:
        return (own.exp() + 2 * logits.exp().where(off, 0.0).sum(1)).log() - own

    expected = (rows(logits) + rows(logits.T)).mean() / 2
    assert_equal([losses.clip_loss(images, texts, s, miner=twice)], [expected])
    expected = (F.softplus(-(own + b)).sum() + 2 * F.softplus(logits + b).where(off, 0.0).sum()) / 3
    assert_equal([losses.siglip_loss(images, texts, s, b, miner=twice)], [expected])


def test_shapes_that_do_not_pair_are_errors():
    images, texts = features(4)
    with pytest.raises(ValueError, match=r"image_features \(4, 6\) and text_features \(3, 6\) must both be \(B, D\)"):
        losses.clip_loss(images, texts[:3], scalar(1.0))
    with pytest.raises(ValueError, match=r"valid has shape \(3,\), expected \(4,\): one entry a feature row"):
        losses.clip_loss(images, texts, scalar(1.0), valid=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"same has shape \(5,\), expected \(4,\)"):
        losses.siglip_loss(images, texts, scalar(1.0), scalar(0.0), same=[torch.arange(5)])
    with pytest.raises(ValueError, match=r"labels has shape \(5,\), expected \(4,\)"):
        losses.multi_positive_loss(images, texts, scalar(1.0), labels=torch.arange(5))
    with pytest.raises(ValueError, match=r"miner .* returned shape \(4, 1\), expected \(4, 4\)"):
        losses.clip_loss(images, texts, scalar(1.0), miner=lambda scores, positives, negatives: scores[:, :1])


def test_a_scale_that_is_no_number_is_an_error():
    images, texts = features(3)
    with pytest.raises(TypeError, match=r"^logit_scale must be a scalar tensor or a number: got str$"):
        losses.clip_loss(images, texts, "10")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^logit_bias must be one number: got a tensor of shape \(3,\)$"):
        losses.siglip_loss(images, texts, 10.0, torch.zeros(3))
    assert losses.clip_loss(images, texts, torch.tensor([10.0])) == losses.clip_loss(images, texts, 10)


def test_same_that_is_no_list_is_refused():
    features = torch.eye(4)
    said = (
        r"^same is a tensor of shape \(4,\), expected a list of int64 tensors \(4,\), such as \[batch\['image_hash'\], "
        r"batch\['caption_hash'\]\]: put one into a list, \[same\]$"
    )
    with pytest.raises(ValueError, match=said):
        losses.clip_loss(features, features, 20.0, same=torch.zeros(4))  # type: ignore[arg-type]
