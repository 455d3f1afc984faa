"""What to type next, once shards have been made or indexed."""

from __future__ import annotations

import shlex
from pathlib import Path

from mmdata.index import Manifest


def next_commands(folder: Path | str, manifest: Manifest) -> list[str]:
    """Lines of a command's output that name the commands to type next, each with what it does.

    Args:
        folder: of the shards or of their index; text if it is a URL.
        manifest: of this folder.
    """
    quoted = shlex.quote(str(folder))
    lines = [f"mmdata plan {quoted}    # batches, shapes and padding"]
    if manifest.has_captions:  # a config for a dual encoder needs texts
        lines.insert(0, f"mmdata init {quoted}    # writes a config to train with")
    behind_urls = "://" in manifest.location
    if not behind_urls:
        lines.append(f"mmdata report {quoted}    # a page about the corpus")
    if manifest.has_captions and manifest.tokenizer is None and isinstance(folder, Path):
        reads = "fetches each tar again" if behind_urls else "reads no image again"
        beside = manifest.location == "." or behind_urls
        tars = quoted if beside else shlex.quote(str(folder / manifest.location))
        out = "" if tars == quoted else f" --out {quoted}"
        lines.insert(0, f"mmdata index {tars}{out} --tokenizer clip    # counts captions; {reads}")
    return [("next: " if i == 0 else "      ") + line for i, line in enumerate(lines)]
