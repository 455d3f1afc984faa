"""Files of groups: what is read, and what is refused with a reason."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmdata.errors import ConfigError, DataError
from mmdata.images import probe
from mmdata.plan.mixture import read_groups, write_groups
from mmdata.tars.write import Sample

REMEDIES = {
    ".arrow": "make it anew with `mmdata neighbours`",
    ".npy": "save the group of each row as int64, -1 for none",
}


def write_arrow(path: Path, column: object, *, index: str | None, name: str = "group") -> Path:
    table = pa.table({name: column}).replace_schema_metadata({} if index is None else {"index": index})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def write_npy(path: Path, values: np.ndarray, **settings: bool) -> Path:
    np.save(path, values, **settings)
    return path


def test_groups_are_read_from_arrow_and_from_npy(corpus, tmp_path: Path):
    expected = np.arange(50) // 4 - 1
    arrow = write_arrow(tmp_path / "g.arrow", expected, index=corpus.index.fingerprint)
    npy = write_npy(tmp_path / "g.npy", expected)
    for path in (arrow, npy):
        of_rows = read_groups(path, corpus.index)
        os.truncate(path, 10)  # a mapped file would end the process now
        assert np.array_equal(of_rows, expected)


@pytest.mark.parametrize("name", ["none.arrow", "none.npy"])
def test_groups_of_a_missing_file(corpus, tmp_path: Path, name: str):
    path = tmp_path / name
    message = f"data.groups.source '{path}': no such file; {REMEDIES[path.suffix]}, or set source to label"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        corpus.loader(groups={"source": str(path), "size": 2})


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (np.arange(50, dtype=np.int32), "int32 (50,)"),
        (np.arange(50.0), "float64 (50,)"),
        (np.arange(50).reshape(25, 2), "int64 (25, 2)"),
    ],
)
def test_groups_of_another_type_or_shape(corpus, tmp_path: Path, values: np.ndarray, found: str):
    path = write_npy(tmp_path / "g.npy", values)
    message = f"file of groups '{path}': expected int64 (rows,), got {found}; {REMEDIES['.npy']}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        read_groups(path, corpus.index)


def test_groups_of_another_type_in_arrow(corpus, tmp_path: Path):
    path = write_arrow(tmp_path / "g.arrow", np.arange(50.0), index=corpus.index.fingerprint)
    with pytest.raises(DataError, match=r"expected int64 \(rows,\), got float64 \(50,\)"):
        read_groups(path, corpus.index)


def test_groups_in_a_column_of_another_name(corpus, tmp_path: Path):
    path = write_arrow(tmp_path / "g.arrow", np.arange(50), index=corpus.index.fingerprint, name="label")
    with pytest.raises(DataError, match=rf"file of groups '{path}': cannot be read: .*group.*; {REMEDIES['.arrow']}"):
        read_groups(path, corpus.index)


@pytest.mark.parametrize("name", ["g.arrow", "g.npy"])
@pytest.mark.parametrize("kept", [0, 5, 60, 300])
def test_groups_of_a_damaged_file(corpus, tmp_path: Path, name: str, kept: int):
    path = tmp_path / name
    if name == "g.npy":
        write_npy(path, np.arange(50))
    else:
        write_arrow(path, np.arange(50), index=corpus.index.fingerprint)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"^file of groups '{path}': cannot be read: .+; {REMEDIES[path.suffix]}$"):
        read_groups(path, corpus.index)


def test_groups_that_are_pickled_are_not_unpickled(corpus, tmp_path: Path):
    values = np.empty(50, object)
    values[:] = [Unpickled() for _ in range(50)]
    path = write_npy(tmp_path / "g.npy", values, allow_pickle=True)
    with pytest.raises(
        DataError, match=rf"file of groups '{path}': cannot be read: Object arrays.*; {REMEDIES['.npy']}"
    ):
        read_groups(path, corpus.index)


class Unpickled:
    """Fails the test when it is read with pickle."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def test_groups_that_were_made_in_another_size(corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Of 4 rows no 8 would stand together; 2 of 4 do, but not the nearest."""
    size = 8
    path = tmp_path / "g.arrow"
    write_groups(path, np.arange(50) // 4, corpus.index, {"size": 4})
    message = (
        f"data.groups.source '{path}': its groups have 4 rows, and data.groups.size is {size}: set it to 4, or make "
        f"groups with `mmdata neighbours --size {size}`"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        corpus.loader(groups={"source": str(path), "size": size})
    corpus.loader(groups={"source": str(path), "candidates": 1}).close()
    corpus.loader(groups={"source": str(path), "size": 2}).close()
    assert "its groups have 4 rows, and data.groups.size is 2: set it to 4, or make groups" in caplog.text
    with pytest.raises(
        ConfigError, match=r"its largest group has 4 rows, and data\.groups\.candidates is 7: no 8 rows"
    ):
        corpus.loader(groups={"source": str(path), "candidates": 7})


def test_groups_of_a_file_that_says_no_size(corpus, tmp_path: Path):
    path = write_npy(tmp_path / "g.npy", np.arange(50) // 5)
    corpus.loader(groups={"source": str(path), "size": 4}).close()
    message = f"data.groups.source '{path}': its largest group has 5 rows, and data.groups.size is 6: no 6 rows would"
    with pytest.raises(ConfigError, match=re.escape(message)):
        corpus.loader(groups={"source": str(path), "size": 6})


@pytest.mark.parametrize(("rows", "index"), [(50, "of another corpus"), (50, None), (49, "same")])
def test_groups_made_for_another_corpus(corpus, tmp_path: Path, rows: int, index: str | None):
    made_for = corpus.index.fingerprint if index == "same" else index
    path = write_arrow(tmp_path / "g.arrow", np.arange(rows), index=made_for)
    message = (
        f"data.groups.source '{path}': made for another corpus: {rows} rows, and data.shards has 50 of other content"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}; {REMEDIES['.arrow']}$"):
        read_groups(path, corpus.index)


def test_groups_for_another_number_of_rows_in_npy(corpus, tmp_path: Path):
    path = write_npy(tmp_path / "g.npy", np.arange(49))
    message = (
        f"data.groups.source '{path}': made for another corpus: 49 rows, and data.shards has 50; {REMEDIES['.npy']}"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        read_groups(path, corpus.index)


def test_groups_in_a_file_that_only_bears_the_name_npy(corpus, tmp_path: Path):
    path = tmp_path / "g.npy"
    with path.open("wb") as file:
        np.savez(file, groups=np.arange(50))
    for content in (path.read_bytes(), b"PK\x03\x04 no archive", b"0\n1\n2\n"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"^file of groups '{path}': cannot be read: .*; {REMEDIES['.npy']}$") as e:
            read_groups(path, corpus.index)
        assert "pickle" not in str(e.value)


def test_groups_of_labels_where_the_corpus_has_none(corpus, photo, tmp_path: Path):
    image = photo(40, 40)
    corpus.write_beside(tmp_path / "bare", [Sample(str(i), image, probe(image), ["a dog"]) for i in range(8)])
    with pytest.raises(
        ConfigError,
        match=r"^data\.groups by label: no row of the corpus has a label; convert it with .*, or set source to a file",
    ):
        corpus.loader(shards=str(tmp_path / "bare"), groups={"size": 2})
