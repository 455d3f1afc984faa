"""The index of tars without images, by which `data.join` finds their samples."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmdata.errors import ConfigError, DataError
from mmdata.index import Index
from mmdata.index.joined_captions import parse_captions
from mmdata.index.keys_index import KeysIndex, build_keys_index
from mmdata.index.member_hashes import hash_member
from tests.loader.member_tars import json_of, npy, write_tar
from tests.programs import run_program


def tars(folder: Path) -> Path:
    write_tar(folder / "a.tar", {"k1": {"json": json_of(1), "npy": npy([1])}, "long" * 40: {"npy": npy([2])}})
    write_tar(folder / "b.tar", {"__meta__/x": {"json": b"{}"}, "sub/k3": {"syn.json": json_of(3)}})
    return folder


def index(*arguments: str) -> tuple[int, str]:
    done = run_program(
        [sys.executable, "-m", "mmdata", "index", *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_samples_have_their_keys_and_places(tmp_path: Path):
    made, _ = build_keys_index(tars(tmp_path / "tars"))
    assert made.keys.to_pylist() == ["k1", "long" * 40, "sub/k3"]
    assert made.starts.tolist() == [0, 2048, 1024]  # each member a header and a block
    assert made.firsts.tolist() == [0, 2, 3]
    assert made.extensions == {"json": 1, "npy": 2, "syn.json": 1}
    assert made.ignored == 1
    assert [tar.name for tar in made.tars] == ["a.tar", "b.tar"]


def test_the_index_may_lie_elsewhere(tmp_path: Path):
    made, _ = build_keys_index(tars(tmp_path / "tars"), out=tmp_path / "deep" / "index")
    assert not (tmp_path / "tars" / "__mmdata__").exists()
    assert made.path(1).samefile(tmp_path / "tars" / "b.tar")


def test_an_equal_index_is_left_and_another_is_replaced_when_asked(tmp_path: Path):
    folder = tars(tmp_path / "tars")
    build_keys_index(folder)
    assert len(build_keys_index(folder)[0]) == 3
    write_tar(folder / "c.tar", {"k4": {"npy": npy([4])}})
    with pytest.raises(DataError, match=r"members.json': is of other tars, or of other contents; .*--overwrite"):
        build_keys_index(folder)
    assert len(build_keys_index(folder, overwrite=True)[0]) == 4


def test_tars_that_cannot_be_indexed_are_refused(tmp_path: Path):
    folder = tars(tmp_path / "tars")
    write_tar(folder / "c.tar", {"k1": {"npy": npy([4])}})
    with pytest.raises(DataError, match=r"key 'k1' comes twice: in 'a.tar' and 'c.tar'; a row could have only one"):
        build_keys_index(folder)
    content = (folder / "b.tar").read_bytes()
    (folder / "c.tar").write_bytes(content[:1000])
    with pytest.raises(DataError, match=r"shard 'c.tar', byte \d+: .*cut"):
        build_keys_index(folder)
    with pytest.raises(ConfigError, match="a folder on this disk is needed here"):
        build_keys_index("https://host/tars")
    assert not list(folder.glob("__mmdata__/*"))


def test_the_command_says_what_there_is(tmp_path: Path):
    folder = tars(tmp_path / "tars")
    assert index(str(folder), "--members-only") == (
        0,
        "members: .json (1), .npy (2), .syn.json (1)\n"
        f"3 samples in 2 shards, 1 member ignored; index in {folder}\n"
        f"next: data.join: [{{shards: {folder}, name: NAME}}] and data.fields: {{x: join:NAME:MEMBER}}\n",
    )
    code, printed = index(str(folder), "--members-only", "--caption", "syn.json", "--overwrite")
    assert (code, printed) == (2, "error: --caption: 'syn.json': captions are in json:KEY or txt\n")
    code, printed = index(str(folder), "--members-only", "--caption", "syn.json:a", "--overwrite")
    assert (code, printed) == (
        2,
        "error: --caption syn.json:a: none of 3 samples has one: shard 'a.tar', sample 'k1': missing_field: no member "
        ".syn.json\n",
    )
    code, printed = index(str(folder), "--members-only", "--caption", "json:a,json:a", "--overwrite")
    assert (code, printed) == (2, "error: --caption: 'json:a' is named twice: name each member once\n")
    assert len(KeysIndex.read(folder, of="x")) == 3  # as before
    code, printed = index(str(folder), "--members-only", "--tokenizer", "clip")
    assert (code, "--members-only reads the tars of one folder, and does not go with" in printed) == (
        2,
        True,
    )


def test_an_index_of_tars_without_images_names_the_command(tmp_path: Path):
    folder = tars(tmp_path / "tars")
    code, printed = index(str(folder))
    assert code == 2
    assert "3 of 3 samples cannot be used (2 missing_caption, 1 bad_caption)" in printed
    instead = f"If they have no images, and belong to those of other tars: `mmdata index {folder} --members-only`"
    assert printed.endswith(f"or mend the shards. {instead}\n")


def test_a_second_writer_is_refused_and_harms_nothing(tmp_path: Path):
    folder = tmp_path / "tars"
    write_tar(folder / "a.tar", {f"k{number}": {"txt": f"caption {number}".encode()} for number in range(3000)})
    captions = parse_captions("txt", of="x")
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(build_keys_index, folder, captions_in=captions, overwrite=True) for _ in range(2)]
        failed = [one.exception() for one in both]
    assert failed.count(None) == 1
    assert any("another process is writing here" in str(error) for error in failed)
    made = KeysIndex.read(folder, of="x")
    assert made.captions_of("txt", of="x").to_pylist() == [[f"caption {number}"] for number in range(3000)]
    assert not list((folder / "__mmdata__").glob(".*.part"))


def verify(folder: Path) -> tuple[int, str]:
    done = run_program(
        [sys.executable, "-m", "mmdata", "verify", str(folder)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_each_member_has_a_hash(tmp_path: Path):
    made, _ = build_keys_index(tars(tmp_path / "tars"))
    hashes = made.hashes
    assert hashes is not None
    assert hashes.of(0) == {hash_member("json", json_of(1)), hash_member("npy", npy([1]))}
    assert hashes.of(2) == {hash_member("syn.json", json_of(3))}
    assert hash_member("json", json_of(3)) not in hashes.of(2)
    assert hashes.checksum() == made.hashes_checksum
    hashes.path.write_bytes(hashes.path.read_bytes()[:-8])
    with pytest.raises(
        DataError, match=r"damaged: 'members.hashes has 56 bytes, which are not those of 4 hashes'; make"
    ):
        KeysIndex.read(made.folder, of="x")


def test_verify_compares_joined_tars_with_their_index(tmp_path: Path):
    folder = tars(tmp_path / "tars")
    build_keys_index(folder)
    remedy = f"fetch it again, or run `mmdata index {folder} --members-only --overwrite`"
    assert verify(folder) == (0, "ok: 2 shards, 3 samples, 20,480 bytes, of tars without images (data.join)\n")
    write_tar(folder / "a.tar", {"k1": {"json": json_of(1), "npy": npy([7])}, "long" * 40: {"npy": npy([2])}})
    changed = f"shard 'a.tar': 1 member changed since they were indexed; the first is 'k1.npy'; {remedy}\n"
    assert verify(folder) == (1, f"{changed}1 problem in 1 shard of {folder}\n")
    write_tar(folder / "a.tar", {"k2": {"json": json_of(1), "npy": npy([1])}, "long" * 40: {"npy": npy([2])}})
    (folder / "b.tar").unlink()
    write_tar(folder / "c.tar", {"k9": {"npy": npy([7])}})
    assert verify(folder) == (
        1,
        f"shard 'a.tar': sample 'k2' at byte 0 is not there in the index; {remedy}\n"
        f"shard 'b.tar': no such file: '{folder / 'b.tar'}'\n"
        f"shard 'c.tar': is not in the index; {remedy}\n"
        f"3 problems in 3 shards of {folder}\n",
    )


def test_an_index_without_hashes_is_read_and_said_so(tmp_path: Path):
    folder = tars(tmp_path / "tars")
    build_keys_index(folder)
    assert index(str(folder), "--members-only", "--no-hashes", "--overwrite")[0] == 0
    made = KeysIndex.read(folder, of="x")
    assert (made.hashes, len(made)) == (None, 3)
    assert not list(folder.glob("__mmdata__/*.hashes"))
    assert verify(folder) == (
        0,
        "ok: 2 shards, 3 samples, 20,480 bytes, of tars without images (data.join)\nmembers were not compared: their "
        f"index has no hashes; `mmdata index {folder} --members-only --overwrite` makes them\n",
    )
    code, said = index(str(folder), "--no-hashes")
    assert (code, "--no-hashes goes with --members-only: images" in said) == (2, True)


def test_a_folder_of_joined_tars_is_named_where_images_are_needed(tmp_path: Path):
    folder = tars(tmp_path / "tars")
    build_keys_index(folder)
    with pytest.raises(DataError, match=r"no manifest.json: these are tars without images, .*: data.join: \[{shards: "):
        Index.open(folder)
