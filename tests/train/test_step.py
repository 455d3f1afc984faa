from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmdata.batch import Batch
from mmdata.config import ModelConfig
from mmdata.train import DualEncoder, miners, train_step
from mmdata.train.run.objective import ContrastiveLoss
from tests.rounding import rounding

ROWS = 7


def make_batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randint(0, 256, (ROWS, 3, 16, 24), dtype=torch.uint8, generator=generator),
        "input_ids": torch.randint(0, 50, (ROWS, 6), generator=generator),
        "attention_mask": (torch.arange(6)[None] < torch.randint(1, 7, (ROWS, 1), generator=generator)).long(),
        "image_hash": torch.tensor([1, 2, 3, 1, 4, 5, 6]),
        "caption_hash": torch.tensor([1, 2, 3, 4, 5, 2, 6]),
        "valid": torch.tensor([True, True, True, True, False, True, True]),
        "rows": torch.arange(ROWS),
        "keys": [str(i) for i in range(ROWS)],
    }


def make_model(dropout: float = 0.0, bias: float | None = None, **settings: object) -> DualEncoder:
    torch.manual_seed(0)
    config = ModelConfig.model_validate({"dropout": dropout, "logit_bias_init": bias, **settings})
    return DualEncoder.from_config(config, vocab_size=50).double()


def gradients(model: DualEncoder) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def rows_of(batch: Batch, rows: slice) -> Batch:
    return {key: value[rows] for key, value in batch.items()}  # type: ignore[index, return-value]


@pytest.mark.parametrize(
    "loss_function",
    [
        ContrastiveLoss("clip"),
        ContrastiveLoss("clip", miner=miners.TopK(2)),
        ContrastiveLoss("siglip", miner=miners.TopK(2)),
    ],
)
@pytest.mark.parametrize("micro_batch_size", [1, 3, 7, 100])
@pytest.mark.sweep(keep=2)
def test_micro_batches_change_no_gradient(loss_function: ContrastiveLoss, micro_batch_size: int):
    model, batch = make_model(bias=-10.0), make_batch()
    expected_loss = loss_function(model(batch), batch)
    expected_loss.backward()
    expected = gradients(model)
    assert expected["logit_scale"].abs() > 1e-6
    model.zero_grad()
    step = train_step(model, batch, loss_function, micro_batch_size=micro_batch_size)
    assert_same(gradients(model), expected)
    torch.testing.assert_close(step.loss, expected_loss.detach(), rtol=1e-12, atol=0)
    assert step.output.image_features.shape == (ROWS, 128)
    assert not step.output.image_features.requires_grad


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_extra_captions_give_the_gradients_of_the_dense_loss(micro_batch_size: int | None):
    model, batch = make_model(), make_batch()
    generator = torch.Generator().manual_seed(9)
    batch["negative_input_ids"] = torch.randint(0, 50, (ROWS, 5), generator=generator)
    batch["negative_attention_mask"] = torch.ones(ROWS, 5, dtype=torch.long)
    batch["negative_valid"] = torch.arange(ROWS) != 2
    batch["negative_caption_hash"] = torch.arange(20, 20 + ROWS)
    batch["negative_caption_hash"][0] = 3  # the caption of row 2

    images, texts = model.encode_image(batch["pixel_values"]), model.encode_text(*texts_of(batch, ""))
    scale, valid = model.logit_scale.exp(), batch["valid"]
    logits, further = scale * images @ texts.T, scale * images @ model.encode_text(*texts_of(batch, "negative_")).T
    equal = [batch[name][:, None] == batch[name] for name in ("image_hash", "caption_hash")]  # type: ignore[literal-required]
    apart = ~torch.stack(equal).any(0) | torch.eye(ROWS, dtype=torch.bool)
    logits = logits.masked_fill(~apart, -torch.inf)[valid][:, valid]
    further[2, 0] = -torch.inf
    targets = torch.arange(len(logits))
    of_images = cross_entropy(torch.cat([logits, further[valid][:, batch["negative_valid"]]], 1), targets)
    expected_loss = (of_images + cross_entropy(logits.T, targets)) / 2
    expected_loss.backward()
    expected = gradients(model)

    model.zero_grad()
    step = train_step(model, batch, ContrastiveLoss("clip"), micro_batch_size=micro_batch_size)
    assert_same(gradients(model), expected)
    torch.testing.assert_close(step.loss, expected_loss.detach(), rtol=1e-12, atol=0)
    assert step.output.negative_text_features is not None
    assert step.output.negative_text_features.shape == (ROWS, 128)


def texts_of(batch: Batch, which: str) -> tuple[Tensor, Tensor]:
    return batch[f"{which}input_ids"], batch[f"{which}attention_mask"]  # type: ignore[literal-required]


