"""Parameter groups and optimizers by name. timm says what layer decay is, a plain loop of torch what an update is."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import yaml
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from torch import nn

from mmdata.config import TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError
from mmdata.train import DualEncoder
from mmdata.train.run.groups import freeze_groups, parameter_groups
from mmdata.train.run.optimizer import averages, load_averages, make_optimizer, set_learning_rate
from tests.train import small_run as small
from tests.train.test_checkpoint import equal
from tests.train.test_loop import last_state, make_trainer

LAYERS = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
CLIP = {
    "model_type": "clip",
    "text_config": {**LAYERS, "vocab_size": 30, "bos_token_id": 28, "eos_token_id": 29},
    "vision_config": {**LAYERS, "image_size": 32, "patch_size": 16},
}
VIT = {"model_type": "vit", **LAYERS, "image_size": 32, "patch_size": 16}
MPNET = {"model_type": "mpnet", **LAYERS, "vocab_size": 30}
DEBERTA = {"model_type": "deberta-v2", **LAYERS, "vocab_size": 30, "relative_attention": True}
MATCH_RMS = "match_rms_adamw"
PLACES = {
    "embeddings|relative_attention_bias|pre_layrnorm|patches|tokens|stem": "cls_token",
    r"(blocks|layers?)\.0\.": "blocks.0.mlp.fc1.weight",
    r"(blocks|layers?)\.1\.": "blocks.1.mlp.fc1.weight",
    "post_layernorm|final_layer_norm|transformer.norm|model.layernorm": "norm.weight",
    "projection|pooler": "head.weight",
}
"""What a parameter's name has in it, the first that fits, and a parameter of timm's at the same place."""


def config(**settings: Any) -> TrainConfig:
    return parse(TrainConfig, {"steps": 9, "lr": 0.01, **settings}, origin="test")


def tiny() -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder.from_config({"name": "tiny"}, vocab_size=30)


def by_timm(depth: int) -> tuple[nn.Module, dict[str, tuple[float, float]]]:
    """A ViT; scale and weight decay of each of its parameters, by timm."""
    vit = VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=depth, num_heads=2, num_classes=5)
    return vit, learns_in(vit, param_groups_layer_decay(vit, weight_decay=0.3, layer_decay=0.7))


def learns_in(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_layer_decay_is_that_of_timm_for_a_vit_of_timm():
    model = nn.Module()
    model.image_tower, expected = by_timm(3)
    groups = parameter_groups(model, config(weight_decay=0.3, groups=[{"match": "image_tower.*", "layer_decay": 0.7}]))
    assert learns_in(model.image_tower, groups) == expected


@pytest.mark.parametrize(
    "model",
    [
        {"name": "tiny"},
        {"name": "pretrained", "clip": CLIP},
        *({"name": "pretrained", "vision": VIT, "text": text} for text in (MPNET, DEBERTA)),
    ],
    ids=["tiny", "clip", "mpnet", "deberta"],
)
def test_layer_decay_is_that_of_timm_at_the_same_depth(model: dict[str, Any]):
    encoder = DualEncoder.from_config(model, vocab_size=30)
    groups = [
        {"match": f"{side}_*", "layer_decay": 0.7, "lr_scale": scale} for side, scale in (("image", 1), ("text", 3))
    ]
    found = learns_in(encoder, parameter_groups(encoder, config(groups=groups)))
    _, expected = by_timm(2)
    assert found.pop("logit_scale") == (1.0, 0.0)
    for name, (scale, _) in found.items():
        of_timm = next(place for pattern, place in PLACES.items() if re.search(pattern, name))
        assert scale == expected[of_timm][0] * (3 if name.startswith("text") else 1), name


def grow(model: nn.Module, step: int) -> None:
    """Give all that learns a gradient, the same at each call."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None


