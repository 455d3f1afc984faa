"""The command: which programs there are, and how their mistakes end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmdata import cli
from mmdata.cli.parser import SETTING, Parser
from mmdata.errors import ConfigError, DataError
from tests.programs import PATIENCE_S

ROOT = Path(__file__).parents[1]


def mmdata(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mmdata", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_cli_commands_are_the_files_of_its_folders():
    files = (ROOT / "mmdata" / "cli").glob("*/*.py")
    assert sorted(cli.COMMANDS) == sorted(path.stem for path in files if path.stem != "__init__")
    assert sorted(cli.COMMANDS) == sorted(path.stem for path in (ROOT / "tools").glob("*.py"))


def test_cli_help_lists_the_commands_by_purpose():
    done = mmdata("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: mmdata COMMAND ...\n")
    listed = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [name for name, _ in listed] == list(cli.COMMANDS)
    assert [name for name, _ in listed[:6]] == ["init", "convert", "index", "train", "report", "export"]
    assert ["plan", "show steps, shapes and padding of an epoch; no image is read"] in listed


def test_cli_without_a_command_is_an_error():
    done = mmdata()
    assert done.returncode == 2
    assert done.stdout.startswith("usage: mmdata COMMAND ...\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian", "error: no command 'trian'; did you mean 'train'?\n"),
        ("eval", "error: no command 'eval'; did you mean 'evaluate'?\n"),
        ("xyzzy", f"error: no command 'xyzzy'; the commands are {', '.join(cli.COMMANDS)}\n"),
        ("\x1b[31m", f"error: no command '\\x1b[31m'; the commands are {', '.join(cli.COMMANDS)}\n"),
    ],
)
def test_cli_unknown_command_names_the_near_one_or_all(name: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert (cli.main([name]), *capsys.readouterr()) == (2, "", message)


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
            "no option '--batch-size'; write it as data.global_batch_size=2; `mmdata x --help` shows the arguments",
        ),
        (
            ["c", "--train.lr", "1e-3"],
            "no option '--train.lr'; write it as train.lr=1e-3; `mmdata x --help` shows the arguments",
        ),
        (
            ["c", "--bogus"],
            "no option '--bogus'; settings are given as section.key=value; `mmdata x --help` shows the arguments",
        ),
        (["c", "--epoch", "x"], "argument --epoch: invalid int value: 'x'; `mmdata x --help` shows the arguments"),
    ],
)
def test_cli_mistake_in_arguments_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    parser = Parser("x", "A command.")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar=SETTING)
    parser.add_argument("--epoch", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse(words)
    assert (ended.value.code, *capsys.readouterr()) == (2, "", f"error: {message}\n")
    assert parser.parse(["c"]).overrides == []


def test_cli_command_without_settings_takes_no_setting_with_dashes(capsys: pytest.CaptureFixture[str]):
    parser = Parser("x", "A command.")
    parser.add_argument("config")
    with pytest.raises(SystemExit):
        parser.parse(["c", "--train.lr=1"])
    assert capsys.readouterr().err.startswith("error: no option '--train.lr=1'; `mmdata x --help`")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quality", "90"], "no option '--quality'; write it as quality=90; "),
        (["--shard-bytes=1000"], "no option '--shard-bytes=1000'; write it as shard_bytes=1000; "),
        (["--keep", "id"], "no option '--keep'; write it as keep=[id]; "),
        (["--keep-duplicates", "--plan"], "no option '--keep-duplicates'; write it as keep_duplicates=true; "),
        (["--no-quotes"], "no option '--no-quotes'; write it as quotes=false; "),
        (["--tabel", "t.csv"], "no option '--tabel'; did you mean '--table'?"),
        (["--bogus"], "no option '--bogus'; settings are given as key=value; "),
        (["qualty=90"], "on the command line: unknown key 'qualty'; did you mean 'quality'?"),
        (["--resize", "large"], "on the command line: 'resize': expected integer ≥ 1 or null; got 'large'"),
        (["90"], "override '90': expected key=value"),
    ],
)
def test_cli_setting_of_a_conversion_without_a_flag_is_told_how_to_write_it(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    try:
        code = cli.main(["convert", str(tmp_path), str(tmp_path / "out"), *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_cli_conversion_without_an_output_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["convert", str(tmp_path), "quality=90"]) == 2
    assert capsys.readouterr().err.startswith("error: OUT is missing: 'quality=90' is a setting; ")


def test_cli_version_is_the_packages():
    done = mmdata("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_cli_every_command_parses_its_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mmdata {command} ")


HELP = """
import sys
from mmdata.cli import COMMANDS, main

main(["--help"])
imported = {"mmdata": {"torch", "pyarrow", "numpy", "pydantic", "mmdata.config"} & {*sys.modules}}
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit:
        imported[name] = {"torch", "pyarrow", "numpy"} & {*sys.modules}
print({name: found for name, found in imported.items() if found})
"""


def test_cli_help_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "{}"
    assert "usage: mmdata train " in done.stdout


def test_cli_wrong_path_is_one_line(tmp_path: Path):
    done = mmdata("verify", "none", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: folder 'none': no such folder\n")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_cli_program_of_tools_is_the_command(command: str):
    said = f'"""`mmdata {command}` from a checkout."""'
    call = f'sys.exit(main(["{command}", *sys.argv[1:]]))'
    text = (ROOT / "tools" / f"{command}.py").read_text()
    assert text.split("\n", 1)[0] == said
    assert text.endswith(f'if __name__ == "__main__":\n    {call}\n')


def test_cli_mistake_in_a_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "c.yaml").write_text("data: {shard: x, tokenizer: t, global_batch_size: 8}")
    assert cli.main(["plan", str(tmp_path / "c.yaml")]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/c.yaml: 'data.shards' is required and missing; "
        "unknown key 'data.shard'; did you mean 'data.shards'?\n"
    )


def test_cli_pipe_that_closes_ends_quietly():
    done = subprocess.run(
        f"{sys.executable} -c 'from mmdata import cli; cli.exit_code(lambda: [print(i) for i in range(100000)] and 0)'"
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

    assert cli.exit_code(program) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_run_shows_where_an_error_was_raised_when_asked(monkeypatch: pytest.MonkeyPatch):
    def program() -> int:
        raise DataError("no such shard")

    monkeypatch.setenv("MMDATA_TRACEBACK", "1")
    with pytest.raises(DataError, match="no such shard"):
        cli.exit_code(program)


def test_run_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]):
    def program() -> int:
        raise MemoryError("Unable to allocate 28 GiB")

    assert cli.exit_code(program) == 2
    said = "error: out of memory (Unable to allocate 28 GiB); MMDATA_TRACEBACK=1 shows where\n"
    assert capsys.readouterr().err == said


def test_run_an_interruption_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]):
    def program() -> int:
        raise KeyboardInterrupt

    assert cli.exit_code(program) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_run_passes_the_exit_code_on(returned: int | None, code: int):
    assert cli.exit_code(lambda: returned) == code


def test_run_an_error_of_our_own_is_a_traceback():
    def program() -> int:
        raise AssertionError("a mistake in mmdata")

    with pytest.raises(AssertionError, match="a mistake in mmdata"):
        cli.exit_code(program)
