"""A model with batch keys and outputs of its own: gradient_cache, train_step and Trainer take it as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

sys.path.insert(0, str(Path(__file__).parent))

import small_run as small

from mmdata.config.train import TeacherConfig
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from mmdata.train import DualEncoder, DualEncoderOutput, gradient_cache, losses, train_step
from mmdata.train.batches import split
from mmdata.train.memory.ema import EMA
from mmdata.train.run.trainer import Trainer

ROWS = 7


class OwnModel(nn.Module):
    """Two towers with dropout, over keys that no `Batch` has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3))
        self.read = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def features(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return F.normalize(self.look(batch["photo"]), dim=1), F.normalize(self.read(batch["title"]), dim=1)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        looks, reads = self.features(batch)
        return {"looks": looks, "reads": reads, "scale": self.scale.exp(), "name": "own", "none": None}


def own_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    photo, title = (torch.randn(ROWS, width, generator=generator, dtype=torch.float64) for width in (6, 5))
    return {"photo": photo, "title": title, "names": [str(i) for i in range(ROWS)], "corpus": "own"}


def parts_of(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [{name: batch[name][start : start + size] for name in ("photo", "title")} for start in range(0, ROWS, size)]


def own_loss(output: Any) -> Tensor:
    return losses.clip_loss(output["looks"], output["reads"], output["scale"])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def expected_gradients(model: OwnModel, batch: dict[str, Any], size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Of one graph over all parts, with the same dropout; and the next random number."""
    torch.manual_seed(5)
    outputs = [model(part) for part in parts_of(batch, size)]
    both = {name: torch.cat([output[name] for output in outputs]) for name in ("looks", "reads")}
    own_loss({**both, "scale": outputs[0]["scale"]}).backward()
    found, following = {name: grad.clone() for name, grad in gradients(model).items()}, torch.rand(3)
    model.zero_grad()
    torch.manual_seed(5)
    return found, following


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-10, atol=1e-12)


class Pair(NamedTuple):
    looks: Tensor
    reads: Tensor
    scale: Tensor


@dataclass
class TransformersOutput(ModelOutput):
    looks: Tensor | None = None
    reads: Tensor | None = None
    scale: Tensor | None = None


FORMS: list[tuple[Callable[[dict[str, Any]], Any], Callable[[Any], dict[str, Any]]]] = [
    (lambda output: output, lambda output: output),
    (lambda output: Pair(output["looks"], output["reads"], output["scale"]), lambda output: output._asdict()),
    (
        lambda output: TransformersOutput(**{name: output[name] for name in ("looks", "reads", "scale")}),
        lambda output: dict(output),
    ),
    (
        lambda output: [output["looks"], (output["reads"], output["scale"])],
        lambda output: {"looks": output[0], "reads": output[1][0], "scale": output[1][1]},
    ),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("size", [1, 3, 7, 9])
def test_gradient_cache_gives_the_gradients_of_one_batch_for_any_output(form: int, size: int):
    to, back = FORMS[form]
    model, batch = OwnModel().double(), own_batch()
    expected, following = expected_gradients(model, batch, size)
    step = gradient_cache(lambda part: to(model(part)), parts_of(batch, size), lambda output: own_loss(back(output)))
    assert_same(gradients(model), expected)
    assert torch.equal(torch.rand(3), following)
    assert back(step.output)["looks"].shape == (ROWS, 8)
    assert not back(step.output)["looks"].requires_grad
    assert not step.loss.requires_grad


def test_gradient_cache_takes_what_the_loss_uses_of_the_model_itself():
    model, batch = OwnModel().double(), own_batch()
    expected, _ = expected_gradients(model, batch, 3)
    gradient_cache(model.features, parts_of(batch, 3), lambda both: losses.clip_loss(*both, model.scale.exp()))
    assert_same(gradients(model), expected)


def test_gradient_cache_within_an_autocast_region_of_the_caller():
    """A weight that the first pass has cast, without a graph, would get no gradient in the second."""
    model, batch = OwnModel().float(), own_batch()
    parts = [{name: value.float() for name, value in part.items()} for part in parts_of(batch, 3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradient_cache(model, parts, own_loss)
    assert gradients(model).keys() == {name for name, _ in model.named_parameters()}


def test_gradient_cache_of_outputs_that_are_no_rows_of_a_part():
    model, batch = OwnModel().double(), own_batch()

    def similarities(part: dict[str, Any]) -> Tensor:
        looks, reads = model.features(part)
        return looks @ reads.T

    with pytest.raises(RuntimeError, match=r"^Sizes of tensors must match except in dimension 0\."):
        gradient_cache(similarities, parts_of(batch, 3), lambda output: output.sum())


def test_gradient_cache_of_no_part():
    with pytest.raises(ValueError, match="gradient_cache needs at least one part of a batch: got none"):
        gradient_cache(OwnModel(), [], own_loss)


@pytest.mark.parametrize("micro_batch_size", [None, 2, 3, 100])
def test_train_step_takes_a_batch_and_an_output_of_any_keys(micro_batch_size: int | None):
    model, batch = OwnModel().double(), own_batch()
    size = micro_batch_size or ROWS
    expected, _ = expected_gradients(model, batch, size)
    seen: list[Any] = []

    def loss(output: Any, whole: Any) -> Tensor:
        seen.append(whole)
        return own_loss(output)

    step = train_step(model, batch, loss, micro_batch_size=micro_batch_size)
    assert_same(gradients(model), expected)
    assert seen == [batch]
    assert (step.output["name"], step.output["none"]) == ("own", None)


def test_train_step_cuts_tensors_and_lists_and_nothing_else():
    parts: list[Any] = []

    class Noting(OwnModel):
        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            parts.append(batch)
            return super().forward(batch)

    train_step(Noting().double(), own_batch(), lambda output, _: own_loss(output), micro_batch_size=4)
    assert [part["names"] for part in parts] == [["0", "1", "2", "3"], ["4", "5", "6"]] * 2
    assert {part["corpus"] for part in parts} == {"own"}


def test_train_step_of_entries_with_different_rows():
    batch = {**own_batch(), "title": torch.zeros(3, 5)}
    message = r"different numbers of rows, and cannot be split: {'photo': 7, 'title': 3, 'names': 7}"
    with pytest.raises(ValueError, match=message):
        train_step(OwnModel(), batch, lambda output, _: own_loss(output), micro_batch_size=2)


class FeaturesOnly(nn.Module):
    """A model without a scale, for losses that take none."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = small.small_model(0.0)

    def forward(self, batch: Any) -> DualEncoderOutput:
        return DualEncoderOutput(*self.encoder(batch)[:2])


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_run_of_a_model_that_gives_features_only(micro_batch_size: int | None, tmp_path: Path):
    model = FeaturesOnly()
    model.encoder.logit_scale.requires_grad_(False)
    config = small.train_config(loss="triplet", steps=2, micro_batch_size=micro_batch_size)
    assert Trainer(model, small.SmallBatches(), config, output=tmp_path).run() == 0
    assert '"logit_scale": null' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_autocast_is_of_the_models_device_wherever_the_batch_is(micro_batch_size: int | None):
    # As row numbers that stayed on the CPU would be beside a model on a GPU.
    elsewhere = torch.zeros(4, device="meta")
    given: dict[str, Any] = {"rows": elsewhere, "valid": elsewhere, "words": ["a", "b", "c", "d"]}
    seen: list[torch.dtype] = []

    class OfWords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch: dict[str, Any]) -> DualEncoderOutput:
            features = self.layer(torch.ones(len(batch["words"]), 3))
            seen.append(features.dtype)
            return DualEncoderOutput(features, features)

    def total(output: DualEncoderOutput, batch: Any) -> Tensor:
        return output.image_features.float().sum()

    bf16: dict[str, Any] = {"micro_batch_size": micro_batch_size, "autocast_dtype": torch.bfloat16}
    train_step(OfWords(), given, total, **bf16)
    EMA(OfWords(), TeacherConfig(), **bf16).embed(cast(Any, given))
    train_step(OfWords(), {"words": ["a", "b"]}, total, **bf16)  # also where no entry is a tensor
    assert set(seen) == {torch.bfloat16}


def test_step_refuses_what_it_cannot_use():
    model = torch.nn.Linear(3, 2)

    def forward_only(batch: Any) -> Any:
        return model(batch["x"])

    with pytest.raises(ValueError, match=r"^Identity has no parameters: there is nothing to train$"):
        train_step(nn.Identity(), {"x": torch.ones(2, 3)}, lambda output, batch: output["x"].sum())
    with pytest.raises(ValueError, match=r"^the batch's entries \['t'\] nest tensors, and cannot be split"):
        list(split({"t": {"x": torch.zeros(4, 3)}, "v": torch.zeros(4)}, 2))
    whole = {"x": torch.zeros(4, 3), "queue": torch.zeros(7, 2)}
    assert [part["queue"].shape for part in split(whole, 8)] == [(7, 2)], "nothing is split, so nothing must fit"
    parts = [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 3), "more": True}]

    def uneven(part: Any) -> Any:
        return (forward_only(part),) if "more" in part else forward_only(part)

    with pytest.raises(ValueError, match=r"outputs of different structure for parts 0 and 1$"):
        gradient_cache(uneven, parts, lambda output: output.sum())


def test_the_loop_of_the_page_on_training_trains(
    tmp_path: Path,
    make_corpus: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    convert(
        make_corpus(tmp_path / "raw", 24) / "captions.jsonl", tmp_path / "shards", ConvertConfig(train_tokenizer=300)
    )
    data = {"shards": "shards", "tokenizer": "shards/tokenizer", "global_batch_size": 8, "image_size": 16}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "scenes.yaml").write_text(yaml.safe_dump({"data": data}))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    (block,) = (code for code in page.split("```python\n") if "DevicePrefetcher(loader, device)" in code)
    exec(block.partition("```")[0], {})
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [epoch for epoch, _ in said] == ["0", "1", "2"]
    assert 0 < float(said[2][1]) < float(said[0][1])


def test_a_model_may_be_named_by_a_dictionary():
    assert DualEncoder.from_config({"name": "micro"}, vocab_size=30).text_tower is not None
    with pytest.raises(ConfigError, match=r"^model: unknown key 'nmae'; did you mean 'name'"):
        DualEncoder.from_config({"nmae": "micro"}, vocab_size=30)
