"""The examples run as a user would run them, and resume."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from mmdata.images import probe
from mmdata.tars.write import Sample
from tests.programs import PATIENCE_S, run_program
from tests.shard_writer import ShardWriter

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model(data: dict[str, Any], clip: Any, tmp_path: Path) -> str:
    """A folder with a tiny CLIP and its tokenizer, as a hub's repository has them."""
    clip.save_pretrained(tmp_path / "model")
    for file in Path(data["tokenizer"]).iterdir():
        shutil.copy(file, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """`example("plain_torch", …)` runs an example in an empty folder. All of them train: no module is in eval mode."""
    from transformers import CLIPModel

    modes: set[bool] = set()

    def look(module: Any, _: Any) -> None:
        if isinstance(module, CLIPModel):
            modes.update(part.training for part in module.modules())

    def run(name: str, *arguments: str) -> None:
        """A program's handlers of signals end with it; here they end with the call."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    yield run
    hook.remove()
    assert modes <= {True}


def test_plain_torch_trains_and_resumes(
    data: dict[str, Any], model: str, example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    example("plain_torch", data["shards"], model, "--steps", "4", "--batch-size", "8")
    assert re.search(r"^step 4 · loss \d+\.\d+ · padding \d+\.\d%$", capsys.readouterr().out, re.MULTILINE)
    state = torch.load(tmp_path / "runs" / "plain_torch.pt", weights_only=True)
    assert (state["loader"]["epoch"], state["loader"]["step"], state["step"]) == (1, 1, 4)  # 3 steps an epoch
    example("plain_torch", data["shards"], model, "--steps", "6", "--batch-size", "8")
    state = torch.load(tmp_path / "runs" / "plain_torch.pt", weights_only=True)
    assert (state["loader"]["epoch"], state["loader"]["step"], state["step"]) == (1, 3, 6)


def interrupted(
    name: str, arguments: list[str], *, number: int, batch: int, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run an example in a process that sends itself a signal when its model gets the batch with a number, from 1."""
    program = f"""
import os, runpy, sys
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
batches = 0

def interrupt(module, _):
    global batches
    if type(module).__name__ in ("CLIPModel", "SqueezeNet"):
        batches += 1
        if batches == {batch}:
            os.kill(os.getpid(), {int(number)})

torch.nn.modules.module.register_module_forward_pre_hook(interrupt)
sys.argv[0] = {str(EXAMPLES / name) + ".py"!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program, *arguments]
    return run_program(command, capture_output=True, text=True, cwd=folder, env=quiet)


@pytest.fixture
def undisturbed(data: dict[str, Any], model: str, example: Any, tmp_path: Path) -> dict[str, Any]:
    """The last checkpoint of a run of plain_torch.py that nothing disturbed."""
    example("plain_torch", data["shards"], model, *UPDATES, "--checkpoint", "whole.pt")
    return torch.load(tmp_path / "whole.pt", weights_only=True)


UPDATES = ["--steps", "7", "--batch-size", "8", "--accumulate", "2", "--dtype", "bfloat16", "--save-steps", "3"]
"""Seven updates of two batches: epochs have three batches, so updates and epochs begin at different batches."""


@pytest.mark.parametrize(
    ("number", "batch"), [(signal.SIGINT, 4), (signal.SIGTERM, 10), (signal.SIGKILL, 4), (signal.SIGKILL, 10)]
)
@pytest.mark.sweep(keep=1)
def test_plain_torch_that_a_signal_ended_goes_on_to_the_same_weights(
    number: int, batch: int, undisturbed: dict[str, Any], data: dict[str, Any], model: str, tmp_path: Path, example: Any
):
    done = interrupted("plain_torch", [data["shards"], model, *UPDATES], number=number, batch=batch, folder=tmp_path)
    at = (batch + 1) // 2  # the update that the signal came in
    checkpoint = tmp_path / "runs" / "plain_torch.pt"
    if number == signal.SIGKILL:
        assert done.returncode == -signal.SIGKILL
        saved = (at - 1) // 3 * 3
    else:
        assert done.returncode == 1
        assert done.stderr.endswith(f"stopped after step {at}; the same command continues\n")
        saved = at
    assert (torch.load(checkpoint, weights_only=True)["step"] if checkpoint.is_file() else 0) == saved
    example("plain_torch", data["shards"], model, *UPDATES)
    state = torch.load(checkpoint, weights_only=True)
    assert state["loader"] == undisturbed["loader"]
    assert all(torch.equal(state["model"][name], value) for name, value in undisturbed["model"].items())


def test_clip_from_scratch_looks_trains_mines_and_evaluates(
    data: dict[str, Any], example: Any, capsys: pytest.CaptureFixture[str]
):
    sizes = ["--epochs", "2", "--batch-size", "8", "--image-size", "32", "--negatives", "2", "--mine-after", "1"]
    example("clip_from_scratch", data["shards"], data["shards"], *sizes)
    told = capsys.readouterr().out
    assert re.search(r"^22 images, 40 to 40 pixels high\n22 captions, of \d+ tokens at most\nrow 0: key 0000, ", told)
    scores = r"R@1 image to text \d+\.\d%, text to image \d+\.\d%, by chance \d+\.\d%"
    for epoch in (1, 2):
        assert re.search(rf"^epoch {epoch} · loss \d\.\d{{3}} · rows left out 0 · {scores}$", told, re.MULTILINE)


def test_sogclr_trains_a_config(data: dict[str, Any], example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": data, "train": {"steps": 2}}))
    example("sogclr", str(config), "--steps", "4")
    assert re.fullmatch(r"step 4 · loss \d+\.\d{3}\n", capsys.readouterr().out)


@pytest.fixture
def flowers(tmp_path: Path) -> list[str]:
    """Folders of shards with labels and no captions, one to train on and one to evaluate on: red and blue images."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 20), ("val", 10)):
        with ShardWriter(tmp_path / "flowers" / name) as writer:
            for i in range(count):
                pixels = rng.normal([220, 40, 40] if i % 2 else [40, 40, 220], 20, (40, 40, 3))
                buffer = io.BytesIO()
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
                writer.write(Sample(f"{i:04d}", buffer.getvalue(), probe(buffer.getvalue()), [], label=i % 2))
            writer.close({"classes": ["blue", "red"]})
    return [str(tmp_path / "flowers" / name) for name in ("train", "val")]


def test_classify_learns_from_labels_only_and_goes_on_when_killed(
    flowers: list[str], example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [*flowers, "--epochs", "6", "--batch-size", "8", "--image-size", "32", "--model", "squeezenet1_1"]
    # An epoch has 3 batches to train on and 2 to evaluate: the eighth is in the middle of the second epoch.
    done = interrupted("classify", arguments, number=signal.SIGKILL, batch=8, folder=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith("epoch 1 · loss ")
    assert torch.load(tmp_path / "runs" / "classify.pt", weights_only=True)["epochs"] == 1
    torch.manual_seed(0)
    example("classify", *arguments)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" · ")[0] for line in lines] == [f"epoch {number}" for number in range(2, 7)]
    last = re.fullmatch(r"epoch 6 · loss \d\.\d{3} · accuracy (\d+\.\d)% of 10 images", lines[-1])
    assert last
    assert float(last[1]) >= 80
    example("classify", *arguments)
    assert capsys.readouterr().out == ""  # all epochs are made


def test_time_a_step_says_what_a_loop_waits_for(
    data: dict[str, Any], model: str, example: Any, capsys: pytest.CaptureFixture[str]
):
    example("time_a_step", data["shards"], model, "--batch-size", "8")
    assert re.fullmatch(
        r"batch [\d.]+ ms \(middle half within [\d.]+ ms\)\nstep [\d.]+ ms \(middle half within [\d.]+ ms\)\n"
        r"a loop waits for data for \d+% of its time or more\n",
        capsys.readouterr().out,
    )


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: pip install 'mmdata[lightning]'"
)
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_and_resumes(data: dict[str, Any], model: str, example: Any, tmp_path: Path):
    for epochs in (1, 2):  # of 3 steps: the training does not end with a multiple of 2 or 4
        arguments = ["--epochs", str(epochs), "--batch-size", "8", "--save-steps", str(2 * epochs)]
        example("lightning_finetune", data["shards"], model, *arguments)
        assert [path.name for path in (tmp_path / "runs" / "lightning").glob("*.ckpt")] == ["last.ckpt"]
        state = torch.load(tmp_path / "runs" / "lightning" / "last.ckpt", weights_only=False)
        assert state["global_step"] == 3 * epochs


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="accelerate is not installed: pip install 'mmdata[huggingface]'",
)
def test_huggingface_trains_and_resumes(data: dict[str, Any], model: str, example: Any, tmp_path: Path):
    for epochs in (1, 2):
        example("huggingface_trainer", data["shards"], model, "--epochs", str(epochs), "--batch-size", "8")
        assert (tmp_path / "runs" / "huggingface" / f"checkpoint-{3 * epochs}").is_dir()
    assert (tmp_path / "runs" / "huggingface" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "needs", "weights"),
    [
        ("lightning_finetune", "lightning", "last.ckpt"),
        ("huggingface_trainer", "accelerate", "model/model.safetensors"),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep(keep=1)
def test_an_example_that_is_killed_goes_on_to_the_same_weights(
    name: str, needs: str, weights: str, data: dict[str, Any], model: str, tmp_path: Path, example: Any
):
    pytest.importorskip(needs)
    arguments = [data["shards"], model, "--epochs", "2", "--batch-size", "8", "--save-steps", "2", "--lr", "0.001"]
    example(name, *arguments, "--out", "whole")
    done = interrupted(name, [*arguments, "--out", "killed"], number=signal.SIGKILL, batch=6, folder=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    example(name, *arguments, "--out", "killed")
    whole, killed = (read_weights(tmp_path / folder / weights) for folder in ("whole", "killed"))
    assert list(whole) == list(killed)
    assert all(torch.equal(whole[key], killed[key]) for key in whole)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=False)["state_dict"]


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="accelerate is not installed: pip install 'mmdata[huggingface]'",
)
def test_huggingface_under_torchrun_is_one_training_of_two_ranks(data: dict[str, Any], model: str, tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(EXAMPLES / "huggingface_trainer.py"), data["shards"], model, "--epochs", "1", "--batch-size", "8"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(command, capture_output=True, text=True, cwd=tmp_path, env=quiet, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "runs" / "huggingface" / "checkpoint-3"
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["global_step"], state["train_batch_size"]) == (3, 4)
    assert {path.name for path in folder.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_plain_torch_is_one_process(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        example("plain_torch", "shards", "model")
    assert "this loop is one process: start it with python, not with torchrun" in capsys.readouterr().err
