"""FSDP2 (gloo, real processes): gradients are those of one process, checkpoints those of any other way to run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from mmdata.config import TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError
from mmdata.train.models.towers import PRESETS, ImageTower
from mmdata.train.ranks import sharding
from tests.programs import run_ranks
from tests.rounding import RUN_IN_DOUBLE, rounding
from tests.train import ranks, sharded_ranks
from tests.train.test_distributed import ALL, FEW, NONE, SOME, one_process
from tests.train.test_loop import last_state, read_metrics, run_small

PROGRAM = Path(__file__).with_name("sharded_ranks.py")
CASES: dict[str, dict[str, Any]] = {
    "2": {"loss": "clip", "valid": [ALL, ALL]},
    "2_siglip_unequal_dropout": {"loss": "siglip", "valid": [SOME, FEW], "dropout": 0.3},
    "2_micro_dropout": {"loss": "clip", "valid": [ALL, SOME], "dropout": 0.3, "micro_batch_size": 3, "mask_same": True},
    "2_micro_regions": {"loss": "clip", "valid": [ALL, SOME], "dropout": 0.3, "micro_batch_size": 3, "regions": True},
    "2_micro_of_one": {"loss": "siglip", "valid": [ALL, SOME], "micro_batch_size": 1},
    "2_micro_checkpointing": {
        "loss": "siglip",
        "valid": [ALL, SOME],
        "dropout": 0.3,
        "micro_batch_size": 1,
        "model": {"gradient_checkpointing": True},
    },
    "2_checkpointing": {
        "loss": "siglip",
        "valid": [NONE, ALL],
        "dropout": 0.3,
        "model": {"gradient_checkpointing": True},
    },
    "2_frozen": {"loss": "clip", "valid": [ALL, SOME], "micro_batch_size": 3, "model": {"freeze": ["image"]}},
    "2_lora": {
        "loss": "clip",
        "valid": [ALL, SOME],
        "micro_batch_size": 3,
        "model": {
            "lora": {"r": 1, "match": ["*.qkv", "text_tower.*.mlp.2"], "dropout": 0.3},
            "patch_dropout": 0.5,
            "gradient_checkpointing": True,
        },
    },
    "2_compiled": {"loss": "clip", "valid": [ALL, SOME], "compile": True},
    "2_compiled_micro_dropout": {
        "loss": "clip",
        "valid": [ALL, SOME],
        "compile": True,
        "dropout": 0.3,
        "micro_batch_size": 2,  # one shape, one compilation
    },
    "2_compiled_checkpointing": {
        "loss": "siglip",
        "valid": [NONE, ALL],
        "compile": True,
        "dropout": 0.3,
        "model": {"gradient_checkpointing": True},
    },
    "3_one_rank_empty": {"loss": "siglip", "valid": [ALL, NONE, SOME], "dropout": 0.3, "micro_batch_size": 2},
}
IN_BF16: dict[str, dict[str, Any]] = {
    "bf16": {"loss": "clip", "valid": [ALL, SOME]},
    "bf16_micro": {"loss": "siglip", "valid": [ALL, SOME], "micro_batch_size": 1},
    "bf16_lora": {"loss": "clip", "valid": [ALL, SOME], "model": {"lora": {"dropout": 0.3}}},
    "bf16_compiled": {"loss": "clip", "valid": [ALL, ALL], "compile": True},
}
BLOCKS = (".transformer.blocks.0", ".transformer.blocks.1")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `<case>.<rank>.pt` of every case; three processes run them all."""
    folder = tmp_path_factory.mktemp("sharded")
    cases = CASES | {f"{name}_{way}": case | {"way": way} for name, case in IN_BF16.items() for way in ("ddp", "fsdp")}
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(PROGRAM, folder, 3)
    return folder


def test_blocks_are_those_of_lists_and_of_timm():
    vit = VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=5)
    assert list(sharding.blocks_of(vit)) == list(vit.blocks)
    with torch.device("meta"):
        tower = ImageTower(PRESETS["base"])
    assert list(sharding.blocks_of(tower)) == list(tower.transformer.blocks), "its patches are one layer"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(keep=1)
def test_sharding_gives_the_gradients_of_one_process(results: Path, name: str):
    loss, gradients = one_process(CASES[name])
    present = [gradient for gradient in gradients.values() if gradient is not None]
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in present]))
    assert gradients["logit_scale"].abs() > 1e-9
    for rank in range(len(CASES[name]["valid"])):
        found = torch.load(results / f"{name}.{rank}.pt")
        torch.testing.assert_close(found["loss"], loss, rtol=1e-10, atol=1e-12)
        assert found["gradients"].keys() == gradients.keys()
        for parameter, expected in gradients.items():
            if expected is None:
                assert found["gradients"][parameter] is None, parameter
                continue
            torch.testing.assert_close(
                found["gradients"][parameter],
                expected,
                rtol=1e-10,
                atol=1e-10,
                msg=lambda text, parameter=parameter, rank=rank: f"rank {rank}, {parameter}: {text}",
            )
        torch.testing.assert_close(found["norm"], norm, rtol=1e-10, atol=0)
        shrunk = 0.01 / (norm + 1e-6)
        torch.testing.assert_close(found["clipped"], gradients["image_projection.weight"] * shrunk)
        torch.testing.assert_close(found["scale"], gradients["logit_scale"] * shrunk)


