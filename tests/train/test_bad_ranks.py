"""Rows and ranks that go bad in runs of two real processes over gloo, without a launcher that would stop one for the
other's sake."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mmdata import Index, Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint
from tests.programs import PATIENCE_S, Program, free_port

ROWS, BATCH = 24, 6


@pytest.fixture
def config(tmp_path: Path, make_corpus: Callable[..., Path]) -> Path:
    """A run over 24 rows in batches of 6; its folder is `run`."""
    raw = make_corpus(tmp_path / "raw", ROWS)
    shards = tmp_path / "shards"
    convert(raw / "captions.jsonl", shards, ConvertConfig(train_tokenizer=300))
    data = {"shards": str(shards), "tokenizer": str(shards / "tokenizer"), "global_batch_size": BATCH}
    data |= {"image_size": 16, "text_buckets": 2, "loading": {"num_workers": 1}}
    train = {"output": str(tmp_path / "run"), "epochs": 1, "warmup_steps": 1, "log_every_steps": 1}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({"data": data, "train": train}))
    return path


def spoil(shards: Path, rows: list[int]) -> None:
    """Zeros in place of these rows' images."""
    index = Index.open(shards)
    columns = index.take(np.array(rows), ["image_offset", "image_bytes"])
    for offset, size in zip(columns["image_offset"].tolist(), columns["image_bytes"].tolist(), strict=True):
        with index.shard_path(0).open("r+b") as file:
            file.seek(offset)
            file.write(bytes(size))


def copy_without_a_shard(folder: Path) -> tuple[Path, Path]:
    """A copy of `folder`/shards whose first shard is gone, and the path that it had."""
    copy = folder / "copy"
    shutil.copytree(folder / "shards", copy)
    gone = Index.open(copy).shard_path(0)
    gone.unlink()
    return copy, gone


def rows_of_rank(config: Path, rank: int) -> list[int]:
    """The rows that a rank of two has in epoch 0, in order."""
    return [int(row) for batch in Loader.from_config(str(config), rank=rank, world_size=2) for row in batch["rows"]]


def start(
    config: Path, *words: str, ranks: int = 2, of_rank: dict[int, list[str]] | None = None, tool: str = "train"
) -> list[subprocess.Popen]:
    port = free_port()
    world = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "mmdata", tool, str(config), *words]
    return [
        Program(
            command + (of_rank or {}).get(rank, []),
            env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Exit code and stderr of each; none may hang."""
    try:
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def ledger(run: Path) -> list[tuple[int, int]]:
    """(epoch, row) of each line of all ranks."""
    lines = [line for path in sorted(run.glob("ledger-rank*")) for line in path.read_text().splitlines()]
    return sorted((entry["epoch"], entry["row"]) for entry in map(json.loads, lines))


def counts(run: Path) -> tuple[int, dict[str, int]]:
    state: dict[str, Any] = load_checkpoint(find_checkpoint(run))["batches"]
    return state["rows_seen"], state["rows_masked"]


def test_ranks_that_select_different_rows_do_not_train(config: Path, tmp_path: Path):
    for rank in range(2):
        keys = Index.open(tmp_path / "shards").keys(np.arange(rank, 20))
        (tmp_path / f"keys{rank}.txt").write_text("\n".join(keys))
    selects = {rank: [f"data.select={tmp_path}/keys{rank}.txt"] for rank in range(2)}
    for code, error in finish(start(config, of_rank=selects)):
        assert code != 0
        assert "rank 1 has other batches than rank 0: selection is 'data.select keys1.txt (" in error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_budget_counts_the_rows_of_all_ranks(config: Path, tmp_path: Path):
    bad = rows_of_rank(config, 1)[:2]  # 2 of 24 rows, and 2 of rank 1's 12
    spoil(tmp_path / "shards", bad)
    results = finish(start(config, "data.loading.max_bad_share=0.1"))
    assert [code for code, _ in results] == [0, 0], results
    assert ledger(tmp_path / "run") == sorted((0, row) for row in bad)
    assert not (tmp_path / "run" / "ledger-rank0.jsonl").exists()
    assert counts(tmp_path / "run") == (24, {"file_changed": 2})


def test_budget_spent_stops_all_ranks_with_the_summary(config: Path, tmp_path: Path):
    spoil(tmp_path / "shards", rows_of_rank(config, 1)[:2])
    results = finish(start(config, "data.loading.max_bad_share=0.05"))
    for code, error in results:
        assert code == 2
        assert "error: over 2 ranks, 2 of 24 rows could not be used (file_changed 2), more than max_bad_share" in error
    # Only rank 1 knows which rows they were.
    assert ["; the first: shard '000000.tar', sample '" in error for _, error in results] == [False, True]


def test_error_on_one_rank_stops_all_and_is_named(config: Path, tmp_path: Path):
    copy, gone = copy_without_a_shard(tmp_path)
    first, second = finish(start(config, of_rank={1: [f"data.shards={copy}"]}))
    assert (first[0], second[0]) == (2, 2)
    assert f"error: shard '{gone}': no such file" in second[1]
    said = f"error: rank 1 got no batch, and all ranks stop: DataError: shard '{gone}': no such file"
    assert said in first[1]


def test_error_of_one_ranks_loader_in_an_evaluation_stops_all_and_is_named(config: Path, tmp_path: Path):
    copy, gone = copy_without_a_shard(tmp_path)
    val = [f"data.val.shards={tmp_path / 'shards'}", f"data.val.shards={copy}"]
    first, second = finish(start(config, of_rank={0: val[:1], 1: val[1:]}))
    assert (first[0], second[0]) == (2, 2)
    no_file = f"shard '{gone}': no such file"
    of_rank_1 = f"rank 1 got no batch, and all ranks stop: DataError: {no_file}"
    assert f"error: rows to evaluate on, of {tmp_path / 'shards'}: {of_rank_1}" in first[1]
    assert f"error: rows to evaluate on, of {copy}: {no_file}" in second[1]
    # The run has its checkpoint, and the program stops alike.
    shards = {0: ["--shards", str(tmp_path / "shards")], 1: ["--shards", str(copy)]}
    first, second = finish(start(tmp_path / "run", "--device", "cpu", of_rank=shards, tool="evaluate"))
    assert (first[0], second[0]) == (2, 2)
    assert of_rank_1 in first[1]
    assert no_file in second[1]


@pytest.mark.sweep
def test_two_ranks_killed_and_resumed_by_one_list_and_count_each_masked_row_once(config: Path, tmp_path: Path):
    bad = [1, 8, 15, 22]
    spoil(tmp_path / "shards", bad)
    words = ["data.loading.max_bad_share=0.5", "train.epochs=60", "train.checkpoint_every_steps=8"]
    ranks = start(config, *words)
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith("step 21 "):  # the checkpoint of step 16 has waited for that of step 8
                break
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
    assert [code for code, _ in finish(ranks)] == [-signal.SIGKILL] * 2
    seen, masked = counts(tmp_path / "run")
    step = load_checkpoint(find_checkpoint(tmp_path / "run"))["step"]
    assert seen == step * BATCH
    assert masked == {"file_changed": step // 4 * len(bad)}
    assert len(ledger(tmp_path / "run")) > masked["file_changed"]
    (result,) = finish(start(config, *words, ranks=1))
    assert result[0] == 0, result[1]
    assert ledger(tmp_path / "run") == [(epoch, row) for epoch in range(60) for row in bad]
    assert counts(tmp_path / "run") == (60 * ROWS, {"file_changed": 60 * len(bad)})
