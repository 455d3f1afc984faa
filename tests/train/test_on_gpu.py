"""What only a GPU can show: compiled tiles, number formats, no wait for the device. `make gpu` runs these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import ModelConfig, TrainConfig
from mmdata.train import DualEncoder, losses, miners, train_step
from mmdata.train.objective import ContrastiveLoss
from mmdata.train.precision import AUTOCAST, Precision, numerics
from mmdata.train.run.optimizer import make_optimizer
from tests.train.compare import value_and_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="computes on a GPU: torch sees none here"),
]
GPU = torch.device("cuda")
ROWS = 64


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_model(**settings: Any) -> DualEncoder:
    return DualEncoder.from_config(ModelConfig(name="micro", **settings), vocab_size=30).to(GPU).train()


def make_batch() -> Batch:
    numbers = torch.arange(ROWS, device=GPU)
    batch: dict[str, Any] = {
        "pixel_values": torch.randint(0, 256, (ROWS, 3, 32, 32), dtype=torch.uint8, device=GPU),
        "input_ids": torch.randint(0, 30, (ROWS, 9), device=GPU),
        "attention_mask": torch.ones(ROWS, 9, dtype=torch.long, device=GPU),
        "valid": numbers != 5,
        "image_hash": numbers // 2,
        "caption_hash": numbers,
        "rows": numbers,
    }
    return cast(Batch, batch)


def dense(images: Tensor, texts: Tensor, scale: Tensor, valid: Tensor, same: Tensor) -> Tensor:
    """InfoNCE over the valid rows as two cross entropies, rows of equal `same` left out."""
    logits = scale * images[valid] @ texts[valid].T
    other = same[valid, None] != same[valid]
    masked = logits.where(other | torch.eye(len(logits), dtype=torch.bool, device=logits.device), -torch.inf)
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(masked, targets) + F.cross_entropy(masked.T, targets)) / 2


@pytest.mark.parametrize("rows", [3, 700, 5000])
def test_compiled_tiles_give_the_dense_loss_and_its_gradients(rows: int):
    images, texts = (F.normalize(torch.randn(rows, 48, device=GPU), dim=1).requires_grad_() for _ in range(2))
    scale = torch.tensor(20.0, device=GPU, requires_grad=True)
    valid, same = torch.arange(rows, device=GPU) != 1, torch.arange(rows, device=GPU) // 2
    with numerics("fp32", GPU):
        found = value_and_gradients(
            losses.clip_loss(images, texts, scale, valid=valid, same=[same]), images, texts, scale
        )
    inputs = [x.detach().double().requires_grad_() for x in (images, texts, scale)]
    expected = value_and_gradients(dense(*inputs, valid, same), *inputs)  # type: ignore[call-arg]
    for ours, theirs in zip(found, expected, strict=True):
        # Sums of float32 products of 48 terms, which a scale of 20 multiplies, in exponents.
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
def test_a_run_of_steps_learns_in_each_number_format(precision: Precision):
    model, batch = make_model(), make_batch()
    optimizer = make_optimizer(model, TrainConfig(steps=1, lr=1e-3))
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    seen: list[float] = []
    with numerics(precision, GPU):
        for _ in range(30):
            optimizer.zero_grad(set_to_none=True)
            loss = ContrastiveLoss("clip")
            seen.append(float(train_step(model, batch, loss, autocast_dtype=AUTOCAST[precision], scaler=scaler).loss))
            scaler.step(optimizer)
            scaler.update()
    assert seen[-1] < 0.8 * seen[0]


@pytest.mark.parametrize("micro", [None, 24])
@pytest.mark.parametrize("kind", ["clip", "siglip", "triplet", "hard_negative"])
def test_a_step_does_not_wait_for_the_device(kind: Any, micro: int | None):
    model, batch = make_model(logit_bias_init=-10.0), make_batch()
    optimizer = make_optimizer(model, TrainConfig(steps=1))
    miner = None if kind == "hard_negative" else miners.TopK(4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        train_step(
            model, batch, ContrastiveLoss(kind, miner=miner), micro_batch_size=micro, autocast_dtype=torch.bfloat16
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()  # kernels are made, memory is taken
    torch.cuda.set_sync_debug_mode("error")
    step()


def test_micro_batches_with_dropout_give_the_gradients_of_two_equal_passes():
    model, batch = make_model(dropout=0.3), make_batch()
    again: list[list[Tensor]] = []
    for _ in range(2):
        torch.manual_seed(7)
        model.zero_grad()
        train_step(model, batch, ContrastiveLoss("clip"), micro_batch_size=24)
        again.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()) + 1e-7)
