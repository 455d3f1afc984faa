from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss
from torch import Tensor

from mmdata.train import losses, miners
from mmdata.train.losses.pairs import ExtraNegatives
from tests.train.compare import assert_equal, features, scalar, value_and_gradients


def negclip(images: Tensor, texts: Tensor, scale: Tensor, swapped: Tensor, pictures: Tensor) -> Tensor:
    """Cross entropy over the batch's logits with those of negative captions, or images, beside them."""
    targets = torch.arange(len(images))
    of_images = F.cross_entropy(scale * images @ torch.cat([texts, swapped]).T, targets)
    of_texts = F.cross_entropy(scale * texts @ torch.cat([images, pictures]).T, targets)
    return (of_images + of_texts) / 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("miner", [None, miners.TopK(1000)])
def test_extra_negatives_equal_concatenated_logits(miner: miners.Miner | None, dtype: torch.dtype, tolerance: float):
    inputs = (*features(5, dtype=dtype), scalar(12.0, dtype), *features(3, seed=1, dtype=dtype))
    images, texts, scale, swapped, pictures = inputs
    ours = losses.clip_loss(
        images,
        texts,
        scale,
        miner=miner,
        extra_texts=ExtraNegatives(swapped),
        extra_images=ExtraNegatives(pictures),
    )
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    expected = value_and_gradients(negclip(*exact), *exact)
    assert_equal([x.double() for x in value_and_gradients(ours, *inputs)], expected, tolerance)


def test_queue_of_earlier_texts_equals_cross_batch_memory():
    raw, texts = features(4)
    images = F.normalize(raw, dim=-1)  # as the oracle does inside
    queue = features(5, seed=1)[1].detach()
    memory = CrossBatchMemory(NTXentLoss(temperature=1 / 12.0), embedding_size=6, memory_size=9).double()
    memory.add_to_memory(queue, torch.arange(5) + 100, 5)
    enqueued = torch.arange(8) >= 4  # images are anchors, texts go to the memory
    image_to_text = memory(torch.cat([images, texts]), torch.arange(4).repeat(2), enqueue_mask=enqueued)
    scale = scalar(12.0)
    # The memory knows one direction, and no gradient to what is in it.
    text_to_image = F.cross_entropy(scale * texts.detach() @ images.T, torch.arange(4))
    ours = losses.clip_loss(images, texts.detach(), scale, extra_texts=ExtraNegatives(queue))
    assert_equal(value_and_gradients(ours, raw), value_and_gradients((image_to_text + text_to_image) / 2, raw))


@pytest.mark.parametrize("miner", [None, miners.TopK(1000)])
def test_extra_negatives_of_equal_keys_or_not_valid_are_left_out(miner: miners.Miner | None):
    images, texts = features(3)
    swapped = features(3, seed=1)[0].detach()
    logits = 5.0 * images @ torch.cat([texts, swapped]).T
    banned = torch.zeros(3, 6, dtype=torch.bool)
    banned[0, 3] = banned[2, 4] = True  # equal keys
    banned[:, 5] = True  # not valid
    targets = torch.arange(3)
    of_images = F.cross_entropy(logits.masked_fill(banned, -1e30), targets)
    expected = (of_images + F.cross_entropy(5.0 * texts @ images.T, targets)) / 2
    spoiled = swapped.masked_fill(torch.tensor([[False], [False], [True]]), float("nan")).requires_grad_()
    extra = ExtraNegatives(spoiled, [torch.tensor([1, 3, 2])], torch.tensor([True, True, False]))
    ours = losses.clip_loss(images, texts, scalar(5.0), miner=miner, same=[torch.tensor([1, 2, 3])], extra_texts=extra)
    assert_equal(value_and_gradients(ours, images, texts), value_and_gradients(expected, images, texts))
    assert (torch.autograd.grad(ours, spoiled)[0][2] == 0).all()


def test_miner_chooses_among_extra_negatives_too():
    images, texts = features(3)
    extra = ExtraNegatives(images.detach())  # nothing is nearer to an image than itself
    ours = losses.clip_loss(images, texts, scalar(5.0), miner=miners.TopK(1), extra_texts=extra)
    logits = 5.0 * images @ texts.T
    own = logits.diagonal()
    hardest_image = logits.masked_fill(torch.eye(3, dtype=torch.bool), -torch.inf).amax(0)
    of_images = torch.logaddexp(own, torch.full_like(own, 5.0)) - own
    of_texts = torch.logaddexp(own, hardest_image) - own
    torch.testing.assert_close(ours, (of_images + of_texts).mean() / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("miner", [None, miners.TopK(1000)])
def test_no_extra_negatives_change_nothing(miner: miners.Miner | None):
    inputs = (*features(3), scalar(5.0))
    none = ExtraNegatives(torch.zeros(0, 6))
    ours = losses.clip_loss(*inputs, miner=miner, extra_texts=none, extra_images=none)
    assert_equal(value_and_gradients(ours, *inputs), value_and_gradients(losses.clip_loss(*inputs), *inputs))


def test_extra_negatives_without_keys_are_negatives_of_all():
    images, texts = features(3)
    swapped = features(2, seed=1)[0]
    keys = [torch.arange(3)]
    found = losses.clip_loss(images, texts, scalar(5.0), same=keys, extra_texts=ExtraNegatives(swapped))
    assert found == losses.clip_loss(images, texts, scalar(5.0), extra_texts=ExtraNegatives(swapped))


def test_keys_that_do_not_match_are_errors():
    images, texts = features(3)
    with pytest.raises(
        ValueError, match=r"same of the extra negatives has shape \(2,\), expected \(3,\): one entry a feature"
    ):
        ExtraNegatives(images, [torch.arange(2)])
    with pytest.raises(ValueError, match=r"valid of the extra negatives has shape \(4,\), expected \(3,\)"):
        ExtraNegatives(images, valid=torch.ones(4, dtype=torch.bool))
    extra = ExtraNegatives(images, [torch.arange(3)])
    with pytest.raises(ValueError, match=r"extra negatives have 1 columns in `same`, the loss has 0: give the same"):
        losses.clip_loss(images, texts, scalar(5.0), extra_texts=extra)
