from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.config import TrainConfig
from mmdata.train import miners
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.run.objective import ContrastiveLoss, make_loss
from tests.train.compare import assert_equal, features, scalar, value_and_gradients


def make_batch(first: int, rows: int = 3, **changes: Tensor) -> dict:
    """Rows with hashes of their own, counted from `first`."""
    numbers = torch.arange(first, first + rows)
    return {
        "valid": torch.ones(rows, dtype=torch.bool),
        "image_hash": numbers,
        "caption_hash": numbers + 1000,
        **changes,
    }


def output_of(seed: int, rows: int = 3) -> DualEncoderOutput:
    return DualEncoderOutput(*features(rows, seed=seed), scalar(5.0), None)


def filled(rows: int, count: int, after_steps: int = 0) -> FeatureQueue:
    """After `count` batches of three rows, seeds 0, 1, …"""
    queue = FeatureQueue(rows, after_steps)
    for step in range(count):
        queue.keep(output_of(step), make_batch(10 * step), step)
    return queue


def test_queue_holds_the_last_rows_of_both_sides_and_drops_the_oldest():
    assert FeatureQueue(4).negatives() is None
    negatives = filled(8, 4).negatives()
    assert negatives is not None
    images, texts = negatives
    # 12 rows went round in 8 slots: the fourth batch lies in slots 1, 2 and 3
    assert images.same[0].tolist() == [22, 30, 31, 32, 11, 12, 20, 21]
    assert texts.same[1].tolist() == [1022, 1030, 1031, 1032, 1011, 1012, 1020, 1021]
    assert torch.equal(images.features[1:4], output_of(3).image_features)
    assert torch.equal(texts.features[1:4], output_of(3).text_features)
    assert not images.features.requires_grad
    assert images.valid is not None
    assert images.valid.all()


def test_queue_smaller_than_a_batch_holds_the_end_of_it():
    negatives = filled(2, 1).negatives()
    assert negatives is not None
    assert negatives[0].same[0].tolist() == [1, 2]


def test_queue_says_how_old_its_rows_are():
    assert filled(8, 0).telemetry(0) == {"rows": 0, "age_steps": 0.0}
    assert filled(8, 1).telemetry(1) == {"rows": 3, "age_steps": 1.0}
    # two rows of step 1 and three each of steps 2 and 3, after 4 steps
    assert filled(8, 4).telemetry(4) == {"rows": 8, "age_steps": (2 * 3 + 3 * 2 + 3 * 1) / 8}


def test_queue_keeps_nothing_before_after_steps():
    assert filled(8, 2, after_steps=2).negatives() is None
    negatives = filled(8, 3, after_steps=2).negatives()
    assert negatives is not None
    assert negatives[0].valid is not None
    assert negatives[0].valid.tolist() == [True] * 3 + [False] * 5


def test_queue_leaves_out_rows_that_do_not_count_or_are_not_finite():
    queue = FeatureQueue(3)
    images, texts = (x.detach().clone() for x in features(3))
    images[1] = torch.nan
    output = DualEncoderOutput(images, texts, scalar(5.0), None)
    queue.keep(output, make_batch(0, valid=torch.tensor([True, True, False])), 0)
    negatives = queue.negatives()
    assert negatives is not None
    assert negatives[0].valid is not None
    assert negatives[0].valid.tolist() == [True, False, False]
    own = output_of(7)
    loss = ContrastiveLoss(queue=queue)(own, make_batch(50))
    assert all(x.isfinite().all() for x in value_and_gradients(loss, own.image_features, own.text_features))


def concatenated(own: DualEncoderOutput, older: list[DualEncoderOutput], keep: Tensor) -> Tensor:
    """Cross-entropy over the logits of the batch and those of all older rows; `keep` says which of these count."""
    images, texts, scale, *_ = own
    targets = torch.arange(len(images))
    losses = []
    for anchors, columns, others in (
        (images, texts, [x.text_features for x in older]),
        (texts, images, [x.image_features for x in older]),
    ):
        outside = (scale * anchors @ torch.cat(others).detach().T).masked_fill(~keep, -1e30)
        losses.append(F.cross_entropy(torch.cat([scale * anchors @ columns.T, outside], dim=1), targets))
    return (losses[0] + losses[1]) / 2