def test_sharding_leaves_each_rank_its_share_of_all_matrices(results: Path):
    kept = [torch.load(results / f"2.{rank}.pt")["kept"] for rank in range(2)]
    parameters = dict(ranks.make_model(0.0).named_parameters())
    sizes = {name: p.numel() for name, p in parameters.items()}
    whole = set(parameters) - set(kept[0])
    assert whole == {name for name, p in parameters.items() if p.ndim < 2}
    assert {"logit_scale", "logit_bias", "text_tower.transformer.blocks.0.mlp_norm.weight"} < whole
    assert all(kept[0][name] + kept[1][name] == sizes[name] for name in kept[0])
    assert kept[0]["text_tower.transformer.blocks.0.mlp.0.weight"] == 4 * 128 * 128 / 2


def test_sharding_averaged_weights_are_updated_without_a_collective(results: Path):
    assert torch.load(results / "collectives2.1.pt") == (0, 1)


def test_sharding_makes_the_updates_of_muon_up_to_its_bfloat16(results: Path):
    found, expected = torch.load(results / "muon2.1.pt"), sharded_ranks.muon_update(is_sharded=False)
    assert len(found) == 4
    for name, update in expected.items():
        bound = rounding(1.0, sums=15, dtype=torch.bfloat16)  # three products in each of five iterations
        assert float((found[name] - update).norm() / update.norm()) < bound, name


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharding_retrieval_shared_out_over_ranks_is_that_of_one(results: Path, world_size: int):
    expected = sharded_ranks.shared_retrieval(share=False)
    assert 0 < expected["image_to_text_r1"] < 1
    for rank in range(world_size):
        assert torch.load(results / f"retrieval{world_size}.{rank}.pt") == expected


@pytest.mark.parametrize(("first", "then"), [("fsdp", "alone"), ("alone", "fsdp")])
@pytest.mark.sweep
def test_sharding_a_run_resumes_in_another_way(tmp_path: Path, first: str, then: str):
    def go(output: Path, way: str, **spec: Any) -> subprocess.CompletedProcess[str]:
        groups = [{"match": "image_tower.*", "freeze": True}]  # the teacher shares them where it is not sharded
        settings = {"parallel": "ddp" if way == "alone" else way, "epochs": 2, "teacher": {"decay": 0.9}}
        settings["groups"] = groups
        return run_small(output, torchrun=0 if way == "alone" else 2, dropout=0.0, double=True, train=settings, **spec)

    assert go(tmp_path / "whole", "alone").returncode == 0
    stopped = go(tmp_path / "cut", first, signal="SIGTERM", at=4)
    assert "stopped by SIGTERM after step 5 of 8" in stopped.stdout, stopped.stderr
    resumed = go(tmp_path / "cut", then)
    assert resumed.returncode == 0, resumed.stderr
    expected = [line["loss"] for line in read_metrics(tmp_path / "whole")]
    found = [line["loss"] for line in read_metrics(tmp_path / "cut")]
    assert found == pytest.approx(expected, rel=0, abs=RUN_IN_DOUBLE)
    before, after = last_state(tmp_path / "whole"), last_state(tmp_path / "cut")
    assert before["model"].keys() == after["model"].keys()
    torch.testing.assert_close(after["memory"]["teacher"], before["memory"]["teacher"], rtol=0, atol=RUN_IN_DOUBLE)
    torch.testing.assert_close(after["optimizer"], before["optimizer"], rtol=0, atol=RUN_IN_DOUBLE)
    assert len(read_metrics(tmp_path / "cut", "evaluation")) == 2


@pytest.mark.parametrize("name", IN_BF16)
def test_sharding_gives_the_numbers_of_ddp_under_autocast(results: Path, name: str):
    for rank in range(2):
        ddp, fsdp = (torch.load(results / f"{name}_{way}.{rank}.pt") for way in ("ddp", "fsdp"))
        # Norms, and what runs through the blocks, are float32; only weights of products are as autocast casts them.
        if "compile" not in IN_BF16[name]:
            assert ddp["formats"] == {part: ["torch.float32"] * 2 for part in ("block", "norm", "linear")}
            assert fsdp["formats"] == {**ddp["formats"], "linear": ["torch.float32", "torch.bfloat16"]}
        # Logits of 1 / 0.07 from features that are rounded to bfloat16.
        bound = rounding(1 / 0.07, sums=1, dtype=torch.bfloat16)
        torch.testing.assert_close(fsdp["loss"], ddp["loss"], rtol=0, atol=bound)
        for parameter, expected in ddp["gradients"].items():
            assert fsdp["gradients"][parameter].dtype == torch.float32
            # Each of two towers' two blocks rounds some tens of products on the way.
            bound = rounding(float(expected.abs().max()), sums=32, dtype=torch.bfloat16)
            torch.testing.assert_close(
                fsdp["gradients"][parameter],
                expected,
                rtol=0,
                atol=bound,
                msg=lambda text, parameter=parameter: f"{parameter}: {text}",
            )
        # Outside of autocast DDP's blocks are float32; those of a sharded model have bfloat16 weights.
        bound = rounding(1.0, sums=8, dtype=torch.bfloat16)
        torch.testing.assert_close(fsdp["features"], ddp["features"], rtol=0, atol=bound)


def test_sharding_clips_whole_gradients_as_torch_does():
    values = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(()))
    values[0].grad, values[1].grad = torch.tensor([3.0, 0.0]), torch.tensor(4.0)
    assert sharding.clip_grad_norm(values, None) == 5
    assert values[0].grad.tolist() == [3, 0]
    assert sharding.clip_grad_norm(values, 0.5) == 5
    torch.testing.assert_close(values[0].grad, torch.tensor([0.3, 0.0]))
    torch.testing.assert_close(values[1].grad, torch.tensor(0.4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp16"}, "parallel 'fsdp' has no gradient scaler: set precision to bf16 or fp32"),
    ],
)
def test_sharding_refuses_what_does_not_go_with_it(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(TrainConfig, {"steps": 1, "parallel": "fsdp", **settings}, origin="test")
