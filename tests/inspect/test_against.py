"""Other loaders beside mmdata, on the user's own shards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from mmdata import Index
from mmdata.errors import ConfigError
from mmdata.images import probe
from mmdata.inspect import against, peers
from mmdata.loader.loader import data_config
from mmdata.tars.write import Sample
from tests.flat_settings import grouped
from tests.programs import run_program
from tests.shard_writer import ShardWriter
from tests.storage.servers import serve


@pytest.fixture(scope="session")
def square(data: dict[str, Any]) -> dict[str, Any]:
    """The corpus of 22 rows in two shards, in batches that other loaders make too."""
    return {**data, "image_size": 32, "image_buckets": None}


@pytest.fixture(autouse=True)
def _runs_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs import nothing anew; test_peers_program_prints_a_rate starts one in an interpreter of its own."""
    monkeypatch.setattr(against, "subprocess", SimpleNamespace(run=run_program))


def test_command_compares_and_says_what_each_does(square: dict[str, Any], tmp_path: Path, command: Any):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": square}))
    flags = ["--steps", "2", "--rounds", "1", "--against", "webdataset,torch"]
    status, output, errors = command("bench", str(tmp_path / "c.yaml"), *flags)
    assert (status, errors) == (0, "")
    assert re.search(r"run 1 of 1: torch [\d,]+ samples/s", output)
    assert re.search(r"mmdata +[\d,]+ +as configured", output)
    assert re.search(r"webdataset +[\d,]+ +[\d.]+x +as OpenCLIP uses it: Pillow", output)
    assert re.search(r"torch +[\d,]+ +[\d.]+x +DataLoader over a Dataset", output)
    assert "Medians of 1 runs in turn, each in a process of its own; 2 workers, batches of 8, 2 batches" in output


@pytest.mark.parametrize(
    ("name", "epoch"),
    [
        ("webdataset", [8, 8, 8]),  # a batch goes on with the next pass
        ("torch", [8, 8, 6]),
    ],
)
def test_peers_give_batches_of_the_size_that_is_set(square: dict[str, Any], name: str, epoch: list[int]):
    settings = grouped(**square, num_workers=0)
    counts = iter(peers.LOADERS[name](data_config(settings)))
    assert [next(counts) for _ in epoch] == epoch


def test_peers_crop_and_tokenize_as_the_settings_say(square: dict[str, Any]):
    rows = peers.PeerRows(data_config({**square, "transform": "eval"}))
    image, caption = rows[1]
    assert (tuple(image.shape), str(image.dtype), len(rows)) == ((3, 32, 32), "torch.float32", 22)
    some = peers.PeerRows(data_config({**square, "transform": "eval", "select": "width > height"}))
    kept = [row for row in range(22) if (shape := rows._index[row].image.size)[0] > shape[1]]
    assert 0 < len(some) == len(kept) < 22
    assert some[0][1] == rows[kept[0]][1]
    images, texts = peers._collate(peers.tokenizer(data_config(square)), 5, [(image, caption), (image, "a")])
    assert (tuple(images.shape), tuple(texts["input_ids"].shape)) == ((2, 3, 32, 32), (2, 5))
    several = json.loads('{"captions": ["a", "a red dog"]}')
    assert peers._encode_one(peers.tokenizer(data_config(square)), 6, several).shape == (6,)


def test_against_unknown_loader_is_an_error():
    assert against.peers_of("torch, webdataset,torch") == ["torch", "webdataset"]
    with pytest.raises(ConfigError) as caught:
        against.peers_of("dali,torch,web-dataset")
    assert str(caught.value) == (
        "--against: no loader 'dali', 'web-dataset'; did you mean 'webdataset'?; give webdataset or torch, or both"
    )


def test_command_lowers_a_number_of_workers_that_is_auto_to_that_of_the_shards(
    square: dict[str, Any], tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mmdata.processes.usable_cores", lambda: 5)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": grouped(**square, num_workers="auto")}))
    flags = ["--steps", "1", "--rounds", "1", "--against", "webdataset"]
    status, output, errors = command("bench", str(tmp_path / "c.yaml"), *flags)
    assert (status, errors) == (0, "")
    assert (
        "data.loading.num_workers=auto is 2 here: webdataset gives each worker shards of its own, and there are 2.\n"
        in output
    )
    assert "2 workers, batches of 8" in output


