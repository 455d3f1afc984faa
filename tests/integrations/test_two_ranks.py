"""Two real processes: neither Lightning nor accelerate shards our batches a second time, and no rank ends alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import mmdata
from mmdata.batch import normalized, valid_inputs
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.index import Index
from mmdata.loader import Loader
from tests.programs import PATIENCE_S, run_program

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'mmdata[lightning]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")

PROGRAM = Path(__file__).with_name("two_ranks.py")


def damaged(data: dict[str, Any], folder: Path, rows: list[int]) -> dict[str, Any]:
    """The settings, on a copy of the shards in which these rows' images are zeros."""
    shutil.copytree(data["shards"], folder)
    index = Index.open(folder)
    shards, _ = index.locate(np.array(rows))
    columns = index.take(np.array(rows), ["image_offset", "image_bytes"])
    for i, shard in enumerate(shards.tolist()):
        with index.shard_path(shard).open("r+b") as file:
            file.seek(int(columns["image_offset"][i]))
            file.write(bytes(int(columns["image_bytes"][i])))
    return data | {"shards": str(folder)}


@pytest.fixture(scope="module")
def bad(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The first rows that rank 1 of 2 gets are damaged."""
    first = next(iter(Loader.from_config(data, rank=1, world_size=2)))["rows"].tolist()
    return damaged(data, tmp_path_factory.mktemp("bad") / "shards", first)


@pytest.fixture(scope="module")
def uneven(labelled: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In the evaluation rank 1 has no row of the first batch, and one row less of the second."""
    settings = labelled | {"val": {"shards": labelled["shards"]}, "tokenizer": None}
    batches = iter(Loader.from_config(evaluation_data(DataConfig(**settings)), rank=1, world_size=2))
    rows = next(batches)["rows"].tolist() + next(batches)["rows"].tolist()[:1]
    made = damaged(labelled, tmp_path_factory.mktemp("uneven") / "shards", rows)
    return made | {"loading": {"max_bad_share": 1.0}}


@pytest.fixture(scope="module")
def model(tiny_clip: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a tiny CLIP."""
    folder = tmp_path_factory.mktemp("model")
    tiny_clip().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seen(
    data: dict[str, Any],
    labelled: dict[str, Any],
    bad: dict[str, Any],
    uneven: dict[str, Any],
    model: Path,
    tmp_path_factory: Any,
) -> list[dict[str, Any]]:
    """What each of two ranks saw in both trainers; neither hung."""
    out = tmp_path_factory.mktemp("seen")
    spec = json.dumps({"data": data, "labelled": labelled, "bad": bad, "uneven": uneven, "model": str(model)})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(
        [*command, str(PROGRAM), spec, str(out)], capture_output=True, text=True, env=quiet, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def losses(clip: Any, data: Any) -> list[Tensor]:
    """CLIP's loss of each batch of both ranks, without a trainer."""
    found: list[Tensor] = []
    for rank in range(2):
        for batch in Loader.from_config(data, rank=rank, world_size=2):
            inputs = valid_inputs(batch)
            inputs["pixel_values"] = normalized(inputs["pixel_values"])
            found.append(clip(**inputs, return_loss=True).loss)
    return found


def test_two_ranks_get_their_slices_of_the_plan(seen: list[dict[str, Any]], data: dict[str, Any]):
    for rank in (0, 1):
        loader = Loader.from_config(data, rank=rank, world_size=2)
        batches = [batch for _ in range(2) for batch in loader]
        assert seen[rank]["lightning"] == [batch["rows"].tolist() for batch in batches]
        stream = mmdata.stream(None, data, rank=rank, world_size=2, steps_per_epoch=2)
        assert seen[rank]["stream"] == [batch["rows"].tolist() for _ in range(3) for batch in stream]
        for got, batch in zip(seen[rank]["huggingface"], batches, strict=True):
            wanted = normalized(batch["pixel_values"][batch["valid"]]).double().sum(dim=(1, 2, 3))
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted)


def test_two_ranks_with_labels_accumulate_the_mean_of_all_batches(
    seen: list[dict[str, Any]], labelled: dict[str, Any], clip: Any
):
    mean = torch.stack(losses(clip, labelled)).mean()  # of three batches on each of two ranks
    gradient = torch.autograd.grad(mean, list(clip.parameters()))
    norm = torch.stack([g.norm() for g in gradient]).norm().item()
    for found in seen:
        assert found["norm"] == [pytest.approx(norm, rel=1e-3)]
        with torch.no_grad():
            data = evaluation_data(DataConfig(**labelled, val={"shards": labelled["shards"]}))
            wanted = torch.stack(losses(clip, data)).mean().item()
        assert found["eval_loss"] == [pytest.approx(wanted, rel=1e-3)]


def test_two_ranks_predict_each_row_once_where_one_has_fewer(seen: list[dict[str, Any]], uneven: dict[str, Any]):
    settings = uneven | {"val": {"shards": uneven["shards"]}, "tokenizer": None}
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=16, patch_size=16, num_labels=5)).eval()
    data = evaluation_data(DataConfig(**settings))
    ranks = [list(Loader.from_config(data, rank=rank, world_size=2)) for rank in range(2)]
    pixels, labels = [], []
    for batch in (batch for step in zip(*ranks, strict=True) for batch in step):
        pixels.append(normalized(batch["pixel_values"][batch["valid"]], [0.5] * 3, [0.5] * 3))
        labels += batch["labels"][batch["valid"]].tolist()
    assert [len(part) for part in pixels] == [4, 0, 4, 3, 3, 3]
    with torch.no_grad():
        logits = model(torch.cat(pixels)).logits
    for found in seen:
        assert found["predicted"]["labels"] == labels
        torch.testing.assert_close(torch.tensor(found["predicted"]["logits"]), logits)
        assert found["predicted"]["loss"] == seen[0]["predicted"]["loss"] > 0


@pytest.mark.parametrize("trainer", ["lightning", "huggingface"])
def test_two_ranks_end_together_where_one_has_too_many_bad_rows(seen: list[dict[str, Any]], trainer: str):
    for found in seen:
        said = r"over 2 ranks, 4 of 22 rows could not be used \(\w+ 4\), more than max_bad_share 5\.0%"
        assert re.match(said, found[f"bad {trainer}"])
