"""`data.join`: columns of tables come to the rows of an index by key, and `data.select` may name them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.config import DataConfig
from mmdata.config.corpus import JoinConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError, DataError
from mmdata.tables.joined import Joined
from tests.joins import load

from .conftest import Corpus
from .test_select import selected

SCORES = np.random.default_rng(3).random(50).round(3)


def write_table(corpus: Corpus, file: Path, rows: Sequence[int] = range(50), **columns: Any) -> str:
    """A table of some rows of the corpus, in this order, with their scores."""
    table = pa.table({"uid": [corpus.samples[row].key for row in rows], "score": SCORES[list(rows)], **columns})
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        options = pyarrow.csv.WriteOptions(delimiter="\t" if file.suffix == ".tsv" else ",")
        pyarrow.csv.write_csv(table, file, options)
    return str(file)


def shuffled(count: int = 50) -> list[int]:
    return np.random.default_rng(1).permutation(50)[:count].tolist()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv"])
def test_a_score_of_a_table_selects_rows(corpus: Corpus, tmp_path: Path, suffix: str):
    table = write_table(corpus, tmp_path / f"scores{suffix}", shuffled())
    join = [{"table": table}]
    assert selected(corpus, join=join, select="score > 0.5") == np.flatnonzero(SCORES > 0.5).tolist()
    width = np.array([corpus.index[row].image.size[0] for row in range(50)])
    both = np.flatnonzero((SCORES > 0.3) & (width >= 48)).tolist()
    assert selected(corpus, join=join, select="score > 0.3 and width >= 48") == both


def test_a_table_may_be_many_files_and_may_name_its_keys(corpus: Corpus, tmp_path: Path):
    for number in range(5):
        rows = list(range(number, 50, 5))
        table = pa.table({"sample": [corpus.samples[row].key for row in rows], "clip": SCORES[rows]})
        pyarrow.parquet.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=3)
    expected = np.flatnonzero(SCORES < 0.6).tolist()
    pattern = [{"table": str(tmp_path / "part-*.parquet"), "key": "sample"}]
    assert selected(corpus, join=pattern, select="clip < 0.6") == expected
    braces = [{"table": str(tmp_path / "part-{0..4}.parquet"), "key": "sample"}]
    assert selected(corpus, join=braces, select="clip < 0.6") == expected
    listed = [{"table": [str(tmp_path / f"part-{n}.parquet") for n in (4, 2, 0, 1, 3)], "key": "sample"}]
    assert selected(corpus, join=listed, select="not clip >= 0.6") == expected


@pytest.mark.parametrize(
    ("encoding", "name", "wrong"),
    [
        (
            "utf-16",
            "score",
            "looks like UTF-16, .* UTF-8: iconv -f UTF-16 -t UTF-8 't.csv' > NEW makes one",
        ),
        ("utf-16-le", "score", "looks like UTF-16, .*"),
        ("utf-16-be", "score", "looks like UTF-16, .*"),
        ("utf-32", "score", "looks like UTF-32, .*: iconv -f UTF-32 -t UTF-8 't.csv' > NEW makes one"),
        ("latin-1", "größe", "cannot be read as a table: .*; write it in UTF-8"),
    ],
)
def test_a_table_in_another_encoding_is_an_error(corpus: Corpus, tmp_path: Path, encoding: str, name: str, wrong: str):
    file = tmp_path / "t.csv"
    file.write_text(f"key,{name}\n" + "".join(f"{row:05d},{row}\n" for row in range(50)), encoding=encoding)
    for select in ("score > 20", f"key in lines('{file}', 'key')"):
        with pytest.raises(DataError, match=rf"^data\.(join\.0|select): '.*t\.csv' {wrong}$"):
            selected(corpus, **({"join": [{"table": str(file)}]} if "lines" not in select else {}), select=select)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_times_of_files_of_several_units_are_one_column(corpus: Corpus, tmp_path: Path, suffix: str):
    days = [datetime(2024, 1, 1, 12) + timedelta(days=row, milliseconds=250 * (row >= 25)) for row in range(50)]
    for number, unit in enumerate(["s", "us"]):
        rows = list(range(25 * number, 25 * number + 25))
        day = pa.array([days[row] for row in rows], pa.timestamp(unit))
        write_table(corpus, tmp_path / f"part-{number}{suffix}", rows, day=day)
    join = [{"table": str(tmp_path / f"part-*{suffix}")}]
    assert selected(corpus, join=join, select="day > '2024-01-26T12:00:00'") == list(range(25, 50))


def test_dates_that_become_texts_far_down_in_a_file_are_texts(corpus: Corpus, tmp_path: Path):
    keys = [sample.key for sample in corpus.samples]
    lines = [f"{key},2024-01-{1 + row % 28:02d}" for row, key in enumerate(keys)]
    lines += [f"other-{number},2024-01-01" for number in range(60_000)]  # more than a block
    (tmp_path / "days.csv").write_text("\n".join(["key,day", *lines, "last,unknown", ""]))
    found = selected(corpus, join=[{"table": str(tmp_path / "days.csv")}], select="day >= '2024-01-20'")
    assert found == [row for row in range(50) if 1 + row % 28 >= 20]


def test_categories_and_decimal_numbers_are_read_as_what_they_are(corpus: Corpus, tmp_path: Path):
    domains = [("web", "art")[row % 2] for row in range(50)]
    price = pa.array([Decimal(row) / 4 for row in range(50)], pa.decimal128(10, 2))
    more = {"domain": pa.array(domains).dictionary_encode(), "price": price}
    join = [{"table": write_table(corpus, tmp_path / "scores.parquet", **more)}]
    assert selected(corpus, join=join, select="domain == 'art' and price < 5") == [*range(1, 20, 2)]
    loader = corpus.loader(join=join, fields={"domain": "join:domain", "price": "join:price"})
    for batch in loader:
        rows, given = batch["rows"].tolist(), dict(batch)
        assert given["domain"] == [domains[row] if row >= 0 else "" for row in rows]
        assert [price for price, row in zip(given["price"].tolist(), rows, strict=True) if row >= 0] == [
            row / 4 for row in rows if row >= 0
        ]


def test_a_column_that_the_index_has_too_is_told(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    table = write_table(corpus, tmp_path / "sizes.parquet", width=[0] * 50)
    selected(corpus, join=[{"table": table}], select="score > 0.5")
    assert not caplog.messages
    selected(corpus, join=[{"table": table}], select="width > 0 and score > 0.5")
    said = f"data.select: 'width' is the index's; the column of this name in '{table}' is not used here: rename it"
    assert set(caplog.messages) == {said}  # by the join, and by the start


def test_rows_that_a_table_lacks_have_no_value_or_are_left_out(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = sorted(shuffled(30))
    join = {"table": write_table(corpus, tmp_path / "scores.parquet", rows)}
    low = [row for row in rows if SCORES[row] < 0.8]
    absent = [row for row in range(50) if row not in rows]
    assert selected(corpus, join=[join], select="score < 0.8") == low
    assert set(caplog.messages) == {f"data.join.0: 20 of 50 rows have no row in '{join['table']}'"}
    assert selected(corpus, join=[join], select="not score >= 0.8") == low
    assert selected(corpus, join=[join], select="score is None") == absent
    assert selected(corpus, join=[join]) == list(range(50))
    assert selected(corpus, join=[{**join, "missing": "mask"}]) == rows
    with pytest.raises(
        ConfigError, match=r"data.join.0: 20 of 50 rows have no row in '.*', such as '\d{5}'; leave them"
    ):
        corpus.loader(join=[{**join, "missing": "error"}])


@settings(max_examples=40)
@given(st.data())
def test_columns_are_those_of_pandas_left_join(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory, data: Any):
    rows = data.draw(st.lists(st.integers(0, 60), min_size=1, unique=True).filter(lambda found: min(found) < 50))
    keys = [f"{row:05d}" for row in rows]
    whole = data.draw(
        st.lists(st.one_of(st.none(), st.integers(-(2**31), 2**31)), min_size=len(rows), max_size=len(rows))
    )
    texts = data.draw(st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=len(rows), max_size=len(rows)))
    flags = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    table = pa.table(
        {"key": keys, "whole": pa.array(whole, pa.int64()), "text": pa.array(texts, pa.string()), "flag": flags}
    )
    file = tmp_path_factory.mktemp("join") / "table.parquet"
    pyarrow.parquet.write_table(table, file)
    joined = Joined([JoinConfig(table=str(file))], corpus.index, writes=True)
    left = pd.DataFrame({"key": [sample.key for sample in corpus.samples]})
    expected = left.merge(table.to_pandas(), on="key", how="left")
    for name in ("whole", "text", "flag"):
        found = [value for shard in range(3) for value in joined.table_of(name).of_shard(shard, name).to_pylist()]
        assert found == [None if pd.isna(value) else value for value in expected[name]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"table": "FOLDER/scroes.parquet"},
            ConfigError,
            r"data.join.0: '.*': no such file; did you mean '.*/scores.parquet'",
        ),
        ({"table": "FOLDER/none-*.parquet"}, ConfigError, r"data.join.0: '.*none-\*.parquet' matches no file"),
        ({"table": "FOLDER/notes.txt"}, ConfigError, "no table; known are .parquet, .csv, .tsv"),
        (
            {"key": "udi"},
            ConfigError,
            "no column 'udi' .did you mean 'uid'.*; it has uid, score: name the column of keys",
        ),
        ({"key": "score"}, ConfigError, "column 'score': values of type double, and keys are texts"),
        ({"table": "FOLDER/twice.parquet"}, ConfigError, r"the key '00003' comes twice: in '.*' row 1 and '.*' row 3"),
        (
            {"table": "FOLDER/other.parquet"},
            ConfigError,
            "50 of 50 rows have no row in .*: keys are like '00000', and those of",
        ),
        (
            {"table": ["FOLDER/scores.parquet", "FOLDER/fewer.parquet"]},
            ConfigError,
            "fewer.parquet' has no column 'score'",
        ),
        ({"table": "FOLDER/damaged.parquet"}, DataError, "damaged.parquet' cannot be read as a table"),
        ({"table": "FOLDER/damaged.csv"}, DataError, "damaged.csv' cannot be read as a table"),
    ],
)
def test_a_wrong_table_is_refused(corpus: Corpus, tmp_path: Path, change: Any, error: type[Exception], message: str):
    scores = write_table(corpus, tmp_path / "scores.parquet")
    write_table(corpus, tmp_path / "twice.parquet", [5, 3, 8, 3])
    pyarrow.parquet.write_table(pa.table({"uid": ["a", "b"], "score": [1.0, 2.0]}), tmp_path / "other.parquet")
    pyarrow.parquet.write_table(pa.table({"uid": ["a", "b"]}), tmp_path / "fewer.parquet")
    (tmp_path / "damaged.parquet").write_bytes(Path(scores).read_bytes()[:-30])
    (tmp_path / "damaged.csv").write_bytes(b"uid,score\n00001,1\n00002\n")
    (tmp_path / "notes.txt").write_text("x")
    if isinstance(table := change.get("table"), str):
        change = {**change, "table": table.replace("FOLDER", str(tmp_path))}
    elif table:
        change = {**change, "table": [one.replace("FOLDER", str(tmp_path)) for one in table]}
    with pytest.raises(error, match=message):
        corpus.loader(join=[{"table": scores, **change}], select="score > 0")


def test_two_tables_do_not_share_a_column(corpus: Corpus, tmp_path: Path):
    one = write_table(corpus, tmp_path / "one.parquet")
    two = write_table(corpus, tmp_path / "two.parquet")
    with pytest.raises(
        ConfigError, match=r"data.join.1: column 'score' is in '.*one.parquet', too; rename one of them"
    ):
        corpus.loader(join=[{"table": one}, {"table": two}], select="score > 0")


def with_fields(corpus: Corpus, table: str, fields: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {**corpus.settings, "join": [{"table": table}], "fields": fields, **changes}


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_values_of_a_table_come_with_their_rows(corpus: Corpus, tmp_path: Path, num_processes: int):
    rows = shuffled()
    features = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float16)
    columns = {
        "age": pa.array(rows, pa.int32()),
        "url": [f"https://example.com/{row}" for row in rows],
        "good": [row % 2 == 0 for row in rows],
        "feature": pa.array(list(features[rows]), pa.list_(pa.float16(), 3)),
        "embedding": pa.array(features[rows].astype(np.float32).tolist(), pa.list_(pa.float32())),
    }
    table = write_table(corpus, tmp_path / "table.parquet", rows, **columns)
    fields = {name: f"join:{name}" for name in columns} | {"clip": "join:score"}
    loading = {"num_processes": num_processes, "num_workers": 1}
    data = with_fields(corpus, table, fields, loading=loading, select="age != 4")
    seen: list[int] = []
    with load(data) as loader, load({**data, "fields": {}}) as plain:
        for batch, other in zip(loader, plain, strict=True):
            entries: dict[str, Any] = dict(batch)
            assert entries.keys() - other.keys() == fields.keys()
            assert torch.equal(batch["pixel_values"], other["pixel_values"])
            kinds = {name: value.dtype for name, value in entries.items() if name in fields and name != "url"}
            assert kinds == {
                "age": torch.int64,
                "good": torch.bool,
                "clip": torch.float64,
                "feature": torch.float16,
                "embedding": torch.float32,
            }
            for place, row in enumerate(batch["rows"].tolist()):
                found = {name: entries[name][place] for name in fields}
                if row < 0:
                    assert (found["url"], found["age"], found["good"]) == ("", 0, False)
                    assert found["feature"].isnan().all()
                    continue
                seen.append(row)
                assert (found["age"], found["good"], found["clip"]) == (row, row % 2 == 0, SCORES[row])
                assert found["url"] == f"https://example.com/{row}"
                assert found["feature"].tolist() == found["embedding"].tolist() == features[row].tolist()
    assert sorted(seen) == [row for row in range(50) if row != 4]


def test_rows_without_a_value_have_nan_or_no_text(corpus: Corpus, tmp_path: Path):
    rows = list(range(0, 50, 2))
    vectors = [None if row == 8 else [0.5, float(row)] for row in rows]
    columns = {"text": [None if row == 6 else "x" for row in rows], "vector": pa.array(vectors, pa.list_(pa.float32()))}
    table = write_table(corpus, tmp_path / "table.parquet", rows, **columns)
    fields = {"clip": "join:score", "text": "join:text", "vector": "join:vector"}
    with load(with_fields(corpus, table, fields)) as loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            for place, row in enumerate(batch["rows"].tolist()):
                known = row in rows
                assert bool(entries["clip"][place].isnan()) != known
                assert entries["text"][place] == ("x" if known and row != 6 else "")
                assert bool(entries["vector"][place].isnan().all()) != (known and row != 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": "join:score"}, "data.fields.labels: batches have an entry of this name already"),
        (
            {"x": "join:scroe"},
            r"data.fields.x: no source 'join:scroe' \(did you mean 'join:score'\?\); joined are join:score",
        ),
        ({"x": "score"}, "no source 'score'.*; joined are join:score"),
        ({"x": "join:whole"}, r"column 'whole': int64 and 11 rows without a value, .*missing: mask"),
        ({"x": "join:ragged"}, "vectors of different lengths, such as 1 and 2"),
        (
            {"x": "join:words"},
            r"lists of large_string; known are numbers, vectors of floats, .*: store the lists as texts",
        ),
        ({"x": "join:time"}, r"values of type duration\[s\]; known are numbers, vectors of floats, texts and dates"),
    ],
)
def test_a_wrong_field_is_refused(corpus: Corpus, tmp_path: Path, fields: dict[str, str], message: str):
    rows = list(range(40))
    columns = {
        "whole": pa.array([None, *range(39)], pa.int64()),
        "ragged": pa.array([[1.0], *[[1.0, 2.0]] * 39]),
        "words": pa.array([["a"]] * 40),
        "time": pa.array([1] * 40, pa.duration("s")),
    }
    table = write_table(corpus, tmp_path / "table.parquet", rows, **columns)
    with pytest.raises(ConfigError, match=message):
        load(with_fields(corpus, table, fields))


def test_evaluations_load_no_fields_and_blank_batches_have_them(corpus: Corpus, tmp_path: Path):
    table = write_table(corpus, tmp_path / "scores.parquet")
    given = {"join": [{"table": table}], "fields": {"score": "join:score"}}
    with corpus.loader(**given) as loader:
        assert all("score" in make() for _, make in loader.blank_batches())
    for val in ({"shards": corpus.settings["shards"]}, {"share": 0.3}):
        data = evaluation_data(DataConfig.model_validate({**corpus.settings, **given, "val": val}))
        with load(data) as loader:
            assert "score" not in next(iter(loader))


def test_whole_numbers_that_no_tensor_holds_are_refused(corpus: Corpus, tmp_path: Path):
    table = write_table(corpus, tmp_path / "a.parquet", big=pa.array([2**63 + 5] * 50, pa.uint64()))
    message = r"^data.join.0: column 'big' has whole numbers above 2\^63 - 1: store them as texts$"
    for changes in ({"select": "big >= 0"}, {"fields": {"big": "join:big"}}):
        with pytest.raises(ConfigError, match=message):
            corpus.loader(join=[{"table": table}], **changes)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_dates_are_compared_as_dates_and_bools_are_conditions(corpus: Corpus, tmp_path: Path, suffix: str):
    days = pa.array([date(2026, 1, 1) + timedelta(days=row) for row in range(50)])
    columns = {"day": days, "good": pa.array([row % 2 == 0 for row in range(50)])}
    table = write_table(corpus, tmp_path / "a.parquet", **columns)
    if suffix == ".csv":
        pyarrow.csv.write_csv(pyarrow.parquet.read_table(table), tmp_path / "a.csv")
        table = str(tmp_path / "a.csv")
    given = {"join": [{"table": table}]}
    assert selected(corpus, **given, select="'2026-01-03' <= day < '2026-01-13'") == list(range(2, 12))
    assert selected(corpus, **given, select="good and width > 0") == list(range(0, 50, 2))
    assert selected(corpus, **given, select="not good or day == '2026-01-01'") == [0, *range(1, 50, 2)]
    with corpus.loader(**given, fields={"day": "join:day"}) as loader:
        batch: dict[str, Any] = dict(next(iter(loader)))
    assert batch["day"] == [days[row].as_py().isoformat() for row in batch["rows"].tolist()]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_times_are_compared_as_times_and_come_as_texts_of_iso_8601(corpus: Corpus, tmp_path: Path, suffix: str):
    times = [datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(hours=row) for row in range(50)]
    local = [time.replace(tzinfo=None) + timedelta(milliseconds=250) for time in times]
    columns = {
        "time": pa.array(times, pa.timestamp("us", "America/New_York")),
        "local": pa.array([None if row == 3 else one for row, one in enumerate(local)], pa.timestamp("ms")),
    }
    table = write_table(corpus, tmp_path / "a.parquet", **columns)
    if suffix == ".csv":
        pyarrow.csv.write_csv(pyarrow.parquet.read_table(table), tmp_path / "a.csv")
        table = str(tmp_path / "a.csv")
    given = {"join": [{"table": table}]}
    assert selected(corpus, **given, select="time >= '2026-01-02T12:00'") == list(range(36, 50))
    assert selected(corpus, **given, select="'2026-01-02 00:00:00' <= time < '2026-01-02T10:30Z'") == list(
        range(24, 35)
    )
    assert selected(corpus, **given, select="local < '2026-01-01T10:00' or time == '2026-01-03'") == [
        *range(3),
        *range(4, 10),
        48,
    ]
    with pytest.raises(
        ConfigError, match=r"data.select: '2026-1-3' is compared with a timestamp with a zone: expected a date"
    ):
        corpus.loader(**given, select="time >= '2026-1-3'")
    with corpus.loader(**given, fields={"time": "join:time", "local": "join:local"}) as loader:
        batch: dict[str, Any] = dict(next(iter(loader)))
    for place, row in enumerate(batch["rows"].tolist()):
        assert batch["time"][place] == times[row].isoformat().replace("+00:00", "Z")
        text = "" if row == 3 else batch["local"][place]
        assert row == 3 or datetime.fromisoformat(text) == local[row]


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("a.parquet", list(range(50)), "like '0'; they are int64, which has no leading zeros: store the keys as texts"),
        ("a.parquet", [float(row) for row in range(50)], "values of type double, and keys are texts: store them as te"),
        ("semicolons.csv", [], r"its first line has semicolons and no commas, which separate columns of a .csv: write"),
        ("commas.tsv", [], r"its first line has commas and no tabs, which separate columns of a .tsv: write it with t"),
    ],
)
def test_keys_that_cannot_be_those_of_samples_are_explained(
    corpus: Corpus, tmp_path: Path, name: str, keys: list[Any], message: str
):
    file = tmp_path / name
    if keys:
        pyarrow.parquet.write_table(pa.table({"key": keys, "score": SCORES}), file)
    else:
        separator = ";" if name.startswith("semi") else ","
        file.write_text("\n".join([f"key{separator}score", *(f"{one.key}{separator}1" for one in corpus.samples)]))
    with pytest.raises(ConfigError, match=message):
        corpus.loader(join=[{"table": str(file)}])


@pytest.mark.parametrize(
    ("changes", "missing", "expected"),
    [
        ({}, "mask", list(range(40))),
        ({"select": "whole is not None"}, "keep", list(range(40))),
        ({"select": "score >= 0"}, "keep", list(range(40))),  # rows without a value, left out by another column
        ({"select": "whole > 10"}, "mask", list(range(11, 40))),
    ],
)
def test_whole_numbers_come_where_the_rows_without_them_are_left_out(
    corpus: Corpus, tmp_path: Path, changes: dict[str, Any], missing: str, expected: list[int]
):
    table = write_table(corpus, tmp_path / "table.parquet", list(range(40)), whole=list(range(40)))
    given = {"join": [{"table": table, "missing": missing}], "fields": {"whole": "join:whole"}, **changes}
    with load({**corpus.settings, **given}) as loader:
        batches: list[dict[str, Any]] = [dict(batch) for batch in loader]
    assert sorted(row for batch in batches for row in batch["rows"].tolist() if row >= 0) == expected
    assert all(torch.equal(batch["whole"][batch["valid"]], batch["rows"][batch["valid"]]) for batch in batches)


def test_rows_with_an_empty_cell_of_whole_numbers_are_left_out_by_a_condition(corpus: Corpus, tmp_path: Path):
    whole = pa.array([None if row % 5 == 0 else row for row in range(50)], pa.int64())
    table = write_table(corpus, tmp_path / "table.parquet", whole=whole)
    given = {"join": [{"table": table}], "fields": {"whole": "join:whole"}}
    message = r"int64 and 10 rows without a value, .*data.select='whole is not None' all"
    with pytest.raises(ConfigError, match=message):
        corpus.loader(**given)
    with corpus.loader(**given, select="whole is not None") as loader:
        rows = [row for batch in loader for row in batch["rows"].tolist() if row >= 0]
    assert sorted(rows) == [row for row in range(50) if row % 5]