def plain(model: DualEncoder, name: str) -> list[torch.optim.Optimizer]:
    """The same by torch alone: the text side at half the rate, without decay; the patches and their norms frozen."""
    model.image_tower.patches.requires_grad_(False)
    named = [(key, p) for key, p in model.named_parameters() if p.requires_grad]

    def groups(*, hidden: bool | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for key, p in named:
            decay = 0.0 if p.ndim < 2 or key.startswith("text_") else 0.2
            if hidden in (None, ".blocks." in key and p.ndim == 2):
                lr = 0.005 if key.startswith("text_") else 0.01
                found.append({"params": [p], "lr": lr, "weight_decay": decay})
        return found

    if name == "muon":
        muon = torch.optim.Muon(groups(hidden=True), momentum=0.8, adjust_lr_fn=MATCH_RMS)
        return [muon, torch.optim.AdamW(groups(hidden=False), betas=(0.8, 0.98))]
    if name == "sgd":
        return [torch.optim.SGD(groups(hidden=None), momentum=0.8)]
    if name == "adafactor":
        return [torch.optim.Adafactor(groups(hidden=None))]
    return [torch.optim.AdamW(groups(hidden=None), betas=(0.8, 0.98))]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd", "muon"])
def test_optimizer_by_name_makes_the_updates_of_torch_also_after_a_resume(name: str):
    groups = [{"match": "text_*", "lr_scale": 0.5, "weight_decay": 0.0}, {"match": "image*.patches.*", "freeze": True}]
    settings = config(optimizer=name, groups=groups, betas=(0.8, 0.98))
    ours, theirs = tiny(), tiny()
    optimizer, expected = make_optimizer(ours, settings), plain(theirs, name)
    for step in range(4):
        if step == 2:
            resumed = make_optimizer(ours, settings)
            averages(ours, resumed, make=True)
            load_averages(ours, resumed, averages(ours, optimizer))
            optimizer = resumed
        if step == 3:  # the optimizers of the first steps have the rates with which they were made
            assert set_learning_rate(optimizer, 0.01) == 0.01
        for model in (ours, theirs):
            grow(model, step)
        for each in (optimizer, *expected):
            each.step()
    for (key, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, key=key: f"{key}: {text}")
    assert equal(ours.image_tower.patches.state_dict(), tiny().image_tower.patches.state_dict())
    assert not {key for key in averages(ours, optimizer) if ".patches." in key}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [{"match": "vision.*", "lr_scale": 2}],
            "no parameter matches 'vision.*'; the nearest are ",
        ),
        (
            [{"match": "image_towr.*", "lr_scale": 2}],
            "'image_towr.*'; the nearest are image_tower.*, image_tower.patches.*, image_tower.patches.*",
        ),
        (
            [{"match": "image_*", "lr_scale": 2}, {"match": "*.bias", "freeze": True}],
            "'image_tower.patches.1.bias' matches both 'image_*' and '*.bias'; a parameter has one group at most",
        ),
        (
            [{"match": "logit_*", "layer_decay": 0.5}],
            "layer_decay of 'logit_*': no tower with numbered blocks is in it",
        ),
        (
            [{"match": "logit_*", "weight_decay": 0.5}],
            "weight_decay of 'logit_*' acts on matrices, and none learns",
        ),
        (
            [{"match": "image_tower.*", "lr_scale": 0.1}],
            "nothing that 'image_tower.*' matches learns: model.freeze or model.lora keeps it as it is; leave the",
        ),
        ([{"match": "*", "freeze": True}], "leave no parameter that learns: freeze less"),
        (
            [{"match": "*", "freeze": True, "lr_scale": 2}],
            "match '*': give freeze alone, or one or more of lr_scale, we",
        ),
        ([{"match": "*"}], "match '*': give freeze alone, or one or more of lr_scale, weight_decay and layer_decay;"),
    ],
)
def test_groups_that_do_not_fit_are_errors(groups: list[dict[str, Any]], said: str):
    model = tiny()
    model.freeze(*(["image"] if "model.freeze or" in said else []))
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_optimizer(model, config(groups=groups))


def test_optimizer_that_has_nothing_to_work_on_or_cannot_is_an_error():
    with pytest.raises(
        ConfigError, match="muon is for the matrices of the towers' blocks, and none learns: take adamw"
    ):
        make_optimizer(small.small_model(), config(optimizer="muon"))
    with pytest.raises(
        ConfigError, match="parallel 'fsdp' and optimizer 'adafactor': torch's takes no sharded weights"
    ):
        config(optimizer="adafactor", parallel="fsdp")


