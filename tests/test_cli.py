"""The command: which programs there are, and how their mistakes end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmdata import cli
from mmdata.errors import ConfigError, DataError
from tests.programs import PATIENCE_S

ROOT = Path(__file__).parents[1]
STARTED_BY_OTHERS = {"convert", "train", "verify", "index"}
"""Programs that test_whole_way.py and shards/test_programs.py start; most tests fork programs (see programs.py)."""


def mmdata(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mmdata", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_cli_commands_are_the_files_of_tools():
    assert cli.commands() == sorted(path.stem for path in (ROOT / "tools").glob("*.py"))
    assert {"convert", "index", "plan", "report", "train", "verify"} <= set(cli.commands())


def test_cli_help_lists_the_commands():
    done = mmdata("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: mmdata COMMAND ...\n")
    listed = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [name for name, _ in listed] == cli.commands()
    assert ["plan", "steps, shapes and padding of an epoch; no image is read."] in listed


def test_cli_without_a_command_is_an_error():
    done = mmdata()
    assert done.returncode == 2
    assert done.stdout.startswith("usage: mmdata COMMAND ...\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian", "error: no command 'trian'; did you mean 'train'?\n"),
        ("eval", "error: no command 'eval'; did you mean 'evaluate'?\n"),
        ("xyzzy", f"error: no command 'xyzzy'; the commands are {', '.join(cli.commands())}\n"),
        ("\x1b[31m", f"error: no command '\\x1b[31m'; the commands are {', '.join(cli.commands())}\n"),
    ],
)
def test_cli_unknown_command_names_the_near_one_or_all(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["mmdata", name])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, *capsys.readouterr()) == (2, "", message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: CONFIG; `mmdata x --help` shows the arguments"),
        (["c", "--epohc", "2"], "no option '--epohc'; did you mean '--epoch'?"),
        (
            ["c", "--lr=2"],
            "no option '--lr=2'; write it as train.lr=2; `mmdata x --help` shows the arguments",
        ),
        (
            ["c", "--batch-size", "2"],
            "no option '--batch-size'; write it as data.global_batch_size=VALUE; `mmdata x --help` shows the arguments",
        ),
        (
            ["c", "--bogus"],
            "no option '--bogus'; settings are given with their section, as in train.lr=1e-3; `mmdata x --help` shows "
            "the arguments",
        ),
        (["c", "--epoch", "x"], "argument --epoch: invalid int value: 'x'; `mmdata x --help` shows the arguments"),
    ],
)
def test_cli_mistake_in_arguments_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    parser = cli.Parser("x", "A command.")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar=cli.SETTING)
    parser.add_argument("--epoch", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse_intermixed_args(words)
    assert (ended.value.code, *capsys.readouterr()) == (2, "", f"error: {message}\n")
    assert parser.parse_intermixed_args(["c"]).overrides == []


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["c", "train.lr=1e-3"], ["train.lr=1e-3"]),
        (["c", "--train.lr=1e-3"], ["train.lr=1e-3"]),
        (["c", "--train.lr", "1e-3", "--epoch", "2", "data.seed=1"], ["train.lr=1e-3", "data.seed=1"]),
        (["c", "--model.logit_bias_init", "-10", "--data.seed", "1"], ["model.logit_bias_init=-10", "data.seed=1"]),
        (
            ["c", "--train.compile", "--data.seed=1"],
            ["train.compile", "data.seed=1"],
        ),  # loading it says what is missing
    ],
)
def test_cli_setting_may_have_dashes_and_a_space_as_other_programs_write_it(words: list[str], settings: list[str]):
    parser = cli.Parser("x", "A command.")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar=cli.SETTING)
    parser.add_argument("--epoch", type=int)
    given = parser.parse_intermixed_args(words)
    assert (given.config, given.overrides) == ("c", settings)


def test_cli_command_without_settings_takes_no_setting_with_dashes(capsys: pytest.CaptureFixture[str]):
    parser = cli.Parser("x", "A command.")
    parser.add_argument("config")
    with pytest.raises(SystemExit):
        parser.parse_args(["c", "--train.lr=1"])
    assert capsys.readouterr().err.startswith("error: no option '--train.lr=1'; `mmdata x --help`")


def test_cli_version_is_the_packages():
    done = mmdata("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize("command", cli.commands())
def test_cli_every_program_parses_its_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mmdata", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mmdata {command} ")


EACH_ALONE = """
import gc, json, os, runpy, sys, tempfile
import pyarrow, pydantic, simplejpeg, tokenizers, torch, torch.distributed.fsdp, torchvision, transformers, webdataset
gc.freeze()

