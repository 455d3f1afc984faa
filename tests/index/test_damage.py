"""Files of a folder that were cut, flipped or forged, before they are read or while they are open."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mmdata.errors import DataError
from mmdata.index import Index, build_index, verify
from mmdata.index.columns import FIXED
from tests.index.rewrite import changed, rewrite, shards_of
from tests.programs import run_program

CUT = """
import os, sys
import numpy as np
from mmdata.errors import DataError
from mmdata.index import Index
folder = sys.argv[1]
index = Index.open(folder)
index.held_rows = 1
rows = np.arange(len(index))
first = index.take(rows, ["height", "image_xxh3"])
views = [index.shard(number).fixed("height") for number in range(3)]
kept = [view.tolist() for view in views]
cells = [[part.tolist() for part in parts] for parts in index.cells()]
for name in os.listdir(folder + "/__mmdata__"):
    if name.endswith(".arrow"):
        os.truncate(os.path.join(folder, "__mmdata__", name), 100)
assert [view.tolist() for view in views] == kept
(manifest,) = index.manifests
for ask in (lambda: index.take(rows, ["height"]), lambda: list(manifest.cells()), lambda: list(manifest)):
    try:
        ask()
    except DataError as error:
        print(error)
assert index.listed(1).rows == 4
"""


def test_files_cut_while_they_are_open_are_an_error_and_not_the_end_of_the_process(shards):
    done = run_program([sys.executable, "-c", CUT, str(shards)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index, page, again = done.stdout.splitlines()
    assert re.search(r"index-00000\.arrow', shard '00000\d\.tar': XXH3 differs from the manifest's; fetch", index)
    assert page == again
    assert "index-00000.arrow', list of shards: changed since it was opened; remove manifest.json" in page


def forge(folder: Path, name: str, row: int, value: int) -> int:
    """Give a row of shard 1 a value, with hashes that agree; the size of the shard in bytes."""

    def change(arrays: dict[str, Any]) -> list[Any]:
        if name in FIXED:
            values = arrays[name].to_numpy().copy()
            values[row] = value
            arrays[name] = pa.array(values)
        else:
            column = arrays[name]
            values = column.values.to_numpy().copy()
            values[column.offsets.to_numpy()[row]] = value
            arrays[name] = pa.ListArray.from_arrays(column.offsets, pa.array(values), type=column.type)
        return [*arrays.values()]

    shards = shards_of(folder)
    shards[1] = changed(shards[1], change)
    rewrite(folder, shards)
    return shards[1][0].bytes


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("image_offset", -1, "0 to SIZE, the shard's bytes"),
        ("image_offset", 2**63 - 1, "0 to SIZE, the shard's bytes"),
        ("image_bytes", -5, "bytes that lie in the shard"),
        ("image_bytes", 2**40, "bytes that lie in the shard"),
        ("caption_offset", -(2**63), "0 to SIZE, the shard's bytes"),
        ("caption_bytes", 2**63 - 1, "bytes that lie in the shard"),
        ("image_format", 9, "0 to 7, or a newer mmdata"),
        ("caption_format", 4, "0 to 3, or a newer mmdata"),
        ("height", 0, "1 or more pixels"),
        ("width", -3, "1 or more pixels"),
        ("orientation", 0, "1 to 8"),
        ("orientation", 9, "1 to 8"),
        ("label", -2, "-1 or a class number"),
        ("caption_tokens", -7, "0 to 8388607 tokens"),
        ("caption_tokens", 2**23, "0 to 8388607 tokens"),
    ],
)
def test_a_forged_value_names_file_column_and_row(shards, name, value, expected):
    size = forge(shards, name, 2, value)
    index = Index.open(shards)
    assert index.take(np.array([0]), ["height"])["height"].tolist() == [20]
    message = rf"arrow', shard '000001.tar': column '{name}', row 2 \(sample '0006'\): {value}, and expected "
    with pytest.raises(
        DataError, match=message + re.escape(expected.replace("SIZE", str(size))) + "; fetch the folder"
    ):
        index.take(np.array([5]), [name]) if name in FIXED else index.take_lists(np.array([5]), name)
    assert any(f"column '{name}', row 2" in str(problem) for problem in verify(shards))


def test_the_largest_label_is_no_forgery(shards):
    forge(shards, "label", 0, 2**63 - 1)
    assert Index.open(shards).column("label")[4] == 2**63 - 1


# What verify finds


def test_an_index_of_which_only_the_fast_hash_is_right_is_found(shards):
    first, (entry, data), third = shards_of(shards)
    rewrite(shards, [first, (replace(entry, index_sha256="0" * 64), data), third])
    assert [str(problem) for problem in verify(shards)] == [
        "'index-00000.arrow': its content is not what the manifest says: it changed"
    ]


def test_accounts_that_do_not_balance_are_found(shards):
    accounts = {"rows": 8, "written": 7, "duplicate": 0, "filtered": 0, "quarantined": 9, "reasons": {"filtered": 2}}
    rewrite(shards, shards_of(shards), accounts=accounts)
    (shards / "__mmdata__/quarantine.jsonl").write_text("{}\n")
    ledger = shards / "__mmdata__/quarantine.jsonl"
    assert [str(problem) for problem in verify(shards)] == [
        "'manifest.json': not every row is accounted for: 8 rows in, and 7 written + 0 duplicate + 0 filtered + "
        "9 quarantined",
        "'manifest.json': its accounts say 7 written, and its shards have 10 rows",
        "'manifest.json': its accounts give reasons for 2 rows, and 9 were left out",
        f"'manifest.json': its ledger '{ledger}' has 1 lines, and its accounts say that 9 rows were left out",
    ]


def test_a_ledger_that_is_gone_and_a_tar_that_is_not_listed_are_found(shards, tmp_path, tar, photo):
    (tmp_path / "b.tar").write_bytes(tar([("a.jpg", photo(20, 30)), ("a.txt", b"t"), ("b.txt", b"t")]))
    build_index(tmp_path, max_bad_share=0.5)
    assert verify(tmp_path) == []
    (tmp_path / "a.tar").write_bytes(tar([]))
    (ledger := tmp_path / "__mmdata__/quarantine.jsonl").unlink()
    assert [str(problem) for problem in verify(tmp_path)] == [
        f"'manifest.json': its ledger '{ledger}' is gone; it named 1 rows that were left out",
        f"shard 'a.tar': lies in '{tmp_path}', and the manifest does not list it: index the folder anew, or remove the "
        "tar",
        "shard 'b.tar': 1 samples are neither in the index nor in quarantine.jsonl; the first is 'b'",
    ]
