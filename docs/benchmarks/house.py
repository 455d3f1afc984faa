"""How large the library is, and how many of its files a batch and the settings enter on their way.

PYTHONPATH=. python docs/benchmarks/house.py CONFIG [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import mmdata
from mmdata.config import load_config

PACKAGE = Path(mmdata.__file__).parent
HARD = (
    "threads",
    "child",
    "process",
    "shared",
    "schedule",
    "windows",
    "row_ranges",
    "tiles",
    "http",
    "prefetch",
)
"""Files in which a reader stumbles most; those of earlier layouts have other names."""
EARLIER = (
    "side",
    "beside",
    "supply",
    "lanes",
    "promise",
    "turns",
    "relay",
    "ahead",
    "parent",
    "shared_memory",
    "shard_prefetch",
)


def kinds_of_lines(path: Path) -> Counter[str]:
    """Lines of a file: code, docstring, comment, blank."""
    text = path.read_text(encoding="utf-8")
    kinds = ["code"] * text.count("\n")
    for number, line in enumerate(text.splitlines()):
        stripped = line.strip()
        kinds[number] = "blank" if not stripped else "comment" if "#" in line and stripped.startswith("#") else "code"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kinds[node.lineno - 1 : node.end_lineno] = ["docstring"] * ((node.end_lineno or 0) - node.lineno + 1)
    return Counter(kinds)


def entered(action: Callable[[], Any]) -> tuple[set[str], int]:
    """Files of the library that are entered while an action runs, in any thread, and calls of its functions."""
    files: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files[frame.f_code.co_filename] += 1

    note_all = threading.setprofile_all_threads if sys.version_info >= (3, 12) else threading.setprofile
    note_all(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        note_all(None)  # type: ignore[arg-type]
    return set(files), files.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    kinds = sum((kinds_of_lines(path) for path in files), Counter[str]())
    print(f"lines {kinds.total():,}: " + ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common()))
    folder, count = Counter(path.parent for path in files).most_common(1)[0]
    print(f"files in the largest folder: {count} ({folder.name})")
    hard = sum((kinds_of_lines(path) for path in files if path.stem in (*HARD, *EARLIER)), Counter[str]())
    print(
        f"comment lines in the hard files: {hard['comment'] / (hard.total() - hard['blank']):.1%} of {hard.total():,}"
    )

    data = load_config(given.config, given.overrides).data
    loaders: list[mmdata.Loader] = []
    came, _ = entered(lambda: loaders.append(mmdata.Loader.from_config(data)))
    rooms = {str(Path(file).parent.relative_to(PACKAGE)) for file in came}
    print(f"from_config enters {len(came)} files in {len(rooms)} folders: {', '.join(sorted(rooms))}")
    batches = iter(loaders[0])
    list(islice(batches, 20))
    # Batches are made in the caller's thread: the profile then holds one batch and no part of others.
    came, calls = entered(lambda: next(batches))
    names = sorted(str(Path(file).relative_to(PACKAGE)) for file in came)
    print(f"a steady-state batch enters {len(came)} files, {calls:,} calls: {', '.join(names)}")


if __name__ == "__main__":
    main()
