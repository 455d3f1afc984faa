"""`data.select`: a condition, a file of keys or a mask chooses the rows that are planned and loaded."""

from __future__ import annotations

import bisect
import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image, ImageOps

from mmdata import Loader
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError, DataError
from mmdata.hashing import hash64, in_share
from tests.joins import load

from .conftest import Corpus


def data_of(corpus: Corpus, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({**corpus.settings, **changes})


def rows_of(loader: Loader) -> list[int]:
    """All rows of an epoch in rising order, padding left out."""
    return sorted(row for batch in loader for row in batch["rows"].tolist() if row >= 0)


def selected(corpus: Corpus, **changes: Any) -> list[int]:
    data = data_of(corpus, **changes)
    with load(data) as loader:
        rows = rows_of(loader)
        assert loader.plan.num_rows == len(rows)
        assert len(loader) == -(-len(rows) // data.global_batch_size)
        return rows


def sizes(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Heights and widths as displayed, by Pillow."""
    shown = [ImageOps.exif_transpose(Image.open(io.BytesIO(sample.image))).size for sample in corpus.samples]
    return np.array([height for _, height in shown]), np.array([width for width, _ in shown])


def test_a_condition_on_the_index_selects_its_rows(corpus: Corpus):
    height, width = sizes(corpus)
    assert selected(corpus, select="width > height") == np.flatnonzero(width > height).tolist()
    captions = [len(sample.captions) for sample in corpus.samples]
    assert selected(corpus, select="captions == 1") == [row for row, count in enumerate(captions) if count == 1]
    offsets, tokens = corpus.index.lists("caption_tokens")
    longest = [tokens[a:b].max() for a, b in pairwise(offsets.tolist())]
    short = [row for row, count in enumerate(longest) if count <= 20]
    assert selected(corpus, select="caption_tokens <= 20", global_batch_size=4) == short
    labelled = [row for row, sample in enumerate(corpus.samples) if sample.label is not None]
    assert labelled == list(range(0, 50, 7))
    assert selected(corpus, select="label >= 0") == labelled
    assert selected(corpus, select="label is None") == [row for row in range(50) if row % 7]
    either = [row for row in range(50) if row in (7, 42) or captions[row] == 1]
    assert selected(corpus, select="label in [7, 42, 8] or captions == 1") == either
    assert selected(corpus, select="shard != '000001.tar' and image_bytes > 0") == [*range(17), *range(34, 50)]


@pytest.mark.parametrize("kind", ["txt", "txt with blanks", "csv", "tsv", "parquet", "condition", "column"])
def test_keys_of_a_file_select_their_rows(corpus: Corpus, tmp_path: Path, kind: str):
    rows = [0, 7, 16, 17, 20, 21, 33, 34, 49]
    keys = [corpus.samples[row].key for row in reversed(rows)]
    table = pa.table({"other": range(9), "uid" if kind == "tsv" else "key": keys})
    file = tmp_path / f"good.{ {'condition': 'txt', 'column': 'parquet'}.get(kind, kind.split()[0]) }"
    select = str(file)
    if kind == "csv":
        pyarrow.csv.write_csv(table, file)
    elif kind == "tsv":
        pyarrow.csv.write_csv(table, file, pyarrow.csv.WriteOptions(delimiter="\t"))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    elif kind == "column":
        pyarrow.parquet.write_table(table.rename_columns(["other", "which"]), file)
        select = f"key in lines('{file}', 'which')"
    else:
        file.write_text("\r\n\n".join(keys) if kind == "txt with blanks" else "\n".join([*keys, *keys, ""]))
        select = f"key in lines('{file}')" if kind == "condition" else select
    assert selected(corpus, select=select) == rows


def mask_of(folder: Path, rows: list[int], count: int = 50) -> str:
    """A mask that selects some of `count` rows."""
    np.save(folder / "mask.npy", np.isin(np.arange(count), rows))
    return str(folder / "mask.npy")


def test_a_mask_selects_its_rows(corpus: Corpus, tmp_path: Path):
    rows = [1, 2, 17, 18, 19, 33, 34, 48]
    assert selected(corpus, select=mask_of(tmp_path, rows)) == rows


def test_uids_of_datacomp_select_the_keys_that_are_these(corpus: Corpus, tmp_path: Path):
    keys = [f"{hash64(sample.key.encode()) % 2**64:032x}" for sample in corpus.samples]
    corpus.write_beside(tmp_path / "uids", [replace(s, key=key) for s, key in zip(corpus.samples, keys, strict=True)])
    # As the tools of DataComp write them: np.array([(int(uid[:16], 16), int(uid[16:32], 16))], np.dtype("u8,u8"))
    uids = [(int(key[:16], 16), int(key[16:32], 16)) for key in keys[5:20]]
    np.save(tmp_path / "subset.npy", np.array(sorted(uids), np.dtype("u8,u8")))
    found = selected(corpus, shards=str(tmp_path / "uids"), select=str(tmp_path / "subset.npy"))
    assert found == list(range(5, 20))


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 19, "9" * 5_000, "1e400", "9223372036854775808"])
def test_a_number_that_nothing_holds_is_an_error(corpus: Corpus, tmp_path: Path, number: str):
    (tmp_path / "ids.txt").write_text(f"48\n{number}\n")
    message = rf"data\.select: the number '{number[:40]}.* is too large; whole numbers have 64 bits: store the column"
    with pytest.raises(ConfigError, match=message):
        selected(corpus, select=f"width in lines('{tmp_path / 'ids.txt'}')")
    (tmp_path / "ids.txt").write_text("48\ninf\n-9223372036854775808\n")
    in_file = selected(corpus, select=f"width in lines('{tmp_path / 'ids.txt'}')")
    assert in_file == selected(corpus, select="width == 48")


def test_keys_in_another_encoding_are_an_error(corpus: Corpus, tmp_path: Path):
    (tmp_path / "keys.txt").write_text("00001\n", encoding="utf-16")
    remedy = r"iconv -f UTF-16 -t UTF-8 'keys\.txt' > NEW makes one$"
    with pytest.raises(DataError, match=rf"keys\.txt' looks like UTF-16, .*: {remedy}"):
        selected(corpus, select=str(tmp_path / "keys.txt"))


def test_a_condition_may_be_longer_than_a_file_name(corpus: Corpus):
    rows = list(range(0, 50, 2))
    assert selected(corpus, select=" or ".join(f"key == '{row:05d}'" for row in rows)) == rows
    assert selected(corpus, select=f"key != '{'日' * 90}'") == list(range(50))


def test_a_pool_of_datacomp_has_the_rows_that_its_resharder_copies(corpus: Corpus, tmp_path: Path):
    pool, rng = tmp_path / "pool", np.random.default_rng(0)
    corpus.write_beside(pool, corpus.samples)
    uids = [rng.bytes(16).hex() for _ in range(50)]
    # Its metadata, from which the baselines of its filtering track make a subset.
    scores = pa.table({"uid": uids, "clip_l14_similarity_score": rng.random(50)})
    (tmp_path / "metadata").mkdir()
    pyarrow.parquet.write_table(scores, tmp_path / "metadata" / "0.parquet")
    kept = scores.filter(pa.compute.greater(scores["clip_l14_similarity_score"], 0.3))["uid"].to_pylist()
    subset = np.array([(int(uid[:16], 16), int(uid[16:32], 16)) for uid in kept], np.dtype("u8,u8"))
    subset.sort()
    np.save(tmp_path / "subset.npy", subset)
    # Tables beside the tars, as img2dataset writes them: an image that could not be fetched has a row, too.
    for number, rows in enumerate(np.array_split(np.arange(50), 3)):
        table = pa.table({"key": [corpus.samples[row].key for row in rows], "uid": [uids[row] for row in rows]})
        lost = pa.table({"key": [f"lost{number}"], "uid": [rng.bytes(16).hex()]})
        pyarrow.parquet.write_table(pa.concat_tables([table, lost]), pool / f"{number:05d}.parquet")

    def is_copied(uid: str) -> bool:
        """As resharder.py decides: a binary search among the sorted pairs of numbers."""
        pair, pairs = (int(uid[:16], 16), int(uid[16:32], 16)), subset.tolist()
        place = bisect.bisect_left(pairs, pair)
        return place < len(pairs) and pairs[place] == pair

    copied = [row for row in range(50) if is_copied(uids[row])]
    assert 0 < len(copied) < 50
    join = [{"table": str(pool / "*.parquet")}]
    assert selected(corpus, shards=str(pool), join=join, select=str(tmp_path / "subset.npy")) == copied
    np.save(tmp_path / "other.npy", np.array([(1, 2)], np.dtype("u8,u8")))
    said = rf"no row has one of its 1 keys: they are like '0{{15}}10{{15}}2', and uids of .* are like '{uids[0]}'"
    with pytest.raises(ConfigError, match=said):
        corpus.loader(shards=str(pool), join=join, select=str(tmp_path / "other.npy"))


def test_shards_without_a_selected_row_are_never_opened(corpus: Corpus, tmp_path: Path):
    own = corpus.copy(tmp_path / "own")
    select = mask_of(tmp_path, [*range(34, 50)])
    gone = [path for path in (own.folder / "shards").rglob("*") if path.name.startswith(("000000.", "000001."))]
    assert len(gone) == 2
    for path in gone:
        path.unlink()
    assert selected(own, select=select) == list(range(34, 50))


def test_a_selection_and_a_share_hold_together(corpus: Corpus):
    data = data_of(corpus, select="width >= height", val={"share": 0.3}, global_batch_size=4)
    height, width = sizes(corpus)
    of_val = [in_share(hash64(sample.image), 0.3) for sample in corpus.samples]
    with Loader.from_config(data) as training, Loader.from_config(evaluation_data(data)) as validation:
        assert rows_of(training) == [row for row in range(50) if width[row] >= height[row] and not of_val[row]]
        assert rows_of(validation) == [row for row in range(50) if width[row] >= height[row] and of_val[row]]


def test_other_shards_to_evaluate_on_are_taken_whole(corpus: Corpus, tmp_path: Path):
    corpus.write_beside(tmp_path / "val", corpus.samples[:9])
    data = data_of(corpus, select="width > height", val={"shards": str(tmp_path / "val")})
    with Loader.from_config(evaluation_data(data)) as validation:
        assert rows_of(validation) == list(range(9))


def test_each_dataset_of_a_mixture_has_a_selection_of_its_own(corpus: Corpus, tmp_path: Path):
    corpus.write_beside(tmp_path / "other", corpus.samples[20:])
    select = mask_of(tmp_path, [*range(3, 30, 3)], count=30)
    shards = [
        {"shards": corpus.settings["shards"], "select": "width > height"},
        {"shards": str(tmp_path / "other"), "select": select},
    ]
    height, width = sizes(corpus)
    expected = [*np.flatnonzero(width > height).tolist(), *(50 + np.arange(3, 30, 3)).tolist()]
    assert selected(corpus, shards=shards) == expected
    both = {**corpus.settings, "shards": shards, "select": "captions == 1", "global_batch_size": 4}
    captions = [len(sample.captions) for sample in [*corpus.samples, *corpus.samples[20:]]]
    with Loader.from_config(both) as loader:
        assert rows_of(loader) == [row for row in expected if captions[row] == 1]


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("widht > 3", "data.select: no column 'widht' .did you mean 'width'"),
        ("class_name == 'dog'", "no column 'class_name'"),
        ("width > 10000", r"data.select width > 10000: selects no row"),
        (
            "key == '00007'",
            r"^data.global_batch_size 8: .* more than 1 rows of 50 \(data.select key == '00007' ",
        ),
        ("FOLDER/kyes.txt", r"data.select: '.*kyes.txt': no such file; did you mean '.*/keys.txt'"),
        ("FOLDER/keys.txt", "no row has one of its 2 keys: they are like '1', and keys of the index are like '00000'"),
        ("FOLDER/empty.txt", "empty.txt: the file has no keys"),
        ("FOLDER/noise.txt", r"noise.txt' is no text in UTF-8 \(byte 0\); write a key a line$"),
        ("key in lines('FOLDER/keys.txt', 'key')", "is a text file and has no column 'key'"),
        (
            "FOLDER/table.parquet",
            r"no column key or uid; it has kee, score: name the column of keys \(key in lines\('.*parquet', 'NAME'\)\)",
        ),
        ("key in lines('FOLDER/table.parquet', 'kea')", "no column 'kea' .did you mean 'kee'"),
        (
            "key in lines('FOLDER/table.parquet', 'score')",
            "column 'score': values of type double, and keys are texts",
        ),
        ("FOLDER/short.npy", "is a mask of 49 rows, and the index has 50: it was made for other shards"),
        ("FOLDER/keys.list", r"keys.list': files of keys and masks end in \.npy, \.txt, \.parquet, \.csv, \.tsv"),
        ("FOLDER/square.npy", r"an array of bool and shape \(5, 10\); masks, weights, .* and uids have one dimension"),
        (
            "FOLDER/rows.npy",
            r"an array of int64; known are bool \(a mask\) .*; save a mask as bool .mask\.astype\(bool\).;",
        ),
        ("FOLDER/bits.npy", r"an array of uint8; .*; of row numbers: mask = np\.zeros\(.*\), mask\[rows\] = True$"),
        ("FOLDER/objects.npy", "an array of object"),
    ],
)
def test_a_wrong_selection_is_refused(corpus: Corpus, tmp_path: Path, select: str, message: str):
    (tmp_path / "keys.txt").write_text("1\n2\n")
    (tmp_path / "keys.list").write_text("1\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "noise.txt").write_bytes(b"\xff\xff\xff")
    pyarrow.parquet.write_table(pa.table({"kee": ["00000"], "score": [0.5]}), tmp_path / "table.parquet")
    arrays = {
        "short": np.ones(49, np.bool_),
        "square": np.ones((5, 10), np.bool_),
        "rows": np.arange(50),
        "bits": np.ones(50, np.uint8),
        "objects": np.array([None] * 50, object),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
    with pytest.raises(ConfigError if "noise" not in select else DataError, match=message):
        corpus.loader(select=select.replace("FOLDER", str(tmp_path)))


@pytest.mark.parametrize("damage", ["cut", "longer", "no header", "other"])
def test_a_damaged_mask_is_refused(corpus: Corpus, tmp_path: Path, damage: str):
    file = tmp_path / "mask.npy"
    np.save(file, np.ones(50, np.bool_))
    whole = file.read_bytes()
    file.write_bytes(
        {"cut": whole[:-1], "longer": whole + b"\0", "no header": whole[:20], "other": b"PK" + whole}[damage]
    )
    message = "mask.npy' is no .npy file" if damage in ("no header", "other") else "which do not hold 50 values"
    with pytest.raises(DataError, match=message):
        corpus.loader(select=str(file))


def test_a_damaged_table_is_refused(corpus: Corpus, tmp_path: Path):
    (tmp_path / "keys.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"keys.parquet' cannot be read as a table"):
        corpus.loader(select=str(tmp_path / "keys.parquet"))


def test_keys_that_no_row_has_are_counted_once(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "keys.txt").write_text("\n".join([sample.key for sample in corpus.samples[:20]] + ["absent"]))
    assert selected(corpus, select=str(tmp_path / "keys.txt")) == list(range(20))
    assert [line for line in caplog.messages if "keys" in line] == [
        "data.select keys.txt: 21 keys, and 20 rows have one of them"
    ]


def test_keys_that_all_rows_have_are_told(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "keys.txt").write_text("\n".join(sample.key for sample in corpus.samples))
    assert selected(corpus, select=str(tmp_path / "keys.txt")) == list(range(50))
    said = "data.select keys.txt: every row has one of its 50 keys, so all are selected"
    assert [line for line in caplog.messages if "keys" in line] == [said]


def test_a_dataset_of_which_nothing_is_selected_is_named(corpus: Corpus, tmp_path: Path):
    corpus.write_beside(tmp_path / "other", corpus.samples[20:])
    shards = [{"shards": corpus.settings["shards"]}, {"shards": str(tmp_path / "other")}]
    select = mask_of(tmp_path, [*range(20)], count=80)
    message = (
        r"^data.select mask.npy: selects no row of data.shards.1 \('.*other'\); leave that dataset out, or select m"
    )
    with pytest.raises(ConfigError, match=message):
        corpus.loader(shards=[{**shards[0], "select": "width > 0"}, shards[1]], select=select)
    with pytest.raises(
        ConfigError, match=r"^data.shards.1.select width > 9999: selects no row; leave that dataset out"
    ):
        corpus.loader(shards=[shards[0], {**shards[1], "select": "width > 9999"}])


def test_a_loader_knows_how_many_rows_it_takes_from(corpus: Corpus):
    assert corpus.loader().num_rows == 50
    width = corpus.index[7].image.size[0]
    assert corpus.loader(select=f"width == {width}", transform="eval").num_rows == len(
        selected(corpus, select=f"width == {width}", transform="eval")
    )