def test_run_says_its_groups_before_it_begins_and_keeps_what_is_frozen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    groups = [{"match": "image_tower.*", "freeze": True}, {"match": "text_*", "lr_scale": 0.5, "weight_decay": 0}]
    trainer = make_trainer(tmp_path, steps=3, groups=groups)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "593 of 1,409 parameters learn: logit_scale 1, image_tower 0, text_tower 320, image_projection 136, "
        "text_projection 136",
        "group image_tower.*: 816 parameters frozen",
        "group text_*: 456 parameters, lr 0.005, weight decay 0",
        "group all others: 137 parameters, lr 0.01, weight decay 0.2",
    ]
    assert trainer.run() == 0
    state, start = last_state(tmp_path), small.small_model().state_dict()
    changed = {name.partition(".")[0] for name, value in start.items() if not torch.equal(value, state["model"][name])}
    assert changed == {"text_tower", "image_projection", "text_projection", "logit_scale"}
    assert not {name for name in state["optimizer"] if name.startswith("image_tower")}
    with pytest.raises(ConfigError, match=r"train\.groups\.1\.lr_scale was 0\.5, is 0\.25"):
        make_trainer(tmp_path, steps=3, groups=[groups[0], {**groups[1], "lr_scale": 0.25}])


def test_muon_alone_makes_the_updates_of_torch_also_after_a_resume():
    ours, theirs = (nn.ModuleDict({"tower": nn.Module()}) for _ in range(2))
    for model in (ours, theirs):
        torch.manual_seed(0)
        model["tower"].blocks = nn.ModuleList([nn.Linear(4, 4, bias=False)])
    settings = config(optimizer="muon", betas=(0.8, 0.98))
    optimizer = make_optimizer(ours, settings)
    expected = torch.optim.Muon(theirs.parameters(), lr=0.01, momentum=0.8, weight_decay=0.2, adjust_lr_fn=MATCH_RMS)
    for step in range(3):
        for model, each in ((ours, optimizer), (theirs, expected)):
            grow(model, step)
            each.step()
        resumed = make_optimizer(ours, settings)
        averages(ours, resumed, make=True)
        load_averages(ours, resumed, averages(ours, optimizer))
        optimizer = resumed
        set_learning_rate(optimizer, 0.01)
    assert equal(ours.state_dict(), theirs.state_dict())


def test_groups_of_the_page_end_the_backward_pass_above_the_blocks_that_they_freeze():
    page = Path(__file__).parents[2] / "docs" / "train.md"
    [groups] = [
        groups
        for code in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if (groups := yaml.safe_load(code).get("train", {}).get("groups")) and "layers" in str(groups)
    ]
    model = DualEncoder.from_config(
        {"name": "pretrained", "clip": {**CLIP, "vision_config": {**CLIP["vision_config"], "num_hidden_layers": 11}}}
    )
    freeze_groups(model, config(groups=groups).groups)
    learns: list[bool] = []
    for layer in model.image_tower.get_submodule("tower.model.encoder.layers"):
        layer.register_forward_pre_hook(lambda _, inputs: learns.append(inputs[0].requires_grad))
    model.encode_image(torch.zeros(2, 3, 32, 32))
    assert learns == [False] * 10 + [True]


def test_groups_that_are_off_are_matrices_and_all_others():
    assert [len(group["params"]) > 10 for group in make_optimizer(tiny(), config()).param_groups] == [True, True]


def test_step_enters_no_file_of_groups_or_averages_that_are_off(tmp_path: Path):
    trainer, entered = make_trainer(tmp_path, steps=2), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        entered.add(Path(frame.f_code.co_filename).name)

    trainer.source.before = lambda number, rows: sys.setprofile(note)
    try:
        assert trainer.run() == 0
    finally:
        sys.setprofile(None)
    assert {"optimizer.py", "kept.py", "trainer.py"} <= entered
    assert not {"groups.py", "ema.py"} & entered