@pytest.mark.parametrize("miner", [None, miners.TopK(50)])
def test_loss_with_queue_equals_cross_entropy_over_concatenated_logits(miner: miners.Miner | None):
    queue, own = filled(6, 2), output_of(7)
    batch = make_batch(100)
    batch["image_hash"][0] = 11  # the same image as row 1 of the second batch
    batch["caption_hash"][2] = 1000  # the same caption as row 0 of the first
    keep = torch.ones(3, 6, dtype=torch.bool)
    keep[0, 4] = keep[2, 0] = False
    expected = concatenated(own, [output_of(0), output_of(1)], keep)
    inputs = own[:3]
    loss = ContrastiveLoss(miner=miner, queue=queue)(own, batch)
    assert_equal(value_and_gradients(loss, *inputs), value_and_gradients(expected, *inputs))


def test_loss_with_queue_equals_cross_batch_memory_of_pytorch_metric_learning():
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    older, own = [output_of(0), output_of(1)], output_of(7)
    sides = []
    for anchor_side, memory_side in ((0, 1), (1, 0)):
        # Theirs keeps what it is given with enqueue_mask, here the other side: first of older batches, then of this.
        memory = pml.CrossBatchMemory(pml.NTXentLoss(temperature=1 / 5.0), 6, memory_size=9)
        for number, batch in enumerate(older):
            both = torch.cat([batch[memory_side], own[anchor_side]])
            labels = torch.cat([torch.arange(3) + 10 * number, torch.arange(3) + 100])
            memory(both, labels, enqueue_mask=torch.arange(6) < 3)
        # It detaches what it keeps, so only the anchors' gradient is comparable, with this batch's columns held fixed.
        both = torch.cat([own[memory_side], own[anchor_side]])
        sides.append(memory(both, torch.arange(3).repeat(2) + 100, enqueue_mask=torch.arange(6) < 3))
    theirs = (sides[0] + sides[1]) / 2
    ours = ContrastiveLoss(queue=filled(6, 2))(own, make_batch(100))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_queue_joins_extra_captions():
    images, texts = features(3, seed=7)
    extra = features(3, seed=8)[1]
    batch = make_batch(100)
    batch |= {"negative_caption_hash": torch.arange(3) + 5000, "negative_valid": torch.tensor([True, False, True])}
    with_extra = ContrastiveLoss(queue=filled(6, 2))(DualEncoderOutput(images, texts, scalar(5.0), None, extra), batch)
    own = torch.cat([5 * images @ texts.T, 5 * images @ extra[[0, 2]].T], dim=1)
    older = [output_of(0), output_of(1)]
    of_images = torch.cat([own, 5 * images @ torch.cat([x.text_features for x in older]).T], dim=1)
    of_texts = torch.cat([5 * texts @ images.T, 5 * texts @ torch.cat([x.image_features for x in older]).T], dim=1)
    targets = torch.arange(3)
    expected = (F.cross_entropy(of_images, targets) + F.cross_entropy(of_texts, targets)) / 2
    torch.testing.assert_close(with_extra, expected, rtol=1e-12, atol=1e-12)


def test_queue_state_comes_back():
    queue, again = filled(8, 3), FeatureQueue(8)
    again.load_state_dict(queue.state_dict())
    for one in (queue, again):
        one.keep(output_of(9), make_batch(90), 3)
    before, after = queue.state_dict(), again.state_dict()
    assert before["next"] == after["next"] == 4
    assert all(torch.equal(value, after["kept"][name]) for name, value in before["kept"].items())
    assert again.telemetry(4) == queue.telemetry(4)


def test_queue_needs_hashes_and_the_mask():
    batch = {"valid": torch.ones(3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"the batch has no image_hash or no caption_hash.*: add them to your batches"):
        FeatureQueue(8).keep(output_of(0), batch, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"queue: its rows are further negatives for loss 'clip' alone, got 'siglip'"):
        ContrastiveLoss("siglip", queue=FeatureQueue(8))
    config = TrainConfig(queue=5, mask_false_negatives=True)
    queue = FeatureQueue(5)
    assert make_loss(0, config, queue=queue).queue is queue
