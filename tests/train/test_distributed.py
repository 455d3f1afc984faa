"""Gradients under real DDP (gloo, real processes) against one process that holds the whole batch, in float64.

What others get wrong would show here: features gathered without gradient under a local loss, the scale's gradient
multiplied by the number of ranks or of micro-batches, dropout not replayed, ranks of unequal numbers of valid rows, a
rank without any (whose scale and bias still need a gradient, or DDP waits for ever), and a batch without any.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmdata.errors import ConfigError
from mmdata.train.ranks import collectives
from tests.programs import PATIENCE_S, run_program, run_ranks
from tests.train import ranks

PROGRAM = Path(__file__).with_name("ranks.py")
ALL, NONE, SOME, FEW = [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0]
LOSSES = {
    "clip": {"loss": "clip"},
    "clip_top_k": {"loss": "clip", "top_k": 3},
    "clip_extra": {"loss": "clip", "negative_captions": True},
    "clip_extra_top_k": {"loss": "clip", "negative_captions": True, "top_k": 3},
    "siglip": {"loss": "siglip"},
    "siglip_top_k": {"loss": "siglip", "top_k": 3},
    "multi_positive": {"loss": "multi_positive"},
    "multi_positive_top_k": {"loss": "multi_positive", "top_k": 3},
    "triplet": {"loss": "triplet"},
    "triplet_hardest": {"loss": "triplet", "top_k": 1},
}
WAYS = {
    "2": {"valid": [ALL, ALL]},
    "2_unequal_dropout": {"valid": [SOME, FEW], "dropout": 0.3},
    "2_micro_same": {"valid": [ALL, SOME], "micro_batch_size": 3, "mask_same": True},
    "3": {"valid": [ALL, ALL, ALL]},
    "3_one_rank_empty_same": {"valid": [ALL, NONE, SOME], "mask_same": True},
    "3_empty_dropout_micro": {"valid": [NONE, ALL, FEW], "dropout": 0.3, "micro_batch_size": 2},
    "3_nothing_valid": {"valid": [NONE, NONE, NONE], "micro_batch_size": 1},
}
CASES = {f"{loss}_{way}": {**LOSSES[loss], **WAYS[way]} for loss in LOSSES for way in WAYS}
PREFIXES = {"loss": "clip", "settings": {"matryoshka": [2, 4], "distill": {"fields": {"image": "i", "text": "t"}}}}
CASES |= {f"matryoshka_distill_{way}": {**PREFIXES, **WAYS[way]} for way in ("2_micro_same", "3_empty_dropout_micro")}
CASES |= {
    f"regions_{loss}_{way}": {**LOSSES[loss], **WAYS[way], "regions": True}
    for loss in ("clip", "clip_top_k", "siglip", "multi_positive")
    for way in ("2_micro_same", "3_empty_dropout_micro", "3_nothing_valid")
}
CASES |= {
    f"regions_{len(without)}_of_2_without_boxes": {
        "loss": "clip",
        **WAYS["2_micro_same"],
        "regions": True,
        "without_boxes": without,
    }
    for without in ([0], [0, 1])
}
CASES["regions_compiled_2"] = {"loss": "clip", **WAYS["2_micro_same"], "regions": True, "compile": True}
CASES["regions_matryoshka_2"] = {**PREFIXES, **WAYS["2_micro_same"], "regions": True}
CASES |= {
    "clip_own_extra_2": {"loss": "clip_own_extra", "valid": [SOME, ALL], "micro_batch_size": 3},
    "clip_compiled_2": {"loss": "clip", "valid": [ALL, SOME], "compile": True, "dropout": 0.3, "micro_batch_size": 3},
    "clip_lora_2": {
        "loss": "clip",
        "valid": [ALL, SOME],
        "model": {"lora": {"dropout": 0.3}, "patch_dropout": 0.5},
        "micro_batch_size": 3,
    },
    "clip_own_extra_3": {"loss": "clip_own_extra", "valid": [NONE, SOME, FEW], "dropout": 0.3},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `<case>.<rank>.pt` of every case; three processes run them all."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    run_ranks(PROGRAM, folder, 3)
    return folder


def one_process(case: dict) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients with the graphs of all ranks' (micro-)batches kept, drawing each rank's dropout."""
    model, outputs = ranks.make_model(case.get("dropout", 0.0), **case.get("model", {})), []
    batches = [ranks.make_batch(rank, case) for rank in range(len(case["valid"]))]
    for rank, batch in enumerate(batches):
        torch.manual_seed(50 + rank)
        size = case.get("micro_batch_size", ranks.ROWS)
        for start in range(0, ranks.ROWS, size):
            outputs.append(model({key: value[start : start + size] for key, value in batch.items()}))
    names = [name for name, value in outputs[0]._asdict().items() if name.endswith("features") and value is not None]
    features = {name: torch.cat([getattr(output, name) for output in outputs]) for name in names}
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0] if key != "keys"}
    loss = ranks.loss_function(case)(outputs[0]._replace(**features), whole)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(keep=4)
