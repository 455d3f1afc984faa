"""What only a GPU shows: compiled kernels, number formats, waiting, random numbers, fused updates. Skipped without one.

The oracles are float64, on the CPU or on the GPU, and written here or torch's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.batch import Batch, to_device
from mmdata.config import ModelConfig
from mmdata.config.train import TeacherConfig
from mmdata.train import DualEncoder, DualEncoderOutput, compiler, losses, miners, train_step
from mmdata.train.batches import split
from mmdata.train.losses import tiles
from mmdata.train.memory.ema import EMA
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.models.towers import PatchConv
from mmdata.train.precision import AUTOCAST, Precision, numerics
from mmdata.train.prefetch import DevicePrefetcher, HostCopy
from mmdata.train.ranks import parallel, sharding
from mmdata.train.run.objective import ContrastiveLoss
from mmdata.train.run.optimizer import make_optimizer
from mmdata.train.run.trainer import Trainer
from tests.programs import PATIENCE_S, run_program
from tests.rounding import rounding
from tests.train import small_run as small
from tests.train.compare import features, scalar, value_and_gradients
from tests.train.test_loop import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="computes on a GPU: torch sees none here"),
]
GPU = torch.device("cuda")
LARGEST_LOGIT = 50.0


def dense_loss(images: Tensor, texts: Tensor, scale: Tensor, valid: Tensor, same: Tensor) -> Tensor:
    """Cross entropies over the whole matrix; pairs of equal keys, and rows that are not valid, are left out."""
    equal = (same[:, None] == same) & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
    logits = (scale * images @ texts.T).masked_fill(equal | ~valid[:, None] | ~valid, -torch.inf)
    targets = torch.arange(len(images), device=images.device)[valid]
    return (F.cross_entropy(logits[valid], targets) + F.cross_entropy(logits.T[valid], targets)) / 2


@pytest.mark.parametrize(
    ("rows", "elements"), [(700, 1 << 12), (700, 1 << 16), (700, 1 << 24), (3, 1 << 24), (5000, 1 << 20)]
)  # of the batch and of a tile
def test_gradients_of_the_compiled_tiles_are_those_of_the_dense_loss(
    rows: int, elements: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cuda", elements)
    width = 64
    exact = [x.detach().cuda().requires_grad_() for x in (*features(rows, width), scalar(LARGEST_LOGIT))]
    inputs = [x.detach().float().requires_grad_() for x in exact]
    valid = torch.arange(rows, device=GPU) % 7 != 3
    same = torch.arange(rows, device=GPU) // 3
    ours = losses.clip_loss(inputs[0], inputs[1], inputs[2], valid=valid, same=[same])
    theirs = dense_loss(exact[0], exact[1], exact[2], valid, same)
    # A gradient is a mean over rows of probabilities times features: what rounding makes of a logit, it has twice.
    tolerance = rounding(LARGEST_LOGIT, sums=width)
    found, expected = value_and_gradients(ours, *inputs), value_and_gradients(theirs, *exact)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=tolerance)
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        largest = float(wanted.abs().max())
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2 * tolerance * max(largest, 1e-3))


@pytest.mark.parametrize(
    ("precision", "eps"),
    [("fp32", 16 * 2.0**-23), ("tf32", 2.0**-10 / 4), ("bf16", 2.0**-8 / 4), ("auto", 2.0**-8 / 4)],
)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_error_of_the_gradient_in_each_precision_of_the_loss(kind: Any, precision: Any, eps: float):
    """As in test_tiles.py, which says where the bounds come from; auto in a run in bf16.

    In fp32 a GPU's exponentials have errors of a few units, and the gradient of the scale is a difference of two sums.
    """
    torch.manual_seed(0)
    texts = F.normalize(torch.randn(3000, 64, dtype=torch.float64, device=GPU), dim=1)
    images = F.normalize(texts + 0.1 * torch.randn_like(texts), dim=1)
    exact = [x.requires_grad_() for x in (images, texts, *(scalar(x).detach().cuda() for x in (50.0, -10.0)))]
    inputs = [x.detach().float().requires_grad_() for x in exact]
    batch: Any = {"valid": torch.arange(3000, device=GPU) % 7 != 3}

    def gradients(inputs: list[Tensor], settings: dict[str, Any]) -> list[Tensor]:
        loss = ContrastiveLoss(kind, **settings)(DualEncoderOutput(*inputs), batch)
        return list(torch.autograd.grad(loss, inputs))

    settings = {"loss_precision": precision, "precision": "bf16" if precision == "auto" else "fp32"}
    for found, expected in zip(gradients(inputs, settings), gradients(exact, {}), strict=True):
        assert float((found.double() - expected).norm()) <= 51 * eps * float(expected.norm())


def make_model(name: str = "micro", **settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder.from_config(ModelConfig.model_validate({"name": name, **settings}), vocab_size=30)


def make_batch(rows: int = 12, length: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(rows)
    return Batch(
        pixel_values=torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8, generator=generator),
        input_ids=torch.randint(0, 30, (rows, length), generator=generator),
        attention_mask=(torch.arange(length) < 2 + (numbers % 6)[:, None]).long(),
        image_hash=numbers,
        caption_hash=numbers // 2,
        labels=numbers % 3,
        valid=numbers != 5,
        rows=numbers,
        keys=[str(row) for row in range(rows)],
    )


def gradient_of(model: DualEncoder) -> Tensor:
    """All gradients as one vector on the CPU, float64."""
    return torch.cat([p.grad.flatten().cpu().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.99999), ("tf32", 0.9999), ("bf16", 0.98), ("fp16", 0.999)])
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_a_step_in_each_number_format_has_the_gradient_of_float64(
    precision: Precision, least: float, micro_batch_size: int | None
):
    loss, batch = ContrastiveLoss(), make_batch()
    exact, model = make_model().double(), make_model().to(GPU)
    expected = train_step(exact, batch, loss).loss
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=precision == "fp16")
    with numerics(precision, GPU):
        found = train_step(
            model,
            to_device(batch, GPU),
            loss,
            micro_batch_size=micro_batch_size,
            autocast_dtype=AUTOCAST[precision],
            scaler=scaler,
        )
    assert found.loss.dtype == torch.float32
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-5 if precision == "fp32" else 2e-2)
    assert F.cosine_similarity(gradient_of(model), gradient_of(exact), dim=0) > least


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """A call that waits for the device raises, as `item`, `nonzero` and copies to the host's own memory do."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_waiting_is_seen():
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        torch.ones(1, device=GPU).item()


