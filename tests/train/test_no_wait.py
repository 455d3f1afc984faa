"""A step never asks the device for a number: the host would wait for it, and the device then for the host.

Everything runs on torch's meta device, which has shapes and no numbers: `.item()`, `.tolist()`, `bool(tensor)`,
indexing by a mask and `nonzero` raise there. It takes the ways of a GPU: the code asks only whether it is on a CPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mmdata.batch import Batch, to_device
from mmdata.config import ModelConfig
from mmdata.config.train import TeacherConfig
from mmdata.train import DualEncoder, miners, train_step
from mmdata.train.evaluation.embedding import embed
from mmdata.train.memory.ema import EMA
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.run.objective import ContrastiveLoss
from tests.train.test_pretrained import PAIRS, config_of

META = torch.device("meta")
ROWS = 8


@pytest.fixture(autouse=True)
def _numbers_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # torch has none for the meta device


def make_batch(*, hashes: bool = True, negatives: bool = False) -> Batch:
    numbers = torch.arange(ROWS, device=META)
    batch: dict[str, Any] = {
        "pixel_values": torch.zeros(ROWS, 3, 32, 32, dtype=torch.uint8, device=META),
        "input_ids": torch.zeros(ROWS, 9, dtype=torch.long, device=META),
        "attention_mask": torch.ones(ROWS, 9, dtype=torch.long, device=META),
        "labels": numbers,
        "valid": torch.ones(ROWS, dtype=torch.bool, device=META),
        "rows": numbers,
        "keys": [str(row) for row in range(ROWS)],
    }
    if hashes:
        batch |= {"image_hash": numbers, "caption_hash": numbers}
    if negatives:
        batch |= {"negative_input_ids": batch["input_ids"], "negative_attention_mask": batch["attention_mask"]}
        batch |= {"negative_valid": batch["valid"], "negative_caption_hash": numbers}
    return cast(Batch, batch)


def make_model(**settings: Any) -> DualEncoder:
    config = ModelConfig(name="micro", logit_bias_init=-10.0, **settings)
    return DualEncoder.from_config(config, vocab_size=30).to(META)


def step(loss: ContrastiveLoss, batch: Batch, *, model: DualEncoder | None = None, **settings: Any) -> None:
    model = model or make_model()
    output = train_step(model, batch, loss, **settings)
    assert output.loss.device == META
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


MINERS: dict[str, miners.AnyMiner | None] = {
    "none": None,
    "all": miners.All(),
    "top_k": miners.TopK(3),
    "semi_hard": miners.SemiHard(0.2),
    "drop_hardest": miners.DropHardest(1),
    "drop_hardest_share": miners.DropHardest(0.3),
    "false_negative_margin": miners.FalseNegativeMargin(0.1),
    "gumbel": miners.GumbelTopK(3),
    "gumbel_straight_through": miners.GumbelTopK(3, gradient="straight_through"),
    "gumbel_relaxed": miners.GumbelTopK(3, gradient="relaxed"),
    "same_group": miners.SameGroup(4, 3),
    "teacher": miners.TeacherMask(torch.zeros(ROWS, 64, device=META), torch.zeros(ROWS, 64, device=META)),
    "chain": miners.Chain([miners.FalseNegativeMargin(0.1), miners.GumbelTopK(3, gradient="relaxed")]),
}


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("kind", ["clip", "siglip", "multi_positive", "triplet"])
@pytest.mark.sweep(keep=6)
def test_no_loss_with_any_miner_waits(kind: Any, miner: str):
    step(ContrastiveLoss(kind, miner=MINERS[miner]), make_batch())


@pytest.mark.parametrize("positives", ["labels", "image_hash"])
def test_no_kind_of_positives_waits(positives: Any):
    step(ContrastiveLoss("multi_positive", positives=positives), make_batch())


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3}])
@pytest.mark.parametrize("frozen", [{}, {"freeze": ["image"]}, {"freeze": ["text"]}, {"freeze": ["logit_scale"]}])
@pytest.mark.parametrize("negatives", [False, True])
@pytest.mark.sweep(keep=1)
def test_no_kind_of_step_waits(settings: dict[str, Any], frozen: dict[str, Any], negatives: bool):
    step(ContrastiveLoss(), make_batch(negatives=negatives), model=make_model(**frozen), **settings)


@pytest.mark.parametrize("model", [{"dropout": 0.1}, {"gradient_checkpointing": True}])
def test_no_kind_of_tower_waits(model: dict[str, Any]):
    step(ContrastiveLoss(), make_batch(), model=make_model(**model))


TOWERS: dict[str, dict[str, Any]] = {
    "clip": {"clip": config_of("clip")},
    "siglip": {"clip": config_of("siglip")},
    "siglip2": {"clip": config_of("siglip2")},
    **{name: {"vision": vision, "text": text} for name, (vision, text) in PAIRS.items()},
}


@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.sweep(keep=1)
def test_towers_of_transformers_do_not_wait(towers: str, micro_batch_size: int | None):
    model = DualEncoder.from_config(ModelConfig(name="pretrained", logit_bias_init=-1.0, **TOWERS[towers])).to(META)
    unused = {name for name, p in model.named_parameters() if "mask_token" in name}
    train_step(model, make_batch(), ContrastiveLoss(), micro_batch_size=micro_batch_size)
    assert {name for name, p in model.named_parameters() if p.grad is None} == unused


def test_a_tower_for_patches_does_not_wait():
    model = DualEncoder.from_config(ModelConfig(name="pretrained", logit_bias_init=-1.0, clip=config_of("siglip2"))).to(
        META
    )
    on_cpu = make_batch() | {
        "pixel_values": torch.zeros(ROWS, 6, 192, dtype=torch.uint8),
        "pixel_attention_mask": torch.ones(ROWS, 6, dtype=torch.long),
        "spatial_shapes": torch.tensor([[2, 3]]).expand(ROWS, 2),
    }
    step(ContrastiveLoss(), to_device(cast(Batch, on_cpu), META), model=model)


@pytest.mark.parametrize("negatives", [False, True])
@pytest.mark.sweep(keep=1)
def test_queue_and_teacher_do_not_wait(negatives: bool):
    model, queue = make_model(), FeatureQueue(12)
    teacher = EMA(model, TeacherConfig())
    for number in range(3):
        batch = make_batch(negatives=negatives)
        mask = teacher.teacher_mask(teacher.embed(batch))
        output = train_step(model, batch, ContrastiveLoss(miner=mask, queue=queue))
        queue.keep(output.output, batch, number)
        teacher.update(model)


def test_an_evaluation_waits_after_its_last_batch_only():
    model, embedded = make_model(), 0

    def count(*_: object) -> None:
        nonlocal embedded
        embedded += 1

    model.register_forward_hook(count)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        embed(model.eval(), (make_batch() for _ in range(3)))
    assert embedded == 3


def test_a_step_that_waits_is_seen():
    def waiting(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        assert negatives.any()
        return negatives

    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        step(ContrastiveLoss(miner=waiting), make_batch())