def test_every_parameters_gradient_under_ddp_is_that_of_one_process(results: Path, name: str):
    loss, gradients = one_process(CASES[name])
    assert {"logit_scale", "logit_bias", "image_projection.weight", "text_tower.tokens.weight"} < gradients.keys()
    for rank in range(len(CASES[name]["valid"])):
        found = torch.load(results / f"{name}.{rank}.pt")
        torch.testing.assert_close(found["loss"], loss, rtol=1e-12, atol=1e-12)
        for parameter, expected in gradients.items():
            torch.testing.assert_close(
                found["gradients"][parameter],
                expected,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda text, parameter=parameter, rank=rank: f"rank {rank}, {parameter}: {text}",
            )
    if name.endswith("nothing_valid"):
        assert loss == 0
        assert all((gradient == 0).all() for gradient in gradients.values())
    elif CASES[name]["loss"] != "triplet":
        assert gradients["logit_scale"].abs() > 1e-9


@pytest.mark.parametrize("function", [collectives._Gather, collectives._LogSumExp])
def test_collectives_refuse_a_second_derivative(function: type[torch.autograd.Function], tmp_path: Path):
    """Refused before anything is sent, so on all ranks alike."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        rows = torch.rand(3, 2, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"the losses of mmdata\.train have no second derivative"):
            torch.autograd.grad(function.apply(rows).sum(), rows, create_graph=True)
    finally:
        collectives.finish()


def test_alone_there_is_one_rank_and_nothing_to_wrap():
    model, rows = torch.nn.Linear(2, 2), torch.rand(3, 2)
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    assert collectives.wrap(model, torch.device("cpu")) is model
    assert collectives.gather(rows) is rows
    assert collectives.init("cpu") == torch.device("cpu")
    assert not collectives.is_initialized()


def test_a_rank_that_fails_ends_its_threads_before_the_interpreter():
    program = (
        "import atexit, sys\n"
        "from pathlib import Path\n"
        "import torch.distributed as dist\n"
        "from mmdata.train import distributed\n"
        "names = lambda: [p.read_text().strip() for p in Path('/proc/self/task').glob('*/comm')]\n"
        "atexit.register(lambda: print(names()))  # called last, being registered first\n"
        "distributed.init('cpu')\n"
        "def fail():\n"
        "    group = dist.new_group(backend='gloo')\n"
        "    dist.broadcast_object_list([None], src=0, group=group)\n"
        "    assert 'pt_gloo_runloop' in names()\n"
        "    raise OSError('disk full')\n"
        "fail()\n"
    )
    world = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_program(
        [sys.executable, "-c", program],
        env=os.environ | world,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "OSError: disk full" in done.stderr
    assert (done.returncode, "python" in done.stdout, "gloo_runloop" in done.stdout) == (1, True, False)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise OSError('disk full')", 1, "aborts"),
        ("raise SystemExit(cli.exit_code(lambda: int('one')))", 2, "aborts"),
        ("raise SystemExit(cli.exit_code(lambda: 0))", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("hang = True; raise OSError('disk full')", 1, "aborts"),
    ],
)
@pytest.mark.sweep(keep=3)
def test_rank_that_fails_cuts_its_connections_and_keeps_its_exit_code(end: str, code: int, said: str):
    """As with nccl, of whose ways only the choice can be tested without a GPU."""
    program = (
        "import time\n"
        "import torch.distributed as dist\n"
        "from mmdata import cli\n"
        "from mmdata.train.ranks import collectives\n"
        "collectives.init('cpu')\n"
        "dist.get_backend = lambda: 'nccl'\n"
        "hang, abort = False, dist.ProcessGroup.abort\n"
        "def note(group):\n"
        "    print('aborts', flush=True)\n"
        "    time.sleep(3600) if hang else abort(group)\n"
        "dist.ProcessGroup.abort = note\n"
        "collectives.ABORT_S = 1.0\n"
        f"{end}\n"
    )
    world = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_program(
        [sys.executable, "-c", program],
        env=os.environ | world,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (code, said), done.stderr
    assert ("error: " in done.stderr or "OSError: disk full" in done.stderr) == (said == "aborts")


def test_ranks_on_gpus_are_bound_to_their_device(monkeypatch: pytest.MonkeyPatch):
    given: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: given.extend([backend, settings]))
    monkeypatch.setattr(collectives.atexit, "register", lambda function: None)
    world = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "RANK": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "")
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")  # undone at the end
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    place = torch.device("cuda", 1)
    assert collectives.init() == place
    assert given == ["nccl", {"timeout": collectives.TIMEOUT, "device_id": place}]
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "what the environment says counts"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    given.clear()
    assert collectives.init("cpu") == torch.device("cpu")
    assert given == ["gloo", {"timeout": collectives.TIMEOUT, "device_id": None}]


def test_devices_that_are_not_there_are_errors(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="device 'tpu': expected auto, cpu, cuda, mps"):
        collectives.init("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda': torch sees no GPU; use device 'cpu', or check the driver"):
        collectives.init("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"local rank 2: this host has 2 GPU\(s\); start that many ranks on it"):
        collectives.init("auto")


def test_torch_of_this_version_shows_the_model_inside_a_compiled_one():
    model = torch.nn.Linear(2, 1)
    compiled = torch.compile(model)
    assert hasattr(compiled, "_orig_mod"), "torch.compile keeps the model elsewhere now: mend collectives.unwrap"
    assert collectives.unwrap(compiled) is model  # type: ignore[arg-type]
