"""The loss sogclr against InfoNCE of the whole corpus, and the numbers it keeps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata.config import TrainConfig
from mmdata.errors import ConfigError
from mmdata.train import RowNormalizers, losses
from mmdata.train.losses import tiles
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.objective import ContrastiveLoss, check_loss
from tests.train import ranks
from tests.train.compare import assert_equal, features, scalar, value_and_gradients

NOTHING = -torch.inf


def unseen(rows: int) -> Tensor:
    return torch.full((rows, 2), NOTHING, dtype=torch.float64)


def global_means(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """g of each row over all others, (N, 2)."""
    logits = scale * images @ texts.T
    ratios = (logits - logits.diagonal()[:, None]).exp(), (logits.T - logits.diagonal()[:, None]).exp()
    others = 1 - torch.eye(len(images), dtype=logits.dtype)
    return torch.stack([(ratio * others).sum(1) / (len(images) - 1) for ratio in ratios], dim=1)


@pytest.mark.parametrize("tile", [4, 2**22])
@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_with_the_whole_corpus_as_batch_it_is_infonce(scale: float, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
    inputs = (*features(9), scalar(scale))
    valid = torch.tensor([True] * 7 + [False] * 2)
    found = losses.sogclr_loss(*inputs, unseen(9), gamma=1.0, eps=1 / 6, valid=valid)
    expected = losses.clip_loss(*inputs, valid=valid)
    assert_equal(value_and_gradients(found.loss, *inputs), value_and_gradients(expected, *inputs), 1e-10)


def test_gradient_of_all_batches_is_that_of_the_corpus():
    """With exact normalizers the mean over all batches of 3 of 6 rows is the full gradient; InfoNCE's is another."""
    inputs = (*features(6), scalar(5.0))
    full = torch.autograd.grad(losses.clip_loss(*inputs), inputs)
    exact = global_means(*inputs).detach().log()
    ours, infonce = ([torch.zeros_like(x) for x in inputs] for _ in range(2))
    batches = list(itertools.combinations(range(6), 3))
    for batch in batches:
        rows = torch.tensor(batch)
        some = inputs[0][rows], inputs[1][rows], inputs[2]
        # gamma as small as a float64 can tell: the normalizers stay exact
        loss, _ = losses.sogclr_loss(*some, exact[rows], gamma=1e-14, eps=1 / 5)
        for sums, value in ((ours, loss), (infonce, losses.clip_loss(*some))):
            for total, grad in zip(sums, torch.autograd.grad(value, inputs, retain_graph=True), strict=True):
                total += grad / len(batches)
    assert_equal(ours, full, 1e-10)
    cosine = torch.cosine_similarity(infonce[0].flatten(), full[0].flatten(), dim=0)
    assert 0.5 < cosine < 0.999


def test_normalizers_are_a_moving_average():
    images, texts = features(4)
    g = global_means(images, texts, scalar(3.0)).detach()
    before = torch.tensor([[0.5, 2.0], [0.25, 1.0], [1.0, 1.0], [1.0, 1.0]], dtype=torch.float64).log()
    before[2] = NOTHING
    _, after = losses.sogclr_loss(images, texts, 3.0, before, gamma=0.75, eps=0.1)
    expected = 0.25 * before.exp() + 0.75 * g
    expected[2] = g[2]
    assert_equal([after.exp()], [expected])
    assert not after.requires_grad


def test_temperature_is_learned_as_in_fastclip():
    inputs = (*features(5), scalar(4.0))
    found, _ = losses.sogclr_loss(*inputs, unseen(5), gamma=1.0, eps=0.01, rho=6.5)
    expected = ((global_means(*inputs) + 0.01).log().mean() + 6.5) / inputs[2]
    assert_equal(value_and_gradients(found, *inputs), value_and_gradients(expected, *inputs), 1e-10)


def test_invalid_rows_and_rows_without_negatives_keep_theirs():
    images, texts = features(4)
    with torch.no_grad():
        images[3] = torch.nan
    before = torch.zeros(4, 2, dtype=torch.float64)
    valid = torch.tensor([True, True, True, False])
    same = [torch.tensor([7, 7, 7, 1])]  # the three are equal: nobody has a negative
    loss, after = losses.sogclr_loss(images, texts, 3.0, before, gamma=0.5, eps=0.1, valid=valid, same=same)
    assert loss == 0
    assert torch.equal(after, before)
    loss.backward()
    assert images.grad is not None
    assert torch.equal(images.grad, torch.zeros(4, 6, dtype=torch.float64))


