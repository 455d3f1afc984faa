"""Transforms of users: torchvision's and callables, equal for equal rows in any number of threads."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdata.errors import ConfigError
from mmdata.images.user import UserTransform

USERS = """
import random

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

fixed = v2.Compose([
    v2.RandomResizedCrop((32, 32), scale=(0.3, 1.0)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)
])

many = v2.Compose([
    v2.RandomCrop(32), v2.TrivialAugmentWide(), v2.RandAugment(), v2.AugMix(), v2.RandomPhotometricDistort(),
    v2.GaussianNoise(), v2.GaussianBlur(3), v2.ElasticTransform(), v2.RandomPerspective(),
    v2.RandomOrder([v2.RandomPosterize(2), v2.RandomRotation(20)]), v2.RandomErasing(p=1.0, value="random"),
    v2.RandomChoice([v2.RandomInvert(), v2.RandomAffine(9)]),
])

def noise(image, size, generator):
    return torch.randint(0, 256, (3, *size), generator=generator).to(torch.uint8)

def shared_noise(image, size, generator):
    return torch.empty(3, *size).uniform_(0, 256).to(torch.uint8)

def with_random(image, size, generator):
    return torch.full((3, *size), random.randrange(256), dtype=torch.uint8)

def with_numpy(image, size, generator):
    return torch.from_numpy(np.random.randint(0, 256, (3, *size), dtype=np.uint8))

def in_place(image, size, generator):
    image += 1
    return image[:, :size[0], :size[1]]

old = v1.RandomCrop(32)

class Cropper:
    def __call__(self, image):
        return image

cropper = Cropper()

def of_size(size):
    return v2.RandomCrop(size)
"""


@pytest.fixture(scope="session")
def image() -> Tensor:
    """Uint8 (3, 60, 80)."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 60, 80), dtype=np.uint8))


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with transforms."""
    name = f"users_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def made(transform: UserTransform, image: Tensor, seed: int) -> Tensor:
    out = torch.zeros(3, 32, 32, dtype=torch.uint8)
    transform(image.clone(), out, seed=seed)
    return out


@pytest.mark.parametrize("name", ["fixed", "many", "noise", "shared_noise"])
def test_user_transform_gives_equal_pixels_for_equal_seeds_in_any_thread(users: str, image: Tensor, name: str):
    transform = UserTransform(f"{users}:{name}")
    seeds = range(24)
    alone = [made(transform, image, seed) for seed in seeds]
    assert len({pixels.numpy().tobytes() for pixels in alone}) == len(seeds)
    for threads in (2, 4):
        torch.manual_seed(threads)
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda seed: made(transform, image, seed), reversed(seeds)))[::-1]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True))


def test_user_transform_equals_torchvision_with_the_process_seeded(users: str, image: Tensor):
    ours = made(UserTransform(f"{users}:fixed"), image, seed=17)
    torch.manual_seed(17)
    assert torch.equal(ours, importlib.import_module(users).fixed(image))


@pytest.mark.parametrize("name", ["fixed", "many", "shared_noise"])
def test_user_transform_leaves_the_generator_of_the_process_alone(users: str, image: Tensor, name: str):
    transform = UserTransform(f"{users}:{name}")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    made(transform, image, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["with_random", "with_numpy"])
def test_user_transform_that_draws_elsewhere_is_refused(users: str, image: Tensor, name: str):
    transform = UserTransform(f"{users}:{name}")
    message = rf"'{users}:{name}': called again with the same row and generator, it gave other pixels: .* random, numpy"
    with pytest.raises(ConfigError, match=message):
        make_some(transform, image)


def make_some(transform: UserTransform, image: Tensor) -> None:
    """Of one row alone a random number may be the same twice, once in 256 times."""
    for seed in range(4):
        made(transform, image, seed)


def test_user_transform_may_work_in_place(users: str, image: Tensor):
    assert torch.equal(made(UserTransform(f"{users}:in_place"), image, seed=0), image[:, :32, :32] + 1)


@pytest.mark.parametrize(
    ("name", "takes"), [("old", r"\(img\)"), ("cropper", r"\(image\)"), ("Cropper", r"\(\)"), ("of_size", r"\(size\)")]
)
def test_user_transform_with_other_arguments_is_refused(users: str, name: str, takes: str):
    expected = r"expected \(image, size, generator\), or a transform of torchvision.transforms.v2"
    with pytest.raises(ConfigError, match=rf"transform '{users}:{name}': takes {takes}; {expected}"):
        UserTransform(f"{users}:{name}")
