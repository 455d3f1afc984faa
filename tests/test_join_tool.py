"""mmdata join: tables are joined with shards, or as a config says; and what cannot be joined."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from mmdata import Index, Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from tests.programs import run_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_corpus: Callable[..., Path]) -> Path:
    """shards/ of 12 images."""
    folder = tmp_path_factory.mktemp("join")
    raw = make_corpus(folder / "raw", 12)
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig(train_tokenizer=300, shard_rows=5))
    return folder


def write_table(folder: Path, name: str = "recaps.parquet", note: str = "", **columns: Any) -> Path:
    keys = Index.open(folder / "shards").keys(range(12))
    recaps = [f"a recaption{note} {key}" for key in keys[:10]]
    table = pa.table({"key": keys[:10], "recap": recaps, "score": [0.5] * 10, **columns})
    pyarrow.parquet.write_table(table, folder / name)
    return folder / name


def join(*words: object, code: int = 0) -> str:
    """What `mmdata join` prints; its error where it fails."""
    command = [sys.executable, "-m", "mmdata", "join", *map(str, words)]
    done = run_program(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr.removeprefix("error: ").strip() if code else done.stdout


def test_a_table_is_joined_with_shards_and_joined_again_when_it_changed(folder: Path):
    table = write_table(folder, "again.parquet")
    shards, tokenizer = folder / "shards", folder / "shards" / "tokenizer"
    for note in ("", " anew", " anew"):
        write_table(folder, "again.parquet", note)
        first, second = join(
            shards, table, "--key", "key", "--captions", "recap", "--tokenizer", tokenizer
        ).splitlines()
        pattern = (
            rf"'{table}': 10 of 12 rows have a row in it; kept in {shards}/__mmdata__/joins/again-\w{{16}}\.rows\.arrow"
        )
        assert re.fullmatch(pattern, first)
        assert second == "join:recap: 10 captions, counted"
    assert len(list((shards / "__mmdata__" / "joins").glob("again-*.arrow"))) == 5  # rows, columns, captions, tokens


def test_the_remedy_of_a_changed_table_is_a_command_that_helps(folder: Path):
    table, config = write_table(folder, "changed.parquet"), folder / "changed.yaml"
    data: dict[str, Any] = {
        "shards": str(folder / "shards"),
        "global_batch_size": 4,
        "join": [{"table": str(table)}],
        "select": "score > 0",
    }
    config.write_text(yaml.safe_dump({"data": data}))
    for score in (0.5, 0.75):
        write_table(folder, "changed.parquet", score=[score] * 10)
        with pytest.raises(ConfigError, match="is not joined with the index") as refused:
            Loader.from_config(config)
        assert str(refused.value).endswith("; run `mmdata join CONFIG`")
        assert join(config).startswith(f"'{table}': 10 of 12 rows")
        Loader.from_config(config).close()


def test_the_tables_of_a_config_are_joined_with_their_captions_and_fields(folder: Path):
    write_table(folder, "of-config.parquet")
    data: dict[str, Any] = {
        "shards": str(folder / "shards"),
        "tokenizer": str(folder / "shards" / "tokenizer"),
        "global_batch_size": 4,
        "join": [{"table": str(folder / "of-config.parquet")}],
        "captions": {"shards": 0.5, "join:recap": 0.5},
        "fields": {"clip": "join:score"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    lines = join(folder / "config.yaml", "data.seed=3").splitlines()
    assert lines[1:2] == ["join:recap: 10 captions, counted"]
    assert re.fullmatch(r"data\.fields clip join:score \(\w{16}\)", lines[2])
    assert (
        len(list((folder / "shards" / "__mmdata__" / "joins").glob("of-config-*.arrow"))) == 4
    )  # score, and no other column


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SHARDS"], "no table to join: none is given; `mmdata join SHARDS TABLE` joins one"),
        (["CONFIG"], r"no table to join: the config '.*plain\.yaml' has no data\.join; `mmdata join SHARDS TABLE` j"),
        (
            ["CONFIG", "recaps.parquet"],
            r"'recaps\.parquet': the tables of a config are those of its data\.join; leave it out, or give a folder of",
        ),
        (["CONFIG", "--key", "uid"], "'--key': the tables of a config are those of its data.join"),
        (["SHARDS", "FOLDER/recap.parquet"], r"data\.join\.0: '.*': no such file; did you mean '.*/recaps\.parquet'\?"),
        (
            ["SHARDS", "FOLDER/recaps.parquet", "--key", "keys"],
            r"no column 'keys' \(did you mean 'key'\?\); it has key, ",
        ),
        (
            ["SHARDS", "FOLDER/recaps.parquet", "--captions", "recap"],
            r"--captions: captions are counted by a tokenizer: give it, too \(--tokenizer NAME_OR_FOLDER\)",
        ),
        (
            ["SHARDS", "FOLDER/recaps.parquet", "--captions", "recaps", "--tokenizer", "clip"],
            r"data\.captions: no source 'join:recaps' \(did you mean 'join:recap'\?\)",
        ),
        (["FOLDER/none", "FOLDER/recaps.parquet"], "none': no such file"),
        (["FOLDER", "FOLDER/recaps.parquet"], r"no manifest\.json; it holds folders of shards: give '.*/shards'"),
        (["SHARDS", "--kye", "uid"], r"no option '--kye'; did you mean '--key'\?"),
    ],
)
@pytest.mark.sweep(keep=2)
def test_what_cannot_be_joined_is_said(folder: Path, words: list[str], message: str):
    write_table(folder)
    (folder / "plain.yaml").write_text(f"data: {{shards: {folder / 'shards'}, global_batch_size: 4}}")
    places = {"SHARDS": str(folder / "shards"), "CONFIG": str(folder / "plain.yaml")}
    given = [places.get(word, word.replace("FOLDER", str(folder))) for word in words]
    assert re.search(message, join(*given, code=2))


def test_a_conversion_that_is_replaced_takes_its_joins_along(folder: Path, tmp_path: Path):
    source = folder / "raw" / "captions.jsonl"
    convert(source, tmp_path / "shards", ConvertConfig(shard_rows=5))
    join(tmp_path / "shards", write_table(folder, "taken.parquet"))
    assert (tmp_path / "shards" / "__mmdata__" / "joins").is_dir()
    convert(source, tmp_path / "shards", ConvertConfig(shard_rows=5))  # complete, and not foreign
    assert (tmp_path / "shards" / "__mmdata__" / "joins").is_dir()
    convert(source, tmp_path / "shards", ConvertConfig(shard_rows=6), overwrite=True)
    assert not (tmp_path / "shards" / "__mmdata__" / "joins").exists()
