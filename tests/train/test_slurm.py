"""Runs that a scheduler stops with a signal and queues again: submitit's local executor, and the script for Slurm.

There is no Slurm here: `srun` and `scontrol` are stand-ins, which do what their manuals say.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from mmdata.text.tokenizer import train_tokenizer
from tests.programs import PATIENCE_S, Program, free_port
from tests.train.test_loop import read_metrics, run_small

ROOT = Path(__file__).parents[2]

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command = command[2:]
command[0] = sys.executable if command[0] == "python" else command[0]
task = {{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "0"}}
tasks = []
signal.signal(signal.SIGUSR2, lambda number, frame: [task.send_signal(number) for task in tasks])
for rank in "01":
    tasks.append(subprocess.Popen(command, env={{**os.environ, **task, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}}))
sys.exit(max(task.wait() for task in tasks))
"""


def logged(output: Path) -> int:
    """Number of updates that a run at work has logged."""
    path = output / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def test_submitit_job_is_queued_again_after_its_checkpoint_and_ends_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    submitit = pytest.importorskip("submitit")
    from tests.train.slurm_task import Task

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR2")
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(tasks_per_node=2, timeout_min=600)
    output = tmp_path / "run"
    output.mkdir()
    job = executor.submit(Task(), output)
    assert job.results() == [0, 0], job.stderr()
    assert (output / "queued_again").exists()
    (first, second) = read_metrics(output, "start")
    assert (first["step"], first["ranks"], second["ranks"]) == (0, 2, 2)
    assert 0 < second["step"] < 12
    assert run_small(tmp_path / "whole", torchrun=2).returncode == 0
    for kind in ("train", "evaluation"):
        assert read_metrics(output, kind) == read_metrics(tmp_path / "whole", kind)


def test_slurm_script_queues_the_job_again_and_resumes(tmp_path: Path, shards: Path):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/queued\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    train_tokenizer(["a red dog", "two green trees"], tmp_path / "tokenizer", vocab_size=300, max_length=16)
    data = {"shards": str(shards), "tokenizer": str(tmp_path / "tokenizer"), "global_batch_size": 2, "image_size": 16}
    train = {"steps": 1_000_000, "log_every_steps": 1, "output": str(tmp_path / "run")}
    settings = {"data": data, "model": {"name": "micro"}, "train": train}
    (tmp_path / "photos.yaml").write_text(yaml.safe_dump(settings))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "MASTER_PORT": str(free_port())}
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, **slurm, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for start in (1, 2):
        made = logged(tmp_path / "run")
        command = ["bash", str(ROOT / "examples" / "slurm.sh"), str(tmp_path / "photos.yaml")]
        with Program(command, env=environment) as script:
            while logged(tmp_path / "run") < made + 3:
                assert script.poll() is None
                time.sleep(0.1)
            script.send_signal(signal.SIGUSR2)
            assert script.wait(PATIENCE_S) == 0
        assert (tmp_path / "queued").read_text() == "requeue 7\n" * start
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert [line["ranks"] for line in read_metrics(tmp_path / "run", "start")] == [2, 2]
    assert read_metrics(tmp_path / "run", "start")[1]["step"] == made
