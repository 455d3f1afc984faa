"""Miners that leave out false negatives, or know labels, groups and a teacher's opinion; chains of miners."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.train import losses, miners

T, N = True, False
SCORES = torch.tensor([[0.7, 0.8, 0.68, 0.5], [0.1, 0.9, 0.95, 0.2]])
POSITIVES = torch.tensor([[T, N, N, N], [N, T, N, N]])


def features(rows: int, seed: int = 0, dim: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [F.normalize(torch.randn(rows, dim, generator=generator), dim=-1) for _ in range(2)]


@pytest.mark.parametrize(
    ("margin", "kept"),
    [
        (0.05, [[N, N, N, T], [T, N, N, T]]),
        (0.0, [[N, N, T, T], [T, N, N, T]]),
        (-0.07, [[N, N, T, T], [T, N, T, T]]),
        (2.0, [[N, N, N, N], [N, N, N, N]]),
    ],
)
def test_false_negative_margin_keeps_what_is_well_below_the_positive(margin: float, kept: list[list[bool]]):
    assert miners.FalseNegativeMargin(margin)(SCORES, POSITIVES, ~POSITIVES).tolist() == kept


def test_positive_of_several_is_their_mean_and_without_one_nothing_is_false():
    scores = torch.tensor([[0.9, 0.3, 0.5, 0.7], [0.9, 0.3, 0.5, 0.7]])
    positives = torch.tensor([[T, T, N, N], [N, N, N, N]])  # mean 0.6
    assert miners.FalseNegativeMargin(0.0)(scores, positives, ~positives).tolist() == [[N, N, T, N], [T, T, T, T]]
    assert miners.SemiHard(0.2)(scores, positives, ~positives).tolist() == [[N, N, T, N], [N, N, N, N]]


def test_teacher_judges_with_its_own_similarities_on_both_sides():
    images = torch.eye(3)
    cosines = torch.tensor([[0.9, 0.95, 0.1], [0.2, 0.8, 0.6], [0.5, 0.3, 0.7]])  # images down, texts across
    teacher = miners.TeacherMask(images, cosines.T, margin=0.15)
    indifferent, positives = torch.zeros(2, 3), torch.eye(3).bool()[1:]
    of_images = teacher.block("image", slice(1, 3))(indifferent, positives, ~positives)
    assert of_images.tolist() == [[T, N, T], [T, T, N]]  # 0.6 < 0.8 - 0.15; 0.5 < 0.7 - 0.15
    of_texts = teacher.block("text", slice(1, 3))(indifferent, positives, ~positives)
    assert of_texts.tolist() == [[N, N, T], [T, N, N]]  # 0.95 is above text 1's own 0.8; 0.6 is near text 2's own 0.7
    outside = torch.cat([indifferent, torch.ones(2, 1)], dim=1)  # one more column, from outside the batch
    masks = F.pad(positives, (0, 1))
    assert teacher.block("image", slice(1, 3))(outside, masks, ~masks)[:, 3].tolist() == [T, T]


def test_teacher_without_an_opinion_leaves_nothing_out():
    images, texts = features(4)
    images[1] = torch.nan
    teacher, masks = miners.TeacherMask(images, texts, margin=0.1), torch.eye(4).bool()
    for side in ("image", "text"):
        kept = teacher.block(side, slice(0, 4))(torch.zeros(4, 4), masks, ~masks)
        unknown = kept[1] if side == "image" else kept[:, 1]
        assert unknown.sum() == 3
    sound = miners.TeacherMask(*features(4), margin=0.1).block("image", slice(0, 4))(torch.zeros(4, 4), masks, ~masks)
    known = torch.tensor([0, 2, 3])
    assert torch.equal(teacher.block("image", slice(0, 4))(torch.zeros(4, 4), masks, ~masks)[known], sound[known])


def test_teacher_that_is_the_model_masks_as_the_margin_does():
    images, texts = features(9)
    teacher = miners.TeacherMask.gather(images, texts, 0.1)
    found = losses.clip_loss(images, texts, torch.tensor(10.0), miner=teacher)
    expected = losses.clip_loss(images, texts, torch.tensor(10.0), miner=miners.FalseNegativeMargin(0.1))
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, losses.clip_loss(images, texts, torch.tensor(10.0)))


def test_same_group_keeps_the_nearest_of_the_anchors_group():
    scores = torch.tensor([[0.9, 0.2, 0.3, 0.8, 0.7, 0.6]]).expand(6, 6)
    positives = torch.eye(6).bool()
    kept = miners.SameGroup(3, 1).block("text", slice(0, 6))(scores, positives, ~positives)
    assert [row.nonzero().flatten().tolist() for row in kept] == [[2], [0], [0], [4], [3], [3]]
    outside = torch.ones(2, 3)  # further columns, from outside the batch
    wide, masks = torch.cat([scores[1:3], outside], dim=1), F.pad(positives[1:3], (0, 3))
    kept = miners.SameGroup(3, 9).block("text", slice(1, 3))(wide, masks, ~masks)
    assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 2], [0, 1]]


def test_chain_hands_what_is_left_to_the_next():
    chain = miners.Chain([miners.FalseNegativeMargin(0.0), miners.TopK(1)])
    kept = chain.block("image", slice(0, 2))(SCORES, POSITIVES, ~POSITIVES)
    assert kept.tolist() == [[N, N, T, N], [N, N, N, T]]


def test_chain_takes_the_weights_of_the_last_and_no_more_than_was_left():
    def weigh_all(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return 1 + scores

    chain = miners.Chain([miners.All(), miners.DropHardest(1), weigh_all])
    weights = chain.block("image", slice(0, 2))(SCORES, POSITIVES, ~POSITIVES)
    torch.testing.assert_close(weights, torch.tensor([[0, 0, 1.68, 1.5], [1.1, 0, 0, 1.2]]))


def test_chain_asks_each_part_about_its_anchors():
    images, texts = features(8)
    scale = torch.tensor(10.0)
    chain = miners.Chain([miners.SameGroup(4, 3), miners.TopK(1)])
    found = losses.clip_loss(images, texts, scale, miner=chain)
    assert found == losses.clip_loss(images, texts, scale, miner=miners.SameGroup(4, 1))


def test_known_miners_refuse_what_they_cannot_do():
    with pytest.raises(
        ValueError, match="FalseNegativeMargin's margin is a difference of cosines, -2 to 2: got margin=3"
    ):
        miners.FalseNegativeMargin(3)
    with pytest.raises(ValueError, match="TeacherMask's margin is a difference of cosines, -2 to 2: got margin=-3"):
        miners.TeacherMask(torch.eye(2), torch.eye(2), -3)
    with pytest.raises(ValueError, match=r"TeacherMask's images \(2, 2\) and texts \(3, 3\) must both be \(N, D\)"):
        miners.TeacherMask(torch.eye(2), torch.eye(3))
    with pytest.raises(ValueError, match="SameGroup keeps at least one negative a row: got k=0"):
        miners.SameGroup(2, 0)
    with pytest.raises(ValueError, match="SameGroup needs groups of at least 2 rows: got size=1"):
        miners.SameGroup(1, 4)
    with pytest.raises(ValueError, match=r"Chain of no miners: give at least one; All\(\) keeps every negative"):
        miners.Chain([])