def output_of(path):
    with tempfile.TemporaryFile() as output:
        if (child := os.fork()) == 0:
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            assert not any(name.partition(".")[0] == "mmdata" for name in sys.modules)
            sys.argv, sys.path[0] = [path, "--help"], os.path.dirname(path)
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return status, output.read().decode()

print(json.dumps([output_of(path) for path in sys.argv[1:]]))
"""
"""Forks a process without any module of mmdata for each program; libraries are imported once."""


def test_cli_every_program_imports_what_it_needs_and_nothing_of_the_others(tmp_path: Path):
    names = sorted({*cli.commands()} - STARTED_BY_OTHERS)
    paths = [str(ROOT / "tools" / f"{name}.py") for name in names]
    done = subprocess.run([sys.executable, "-c", EACH_ALONE, *paths], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name, (status, output) in zip(names, json.loads(done.stdout), strict=True):
        assert (status, output.partition(f"usage: mmdata {name} ")[0]) == (0, ""), output


def test_cli_command_and_program_say_the_same(tmp_path: Path):
    command = mmdata("verify", "none", cwd=tmp_path)
    program = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "verify.py"), "none"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (command.returncode, command.stderr) == (program.returncode, program.stderr)
    assert command.returncode == 2
    assert command.stderr == "error: folder 'none': no such folder\n"


def test_cli_mistake_in_a_config_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "c.yaml").write_text("data: {shard: x, tokenizer: t, global_batch_size: 8}")
    monkeypatch.setattr(sys, "argv", ["mmdata", "plan", str(tmp_path / "c.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/c.yaml: 'data.shards' is required and missing; "
        "unknown key 'data.shard'; did you mean 'data.shards'?\n"
    )


def test_cli_pipe_that_closes_ends_quietly():
    done = subprocess.run(
        f"{sys.executable} -c 'from mmdata import cli; cli.run(lambda: [print(i) for i in range(100000)] and 0)'"
        " | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    "error",
    [ConfigError("no such key"), DataError("no such shard"), ValueError("no"), OSError("disk"), ImportError("none")],
)
def test_run_turns_an_expected_error_into_one_line(error: Exception, capsys: pytest.CaptureFixture[str]):
    def program() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        cli.run(program)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_run_shows_where_an_error_was_raised_when_asked(monkeypatch: pytest.MonkeyPatch):
    def program() -> int:
        raise DataError("no such shard")

    monkeypatch.setenv("MMDATA_TRACEBACK", "1")
    with pytest.raises(DataError, match="no such shard"):
        cli.run(program)


def test_run_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]):
    def program() -> int:
        raise MemoryError("Unable to allocate 28 GiB")

    with pytest.raises(SystemExit, match="2"):
        cli.run(program)
    said = "error: out of memory (Unable to allocate 28 GiB); MMDATA_TRACEBACK=1 shows where\n"
    assert capsys.readouterr().err == said


def test_run_an_interruption_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]):
    def program() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        cli.run(program)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_run_passes_the_exit_code_on(returned: int | None, code: int):
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: returned)
    assert ended.value.code == code


def test_run_an_error_of_our_own_is_a_traceback():
    def program() -> int:
        raise AssertionError("a mistake in mmdata")

    with pytest.raises(AssertionError, match="a mistake in mmdata"):
        cli.run(program)


def test_shipped_finds_the_files_of_the_checkout():
    assert cli.shipped("tools", "verify.py").samefile(ROOT / "tools" / "verify.py")
