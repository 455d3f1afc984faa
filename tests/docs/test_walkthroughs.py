"""The commands of docs/walkthroughs, index.md, remote.md and SKILL.md run, in order, and print what the pages say.

A page is Markdown with these parts; any other block is not run:
- `<!-- setup: NAME -->`: the function NAME of sources.py makes the data that the page begins with. It may be a context
  manager, whose value says what takes the place of a text of the page, such as a server's address.
- ```sh: each line is run, and must be a command of mmdata or python; a line that ends in a backslash goes on.
- ```python: run in this process; the blocks of a page share their names.
- ```yaml or ```json, with `# NAME` in the first line: written to the file NAME.
- ```text after ```sh or ```python: what the block prints. Numbers and sizes may differ, and "…" stands for any text.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docs import sources
from tests.programs import run_program

FOLDER = Path(__file__).parents[2] / "docs" / "walkthroughs"
WALKTHROUGHS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
PAGES = [*WALKTHROUGHS, FOLDER.parent / "index.md", FOLDER.parent / "remote.md", FOLDER.parents[1] / "SKILL.md"]
SETUP = re.compile(r"<!-- setup: (\w+) -->")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANY = "…"


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, and the number of its first line in the page."""

    language: str
    text: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = BLOCK.finditer(page)
    return [Block(match[1], match[2], page.count("\n", 0, match.start()) + 2) for match in found]


def masked(text: str) -> str:
    """The text without what differs between two runs: numbers, and the width of what is printed."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d,.]*", "N", text)).strip()


def prints(expected: str, printed: str) -> bool:
    """Whether a program printed what a page says."""
    pattern = ".*?".join(re.escape(masked(part)) for part in expected.split(ANY))
    return re.fullmatch(pattern, masked(printed), re.DOTALL) is not None


def run_shell(text: str, folder: Path) -> str:
    """Run each line as a program; returns what all of them print.

    Raises:
        ValueError: a line is neither a command of mmdata nor of python.
    """
    printed = ""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] not in ("mmdata", "python"):
            raise ValueError(f"'{line}': a walk-through runs commands of mmdata and python only")
        command = [sys.executable, *(["-m"] if words[0] == "mmdata" else []), *words[words[0] == "python" :]]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = run_program(command, capture_output=True, text=True, cwd=folder, env=quiet)
        assert done.returncode == 0, f"$ {line}\n{done.stdout}\n{done.stderr}"
        printed += done.stdout
    return printed


def run_page(page: str, folder: Path) -> None:
    """Run a page in an empty folder, which is the current one.

    Raises:
        AssertionError: a block fails or prints something else; the message names the line of the page.
    """
    with contextlib.ExitStack() as made:
        for name in SETUP.findall(page):
            if (manager := getattr(sources, name)(folder)) is not None:
                for written, real in made.enter_context(manager).items():
                    page = page.replace(written, real)
        run_blocks(page, folder)


def run_blocks(page: str, folder: Path) -> None:
    """Run the blocks of a page whose data is there; see `run_page`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(page):
        head, _, body = block.text.partition("\n")
        if block.language == "sh":
            printed = run_shell(block.text, folder)
        elif block.language == "python":
            output = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.text, "page", "exec")
            with contextlib.redirect_stdout(output):
                exec(code, names)
            printed = output.getvalue()
        elif block.language in ("yaml", "json") and head.startswith("# "):
            (folder / head[2:].strip()).write_text(body, encoding="utf-8")
        elif block.language == "text":
            assert prints(block.text, printed), f"line {block.line}: the page says\n{block.text}\nprinted\n{printed}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
@pytest.mark.sweep(keep=2)
def test_walkthrough_runs_as_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page(path.read_text(encoding="utf-8"), tmp_path)


def test_there_are_pages_and_each_names_its_source():
    assert PAGES
    for path in PAGES:
        assert SETUP.search(path.read_text(encoding="utf-8")), f"{path.name} has no <!-- setup: NAME -->"


def test_the_list_of_pages_names_each_of_them():
    listed = re.findall(
        r"^\| .* \| \[.*\]\((.*\.md)\) \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == [path.name for path in WALKTHROUGHS]


def test_output_is_compared_without_its_numbers():
    assert prints("loss 1.5 of  3,000 rows\n", "loss 0.25 of 12 rows\n")
    assert prints("first\n…\nlast", "first\nsecond\nthird\nlast\n")
    assert not prints("first\n…\nlast", "first\nsecond\n")
    assert not prints("loss 1.5", "accuracy 1.5")


def test_a_page_that_says_something_else_fails_with_its_line(tmp_path: Path):
    page = '# Title\n\n```python\nprint("one")\n```\n\n```text\ntwo\n```\n'
    with pytest.raises(AssertionError, match=r"line 8: the page says\s+two\s+printed\s+one"):
        run_page(page, tmp_path)


def test_a_page_shares_names_and_writes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = "```yaml\n# a.yaml\nx: 1\n```\n```python\nx = open('a.yaml').read()\n```\n"
    page += "```python\nprint(x)\n```\n```text\nx: 1\n```\n"
    run_page(page, tmp_path)


def test_a_page_runs_no_other_program(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'rm -r x': a walk-through runs commands of mmdata and python only"):
        run_page("```sh\nrm -r x\n```\n", tmp_path)