def test_a_scale_of_100_and_far_averages_stay_finite():
    images, _texts = features(4, dtype=torch.float32)
    before = torch.tensor([[-300.0, 300.0]] * 4)
    loss, after = losses.sogclr_loss(
        images, -images.detach(), scalar(100.0, torch.float32), before, gamma=0.2, eps=1e-14
    )
    loss.backward()
    assert after.isfinite().all()
    assert images.grad is not None
    assert images.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0.0, "eps": 0.1}, "gamma must be above 0 to 1, eps above 0: got 0.0 and 0.1"),
        ({"gamma": 0.5, "eps": 0.0}, "gamma must be above 0 to 1, eps above 0: got 0.5 and 0.0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        losses.sogclr_loss(*features(4), 1.0, unseen(4), **settings)


def test_normalizers_of_another_shape():
    with pytest.raises(ValueError, match=r"log_normalizers has shape \(4,\), expected \(4, 2\): of each row"):
        losses.sogclr_loss(*features(4), 1.0, torch.zeros(4), gamma=0.5, eps=0.1)


def test_kept_by_row_number():
    kept = RowNormalizers(10)
    kept.write(torch.tensor([3, -1, 9]), torch.tensor([[1.0, 2.0], [5.0, 5.0], [3.0, 4.0]]))
    found = kept.read(torch.tensor([9, 0, 3, -1]))
    assert found.tolist() == [[3.0, 4.0], [NOTHING] * 2, [1.0, 2.0], [NOTHING] * 2]
    assert kept.telemetry(1) == {"seen_share": 0.2}
    other = RowNormalizers(10)
    other.load_state_dict(kept.state_dict())
    assert torch.equal(other.read(torch.arange(10)), kept.read(torch.arange(10)))
    with pytest.raises(ValueError, match="row 10: the normalizers are of an index of 10 rows"):
        kept.read(torch.tensor([10]))


def test_the_objective_moves_the_rows_of_its_batch():
    model, kept = ranks.make_model(0.0), RowNormalizers(1000)
    batch = ranks.make_batch(0, {"valid": [[1, 0, 1, 1]]})
    loss = ContrastiveLoss("sogclr", normalizers=kept)(model(batch), batch)
    assert 0 < loss.item() < math.log(1000) + 10
    seen = kept.read(torch.arange(1000))[:, 0] > NOTHING
    assert seen.nonzero().flatten().tolist() == sorted(batch["rows"][batch["valid"]].tolist())


def test_sogclr_takes_no_miner_and_needs_its_numbers():
    with pytest.raises(ValueError, match="loss 'sogclr' needs the numbers that it keeps: give normalizers="):
        ContrastiveLoss("sogclr")
    config = TrainConfig.model_validate({"steps": 1, "loss": "sogclr", "miner": {"name": "top_k", "k": 2}})
    with pytest.raises(ConfigError, match=r"train\.loss .sogclr. weighs all negatives and takes no miner"):
        check_loss(config, has_bias=False, has_negative_captions=False)


def test_eps_is_that_of_the_rows_that_are_trained_on():
    images, texts = features(6)[:2]
    batch: Any = {"valid": torch.ones(6, dtype=torch.bool), "rows": torch.arange(6)}
    output = DualEncoderOutput(images, texts, torch.tensor(3.0), None, None)
    found = [
        float(ContrastiveLoss("sogclr", normalizers=normalizers, gamma=1.0)(output, batch).detach())
        for normalizers in (RowNormalizers(600, trained=6), RowNormalizers(6), RowNormalizers(600))
    ]
    assert found[0] == found[1]
    assert abs(found[2] - found[1]) > 0.1
    assert found[1] == pytest.approx(float(losses.clip_loss(images, texts, 3.0).detach()), rel=1e-5)


def test_of_a_row_that_comes_twice_the_last_values_are_kept():
    normalizers = RowNormalizers(4)
    values = torch.arange(12.0).reshape(6, 2)
    normalizers.write(torch.tensor([2, 0, -1, 2, 0, 2]), values)
    assert normalizers.read(torch.tensor([0, 1, 2, 3])).tolist() == [[8, 9], [-math.inf] * 2, [10, 11], [-math.inf] * 2]