@pytest.mark.parametrize(
    ("num_workers", "names", "fitted"),
    [("auto", ["torch", "webdataset"], 2), ("auto", ["torch"], "auto"), (3, ["webdataset"], 3)],
)
def test_only_auto_workers_are_lowered_and_only_for_webdataset(
    square: dict[str, Any], num_workers: Any, names: list[str], fitted: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mmdata.processes.usable_cores", lambda: 5)
    data = data_config(grouped(**square, num_workers=num_workers))
    assert against.fit_workers(data, names).loading.num_workers == fitted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "compares batches of images and texts: give data.tokenizer"),
        ({"image_patches": [4], "patch_size": 16}, "no other loader here makes batches of native resolution"),
        (
            {"text_transform": "mine:text"},
            "text_transform 'mine:text' is made for mmdata; give data.text_transform=null",
        ),
        ({"transform": "mine:crop"}, "transform 'mine:crop' is made for mmdata; give data.transform=train or eval"),
        ({"loading": {"num_workers": 3}}, "2 shards are too few for 3 workers; give data.loading.num_workers=2"),
    ],
)
def test_against_settings_that_others_do_not_have_are_errors(
    square: dict[str, Any], changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        against.compare(data_config({**square, **changes}), ["webdataset"], steps=1, rounds=1)


def test_against_lists_all_that_is_wrong_before_anything_is_timed(
    square: dict[str, Any], tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(against, "find_spec", lambda name: None if name == "webdataset" else find_spec(name))
    monkeypatch.setattr(against, "_run", lambda *_: pytest.fail("timed"))
    data = {**square, "transform": "mine:crop", "loading": {"num_workers": 3}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}))
    status, output, errors = command("bench", str(tmp_path / "c.yaml"), "--against", "webdataset,torch")
    assert (status, output) == (2, "")
    assert errors == (
        "error: 3 things do not fit:\n"
        "- --against webdataset: not installed here; `pip install webdataset`, or leave it out\n"
        "- --against: transform 'mine:crop' is made for mmdata; give data.transform=train or eval\n"
        "- --against webdataset: it gives each worker shards of its own, and 2 shards are too few for 3 workers; give "
        "data.loading.num_workers=2\n"
    )


def test_against_shards_behind_a_url_are_an_error(square: dict[str, Any], tmp_path: Path):
    with serve(Path(square["shards"])) as server:
        data = data_config(grouped(**{**square, "shards": server.url}, cache_dir=str(tmp_path)))
        with pytest.raises(ConfigError, match=r"local shards, and data.shards has a URL: copy some shards with their"):
            against.compare(data, ["torch"], steps=1, rounds=1)


def test_against_a_mixture_is_an_error(square: dict[str, Any], photo: Any, tmp_path: Path):
    image = photo(40, 40, seed=99)
    with ShardWriter(tmp_path / "b") as writer:
        writer.write(Sample("0", image, probe(image), ["a dog"]))
    data = data_config({**square, "shards": [{"shards": square["shards"]}, {"shards": str(tmp_path / "b")}]})
    with pytest.raises(ConfigError, match=r"data.shards is a mixture of 2: give one of them as data.shards"):
        against.compare(data, ["torch"], steps=1, rounds=1)


def test_against_a_loader_that_fails_is_named_with_what_it_said(square: dict[str, Any], tmp_path: Path):
    folder = tmp_path / "shards"
    subprocess.run(["cp", "-r", square["shards"], str(folder)], check=True)
    index = Index.open(folder)
    for row in range(22):  # plain torch has no answer to a photo that does not decode
        shards, _ = index.locate(np.array([row]))
        offset = int(index.take(np.array([row]), ["image_offset"])["image_offset"][0])
        with index.shard_path(int(shards[0])).open("r+b") as file:
            file.seek(offset)
            file.write(b"broken")
    data = data_config(grouped(**{**square, "shards": str(folder)}, max_bad_share=1.0))
    with pytest.raises(ConfigError, match=r"the run of 'torch' failed with exit code 1: .*cannot identify image file"):
        against.compare(data, ["torch"], steps=1, rounds=1)


def test_peers_program_prints_a_rate(square: dict[str, Any]):
    settings = {"data": data_config(square).model_dump(mode="json"), "name": "torch", "steps": 1}
    done = subprocess.run(
        [sys.executable, "-m", "mmdata.inspect.peers"], input=json.dumps(settings), capture_output=True, text=True
    )
    assert float(done.stdout) > 0
