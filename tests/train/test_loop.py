from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mmdata.config import TrainConfig
from mmdata.config.train import TopKConfig
from mmdata.errors import ConfigError, TrainingError
from mmdata.files import lock
from mmdata.train.log import meter
from mmdata.train.log.log import format_values, read_lines
from mmdata.train.miners import TopK
from mmdata.train.run import report
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint
from mmdata.train.run.objective import make_loss
from mmdata.train.run.optimizer import learning_rate, make_optimizer
from mmdata.train.run.trainer import Trainer
from mmdata.train.run.watchdog import Watchdog
from tests.programs import PATIENCE_S, Program, free_port, run_program
from tests.rounding import RUN_IN_DOUBLE

PROGRAM = Path(__file__).with_name("small_run.py")
CLOCKS = ("time", "samples_per_s", "step_ms", "data_wait_share")


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("small_run", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small = load_program()


def make_trainer(output: Path, batches: Any = None, evaluate: Any = None, **changes: Any) -> Trainer:
    config = small.train_config(**changes)
    return Trainer(small.small_model(), batches or small.SmallBatches(), config, output=output, evaluate=evaluate)


def run_small(output: Path, *, torchrun: int = 0, **spec: Any) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    command = [*(launcher if torchrun else [sys.executable]), str(PROGRAM), json.dumps({"output": str(output), **spec})]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return run_program(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)


def read_metrics(output: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines if line["kind"] == kind]


def read_rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]


def last_state(output: Path) -> dict[str, Any]:
    path = latest_checkpoint(output / "checkpoints")
    assert path is not None
    return load_checkpoint(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")

    def record(number: int, rows: list[int]) -> None:
        with (output / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"batch": number, "rows": rows}) + "\n")

    assert make_trainer(output, small.SmallBatches(record)).run() == 0
    return output


def test_loop_logs_each_step_once_with_exact_schedule(whole: Path):
    lines = read_metrics(whole)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4 + [2] * 4
    rates = [learning_rate(i, small.train_config(), 12) for i in range(12)]
    assert [line["lr"] for line in lines] == rates
    assert set(metrics_with_clocks(whole)[0]) == {
        *("kind", "time", "step", "epoch", "loss", "lr", "grad_norm"),
        *("samples_per_s", "step_ms", "data_wait_share", "padding_share", "logit_scale"),
    }


def test_loop_padding_share_counts_tokens_that_mean_nothing(whole: Path):
    masks = [batch["attention_mask"] for batch in small.SmallBatches()]
    expected = [1 - mask.sum().item() / mask.numel() for mask in masks]
    assert [line["padding_share"] for line in read_metrics(whole)[:4]] == pytest.approx(expected, abs=1e-12)


