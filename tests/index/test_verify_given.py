"""`mmdata verify` on several folders, patterns and single tars: what has an index is compared with it."""

from __future__ import annotations

import numpy as np
import pytest

from mmdata.cli.data.verify import sort_given
from mmdata.index import Index, build_index
from tests.index.test_programs import program


@pytest.fixture
def folders(tmp_path, tar, photo):
    """Two folders with an index, of two tars each; the last byte of the first payload of a/1.tar is another one."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in (0, 1):
            members = [(f"{name}{number}.jpg", photo(20, 30, seed=number)), (f"{name}{number}.txt", b"a dog")]
            (tmp_path / name / f"{number}.tar").write_bytes(tar(members))
        build_index(tmp_path / name)
    place = Index.open(tmp_path / "a").take(np.array([1]), ["image_offset", "image_bytes"])
    data = bytearray((tmp_path / "a/1.tar").read_bytes())
    data[int(place["image_offset"][0] + place["image_bytes"][0]) - 1] ^= 1
    (tmp_path / "a/1.tar").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("given", [["{}/a", "{}/b"], ["{}/{{b,a}}"], ["{}/a/1.tar"], ["{}/a/{{0,1}}.tar", "{}/b"]])
def test_a_payload_that_changed_is_found_however_its_folder_is_named(folders, given):
    run = program("verify", *[one.format(folders) for one in given])
    assert run.returncode == 1
    assert "shard '1.tar': its SHA-256 is not the manifest's: the content changed" in run.stdout
    assert "no index" not in run.stdout


def test_one_tar_of_an_indexed_folder_is_compared_with_its_index_alone(folders):
    run = program("verify", folders / "a/0.tar")
    size = (folders / "a/0.tar").stat().st_size
    assert run.returncode == 0
    assert run.stdout == f"ok: 1 shard, 1 row, {size:,} bytes, compared with the index of {folders / 'a'}\n"


def test_tars_without_an_index_are_told_from_folders_with_one(folders, tar):
    (folders / "c").mkdir()
    (folders / "c/0.tar").write_bytes(tar([("0.txt", b"a dog")]))
    (folders / "a/new.tar").write_bytes(tar([("0.txt", b"a dog")]))
    names = [str(folders / name) for name in ("a/0.tar", "a/1.tar", "b", "b/0.tar", "c", "a/new.tar", "gone.tar")]
    given = sort_given(names)
    assert given.folders == {names[0][: -len("/0.tar")]: {"0.tar", "1.tar"}, names[2]: None}
    assert given.tars == names[4:]