def updates(model: DualEncoder, loss: Callable[[], ContrastiveLoss], precision: Precision = "bf16", **settings: Any):
    """Three updates, the last one with `waiting_is_an_error`; the first ones compile and start libraries."""
    batch, optimizer = to_device(make_batch(), GPU), make_optimizer(model, small.train_config())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def update() -> HostCopy:
        optimizer.zero_grad(set_to_none=True)
        output = train_step(model, batch, loss(), autocast_dtype=AUTOCAST[precision], scaler=scaler, **settings)
        scaler.unscale_(optimizer)
        norm = sharding.clip_grad_norm(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return HostCopy(output.loss, norm)

    with numerics(precision, GPU):
        update(), update()
        with waiting_is_an_error():
            coming = update()
    assert all(value.isfinite() for value in coming.read())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
def test_an_update_in_each_number_format_does_not_wait(precision: Precision):
    updates(make_model().to(GPU), ContrastiveLoss, precision)


@pytest.mark.parametrize("settings", [{"micro_batch_size": 5}])
def test_an_update_of_micro_batches_does_not_wait(settings: dict[str, Any]):
    updates(make_model().to(GPU), ContrastiveLoss, **settings)


@pytest.mark.parametrize("model", [{"dropout": 0.1}, {"gradient_checkpointing": True}, {"freeze": ["image"]}])
def test_no_kind_of_tower_waits(model: dict[str, Any]):
    updates(make_model(**model).to(GPU), ContrastiveLoss)


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = {
    "model_type": "clip",
    "projection_dim": 8,
    "text_config": {**TINY, "vocab_size": 30, "max_position_embeddings": 9, "projection_dim": 8, "eos_token_id": 29},
    "vision_config": {**TINY, "image_size": 32, "patch_size": 8, "projection_dim": 8},
}


def test_towers_of_transformers_do_not_wait():
    updates(make_model("pretrained", clip=CLIP).to(GPU), ContrastiveLoss)


@pytest.mark.parametrize("kind", ["clip", "siglip", "multi_positive", "triplet"])
def test_no_loss_waits(kind: Any):
    updates(make_model(logit_bias_init=-10.0).to(GPU), lambda: ContrastiveLoss(kind))


@pytest.mark.parametrize(
    "miner",
    [miners.TopK(3), miners.SemiHard(0.2), miners.DropHardest(0.3), miners.GumbelTopK(3)],
    ids=lambda miner: type(miner).__name__,
)
def test_no_miner_waits(miner: miners.AnyMiner):
    updates(make_model().to(GPU), lambda: ContrastiveLoss(miner=miner))


def test_queue_and_teacher_do_not_wait():
    model, queue = make_model().to(GPU), FeatureQueue(48)
    teacher, batch = EMA(model, TeacherConfig()), to_device(make_batch(), GPU)

    def update(number: int) -> None:
        mask = teacher.teacher_mask(teacher.embed(batch))
        output = train_step(model, batch, ContrastiveLoss(miner=mask, queue=queue))
        queue.keep(output.output, batch, number)
        teacher.update(model)

    for number in range(3):
        update(number)
    with waiting_is_an_error():
        update(3)


def test_the_gradient_cache_draws_the_same_dropout_in_both_passes():
    batch = to_device(next(iter(small.SmallBatches())), GPU)
    model = small.small_model(dropout=0.3).double().to(GPU)
    torch.manual_seed(1)
    loss = train_step(model, batch, ContrastiveLoss(), micro_batch_size=4).loss
    found = {"loss": loss, **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}
    model.zero_grad()
    torch.manual_seed(1)
    outputs = [model(part) for part in split(batch, 4)]  # each drawn once
    names = ("image_features", "text_features")
    joined = {name: torch.cat([getattr(output, name) for output in outputs]) for name in names}
    expected = ContrastiveLoss()(outputs[0]._replace(**joined), batch)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, {"loss": expected.detach(), **gradients}, rtol=1e-10, atol=1e-10)


