"""LoRA: peft's own model is the oracle. Under DDP and FSDP2: test_distributed.py, test_sharding.py."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from mmdata.errors import ConfigError
from mmdata.train import DualEncoder, train_step
from mmdata.train.models.lora import merge_adapters
from mmdata.train.run.objective import ContrastiveLoss
from tests.train.test_pretrained import config_of, library_output, make_batch, save

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
BERT = {"model_type": "bert", **SMALL, "vocab_size": 60}
DEBERTA = {"model_type": "deberta-v2", **SMALL, "vocab_size": 60}
MODERN = {
    "model_type": "modernbert",
    **SMALL,
    "vocab_size": 60,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}


def build(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder.from_config(settings, vocab_size=60).train()


def learning(model: DualEncoder) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def fill(model: torch.nn.Module) -> None:
    """Matrices that begin at 0 get numbers, so that adapters change something."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


@pytest.mark.parametrize("way", ["float32", "bfloat16", "checkpointing"])
def test_lora_gives_the_losses_gradients_and_updates_of_peft(tmp_path: Path, way: str):
    plain = save(tmp_path, "clip").train()
    targets = [f"{name}_proj" for name in "qkv"]
    theirs = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets))
    lora = {"r": 4, "alpha": 6}
    ours = build(
        name="pretrained",
        clip=str(tmp_path),
        lora=lora,
        freeze=["logit_scale"],
        gradient_checkpointing=way == "checkpointing",
    )

    def name_there(name: str) -> str:
        name = name.replace("image_tower.tower.model.", "vision_model.").replace("text_tower.model.", "text_model.")
        return f"base_model.model.{name}"

    fill(theirs)
    parameters = dict(theirs.named_parameters())
    assert {name_there(name) for name in learning(ours)} == {n for n, p in parameters.items() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(parameters[name_there(name)])
    dtype = torch.bfloat16 if way == "bfloat16" else None
    batch = make_batch()
    optimizers = [torch.optim.AdamW(p for p in each.parameters() if p.requires_grad) for each in (ours, theirs)]
    for _ in range(3):
        step = train_step(ours, batch, ContrastiveLoss("clip"), autocast_dtype=dtype)
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss = library_output(theirs, batch, ours).loss
        loss.backward()
        torch.testing.assert_close(step.loss, loss.detach(), rtol=0, atol=1e-5 if dtype is None else 1e-2)
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad:
                gradient, expected = parameter.grad, parameters[name_there(name)].grad
                assert gradient is not None
                assert expected is not None
                near: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5} if dtype is None else {"rtol": 0.1, "atol": 1e-2}
                torch.testing.assert_close(gradient, expected, **near, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("settings", "names", "others"),
    [
        ({"name": "micro"}, [".attention.qkv.lora_"], ["image_projection.weight", "text_projection.weight"]),
        (
            {"name": "pretrained", "clip": config_of("siglip"), "freeze": ["image", "logit_scale"]},
            ["_proj.lora_"],
            ["logit_bias"],
        ),
    ],
)
def test_lora_trains_adapters_what_is_above_the_towers_and_no_frozen_tower(
    settings: dict[str, Any], names: list[str], others: list[str]
):
    found = learning(build(**settings, lora={}))
    adapters = [name for name in found if "lora_" in name]
    assert all(any(part in name for part in names) for name in adapters)
    assert {name.partition(".")[0] for name in adapters} == {"image_tower", "text_tower"} - {
        f"{tower}_tower" for tower in settings.get("freeze", [])
    }
    scale = [] if "logit_scale" in settings.get("freeze", []) else ["logit_scale"]
    assert sorted({*found} - {*adapters}) == sorted(others + scale)


@pytest.mark.parametrize(("text", "layers"), [(DEBERTA, 6), (MODERN, 2)], ids=["deberta-v2", "modernbert"])
def test_lora_finds_queries_keys_and_values_by_other_names(text: dict[str, Any], layers: int):
    model = build(name="pretrained", vision={"model_type": "vit", **SMALL, "image_size": 32}, text=text, lora={})
    adapted = [name.partition(".")[0] for name in learning(model) if "lora_A" in name]
    assert (adapted.count("image_tower"), adapted.count("text_tower")) == (6, layers)


def test_lora_leaves_layers_alone_whose_weights_another_module_reads():
    """The head of SigLIP's image tower is torch's MultiheadAttention, which never calls its out_proj."""
    model = build(name="pretrained", clip=config_of("siglip"), lora={"match": ["image_tower.*out_proj"]})
    assert len([name for name in learning(model) if "lora_A" in name]) == 2  # two layers
    assert not any(".head." in name for name in learning(model))


@pytest.mark.parametrize("settings", [{"name": "micro"}, {"name": "pretrained", "clip": config_of("clip")}])
def test_merged_model_has_the_features_and_the_weights_of_a_plain_one(settings: dict[str, Any]):
    plain, model, batch = build(**settings), build(**settings, lora={}).eval(), make_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        expected = model(batch)
        merge_adapters(model)
        found = model(batch)
    torch.testing.assert_close(found.image_features, expected.image_features, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.text_features, expected.text_features, rtol=0, atol=1e-5)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert learning(model) == learning(plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lora": {"match": ["*.qkv", "text_tower.*.qvk"]}},
            r"^model\.lora\.match 'text_tower\.\*\.qvk': no linear layer of a tower that is not frozen has such a "
            r"name; the nearest are text_tower\.\S+\.qkv, \S+, \S+$",
        ),
        (
            {"name": "pretrained", "vision": RESNET, "text": BERT, "lora": {}},
            r"^model\.lora: no linear layer of the image tower is named as those of queries, keys and values are; name "
            r"some in model\.lora\.match \(there are none\), or leave the tower as it is with model\.freeze=\[image\]$",
        ),
        ({"lora": {"match": ["image_tower.*"]}, "freeze": ["image"]}, r"match 'image_tower\.\*': no linear layer of a"),
        ({"lora": {}, "freeze": ["image", "text"]}, "lora: a frozen tower gets no adapters, and both are in freeze"),
        ({"lora": {"match": []}}, "'lora.match': expected"),
    ],
)
def test_lora_that_adapts_nothing_is_an_error(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build(**{"name": "micro", **settings})


def test_lora_without_peft_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"^model\.lora needs peft: pip install 'mmdata\[lora\]'$"):
        build(name="micro", lora={})
    build(name="micro")  # needs none
