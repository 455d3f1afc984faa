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
from mmdata.train.log import utilization
from mmdata.train.log.meter import Meter
from mmdata.train.log.utilization import FlopCounter, count_flops, peak_flops, without_numbers

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


def read_after(meter: Meter, *rows: int) -> dict[str, float | None]:
    for _ in meter.waited_for(iter(map(batch_of, rows))):
        pass
    return meter.read()


def test_rates_are_those_since_the_last_line():
    meter = Meter(flops=FlopCounter(Linear()))
    values = read_after(meter, 4, 4, 2)
    a_row = values["tflops"] / values["samples_per_s"]  # type: ignore[operator]
    assert a_row == pytest.approx(2 * 2 * 3 * (5 + 7) / 1e12)
    assert meter.read()["tflops"] == 0.0


def test_share_of_the_peak_and_memory_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 29)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    meter = Meter(flops=FlopCounter(Linear()))
    for _ in meter.waited_for(iter([batch_of(4)])):
        pass
    meter._device = torch.device("cuda", 0)
    values = meter.read()
    assert values["mfu_share"] == pytest.approx(values["tflops"] / 756)  # type: ignore[operator]
    assert values["memory_gib"] == 1.5


def test_a_shape_is_counted_once_whatever_its_rows(monkeypatch: pytest.MonkeyPatch):
    counted: list[int] = []

    def counting(model: Any, batch: Any) -> float:
        counted.append(len(batch["valid"]))
        return count_flops(model, batch)

    monkeypatch.setattr(utilization, "count_flops", counting)
    flops = FlopCounter(Linear())
    assert flops.count(batch_of(4)) + flops.count(batch_of(1)) == 2 * 2 * 5 * 3 * (5 + 7)
    assert counted == [2]


class NeedsNumbers(Linear):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch) if batch["pixel_values"].sum() >= 0 else None


def with_a_lock() -> nn.Module:
    model = Linear()
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(("make", "why"), [(NeedsNumbers, ""), (with_a_lock, "cannot pickle")])
def test_a_model_that_cannot_be_counted_has_no_rate(make: Any, why: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", "mmdata"):
        meter = Meter(flops=FlopCounter(make()))
        assert read_after(meter, 4, 2)["tflops"] is None
    (said,) = caplog.messages
    assert said.startswith(
        f"the log shows no operations a second: the model cannot be copied and run without numbers ({why}"
    )


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