def test_loop_killed_and_resumed_repeats_rows_and_losses_bit_for_bit(whole: Path, tmp_path: Path):
    killed = run_small(tmp_path, signal="SIGKILL", at=7)
    assert killed.returncode == -signal.SIGKILL
    assert last_state(tmp_path)["step"] == 6
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 8)), "one line beyond the checkpoint"
    resumed = run_small(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from {tmp_path}/checkpoints/step-0000000006: step 6 of 12" in resumed.stdout
    assert read_metrics(tmp_path) == read_metrics(whole)
    assert [line["step"] for line in read_metrics(tmp_path, "evaluation")] == [4, 8, 12]
    rows = read_rows(tmp_path)
    assert [line["batch"] for line in rows] == [*range(8), *range(6, 12)]
    assert rows[8:] == read_rows(whole)[6:]
    before, after = last_state(whole), last_state(tmp_path)
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    assert [line["step"] for line in read_metrics(tmp_path, "start")] == [0, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_loop_signal_finishes_step_saves_and_same_command_resumes(
    number: signal.Signals, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    handler = signal.getsignal(number)
    stop_here = small.SmallBatches(lambda batch, rows: signal.raise_signal(number) if batch == 4 else None)
    assert make_trainer(tmp_path, stop_here).run() == 128 + number
    said = (
        f"stopped by {number.name} after step 5 of 12; checkpoint in {tmp_path}/checkpoints; the same command resumes"
    )
    assert said in capsys.readouterr().out
    assert signal.getsignal(number) is handler
    assert last_state(tmp_path)["step"] == 5
    assert make_trainer(tmp_path).run() == 0
    assert read_metrics(tmp_path) == read_metrics(whole)


def test_stop_signals_leave_where_a_library_in_c_had_set_a_handler(monkeypatch: pytest.MonkeyPatch):
    install, number = signal.signal, signal.SIGHUP
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    install(number, signal.SIG_DFL)
    with monkeypatch.context() as patched:
        # What Python says of a handler that it has not set itself.
        patched.setattr(signal, "signal", lambda n, handler: (install(n, handler), None)[1])
        stop = Watchdog(600, lambda: 0, None).__enter__()
    try:
        stop.__exit__(None, None, None)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        for one, handler in before.items():
            install(one, handler)


def test_loop_signal_in_last_step_of_epoch_resumes_at_next_epoch(whole: Path, tmp_path: Path):
    def stop_here(number: int, rows: list[int]) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGTERM)

    evaluated: list[int] = []
    assert make_trainer(tmp_path, small.SmallBatches(stop_here)).run() == 128 + signal.SIGTERM
    state = last_state(tmp_path)
    assert (state["epoch"], state["epoch_step"], state["step"]) == (1, 0, 4)
    trainer = make_trainer(tmp_path, evaluate=lambda model: evaluated.append(1) or {"score": 0.5})
    assert trainer.run() == 0
    assert [line["step"] for line in read_metrics(tmp_path, "evaluation")] == [4, 8, 12]
    assert read_metrics(tmp_path) == read_metrics(whole)


def test_loop_signal_that_nohup_ignores_stays_ignored(tmp_path: Path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hang_up = small.SmallBatches(lambda batch, rows: signal.raise_signal(signal.SIGHUP))
        assert make_trainer(tmp_path, hang_up).run() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_loop_runs_outside_the_main_thread(tmp_path: Path):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(make_trainer(tmp_path).run).result() == 0


def test_loop_second_sigint_exits_at_once(tmp_path: Path):
    done = run_small(tmp_path, signal="SIGINT", at=4, times=2)
    assert done.returncode == -signal.SIGINT
    assert last_state(tmp_path)["step"] == 4, "from the end of the epoch"


def test_loop_lost_terminal_leaves_a_checkpoint(tmp_path: Path):
    spec = {"output": str(tmp_path), "seconds_a_batch": 0.05, "train": {"epochs": 1000}}
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, str(PROGRAM), json.dumps(spec)], os.environ | {"TERM": "xterm"})
    deadline = time.monotonic() + PATIENCE_S
    shown = b""
    while b"step 2 " not in shown and time.monotonic() < deadline:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP
    assert last_state(tmp_path)["step"] == len(read_metrics(tmp_path)) >= 2


def test_loop_two_ranks_log_the_losses_of_one_and_stop_at_the_same_step(tmp_path: Path):
    config = small.train_config()
    model, batches = small.small_model(dropout=0.0).double(), small.SmallBatches()
    assert Trainer(model, batches, config, output=tmp_path / "one", evaluate=small.evaluate).run() == 0
    two = tmp_path / "two"
    stopped = run_small(two, torchrun=2, dropout=0.0, double=True, signal="SIGTERM", at=6)
    assert stopped.returncode != 0
    assert "stopped by SIGTERM after step 6 of 12" in stopped.stdout, stopped.stderr  # batch 6 was ahead
    expected = [line["loss"] for line in read_metrics(tmp_path / "one")[:6]]
    assert [line["loss"] for line in read_metrics(two)] == pytest.approx(expected, rel=0, abs=RUN_IN_DOUBLE)
    assert read_metrics(two, "evaluation") == read_metrics(tmp_path / "one", "evaluation")[:1]
    state = last_state(two)
    assert state["step"] == 6
    assert len(state["rng"]) == 2
    assert not torch.equal(state["rng"][0]["torch"], state["rng"][1]["torch"])


def test_loop_micro_batches_give_the_same_losses(tmp_path: Path):
    for name, size in (("whole", None), ("parts", 3)):
        config = small.train_config(micro_batch_size=size, epochs=1)
        Trainer(small.small_model(dropout=0.0).double(), small.SmallBatches(), config, output=tmp_path / name).run()
    expected = [line["loss"] for line in read_metrics(tmp_path / "whole")]
    found = [line["loss"] for line in read_metrics(tmp_path / "parts")]
    assert found == pytest.approx(expected, rel=0, abs=RUN_IN_DOUBLE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loop_half_precision_resumes_bit_for_bit(precision: str, tmp_path: Path):
    make_trainer(tmp_path / "whole", precision=precision).run()
    stop_here = small.SmallBatches(lambda batch, rows: signal.raise_signal(signal.SIGTERM) if batch == 5 else None)
    assert make_trainer(tmp_path / "cut", stop_here, precision=precision).run() == 128 + signal.SIGTERM
    make_trainer(tmp_path / "cut", precision=precision).run()
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    assert ("loss_scale" in read_metrics(tmp_path / "cut")[0]) == (precision == "fp16")


def spoiled_from(first: int) -> Any:
    """Batches whose pixels are NaN from batch `first` on."""

    def spoil(number: int, batch: Any) -> None:
        batch["pixel_values"] = batch["pixel_values"] / (255.0 if number < first else float("nan"))

    batches = small.SmallBatches()
    batches.spoil = spoil
    return batches


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.sweep(keep=1)
def test_loop_resumed_between_two_log_lines_logs_the_undisturbed_ones(ranks: int, tmp_path: Path):
    train = {"log_every_steps": 4, "checkpoint_every_steps": 3}
    spec = {"train": train, "dropout": 0.0}
    assert run_small(tmp_path / "whole", torchrun=ranks, **spec).returncode == 0
    cut = run_small(tmp_path / "cut", torchrun=ranks, signal="SIGTERM", at=5, **spec)
    assert cut.returncode != 0
    assert last_state(tmp_path / "cut")["step"] == (5 if ranks else 6)  # several ranks take a batch ahead
    assert run_small(tmp_path / "cut", torchrun=ranks, **spec).returncode == 0
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")


def test_loop_loss_that_is_not_finite_names_step_and_rows(tmp_path: Path):
    rows = [batch["rows"].tolist() for batch in small.SmallBatches()][2]
    expected = rf"step 2: loss is nan and its gradient's norm nan, on rank 0 with rows {str(rows)[1:-1]} \(all in "
    with pytest.raises(TrainingError, match=expected):
        make_trainer(tmp_path, spoiled_from(2)).run()
    assert json.loads((tmp_path / "not_finite_rank0.json").read_text())["rows"] == rows
    assert latest_checkpoint(tmp_path / "checkpoints") is None, "nothing was saved after the bad update"


def test_loop_checkpoint_is_never_written_after_a_bad_update(tmp_path: Path):
    with pytest.raises(TrainingError, match="step 5"):
        make_trainer(tmp_path, spoiled_from(5), log_every_steps=100).run()
    assert last_state(tmp_path)["step"] == 3


def test_loop_len_that_is_not_kept_is_an_error(tmp_path: Path):
    batches = small.SmallBatches()
    batches.steps = 3
    with pytest.raises(TrainingError, match=r"epoch 0: 3 of len\(batches\) = 4 batches came"):
        make_trainer(tmp_path / "short", batches).run()
    batches = small.SmallBatches()
    batches.count = 3
    with pytest.raises(TrainingError, match=r"epoch 0: more than len\(batches\) = 3 batches came"):
        make_trainer(tmp_path / "long", batches).run()


def test_loop_needs_a_length(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train.epochs or train.steps is required"):
        make_trainer(tmp_path, epochs=None)


def test_loop_steps_end_in_mid_epoch_with_evaluation_and_checkpoint(tmp_path: Path):
    trainer = make_trainer(tmp_path, steps=6, evaluate=lambda model: {"score": 0.25}, evaluate_every_epochs=0)
    assert trainer.run() == 0
    assert last_state(tmp_path)["step"] == 6
    assert read_metrics(tmp_path, "evaluation") == [{"kind": "evaluation", "step": 6, "epochs_done": 1, "score": 0.25}]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {"step": 6, "epochs_done": 1, "score": 0.25}


def test_loop_makes_its_own_evaluation_whatever_evaluation_json_says(tmp_path: Path):
    scores = iter([0.25, 0.5])
    make_trainer(tmp_path, steps=2).run()
    # As `mmdata evaluate` writes it.
    (tmp_path / "evaluation.json").write_text('{"step": 2, "epochs_done": 0, "rows": 7}')
    for _ in range(2):
        make_trainer(tmp_path, steps=2, evaluate=lambda model: {"score": next(scores)}).run()
    assert read_metrics(tmp_path, "evaluation") == [{"kind": "evaluation", "step": 2, "epochs_done": 0, "score": 0.25}]


def test_loop_resumed_from_further_back_evaluates_each_step_once(tmp_path: Path):
    def go() -> list[int]:
        make_trainer(tmp_path, epochs=2, keep_checkpoints=9, evaluate=lambda model: {"score": 0.5}).run()
        return [line["step"] for line in read_metrics(tmp_path, "evaluation")]

    assert go() == [4, 8]
    small.go_back(tmp_path, 4)
    assert go() == [4, 8]


def run_two_ranks(output: Path, **spec: Any) -> list[tuple[int, str]]:
    """Exit code and stderr of two ranks; no launcher here that would stop one for the other's sake."""
    command = [sys.executable, str(PROGRAM), json.dumps({"output": str(output), "dropout": 0.0, **spec})]
    world = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Program(command, env=os.environ | world | {"RANK": rank}, stderr=subprocess.PIPE, text=True) for rank in "01"
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, error) for process, error in zip(ranks, errors, strict=True)]


def test_loop_full_disk_stops_all_ranks_with_the_error(tmp_path: Path):
    for code, error in run_two_ranks(tmp_path, largest_file=5000):
        assert "OSError: [Errno 27] File too large" in error
        assert code == 1
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_loop_epoch_that_ends_early_on_one_rank_stops_all(tmp_path: Path):
    for code, error in run_two_ranks(tmp_path, steps_of_last=2):
        assert "TrainingError: rank 1 got no batch, and all ranks stop: its epoch has ended" in error
        assert code == 1


def test_loop_mines_only_after_the_steps_that_are_set():
    config = TrainConfig(steps=9, miner=TopKConfig(name="top_k", k=5), mining_after_steps=3, mask_false_negatives=True)
    assert [make_loss(step, config).miner for step in (0, 2, 3, 8)] == [None, None, TopK(5), TopK(5)]
    assert make_loss(8, TrainConfig(steps=9)).miner is None


def test_loop_finished_run_does_nothing_again(tmp_path: Path):
    make_trainer(tmp_path, evaluate=lambda model: {"score": 1.0}).run()
    content = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(model: Any) -> dict[str, float]:
        raise AssertionError("evaluated twice")

    assert make_trainer(tmp_path, evaluate=fail).run() == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_loop_evaluation_draws_no_number_of_the_run(whole: Path, tmp_path: Path):
    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        assert not model.training
        return {"noise": torch.rand(()).item()}

    make_trainer(tmp_path, evaluate=evaluate).run()
    assert read_metrics(tmp_path) == read_metrics(whole)


def test_loop_refuses_other_settings_and_other_lengths(tmp_path: Path):
    make_trainer(tmp_path, steps=3).run()
    with pytest.raises(ConfigError, match=r"cannot resume from .*: train.lr was 0.01, is 0.5. Restore the values"):
        make_trainer(tmp_path, steps=3, lr=0.5)
    make_trainer(tmp_path / "epochs", epochs=1).run()
    longer = small.SmallBatches()
    longer.count = 5
    with pytest.raises(ConfigError, match=r"the run had 4 steps, now it has 5; restore the data"):
        make_trainer(tmp_path / "epochs", longer, epochs=1)


def test_loop_harmless_settings_may_change_on_resume(tmp_path: Path):
    make_trainer(tmp_path, steps=3).run()
    make_trainer(tmp_path, steps=3, log_every_steps=7, keep_checkpoints=5, checkpoint_every_steps=100).run()


def test_optimizer_decays_matrices_only():
    model = small.small_model()
    decayed, others = make_optimizer(model, small.train_config(weight_decay=0.3)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {names[id(p)] for p in decayed["params"]} == {
        "image_tower.1.weight",
        "text_tower.vectors.weight",
        "image_projection.weight",
        "text_projection.weight",
    }
    assert "logit_scale" in {names[id(p)] for p in others["params"]}


def test_loop_trains_a_model_that_comes_in_eval_mode(tmp_path: Path):
    model, modes = small.small_model().eval(), set()
    model.register_forward_pre_hook(lambda module, _: modes.update(part.training for part in module.modules()))
    assert Trainer(model, small.SmallBatches(), small.train_config(epochs=1), output=tmp_path).run() == 0
    assert modes == {True}


def test_loop_refuses_batches_of_another_rank(tmp_path: Path):
    batches = small.SmallBatches()
    batches.rank, batches.world_size = 1, 2
    message = (
        r"the loader gives the share of rank 1 of 2, and this process trains as rank 0 of 1: rows would come several "
        r"times or never; call mmdata\.train\.distributed\.init\(\) before"
    )
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, batches)
    batches.rank, batches.world_size = 0, 1
    make_trainer(tmp_path, batches)


def test_loop_second_run_in_a_folder_is_refused_until_the_first_is_killed(tmp_path: Path):
    spec = {"output": str(tmp_path), "seconds_a_batch": 0.05, "train": {"epochs": 1000}}
    command = [sys.executable, str(PROGRAM), json.dumps(spec)]
    with Program(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as first:
        assert first.stdout is not None
        next(line for line in first.stdout if line.startswith("step 4 "))
        said = (
            rf"^train.output '{re.escape(str(tmp_path))}': another process trains there, process {first.pid} on host "
            rf"'{re.escape(socket.gethostname())}'; wait until it has ended, end it \(after a kill of torchrun its "
            r"ranks may still be at work\), or give another train.output$"
        )
        with pytest.raises(ConfigError, match=said):
            make_trainer(tmp_path)
        for code, error in run_two_ranks(tmp_path):
            assert "ConfigError: train.output " in error
            assert code == 1
        assert [line["step"] for line in read_metrics(tmp_path, "start")] == [0], "nothing was written"
        assert first.poll() is None
        first.kill()
        first.wait()
    assert make_trainer(tmp_path, epochs=1000).step >= 3


def test_loop_lock_of_a_killed_run_is_free_though_a_process_that_it_forked_lives_on(tmp_path: Path):
    program = f"""
import os, time
from pathlib import Path
from mmdata.train.log import meter
from mmdata.train.run import report
report.hold(Path({str(tmp_path)!r}))
if os.fork() == 0:
    print(os.getpid(), flush=True)  # the child, which has closed the lock by now
time.sleep(3600)
"""
    with Program([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        try:
            with pytest.raises(ConfigError, match="another process trains there"):
                report.hold(tmp_path)
            run.kill()
            run.wait()
            report.hold(tmp_path)
        finally:
            run.kill()
            os.kill(child, signal.SIGKILL)
    report.release(tmp_path)


def test_loop_folder_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def missing(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", missing)
    assert make_trainer(tmp_path, epochs=1).run() == 0
    assert [record.getMessage() for record in caplog.records if record.name == "mmdata"] == [
        f"train.output '{tmp_path}': this file system has no locks (No locks available): nothing refuses a second run "
        "there, so start one at a time"
    ]


def test_loop_process_lets_a_folder_go_with_the_end_of_its_run(tmp_path: Path):
    assert make_trainer(tmp_path, epochs=1).run() == 0
    with pytest.raises(ConfigError, match="lr"):
        make_trainer(tmp_path, lr=0.5)
    with lock(tmp_path):  # as another process would
        pass


def test_loop_time_before_the_first_batch_is_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = FakeClock()
    monkeypatch.setattr(meter, "time", clock)
    trainer = make_trainer(tmp_path, epochs=1)
    clock.now += 1000  # as long as the compiler takes to be tried, or a checkpoint to be read
    assert trainer.run() == 0
    assert [line["step_ms"] for line in metrics_with_clocks(tmp_path)] == pytest.approx([0, 0, 0, 0], abs=0.1)


class FakeClock:
    """Stands still."""

    now = 0.001

    def perf_counter(self) -> float:
        self.now += 1e-9  # nothing is divided by 0
        return self.now


def metrics_with_clocks(output: Path) -> list[dict[str, Any]]:
    return read_lines(output / "metrics.jsonl", "train")


def test_log_shows_large_numbers_whole():
    values = {
        "step": 20,
        "loss": 1.23456,
        "step_ms": 43520.6,
        "samples_per_s": 1234.5,
        "lr": 1e-5,
        "loss_scale": 65536.0,
    }
    assert (
        format_values(values) == "step 20 · loss 1.235 · step ms 43,521 · samples/s 1234 · lr 1e-05 · loss scale 65,536"
    )


def test_loop_own_run_says_how_its_weights_are_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert make_trainer(tmp_path, epochs=1).run() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    path = tmp_path / "checkpoints" / "step-0000000004"
    line = (
        "from pathlib import Path; from mmdata.train.run.checkpoint import load_checkpoint; "
        f"model.load_state_dict(load_checkpoint(Path('{path}'))['model'])"
    )
    assert last == f"finished after step 4; checkpoint in {tmp_path / 'checkpoints'}; next: {line}"
    model = small.small_model()
    exec(line, {"model": model})
    torch.testing.assert_close(dict(model.state_dict()), dict(last_state(tmp_path)["model"]))
