"""Apple's GPU by construction: none is here, so it is asked for what it lacks, and float64 is counted as an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmdata.batch import to_device
from mmdata.errors import ConfigError
from mmdata.train.accelerator import (
    best_device,
    generator_states,
    set_generator_states,
    where_float64_is,
    widest,
)
from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.telemetry import mining_telemetry
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.miners import DropHardest
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.precision import choose_precision
from mmdata.train.prefetch import HostCopy
from mmdata.train.ranks import collectives
from mmdata.train.run.random_state import rng_state, set_rng_state

MPS = torch.device("mps")


class NoFloat64(TorchDispatchMode):
    """Raises where an operation makes a tensor of float64, as the device does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise TypeError(f"{func}: Cannot convert a MPS Tensor to float64 dtype")
        return result


def test_auto_is_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (best_device(), collectives.init("auto")) == ("cpu", torch.device("cpu"))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert (collectives.init("auto"), collectives.init("mps"), collectives.init("cpu").type) == (MPS, MPS, "cpu")
    assert choose_precision("auto", MPS) == "fp32"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert best_device() == "cuda"


def test_mps_is_for_one_process(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"^device 'mps': torch sees no GPU of Apple's; use device 'cpu'$"):
        collectives.init("mps")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"^device 'mps': ranks of torchrun cannot exchange what is on Apple's GPU"):
        collectives.init("mps")
    assert collectives.init("auto").type == "cpu"


def test_mps_has_no_float64():
    assert (widest(MPS), widest(torch.device("cpu"))) == (torch.float32, torch.float64)
    tensor = torch.ones(2)
    assert where_float64_is(tensor) is tensor


def test_generator_of_mps_is_kept_and_restored(monkeypatch: pytest.MonkeyPatch):
    restored: list[Any] = []
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr("torch.mps.set_rng_state", restored.append)
    set_generator_states(generator_states())
    set_rng_state(rng_state(MPS), MPS)
    assert restored == [torch.tensor([7])] * 2


def test_what_is_measured_on_the_device_is_no_float64(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.nn.functional.normalize(torch.randn(2, 12, 8, generator=generator), dim=-1)
    batch = GlobalBatch.gather(images, texts)

    def measured() -> dict[str, Any]:
        queue = FeatureQueue(24)
        keys: Any = {name: torch.arange(12) for name in ("image_hash", "caption_hash")}
        queue.keep(DualEncoderOutput(images, texts), {**keys, "valid": torch.ones(12, dtype=torch.bool)}, step=3)
        rows = mining_telemetry(batch, torch.tensor(10.0), DropHardest(0.3))
        return {**rows, **queue.telemetry(5)}

    expected = measured()
    for module in ("miners", "memory.queue", "losses.telemetry"):
        monkeypatch.setattr(f"mmdata.train.{module}.widest", lambda _: torch.float32)
    with NoFloat64():
        found = measured()
    assert found == pytest.approx(expected, rel=1e-5)


def test_copies_to_and_from_mps_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, bool]] = []

    def to(tensor: torch.Tensor, device: Any, *, non_blocking: bool) -> torch.Tensor:
        asked.append((torch.device(device).type, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device({"labels": torch.ones(1)}, "mps")  # type: ignore[typeddict-item]
    to_device({"labels": torch.ones(1)}, "cuda")  # type: ignore[typeddict-item]
    HostCopy(torch.ones(1))
    assert asked == [("mps", False), ("cuda", True), ("cpu", False)]
