"""What batches take of a device: operations of the towers' products, and their share of the peak."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from torch import nn

from mmdata.batch import Batch
from mmdata.config import ModelConfig
from mmdata.train import DualEncoder
from mmdata.train.peaks import peak_flops
from mmdata.train.run import utilization
from mmdata.train.run.meter import Meter
from mmdata.train.run.utilization import Utilization, count_flops, without_numbers

CPU = torch.device("cpu")


class Linear(nn.Module):
    """Two towers of one matrix each, of 5 and 7 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(5, 3, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.image(batch["pixel_values"]), self.text(batch["input_ids"])


def batch_of(rows: int) -> Batch:
    valid = torch.ones(rows, dtype=torch.bool)
    batch = {
        "pixel_values": torch.zeros(rows, 5),
        "input_ids": torch.zeros(rows, 7),
        "valid": valid,
        "keys": ["a"] * rows,
    }
    return cast(Batch, batch)


def test_operations_are_those_of_forward_and_of_the_weights_gradients():
    # The inputs need no gradients, so each matrix is multiplied once forward and once backward; a product and a sum.
    assert count_flops(without_numbers(Linear()), batch_of(4)) == 2 * 2 * 4 * 3 * (5 + 7)


def test_a_frozen_tower_counts_forward_only():
    model = Linear()
    model.image.requires_grad_(False)
    assert count_flops(without_numbers(model), batch_of(4)) == 2 * 4 * 3 * (5 + 2 * 7)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.sweep(keep=1)
def test_activations_that_are_computed_again_are_no_progress(checkpointing: bool):
    model = DualEncoder.from_config(ModelConfig(name="micro", gradient_checkpointing=checkpointing), vocab_size=30)
    batch: Any = {
        "pixel_values": torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
        "input_ids": torch.ones(2, 9, dtype=torch.long),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
    }
    plain = DualEncoder.from_config(ModelConfig(name="micro"), vocab_size=30)
    assert count_flops(without_numbers(model), batch) == count_flops(without_numbers(plain), batch) > 0
    assert all(weight.device == CPU and weight.grad is None for weight in model.parameters())


def test_rates_are_those_since_the_last_line():
    used = Utilization(Linear(), CPU)
    for rows in (4, 4, 2):
        used.add(batch_of(rows))
    flops = 2 * 2 * 10 * 3 * (5 + 7)
    assert used.read(2.0) == {"tflops": flops / 2e12, "mfu_share": None, "memory_gib": None}
    assert used.read(2.0)["tflops"] == 0.0
    used._peak = flops / 0.4
    for rows in (4, 4, 2):
        used.add(batch_of(rows))
    assert used.read(1.0)["mfu_share"] == pytest.approx(0.4, rel=1e-12)


def test_a_shape_is_counted_once_whatever_its_rows(monkeypatch: pytest.MonkeyPatch):
    counted: list[int] = []

    def counting(model: Any, batch: Any) -> float:
        counted.append(len(batch["valid"]))
        return count_flops(model, batch)

    monkeypatch.setattr(utilization, "count_flops", counting)
    used = Utilization(Linear(), CPU)
    meter = Meter(utilization=used)
    meter.expect(batch_of(8))
    assert used.read(1.0)["tflops"] == 0.0  # expected, and not come
    used.add(batch_of(4))
    used.add(batch_of(1))
    assert counted == [2]
    assert used.read(1.0)["tflops"] == 2 * 2 * 5 * 3 * (5 + 7) / 1e12


def test_a_model_that_needs_numbers_has_no_rate(caplog: pytest.LogCaptureFixture):
    class NeedsNumbers(Linear):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch) if batch["pixel_values"].sum() >= 0 else None

    used = Utilization(NeedsNumbers(), CPU)
    with caplog.at_level("INFO", "mmdata"):
        used.add(batch_of(4))
        used.add(batch_of(2))
    assert used.read(1.0) == {"tflops": None, "mfu_share": None, "memory_gib": None}
    (said,) = caplog.messages
    assert said.startswith("the log shows no operations a second: the model does not run without numbers (")


def test_a_model_that_cannot_be_copied_has_no_rate(caplog: pytest.LogCaptureFixture):
    model = Linear()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with caplog.at_level("INFO", "mmdata"):
        used = Utilization(model, CPU)
    used.add(batch_of(4))
    assert used.read(1.0) == {"tflops": None, "mfu_share": None, "memory_gib": None}
    (said,) = caplog.messages
    assert said.startswith("the log shows no operations a second: the model cannot be copied (cannot pickle")


def test_the_meter_reads_it():
    meter = Meter(utilization=Utilization(Linear(), CPU))
    for _ in meter.waited_for(iter([batch_of(4)])):
        pass
    values = meter.read()
    assert values["tflops"] is not None
    assert values["tflops"] > 0
    assert values["step_ms"] == meter.step_ms > 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla T4", None),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_peak_is_that_of_the_whole_name(name: str, tflops: int | None):
    assert peak_flops(name) == (None if tflops is None else 1e12 * tflops)
