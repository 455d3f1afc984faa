from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from mmdata.config import TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError
from mmdata.train import losses, miners
from mmdata.train.run.objective import make_loss


@pytest.mark.parametrize(
    ("config", "miner"),
    [
        ({"name": "all"}, miners.All()),
        ({"name": "top_k"}, miners.TopK(64)),
        ({"name": "semi_hard"}, miners.SemiHard(0.2)),
        ({"name": "gumbel_top_k", "gradient": "relaxed"}, miners.GumbelTopK(64, gradient="relaxed")),
        ({"name": "same_group", "size": 4, "k": 2}, miners.SameGroup(4, 2)),
        (
            {"name": "top_k", "k": 2, "drop_hardest": 0.01, "false_negative_margin": 0.05},
            miners.Chain((miners.FalseNegativeMargin(0.05), miners.DropHardest(0.01), miners.TopK(2))),
        ),
    ],
)
def test_settings_name_each_miner(config: dict[str, Any], miner: miners.AnyMiner):
    assert make_loss(0, parse(TrainConfig, {"steps": 1, "miner": config}, origin="c")).miner == miner


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of the miner in docs/mine.md, which is in a file of its own."""
    text = (Path(__file__).parents[2] / "docs" / "mine.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n([^`]*class HarderThan.*?)```", text, re.DOTALL)
    (tmp_path / "my_miners.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_miners", raising=False)
    (line,) = re.findall(r"`train.miner: ({name: user.*})`", text)
    return yaml.safe_load(line)


def loss_of(config: dict[str, Any]) -> Any:
    return make_loss(0, parse(TrainConfig, {"steps": 1, "miner": config}, origin="c"))


def test_miner_of_a_user_is_ten_lines_and_a_setting(own: dict[str, Any]):
    miner = loss_of(own).miner
    generator = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(6, 5, generator=generator).double(), dim=-1) for _ in range(2))

    def one_direction(scores: torch.Tensor) -> torch.Tensor:
        weights = (scores - 0.3).clamp(min=0) * (1 - torch.eye(6))
        exp = (4 * scores).exp()
        return (1 + (weights * exp).sum(1) / exp.diagonal()).log().mean()

    expected = (one_direction(images @ texts.T) + one_direction(texts @ images.T)) / 2
    found = losses.clip_loss(images, texts, torch.tensor(4.0).double(), miner=miner)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert expected > 0


def test_a_function_of_a_user_is_named_where_it_is_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "faulty_miners.py").write_text(
        "def nan_miner(scores, positives, negatives):\n    return scores * float('nan')\n"
        "def narrow(scores, positives, negatives):\n    return negatives[:, :1]\n"
        "def nothing(scores, positives, negatives):\n    scores > 0\n"
        "def a_list(scores, positives, negatives):\n    return negatives.tolist()\n"
        "def boom(scores, positives, negatives):\n    raise ValueError('boom')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    images, texts = torch.eye(6), torch.eye(6)
    settings = {"name": "user", "target": "faulty_miners:nan_miner"}
    for more in ({}, {"drop_hardest": 1}):
        with pytest.raises(ValueError, match=r"^miner faulty_miners:nan_miner gave \d+ negatives a weight that is NaN"):
            losses.clip_loss(images, texts, 4.0, miner=loss_of({**settings, **more}).miner)
    narrow = loss_of({**settings, "target": "faulty_miners:narrow"}).miner
    with pytest.raises(ValueError, match=r"^miner faulty_miners:narrow returned shape \(6, 1\), expected \(6, 6\)"):
        losses.clip_loss(images, texts, 4.0, miner=narrow)
    for name, got in (("nothing", "None"), ("a_list", r"a value of type list \(6 items\)")):
        for more in ({}, {"drop_hardest": 1}):
            miner = loss_of({**settings, "target": f"faulty_miners:{name}", **more}).miner
            said = rf"miner faulty_miners:{name} returned {got}, expected a tensor of shape \(6, 6\): bool, or weights"
            with pytest.raises(ValueError, match=said):
                losses.clip_loss(images, texts, 4.0, miner=miner)
    with pytest.raises(RuntimeError, match=r"^train.miner.target 'faulty_miners:boom': boom$") as caught:
        losses.clip_loss(images, texts, 4.0, miner=loss_of({**settings, "target": "faulty_miners:boom"}).miner)
    assert caught.value.__cause__ is not None
    assert traceback.extract_tb(caught.value.__cause__.__traceback__)[-1].filename == str(tmp_path / "faulty_miners.py")


def test_miner_of_a_user_that_cannot_be_made_is_named(own: dict[str, Any], tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match=r"train.miner.target 'my_miners:Harder': expected 'module:function' or 'module:Class' \(module 'my_",
    ):
        loss_of({**own, "target": "my_miners:Harder"})
    with pytest.raises(ConfigError, match=r"train.miner.target 'none_such:A': cannot be imported: No module named"):
        loss_of({**own, "target": "none_such:A"})
    (tmp_path / "needs_another.py").write_text("import none_such")
    with pytest.raises(
        ConfigError, match=r"'none_such:A': cannot be imported: No .*'none_such'; a file of the current folder is found"
    ):
        loss_of({**own, "target": "none_such:A"})
    with pytest.raises(ConfigError, match=r"'needs_another:A': cannot be imported: No .*'none_such'$"):
        loss_of({**own, "target": "needs_another:A"})
    with pytest.raises(ConfigError, match=r"train.miner.target '': expected 'module:function' or 'module:Class' \("):
        loss_of({**own, "target": ""})
    with pytest.raises(ConfigError, match=r"train.miner.target 'HarderThan': cannot be imported: No module named 'Ha"):
        loss_of({**own, "target": "HarderThan"})
    assert loss_of({**own, "target": "my_miners.HarderThan"}).miner.block("image", slice(1)), "a dot serves as well"
    with pytest.raises(ConfigError, match=r"train.miner.arguments {'k': 3} of 'my_miners:HarderThan': .*argument 'k'"):
        loss_of({**own, "arguments": {"k": 3}})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"cosine": 0.5, "k": 3}, "got an unexpected keyword argument 'k'"),
        ({}, "missing a required argument: 'cosine'"),
        ({"cosine": 0.5, "scores": 3}, "multiple values for argument 'scores'"),
    ],
)
@pytest.mark.parametrize("target", ["my_functions:above", "my_functions:Above"])
def test_arguments_that_a_miner_does_not_take_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, arguments: dict[str, Any], said: str
):
    (tmp_path / "my_functions.py").write_text(
        "def above(scores, positives, negatives, cosine):\n    return negatives & (scores > cosine)\n"
        "class Above:\n"
        "    def __init__(self, cosine): ...\n"
        "    def __call__(self, scores): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_functions", raising=False)
    if target.endswith("Above"):
        arguments, said = {"cosine": 0.5}, "too many positional arguments"
    with pytest.raises(ConfigError, match=rf"^train.miner.arguments .* of '{target}': {said}; a miner is called with"):
        loss_of({"name": "user", "target": target, "arguments": arguments})


def test_miner_of_a_user_may_be_a_function_or_a_class_of_mmdata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_functions.py").write_text(
        "def above(scores, positives, negatives, cosine=0.0):\n    return negatives & (scores > cosine)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_functions", raising=False)
    scores = torch.tensor([[0.1, 0.5, 0.9]])
    positives, negatives = torch.tensor([[True, False, False]]), torch.tensor([[False, True, True]])
    plain = loss_of({"name": "user", "target": "my_functions:above"}).miner
    called = (scores, positives, negatives)
    assert miners.for_block(plain, "image", slice(1))(*called).tolist() == [[False, True, True]]
    bound = loss_of({"name": "user", "target": "my_functions:above", "arguments": {"cosine": 0.7}}).miner
    assert miners.for_block(bound, "image", slice(1))(*called).tolist() == [[False, False, True]]
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    ratio = {"name": "user", "target": "own_miners:Ratio", "arguments": {"share": 0.5}}
    hardest = miners.for_block(loss_of(ratio).miner, "image", slice(1))
    assert hardest(*called).tolist() == [[False, False, True]]