def test_fused_updates_are_those_of_plain_adamw_in_float64():
    config = small.train_config(weight_decay=0.2)
    ours, exact = small.small_model().to(GPU), small.small_model().double()
    optimizer = make_optimizer(ours, config)
    assert optimizer.defaults["fused"]
    groups = [{**group, "params": []} for group in optimizer.state_dict()["param_groups"]]
    of_exact = dict(zip(ours.parameters(), exact.parameters(), strict=True))
    for group, plain in zip(optimizer.param_groups, groups, strict=True):
        plain |= {"params": [of_exact[p] for p in group["params"]], "fused": False, "foreach": False}
    oracle = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, foreach=False)
    for number in range(5):
        for p, q in of_exact.items():
            generator = torch.Generator().manual_seed(number)
            q.grad = torch.randn(q.shape, generator=generator, dtype=torch.float64)
            p.grad = q.grad.float().to(GPU)
        optimizer.step()
        oracle.step()
    for p, q in of_exact.items():
        torch.testing.assert_close(p.detach().cpu().double(), q.detach(), rtol=1e-5, atol=1e-6)


def test_fused_updates_with_a_gradient_that_overflows_change_nothing():
    model = small.small_model().to(GPU)
    optimizer, scaler = make_optimizer(model, small.train_config()), torch.amp.GradScaler("cuda", init_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(sum((p.sum() for p in model.parameters()), torch.zeros((), device=GPU))).backward()
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), torch.inf)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_compiled_blocks_have_the_gradients_of_eager_ones():
    eager, compiled = (make_model("tiny").to(GPU) for _ in range(2))
    parallel.compile_blocks(compiled)
    for length in (9, 5):
        batch = to_device(make_batch(length=length), GPU)
        for model in (eager, compiled):
            model.zero_grad()
        expected, found = (train_step(model, batch, ContrastiveLoss()).loss for model in (eager, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert F.cosine_similarity(gradient_of(compiled), gradient_of(eager), dim=0) > 0.9999


def test_patches_of_a_gpu_are_a_product_that_gives_what_the_convolution_gives():
    conv = torch.nn.Conv2d(3, 8, 4, stride=4).to(GPU, torch.float64)
    x = torch.randn(2, 3, 12, 16, device=GPU, dtype=torch.float64)
    results = [map_(x) for map_ in (conv, PatchConv.of(conv))]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((y * y).sum(), list(conv.parameters())) for y in results]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-10)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert PatchConv.of(conv.float())(x.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_a_run_on_a_gpu_learns_and_says_its_number_format(precision: str, tmp_path: Any):
    compiles: Any = "auto" if precision == "auto" else False  # auto is the default, and takes longer
    config = small.train_config(epochs=10, precision=precision, lr=0.003, compile=compiles)
    trainer = Trainer(small.small_model(0.0).to(GPU), small.SmallBatches(), config, output=tmp_path)
    assert trainer.run() == 0
    assert trainer.precision == {"auto": "bf16", "fp16": "fp16"}[precision]
    assert parallel.is_compiled(trainer.model) == (precision == "auto" and compiler.compiles(GPU))
    logged = [line["loss"] for line in read_metrics(tmp_path) if line.get("loss") is not None]
    assert sum(logged[-4:]) < sum(logged[:4])


def test_prefetcher_gpu_memory_is_not_used_again_under_a_slow_reader():
    # Each batch is dropped before the kernels that read it have run: they must find it as it was.
    class Numbered:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def __iter__(self) -> Iterator[Any]:
            for number in range(50):
                yield {"pixel_values": torch.full((64, 3, 64, 64), number, dtype=torch.uint8)}

    batches: Any = Numbered()
    results: list[Tensor] = []
    for batch in DevicePrefetcher(batches, "cuda"):
        torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
        results.append(batch["pixel_values"].float().mean())
        del batch
    assert [float(result) for result in results] == list(range(50))


def test_ddp_and_fsdp_over_nccl_have_the_losses_of_one_process(tmp_path: Path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = run_program(
        [*launcher, str(Path(__file__).with_name("nccl_rank.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"(\w+): \d+ losses", done.stdout) == ["ddp", "fsdp"]


@pytest.mark.parametrize("loss", ["clip", "clip with more texts", "siglip"])
def test_kernels_give_the_gradients_of_torchs_operations(loss: str, monkeypatch: pytest.MonkeyPatch):
    if not tiles.has_kernels(torch.zeros(1, dtype=torch.bfloat16, device="cuda")):
        pytest.skip("this GPU has no kernels: they run on those of compute capability 9.0")
    rows = 3000
    sides = [x.detach().cuda() for x in features(rows, 200)]
    settings: dict[str, Any] = {
        "valid": torch.arange(rows, device="cuda") % 7 != 3,
        "same": [torch.arange(rows, device="cuda") // 2, torch.arange(rows, device="cuda") % 500],
        "precision": "bf16",
    }

    def value_and_gradients_of() -> list[Tensor]:
        images, texts = (x.clone().requires_grad_() for x in sides)
        scale, bias = (torch.tensor(x, device="cuda", requires_grad=True) for x in (LARGEST_LOGIT, -10.0))
        if loss != "siglip":
            more = {"extra_texts": losses.ExtraNegatives(2 * sides[1])} if "more" in loss else {}
            value = losses.clip_loss(images, texts, scale, **settings, **more)
            return [value, *torch.autograd.grad(value, (images, texts, scale))]
        value = losses.siglip_loss(images, texts, scale, bias, **settings)
        return [value, *torch.autograd.grad(value, (images, texts, scale, bias))]

    ours = value_and_gradients_of()
    monkeypatch.setattr(tiles, "has_kernels", lambda _: False)
    for found, expected in zip(ours, value_and_gradients_of(), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 2**-9  # half of a tile's rounding
