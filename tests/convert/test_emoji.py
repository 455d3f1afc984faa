"""A real corpus: Noto Emoji, 3,554 PNGs with transparency and palettes. Skipped where it is absent."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import webdataset

from mmdata.convert import convert, load_recipe
from mmdata.index import Index

ROOT = Path(__file__).parents[2]
EMOJI = Path(os.environ.get("MMDATA_TEST_DATA", ROOT.parent / "shared/data")) / "emoji"

pytestmark = pytest.mark.skipif(
    not (EMOJI / "captions.csv").is_file(), reason=f"no corpus at {EMOJI} (set MMDATA_TEST_DATA to its parent)"
)


def test_emoji_accounts_balance_and_webdataset_reads_them_back(tmp_path: Path) -> None:
    report = convert(EMOJI, tmp_path / "out", load_recipe("emoji"))
    counts = {name: report.accounts[name] for name in ("rows", "written", "duplicate", "filtered", "quarantined")}
    assert counts == {"rows": 3554, "written": 3544, "duplicate": 10, "filtered": 0, "quarantined": 0}

    with (EMOJI / "captions.csv").open(newline="") as file:
        rows = {f"{number:09d}": row for number, row in enumerate(csv.DictReader(file))}
    duplicates = [json.loads(line)["path"] for line in (tmp_path / "out/__mmdata__/quarantine.jsonl").open()]
    seen: list[str] = []
    for sample in webdataset.WebDataset(str(tmp_path / "out/000000.tar"), shardshuffle=False):
        row = rows[sample["__key__"]]
        assert sample["png"] == (EMOJI / row["filepath"]).read_bytes()
        assert sample["txt"].decode() == row["caption"]
        seen.append(row["filepath"])
    assert sorted(seen + duplicates) == sorted(row["filepath"] for row in rows.values())

    index = Index.open(tmp_path / "out")
    assert list(index.keys(np.arange(3))) == ["000000000", "000000001", "000000002"]
    tokens = index.lists("caption_tokens")[1]
    assert (int(tokens.min()), len(tokens)) == (3, 3544)