def test_micro_batches_replay_dropout_and_leave_the_random_state_where_one_pass_does():
    batch, loss_function = make_batch(), ContrastiveLoss("clip")
    model = make_model(dropout=0.3)
    torch.manual_seed(5)
    parts = [model(rows_of(batch, slice(start, start + 3))) for start in range(0, ROWS, 3)]  # all graphs kept
    images, texts = (torch.cat([part[i] for part in parts]) for i in range(2))
    loss_function(parts[0]._replace(image_features=images, text_features=texts), batch).backward()
    expected, expected_next = gradients(model), torch.rand(3)
    model.zero_grad()
    torch.manual_seed(5)
    train_step(model, batch, loss_function, micro_batch_size=3)
    assert_same(gradients(model), expected)
    assert torch.equal(torch.rand(3), expected_next)


def test_a_random_miner_meets_a_random_state_of_its_own():
    """The second pass replays dropout; the state after the step is the one after the loss."""
    drawn: list[float] = []

    def noisy(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        noise = torch.rand_like(scores)
        drawn.append(noise.sum().item())
        return negatives & (noise > 0.5)

    model, batch = make_model(dropout=0.3), make_batch()
    torch.manual_seed(1)
    for _ in range(2):
        train_step(model, batch, ContrastiveLoss("clip", miner=noisy), micro_batch_size=3)
    assert len(set(drawn)) == 4


def test_gradients_add_up_over_steps():
    model, loss_function = make_model(), ContrastiveLoss("clip")
    expected: dict[str, Tensor] = {}
    for seed in range(2):
        model.zero_grad()
        train_step(model, make_batch(seed), loss_function)
        expected = {name: g + expected.get(name, torch.zeros_like(g)) for name, g in gradients(model).items()}
    model.zero_grad()
    for seed in range(2):
        train_step(model, make_batch(seed), loss_function, micro_batch_size=2)
    assert_same(gradients(model), expected)


def test_frozen_towers_get_no_gradient_with_micro_batches():
    model, batch = make_model(freeze=["image"]), make_batch()
    for micro_batch_size in (None, 2):
        model.zero_grad()
        train_step(model, batch, ContrastiveLoss("clip"), micro_batch_size=micro_batch_size)
        names = set(gradients(model))
        assert {"image_projection.weight", "text_projection.weight", "logit_scale"} < names
        assert not any(name.startswith("image_tower") for name in names)


def test_gradient_checkpointing_changes_no_gradient():
    batch, loss_function = make_batch(), ContrastiveLoss("clip")
    found = []
    for checkpointing in (False, True):
        model = make_model(dropout=0.2, gradient_checkpointing=checkpointing)
        torch.manual_seed(3)
        train_step(model, batch, loss_function, micro_batch_size=4)
        found.append(gradients(model))
    assert_same(found[1], found[0])


def test_scaler_scales_all_gradients_alike():
    model, batch, loss_function = make_model(), make_batch(), ContrastiveLoss("clip")
    train_step(model, batch, loss_function)
    expected = gradients(model)
    for micro_batch_size in (None, 3):
        model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        train_step(model, batch, loss_function, micro_batch_size=micro_batch_size, scaler=scaler)
        assert_same({name: gradient / 1024 for name, gradient in gradients(model).items()}, expected)


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_autocast_keeps_features_loss_and_gradients_in_float32(micro_batch_size: int | None):
    model, batch = make_model().float(), make_batch()
    exact = train_step(model, batch, ContrastiveLoss("clip"))
    model.zero_grad()
    step = train_step(
        model,
        batch,
        ContrastiveLoss("clip"),
        micro_batch_size=micro_batch_size,
        autocast_dtype=torch.bfloat16,
    )
    assert step.loss.dtype == step.output.image_features.dtype == torch.float32
    # Logits of 1 / 0.07 from features that are rounded to bfloat16.
    torch.testing.assert_close(step.loss, exact.loss, rtol=0, atol=rounding(1 / 0.07, sums=1, dtype=torch.bfloat16))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients(model).values())


def test_step_brings_an_overgrown_scale_back_where_it_has_a_gradient():
    model, batch = make_model().float(), make_batch()
    with torch.no_grad():
        model.logit_scale.fill_(6.0)
    step = train_step(model, batch, ContrastiveLoss("clip"))
    assert 99.99 < step.output.logit_scale <= 100.0
    assert model.logit_scale.grad is not None
    assert model.logit_scale.grad != 0


def test_micro_batch_of_no_rows_is_an_error():
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1: got 0"):
        train_step(make_model(), make_batch(), ContrastiveLoss("clip"), micro_batch_size=0)


def test_a_dual_encoder_gets_tensors_only():
    model, seen = make_model(), set[type]()
    model.register_forward_pre_hook(lambda _, given: seen.update(type(value) for value in given[0].values()))
    batch = make_batch()
    rows = len(batch["valid"])
    train_step(model, {**batch, "keys": ["a"] * rows, "captions": ["b"] * rows}, ContrastiveLoss("clip"))
    assert seen == {torch.Tensor}, "DDP and FSDP2 walk through all that they are given"
