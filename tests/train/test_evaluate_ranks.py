"""`mmdata evaluate` under real torchrun (gloo): the numbers are those of one process, and each file is written once.

Each rank loaded all rows and then gathered those of all: with W ranks every row was there W times, and R@10 of 8 ranks
was R@2. Rows, captions and pairs here divide by no number of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from mmdata import Index, cli
from mmdata.convert import ConvertConfig, convert
from tests.programs import PATIENCE_S, free_port, run_program

ROOT = Path(__file__).parents[2]
ROWS, COLORS = 25, ("red", "green", "blue")


def run_tool(name: str, *words: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process."""
    return cli.main([name, *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, and what it is evaluated on: rows of one to three captions, one of them twice, one of them bad."""
    folder = tmp_path_factory.mktemp("evaluate")
    generator, lines = np.random.default_rng(0), []
    for i in range(ROWS):
        pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        pixels[:, :, i % 3] = 255
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
        captions = [f"{'very ' * (i % 4)}{COLORS[i % 3]} picture {i} the {n}th" for n in range(1 + i % 3)]
        lines.append({"path": f"{i:02d}.png", "captions": captions, "label": i % 3})
    lines[7]["captions"][0] = lines[8]["captions"][0]
    table = folder / "captions.jsonl"
    lines.append({**lines[4], "captions": ["the fourth again"]})
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = []
    for i in range(7):
        sides = [(f"{i + 5 * side:02d}.png", f"{COLORS[(i + side) % 3]} the {i}th") for side in (0, 1)]
        named = {f"image_{side}": name for side, (name, _) in enumerate(sides)}
        named |= {f"caption_{side}": text for side, (_, text) in enumerate(sides)}
        pairs.append({"type": ("colour", "shade")[i % 2], **named})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "classes.json").write_text(
        json.dumps({"classes": [*COLORS, "pale", "dark", "grey"], "templates": "imagenet"})
    )
    convert(table, folder / "shards", ConvertConfig(train_tokenizer=300, keep_duplicates=True))
    index = Index.open(folder / "shards")
    place = index.take(np.array([11]), ["image_offset", "image_bytes"])
    with index.shard_path(0).open("r+b") as file:
        file.seek(int(place["image_offset"][0]))
        file.write(bytes(int(place["image_bytes"][0])))
    shards = str(folder / "shards")
    data = {"shards": shards, "val": {"shards": shards}, "tokenizer": f"{shards}/tokenizer", "global_batch_size": 5}
    data |= {"image_size": 16, "text_buckets": 2, "loading": {"num_workers": 1}}
    train = {"output": str(folder / "run"), "steps": 2, "warmup_steps": 1}
    (folder / "small.yaml").write_text(yaml.safe_dump({"data": data, "train": train}))
    with pytest.MonkeyPatch.context() as patch:
        assert run_tool("train", folder / "small.yaml", monkeypatch=patch) == 0
    return folder


def words(folder: Path, out: Path) -> list[object]:
    tests = ["--pairs", folder / "pairs.jsonl", "--classes", folder / "classes.json"]
    return [folder / "run", *tests, "--device", "cpu", "--out", out]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process measures."""
    with pytest.MonkeyPatch.context() as patch:
        assert run_tool("evaluate", *words(folder, folder / "alone.json"), monkeypatch=patch) == 0
    return json.loads((folder / "alone.json").read_text())


def torchrun(ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", free_port()]
    return run_program(
        [sys.executable, *map(str, [*launcher, *command])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_evaluate_alone_counts_each_row_image_and_caption_once(alone: dict[str, Any]):
    assert alone["rows_masked"] == {"file_changed": 1}
    captions = sum(1 + i % 3 for i in range(ROWS) if i != 11) + 1
    assert (alone["rows"], alone["images"], alone["texts"]) == (ROWS, ROWS - 1, captions)
    assert alone["compositional"]["mean"]["pairs"] == 7


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.sweep(keep=1)
def test_evaluate_under_torchrun_measures_what_one_process_does(
    folder: Path, alone: dict[str, Any], ranks: int, tmp_path: Path
):
    done = torchrun(ranks, "-m", "mmdata", "evaluate", *words(folder, tmp_path / "scores.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "scores.json").read_text()) == alone
    assert done.stdout.count("→") == 1, "one rank prints and writes"
    listed = tmp_path / "scores-ledger-rank*.jsonl"
    assert done.stderr.count(f"left out: 1 row that could not be loaded (file_changed), listed in {listed}") == 1
    (ledger,) = tmp_path.glob(listed.name)  # of the rank that had the row
    assert json.loads(ledger.read_text())["row"] == 11
    assert {path.name for path in tmp_path.iterdir()} == {"scores.json", ledger.name}


TOGETHER = """
import sys
from types import SimpleNamespace
import torch
from mmdata import Config, Loader, load_config
from mmdata.errors import DataError
from mmdata.train import DualEncoder, distributed, losses
from mmdata.train.evaluation.embedding import embed
from mmdata.train.evaluation.evaluate import evaluate_retrieval

distributed.init("cpu")
torch.set_num_threads(1)
rank, generator = distributed.rank(), torch.Generator().manual_seed(0)
features = torch.nn.functional.normalize(torch.randn(4, 8, generator=generator), dim=1).requires_grad_()
scale = torch.tensor(9.0)


def one_ranks_fault(scores, positives, negatives):
    return torch.ones_like(scores) if rank == 0 else torch.full_like(scores, torch.nan)


def said(do):
    try:
        return f"no error: {do()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class OneRanksCaptions:
    def all_captions(self, rows):
        if rank == 1:
            raise DataError("a caption has changed")
        return loader.all_captions(rows)


def one_ranks_batches():
    for number, batch in enumerate(loader):
        if number == 3 and rank == 1:
            raise RuntimeError("a tower of cards")
        yield batch


def unreadable():
    for batch in loader:
        yield batch | {"valid": torch.zeros_like(batch["valid"])}


changes = {"transform": "eval", "global_batch_size": 2}
data = load_config(sys.argv[1]).data.model_copy(update=changes).with_loading(max_bad_share=0.03)
loader = Loader.from_config(data, rank=rank, world_size=2)
model = DualEncoder.from_config(Config(data=data).model, vocab_size=loader.builder.spec.tokenizer.vocab_size).eval()
lines = [
    said(lambda: losses.clip_loss(features, features, scale, miner=one_ranks_fault)),
    said(lambda: torch.autograd.grad(losses.clip_loss(features, features, scale), features, create_graph=True)),
    said(lambda: evaluate_retrieval(model, loader)),
    said(lambda: evaluate_retrieval(model, iter(loader), source=OneRanksCaptions())),
    said(lambda: evaluate_retrieval(model, one_ranks_batches())),
    said(lambda: evaluate_retrieval(model, [batch for batch in loader][: 12 + rank])),
    said(lambda: len(embed(model, unreadable(), source=SimpleNamespace(all_captions=loader.all_captions)).rows)),
    said(lambda: losses.clip_loss(features, features, scale).item() > 0),
]
print("".join(f"rank {rank} {number} {line}\\n" for number, line in enumerate(lines)), end="", flush=True)
"""


def test_what_is_wrong_on_one_rank_raises_on_all(folder: Path, tmp_path: Path):
    """A rank that raised alone would leave the others waiting in a collective."""
    (tmp_path / "together.py").write_text(TOGETHER)
    done = torchrun(2, tmp_path / "together.py", folder / "small.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("miner one_ranks_fault gave 28 negatives a weight that is NaN, infinite or below 0") == 2
    for rank in (0, 1):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank} ")]
        expected = (
            "no error: nan",
            "RuntimeError: the losses of mmdata.train have no second derivative",
            "DataError: 1 of 26 rows could not be used (file_changed 1), more than max_bad_share 3.0%",
            (
                "TrainingError: rank 1 got no batch, and all ranks stop: DataError: a caption has changed",
                "DataError: a caption has changed",
            )[rank],
            ("TrainingError: rank 1 got no batch, and all ranks stop: RuntimeError: a tower", "RuntimeError: a tower")[
                rank
            ],
            ("", "TrainingError: rank 0 got no batch, and all ranks stop: its epoch has ended")[rank],
            "no error: 0",
            "no error: True",
        )
        for number, (line, start) in enumerate(zip(lines, expected, strict=True)):
            assert line.startswith(f"rank {rank} {number} {start}")


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"train", "evaluate"}))
def test_programs_of_one_process_refuse_torchrun(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main([name, "--help"]) == 2
    said = capsys.readouterr()
    assert f"error: mmdata {name} is one process, and torchrun started 2 of it (WORLD_SIZE): start it" in said.err
    assert said.out == ""
