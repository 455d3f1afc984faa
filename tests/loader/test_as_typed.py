"""Python as people type it: a callable as transform, captions as text, and what a wrong first try says."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from mmdata import Batch, Loader
from mmdata.config import DataConfig
from mmdata.errors import ConfigError

from .conftest import Corpus

UNNAMED = r"tests\.loader\.test_as_typed:unnamed\.<locals>\.inner"


def jittered(image: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Another process can import it as tests.loader.test_as_typed:jittered."""
    crop = v2.RandomResizedCrop(size, scale=(0.3, 1.0))
    return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.ColorJitter(0.4)])(image)


def unnamed(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A function that no other process can import."""

    def inner(image: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        return change(image)

    return inner


def pixels(loader: Loader) -> list[Tensor]:
    return [batch["pixel_values"].clone() for batch in loader]


def captions(batch: Batch) -> list[str]:
    return cast("dict[str, Any]", batch)["captions"]


def is_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_function_as_transform_is_known_by_its_name(corpus: Corpus):
    name = f"{__name__}:jittered"
    assert DataConfig.model_validate({**corpus.settings, "transform": jittered}).transform == name
    by_name = pixels(corpus.loader(transform=name, num_workers=0))
    assert is_equal(pixels(corpus.loader(transform=jittered, num_processes=1)), by_name)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (unnamed, "tests.loader.test_as_typed:unnamed.<locals>.inner"),
        (None, "torchvision.transforms.v2._container:Compose"),
    ],
    ids=["function", "object"],
)
def test_transform_without_a_name_works_in_threads(corpus: Corpus, of: Any, name: str):
    crop = v2.Compose([v2.RandomCrop(24, pad_if_needed=True), v2.RandomVerticalFlip()])
    square: dict[str, Any] = {"image_buckets": None, "image_size": 24, "transform": of(crop) if of else crop}
    expected = pixels(corpus.loader(**square, num_workers=0))
    assert is_equal(pixels(corpus.loader(**square, num_workers=3)), expected)
    state = corpus.loader(**square).state_dict()
    assert json.loads(json.dumps(state))["plan"]["transform"] == name
    assert json.loads(DataConfig.model_validate({**corpus.settings, **square}).model_dump_json())["transform"] == name


def test_transform_without_a_name_is_refused_in_a_worker_process(corpus: Corpus):
    message = (
        rf"^transform '{UNNAMED}': data\.loading\.num_processes is 1, and another process cannot import it by its "
        r"name: .* Define it at the top of a file of its own, or set data\.loading\.num_processes to 0$"
    )
    with pytest.raises(ConfigError, match=message):
        corpus.loader(transform=unnamed(torch.clone), num_processes=1)


def test_transform_of_another_kind_is_refused(corpus: Corpus):
    with pytest.raises(
        ConfigError, match=r"'transform': expected a text, as \"module:callable\", or a callable; got 5"
    ):
        corpus.loader(transform=5)


def test_captions_are_text_in_the_batch(corpus: Corpus):
    loader = corpus.loader(num_workers=2)
    for batch in loader:
        texts, valid = captions(batch), batch["valid"].numpy()
        ids, mask = loader.builder.spec.tokenizer.encode(texts, batch["input_ids"].shape[1])
        assert np.array_equal(batch["input_ids"].numpy()[valid], ids[valid])
        assert np.array_equal(batch["attention_mask"].numpy()[valid], mask[valid])
        rows = zip(batch["rows"].tolist(), texts, strict=True)
        assert all(text in corpus.samples[row].captions if row >= 0 else text == "" for row, text in rows)


@pytest.mark.parametrize("given", ["cc", Path("cc"), {"shards": "cc"}], ids=["str", "path", "dict"])
def test_loader_of_a_path_or_settings_says_what_to_write(given: Any):
    message = (
        r"^Loader takes a plan and a BatchBuilder; got .*\. To make a loader of settings: Loader\.from_config\('CONF"
    )
    with pytest.raises(TypeError, match=message):
        Loader(given)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=message):
        Loader(plan=given)  # type: ignore[call-arg]


def test_loader_keeps_its_signature():
    names = list(inspect.signature(Loader).parameters)
    assert names[:4] == ["plan", "builder", "rank", "world_size"]
    assert "prefetch_batches" in names


def test_loader_in_a_torch_dataloader_says_what_to_do(corpus: Corpus):
    message = (
        r"^a Loader gives whole batches when it is iterated \(`for batch in …`\), and has no rows to ask for: use it "
        r"in place of torch's DataLoader, not inside one\. `loader\.index\[3\]` is one row to look at\. In the Hug"
    )
    wrapped: Any = DataLoader(cast(Any, corpus.loader(num_workers=0)))
    with pytest.raises(TypeError, match=message):
        next(iter(wrapped))
