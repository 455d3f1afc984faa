"""Damaged shards: all are listed, what can be read is indexed on request, and a rerun reads only what is new."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmdata.cli.data.index import account_lines
from mmdata.errors import DataError
from mmdata.index import Index, Manifest, build_index, builder, verify
from mmdata.index.staging import STAGING_NAME
from mmdata.tars.members import Members
from tests.index.rewrite import published

NUM_SHARDS = 4


@pytest.fixture
def folder(tmp_path: Path, tar, photo) -> Path:
    """Four tars of three samples each."""
    path = tmp_path / "tars"
    path.mkdir()
    for shard in range(NUM_SHARDS):
        members = []
        for i in range(3):
            members += [(f"{shard}{i}.jpg", photo(20, 30, seed=3 * shard + i)), (f"{shard}{i}.txt", b"a dog %d" % i)]
        (path / f"{shard}.tar").write_bytes(tar(members))
    return path


def cut(path: Path, key: str) -> int:
    """Cut a tar in the image of a sample; returns the offset of the sample."""
    data = path.read_bytes()
    start = data.index(f"{key}.jpg\0".encode())
    path.write_bytes(data[: start + 700])
    return start


def scanned(monkeypatch) -> list[str]:
    """Names of the tars that are read from now on."""
    names: list[str] = []
    scan = builder.scan_shard
    monkeypatch.setattr(builder, "scan_shard", lambda path, **given: names.append(path.name) or scan(path, **given))
    return names


def test_all_damaged_shards_are_listed_with_their_offsets(folder):
    first, second = cut(folder / "0.tar", "01"), cut(folder / "2.tar", "22")
    with pytest.raises(DataError) as caught:
        build_index(folder)
    message = str(caught.value)
    assert message.startswith("2 of 4 shards are damaged: ")
    assert f"shard '0.tar', byte {first}: a member of" in message
    assert f"shard '2.tar', byte {second}: a member of" in message
    assert "reads only them; or index what can be read with --skip-damaged, which counts what is lost" in message
    assert not (folder / "__mmdata__").exists()


def test_a_long_list_of_damaged_shards_is_cut(folder, monkeypatch):
    monkeypatch.setattr(builder, "MAX_LISTED", 1)
    cut(folder / "0.tar", "01")
    (folder / "3.tar").write_bytes(b"<html>login</html>" + bytes(600))
    with pytest.raises(DataError, match=r"2 of 4 shards are damaged: shard '0\.tar', byte .*; and 1 more\. Fetch"):
        build_index(folder)


def test_skip_damaged_indexes_the_samples_before_the_damage(folder):
    start = cut(folder / "1.tar", "12")
    (folder / "3.tar").write_bytes(b"<html>login</html>" + bytes(600))
    report = build_index(folder, skip_damaged=True, max_bad_share=0.2)
    assert Index.open(folder).keys(np.arange(8)) == ["00", "01", "02", "10", "11", "20", "21", "22"]
    accounts = Manifest.read(folder).accounts
    assert accounts is not None
    assert accounts == report.accounts
    counts = (accounts["samples"], accounts["indexed"], accounts["quarantined"])
    assert counts == (9, 8, 1)
    damaged = accounts["damaged_shards"]
    assert damaged.keys() == {"1.tar", "3.tar"}
    assert damaged["1.tar"].startswith(f"shard '1.tar', byte {start}: a member of")
    assert damaged["3.tar"].startswith("shard '3.tar': is an HTML page, not a tar")
    (line,) = report.quarantined
    assert (line["shard"], line["key"], line["offset"], line["reason"]) == ("1.tar", "12", start, "damaged_shard")
    said = [line for line in account_lines(report) if line.startswith("damaged: ")]
    size = (folder / "1.tar").stat().st_size
    before = "the samples before it are indexed"
    unread = f"what follows byte {start:,} of {size:,} is not counted"
    assert said == [f"damaged: {damaged['1.tar']}; {before}, {unread}", f"damaged: {damaged['3.tar']}; {before}"]
    assert verify(folder) == []  # the damage is known
    os.truncate(folder / "1.tar", start)
    assert any("and the manifest says" in problem.detail for problem in verify(folder))


def test_without_skip_damaged_the_same_shards_stay_an_error(folder):
    cut(folder / "1.tar", "12")
    build_index(folder, skip_damaged=True, max_bad_share=0.2, out=folder.parent / "out")
    with pytest.raises(
        DataError, match=r"shard '1\.tar', byte .*; or index what can be read of it with --skip-damaged"
    ):
        build_index(folder)


def test_an_index_that_leaves_out_more_than_is_allowed_is_not_taken_for_done(folder):
    cut(folder / "1.tar", "12")
    given = {"skip_damaged": True, "max_bad_share": 0.2}
    build_index(folder, **given)
    assert build_index(folder, **given).unchanged
    with pytest.raises(DataError, match=r"leaves out what lies behind the damage of 1 shard, such as: shard '1\.tar'"):
        build_index(folder, max_bad_share=0.2)
    with pytest.raises(DataError, match=r"leaves out 1 of 12 samples, more than 5% of them; its quarantine\.jsonl"):
        build_index(folder, skip_damaged=True, max_bad_share=0.05)


def test_a_rerun_reads_only_the_shards_that_changed(folder, monkeypatch):
    whole = (folder / "1.tar").read_bytes()
    cut(folder / "1.tar", "12")
    with pytest.raises(DataError):
        build_index(folder)
    names = scanned(monkeypatch)
    (folder / "1.tar").write_bytes(whole)
    build_index(folder)
    assert names == ["1.tar"]
    assert not (folder / STAGING_NAME).exists()
    build_index(folder, out=folder.parent / "undisturbed")
    theirs = published(folder.parent / "undisturbed")
    ours = published(folder)
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"manifest.json"}  # its location


def test_other_settings_read_all_shards_again(folder, monkeypatch):
    cut(folder / "1.tar", "12")
    with pytest.raises(DataError):
        build_index(folder)
    names = scanned(monkeypatch)
    with pytest.raises(DataError):
        build_index(folder, members=Members.parse(caption="txt"))
    assert names == ["0.tar", "1.tar", "2.tar", "3.tar"]


def test_a_staged_file_that_is_damaged_is_not_used(folder, monkeypatch):
    cut(folder / "1.tar", "12")
    with pytest.raises(DataError):
        build_index(folder)
    staged = folder / STAGING_NAME / "2.tar.scan"
    data = bytearray(staged.read_bytes())
    data[-300] ^= 1
    staged.write_bytes(data)
    names = scanned(monkeypatch)
    build_index(folder, skip_damaged=True, max_bad_share=0.2)
    assert names == ["2.tar"]
    assert Index.open(folder).column("height").tolist() == [20] * 11


def test_a_killed_run_is_continued(folder, monkeypatch):
    program = textwrap.dedent(
        f"""
        import os, signal
        from mmdata.index import build, builder
        scan = builder.scan_shard
        def until_the_third(path, **given):
            if path.name == "2.tar":
                os.kill(os.getpid(), signal.SIGKILL)
            return scan(path, **given)
        builder.scan_shard = until_the_third
        build.build_index({str(folder)!r})
        """
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert not (folder / "__mmdata__").exists()
    names = scanned(monkeypatch)
    build_index(folder)
    assert names == ["2.tar", "3.tar"]
    assert verify(folder) == []


def test_a_run_that_ends_while_it_publishes_is_finished_by_the_next(folder, monkeypatch, count):
    """The index that is replaced has other lengths; at no moment do files of both make one index."""
    build_index(folder, count_tokens=count, tokenizer="characters")
    replace, moved = os.replace, list[str]()

    def stops(source: object, target: object) -> None:
        if (
            "/new/" in str(source)
            and str(target).endswith((".arrow", ".jsonl", ".json"))
            and ".part" not in str(source)
        ):
            if moved:
                raise KeyboardInterrupt
            moved.append(str(target))
        replace(source, target)

    shorter = {"count_tokens": lambda captions: [1 for _ in captions], "tokenizer": "ones"}
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", stops)
        with pytest.raises(KeyboardInterrupt):
            build_index(folder, overwrite=True, **shorter)
        with pytest.raises(DataError, match=r"no manifest\.json; `mmdata index .*` makes one"):
            Manifest.read(folder)
    build_index(folder, **shorter)
    assert Manifest.read(folder).tokenizer == "ones"
    assert verify(folder) == []
    assert not (folder / STAGING_NAME).exists()


def test_overwrite_leaves_no_file_of_the_old_index(folder):
    build_index(folder)
    more = folder / "__mmdata__/index-00001.arrow"
    more.write_bytes(b"of an index of 1,025 shards")
    (folder / "3.tar").unlink()
    with pytest.raises(
        DataError, match=r"is of other shards \(4, and 3 are to be indexed\); read all tars again with --ov"
    ):
        build_index(folder)
    build_index(folder, overwrite=True)
    assert len(Index.open(folder)) == 9
    assert not more.exists()


def test_a_conversion_is_not_overwritten(shards):
    converted = replace(Manifest.read(shards), accounts={"run": {}})
    (shards / "__mmdata__/manifest.json").write_bytes(converted.to_json())
    with pytest.raises(DataError, match="holds a conversion with its accounts, which an index does not replace"):
        build_index(shards, overwrite=True)


def test_a_tokenizer_added_later_reads_captions_only(folder, monkeypatch, count):
    build_index(folder)
    names = scanned(monkeypatch)
    report = build_index(folder, count_tokens=count, tokenizer="characters")
    assert (names, report.only_counted) == ([], True)
    assert report.manifest.tokenizer == "characters"
    assert report.manifest.lengths == [(7, 12)]
    monkeypatch.undo()
    out = folder.parent / "at_once"
    build_index(folder, out=out, count_tokens=count, tokenizer="characters")
    ours, theirs = published(folder), published(out)
    assert {name for name in ours if ours[name] != theirs[name]} == {"manifest.json"}  # its location
    assert Manifest.read(folder).root == Manifest.read(out).root


def test_a_tokenizer_added_after_the_tars_were_moved(folder, tmp_path, count):
    out = tmp_path / "index"
    build_index(folder, out=out)
    folder.rename(tmp_path / "moved")
    report = build_index(tmp_path / "moved", out=out, count_tokens=count, tokenizer="characters")
    assert (report.only_counted, report.manifest.location) == (True, "../moved")
    assert report.manifest.lengths == [(7, 12)]


def test_an_index_gets_nothing_of_a_run_that_was_killed(folder, count):
    def is_killed(captions, tokenizer: Path):
        tokenizer.mkdir(parents=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(folder, make_tokenizer=is_killed)
    build_index(folder, count_tokens=count, tokenizer="characters")
    assert not (folder / "tokenizer").exists()
    assert "tokenizer" not in {path.name for path in (folder / "__mmdata__").iterdir()}


def test_a_caption_that_changed_since_it_was_indexed_is_not_counted(folder, count):
    build_index(folder)
    before = published(folder)
    (folder / "1.tar").write_bytes((folder / "1.tar").read_bytes().replace(b"a dog 1", b"a cat 1"))
    with pytest.raises(DataError, match="sample '11': the captions are not those that were indexed"):
        build_index(folder, count_tokens=count, tokenizer="characters")
    assert published(folder) == before


def test_a_second_image_is_counted(tmp_path, tar, photo):
    first, second = photo(20, 30), photo(24, 24, format="PNG")
    (tmp_path / "x.tar").write_bytes(tar([("a.jpg", first), ("a.png", second), ("a.txt", b"a dog")]))
    report = build_index(tmp_path)
    assert report.accounts["lost"] == {"second_image": 1}
    assert list(report.lost.values()) == ["shard 'x.tar', sample 'a': .png beside 'a.jpg', which is used"]
    assert Index.open(tmp_path).column("image_bytes").tolist() == [len(first)]
