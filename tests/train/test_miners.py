from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmdata.train import losses, miners

T, N = True, False


def test_top_k_keeps_the_hardest_admissible_negatives():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.5], [0.2, 0.9, 0.3, 0.4]])
    positives = torch.tensor([[T, N, N, N], [N, T, N, N]])
    negatives = torch.tensor([[N, N, T, T], [T, N, T, T]])  # of row 0, column 1 is a known false negative
    assert miners.TopK(1)(scores, positives, negatives).tolist() == [[N, N, N, T], [N, N, N, T]]
    assert miners.TopK(2)(scores, positives, negatives).tolist() == [[N, N, T, T], [N, N, T, T]]


def test_top_k_beyond_the_negatives_keeps_exactly_them():
    negatives = torch.tensor([[N, T, T], [N, N, N], [T, N, T]])
    kept = miners.TopK(7)(torch.rand(3, 3), torch.eye(3).bool(), negatives)
    assert torch.equal(kept, negatives)


def test_top_k_of_none_is_an_error():
    with pytest.raises(ValueError, match="TopK keeps at least one negative a row: got k=0"):
        miners.TopK(0)


def test_top_k_mines_images_and_texts_each_for_themselves():
    # Cosines, images down, texts across. Hardest text of image 1 is text 2, hardest image of text 1 is image 0.
    cosines = torch.tensor([[0.9, 0.7, 0.1], [0.2, 0.8, 0.6], [0.5, 0.3, 0.7]])
    images, texts = torch.eye(3), cosines.T  # images @ texts.T == cosines
    targets = torch.zeros(3, dtype=torch.long)
    hardest_text = torch.stack([cosines.diagonal(), torch.tensor([0.7, 0.6, 0.5])], dim=1)
    hardest_image = torch.stack([cosines.diagonal(), torch.tensor([0.5, 0.7, 0.6])], dim=1)
    expected = (F.cross_entropy(4 * hardest_text, targets) + F.cross_entropy(4 * hardest_image, targets)) / 2
    loss = losses.clip_loss(images, texts, torch.tensor(4.0), miner=miners.TopK(1))
    torch.testing.assert_close(loss, expected)


def test_a_function_is_a_miner_and_cannot_admit_what_is_masked():
    def everything(scores: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(negatives)

    generator = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(5, 4, generator=generator), dim=-1) for _ in range(2))
    valid = torch.tensor([T, T, N, T, T])
    same = [torch.tensor([1, 2, 3, 1, 4])]
    scale = torch.tensor(5.0)
    mined = losses.clip_loss(images, texts, scale, valid=valid, same=same, miner=everything)
    assert mined == losses.clip_loss(images, texts, scale, valid=valid, same=same, miner=miners.TopK(5))
    unmined = losses.clip_loss(images, texts, scale, valid=valid, same=same)  # another way of computing
    torch.testing.assert_close(mined, unmined, rtol=1e-6, atol=0)
