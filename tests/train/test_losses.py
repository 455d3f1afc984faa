from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss
from torch import Tensor
from torch.autograd import gradcheck

from mmdata.train import losses, miners, tiles
from mmdata.train.model import DualEncoderOutput
from mmdata.train.objective import ContrastiveLoss


def features(rows: int, width: int = 6, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pair = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    images, texts = (F.normalize(x, dim=-1).requires_grad_() for x in pair)
    return images, texts


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def value_and_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs, retain_graph=True)]


def assert_equal(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def symmetric_cross_entropy(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    logits = scale * images @ texts.T
    targets = torch.arange(len(images))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def sigmoid_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """As the library's SiglipModel computes it."""
    logits = texts @ images.T * scale + bias
    signs = 2 * torch.eye(len(images), dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


def weights_by_similarity(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    return (2 * scores).exp()


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_clip_loss_equals_cross_entropy(scale: float):
    images, texts = features(9)
    s = scalar(scale)
    ours = value_and_gradients(losses.clip_loss(images, texts, s), images, texts, s)
    assert_equal(ours, value_and_gradients(symmetric_cross_entropy(images, texts, s), images, texts, s))


def test_clip_loss_equals_ntxent_of_pytorch_metric_learning():
    raw_images, raw_texts = (x.detach().mul(3).requires_grad_() for x in features(8))
    images, texts = F.normalize(raw_images, dim=-1), F.normalize(raw_texts, dim=-1)  # as the oracle does inside
    labels, partners = torch.arange(8), torch.arange(8)  # two tensors: of one and the same it drops the diagonal
    oracle = NTXentLoss(temperature=1 / 14.0)
    image_to_text = oracle(images, labels, ref_emb=texts, ref_labels=partners)
    text_to_image = oracle(texts, labels, ref_emb=images, ref_labels=partners)
    expected = (image_to_text + text_to_image) / 2
    ours = losses.clip_loss(images, texts, scalar(14.0))
    raw = (raw_images, raw_texts)
    assert_equal(value_and_gradients(ours, *raw), value_and_gradients(expected, *raw))


def test_siglip_loss_equals_the_whole_matrix():
    images, texts = features(7)
    s, b = scalar(10.0), scalar(-10.0)
    ours = losses.siglip_loss(images, texts, s, b)
    expected = sigmoid_loss(images, texts, s, b)
    assert_equal(value_and_gradients(ours, images, texts, s, b), value_and_gradients(expected, images, texts, s, b))


def test_losses_have_exact_gradients():
    images, texts = features(5, 3)
    s, b = scalar(5.0), scalar(-1.0)
    valid = torch.tensor([True, True, False, True, True])
    for miner in (None, miners.TopK(2), weights_by_similarity):
        assert gradcheck(lambda i, t, s, m=miner: losses.clip_loss(i, t, s, miner=m, valid=valid), (images, texts, s))
        assert gradcheck(
            lambda i, t, s, b, m=miner: losses.siglip_loss(i, t, s, b, miner=m, valid=valid), (images, texts, s, b)
        )


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("miner", [None, miners.TopK(2)])
def test_masked_rows_leave_no_trace(kind: str, miner: miners.Miner | None):
    images, texts = features(6)
    valid = torch.tensor([True, False, True, True, False, True])
    inputs = (images, texts, scalar(10.0), scalar(-3.0))[: 3 if kind == "clip" else 4]
    loss = losses.clip_loss if kind == "clip" else losses.siglip_loss
    kept = tuple(x[valid].detach().requires_grad_() if x.ndim else x for x in inputs)
    alone = value_and_gradients(loss(*kept, miner=miner), *kept)  # type: ignore[arg-type]
    for garbage in (0.3, 1e6, float("nan")):
        spoiled = tuple(
            x.detach().masked_fill(~valid[:, None], garbage).requires_grad_() if x.ndim else x for x in inputs
        )
        ours = value_and_gradients(loss(*spoiled, miner=miner, valid=valid), *spoiled)  # type: ignore[arg-type]
        assert_equal([ours[0], ours[1][valid], ours[2][valid], *ours[3:]], alone)
        assert ours[1][~valid].abs().sum() == 0
        assert ours[2][~valid].abs().sum() == 0


@pytest.mark.parametrize("rows", [4, 1])
def test_no_valid_row_gives_zero_with_a_graph(rows: int):
    images, texts = features(rows)
    s, b = scalar(100.0), scalar(-10.0)
    valid = torch.zeros(rows, dtype=torch.bool)
    for loss in (losses.clip_loss(images, texts, s, valid=valid), losses.siglip_loss(images, texts, s, b, valid=valid)):
        assert loss.item() == 0.0
        loss.backward()
    assert all(x.grad is not None and (x.grad == 0).all() for x in (images, texts, s, b))


def test_one_valid_row_has_nothing_to_learn_from_infonce():
    images, texts = features(3)
    s = scalar(10.0)
    loss = losses.clip_loss(images, texts, s, valid=torch.tensor([False, True, False]))
    assert value_and_gradients(loss, s) == [0.0, 0.0]


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


def test_top_k_of_all_negatives_changes_nothing():
    images, texts = features(6)
    s, b = scalar(9.0), scalar(-4.0)
    for k in (5, 6, 1000):
        assert torch.equal(losses.clip_loss(images, texts, s, miner=miners.TopK(k)), losses.clip_loss(images, texts, s))
        torch.testing.assert_close(
            losses.siglip_loss(images, texts, s, b, miner=miners.TopK(k)),
            losses.siglip_loss(images, texts, s, b),
            rtol=1e-14,
            atol=0,
        )


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


@pytest.mark.parametrize("elements", [1, 8, 30])  # tiles of 1 × 2, 2 × 4, 3 × 10; blocks of 1, 1 and 3 rows
@pytest.mark.parametrize("miner", [None, miners.TopK(3), weights_by_similarity])
def test_blocks_change_neither_value_nor_gradient(
    monkeypatch: pytest.MonkeyPatch, elements: int, miner: miners.Miner | None
):
    images, texts = features(10)
    s, b = scalar(9.0), scalar(-4.0)
    valid = torch.arange(10) != 4

    def both() -> list[Tensor]:
        loss = losses.clip_loss(images, texts, s, miner=miner, valid=valid) + losses.siglip_loss(
            images, texts, s, b, miner=miner, valid=valid
        )
        return value_and_gradients(loss, images, texts, s, b)

    whole = both()
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", elements)
    assert_equal(both(), whole)


def test_losses_are_float32_under_autocast():
    images, texts = (x.detach().float() for x in features(8))
    s = torch.tensor(100.0)
    expected = losses.clip_loss(images, texts, s)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses.clip_loss(images, texts, s)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert losses.clip_loss(images.bfloat16(), texts.bfloat16(), s).dtype == torch.float32


def test_contrastive_loss_reads_mask_and_hashes_from_the_batch():
    images, texts = features(4)
    batch = {
        "valid": torch.tensor([True, True, True, False]),
        "image_hash": torch.tensor([1, 1, 2, 3]),
        "caption_hash": torch.tensor([1, 2, 3, 3]),
    }
    output = DualEncoderOutput(images, texts, scalar(5.0), scalar(-2.0))
    same = (batch["image_hash"], batch["caption_hash"])
    clip = losses.clip_loss(*output[:3], valid=batch["valid"], same=same)
    siglip = losses.siglip_loss(*output, valid=batch["valid"], same=same)
    assert ContrastiveLoss("clip")(output, batch) == clip
    assert ContrastiveLoss("siglip")(output, batch) == siglip
    unmasked = ContrastiveLoss("clip", mask_same=False)(output, batch)
    assert unmasked == losses.clip_loss(*output[:3], valid=batch["valid"])
    assert unmasked != clip


def test_clip_loss_gives_a_bias_the_gradient_zero():
    images, texts = features(3)
    bias = scalar(-10.0)
    output = DualEncoderOutput(images, texts, scalar(5.0), bias)
    ContrastiveLoss("clip")(output, {"valid": torch.ones(3, dtype=torch.bool)}).backward()
    assert bias.grad == 0


def test_siglip_without_bias_is_an_error():
    images, texts = features(3)
    output = DualEncoderOutput(images, texts, scalar(5.0), None)
    with pytest.raises(ValueError, match=r"loss 'siglip' needs a bias: set model.logit_bias_init \(-10 in the paper\)"):
        ContrastiveLoss("siglip")(output, {"valid": torch.ones(3, dtype=torch.bool)})


def test_shapes_that_do_not_pair_are_errors():
    images, texts = features(4)
    with pytest.raises(ValueError, match=r"image_features \(4, 6\) and text_features \(3, 6\) must both be \(B, D\)"):
        losses.clip_loss(images, texts[:3], scalar(1.0))
    with pytest.raises(ValueError, match=r"valid has shape \(3,\), expected \(4,\): one entry a feature row"):
        losses.clip_loss(images, texts, scalar(1.0), valid=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"same has shape \(5,\), expected \(4,\)"):
        losses.siglip_loss(images, texts, scalar(1.0), scalar(0.0), same=[torch.arange(5)])
    with pytest.raises(ValueError, match=r"miner .* returned shape \(4, 1\), expected \(4, 4\)"):
        losses.clip_loss(images, texts, scalar(1.0), miner=lambda scores, positives, negatives: scores[:, :1])
