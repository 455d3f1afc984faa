"""Names of shards: file: URLs as webdataset reads them, and brace patterns whose size is known before they expand."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import webdataset
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

import mmdata
from mmdata.convert import convert
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, build_index, verify
from mmdata.loader.stream import find_shards
from mmdata.storage import ShardCache
from mmdata.tars.foreign import MAX_SHARDS, most_names


@pytest.mark.parametrize("form", ["file:{path}", "file://{path}", "file://localhost{path}", "FILE:{path}"])
def test_file_urls_are_read_as_webdataset_reads_them(tmp_path: Path, shards: Path, config, form: str):
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(shards / "000000.tar", folder / "x.tar")
    assert find_shards(form.format(path=f"{tmp_path}/a%20folder/x.tar")) == [f"{folder}/x.tar"]
    url = form.format(path=f"{folder}/x.tar")
    expected = sorted(sample["__key__"] for sample in webdataset.WebDataset(url, shardshuffle=False))
    found = [key for batch in mmdata.stream(url, config()) for key in batch["keys"] if key]
    assert sorted(found) == expected
    assert find_shards(form.format(path=folder)) == [f"{folder}/x.tar"]
    assert find_shards(form.format(path=f"{folder}/{{x,x}}.tar")) == 2 * [f"{folder}/x.tar"]


def test_relative_file_urls_are_read_as_webdataset_reads_them(shards: Path, monkeypatch: pytest.MonkeyPatch, config):
    monkeypatch.chdir(shards.parent)
    url = "file:shards/000003.tar"
    expected = sorted(sample["__key__"] for sample in webdataset.WebDataset(url, shardshuffle=False))
    assert sorted(k for batch in mmdata.stream(url, config()) for k in batch["keys"] if k) == expected
    with pytest.raises(DataError, match=r"shard 'shards/none\.tar': no such file or directory; check the path"):
        find_shards("file:shards/none.tar")
    with pytest.raises(
        DataError, match=r"'tars/\*\.tar': .*check the path; a \* stands .*: give the folder, or glob\."
    ):
        find_shards("tars/*.tar")


def test_a_shard_that_the_system_refuses_is_told_with_its_reason():
    with pytest.raises(DataError, match=r"shard 'x+\.tar': file name too long; choose a shorter path"):
        find_shards(f"{'x' * 300}.tar")


def test_file_urls_that_name_a_host_or_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"'file://shards/x\.tar': 'shards' is a host here, .*write file:///shards/x"):
        find_shards("file://shards/x.tar")
    with pytest.raises(ConfigError, match="'file:': a file: URL without a path; write file:/folder/name"):
        find_shards("file:")


@pytest.mark.parametrize("form", ["file:{}", "file://{}"])
def test_index_loader_convert_and_verify_take_file_urls(
    shards: Path, tmp_path: Path, config, monkeypatch: pytest.MonkeyPatch, form: str
):
    tars = tmp_path / "tars"
    tars.mkdir()
    shutil.copy(shards / "000000.tar", tars / "x.tar")
    assert build_index(form.format(tars)).accounts["indexed"] == 10
    assert verify(form.format(tars)) == []
    assert convert(form.format(tars / "x.tar"), tmp_path / "out").accounts["written"] == 10
    cache = tmp_path / "cache"
    assert len(Index.open(form.format(tars), cache=ShardCache(cache))) == 10
    loader = mmdata.Loader.from_config(config(shards=form.format(tars), cache_dir=str(cache), num_workers=0))
    assert sum(int(batch["valid"].sum()) for batch in loader) == 10
    monkeypatch.chdir(tmp_path)
    assert len(Index.open("file:tars", cache=ShardCache(cache))) == 10


PARTS = ["{", "}", ",", "..", "1", "9", "a", "Z", "-", "0", "{1..3}", "{a,b}", "{09..1..3}", "{d..b}"]


@given(st.lists(st.sampled_from(PARTS), max_size=7).map("".join))
def test_a_pattern_has_at_most_the_names_that_are_counted_before(pattern: str):
    with contextlib.suppress(ValueError):  # braces that do not close
        assert len(list(braceexpand(pattern, escape=False))) <= most_names(pattern)


def test_names_are_counted_exactly_without_nested_braces():
    for pattern in ("x-{0000..0331}.tar", "{a,b}-{09..1..3}", "{d..b}{0..-4}", "x.tar"):
        assert len(list(braceexpand(pattern, escape=False))) == most_names(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "x-{000000000..999999999}.tar",
        "{0..99999}{0..9999}.tar",
        "{a,{0..999999999}}.tar",
        30 * "{a,b}",
        "{0..99999999999999999999999999}",
        f"{{1..{MAX_SHARDS + 1}}}",
    ],
)
def test_patterns_of_too_many_shards_are_refused_before_they_expand(pattern: str):
    with pytest.raises(ConfigError, match=rf"the pattern stands for more than {MAX_SHARDS:,} shards; correct the num"):
        find_shards(pattern)
    with pytest.raises(ConfigError, match="braces that do not close"):
        find_shards(pattern + "{")


def test_braces_inside_each_other_without_end_are_refused():
    with pytest.raises(ConfigError, match=r"shards '\{{100}…': hundreds of nested braces; write the names out"):
        find_shards("{" * 5000 + "a,b" + "}" * 5000)
