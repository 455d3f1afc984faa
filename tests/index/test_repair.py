"""What `mmdata repair` does with each kind of damage, and what it says of it."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mmdata.commands.repair import check_decode
from mmdata.errors import ConfigError, DataError
from mmdata.index import build_index, verify
from mmdata.repair import Dropped, Report, repair_tars
from mmdata.tars.tar import END, header, padding
from tests.index.test_programs import program

NAMES = ("jpg", "txt")


@pytest.fixture
def members(photo) -> list[tuple[str, bytes]]:
    """Four samples of a photo and a caption."""
    made = []
    for i in range(4):
        made += [(f"{i}.jpg", photo(20, 30, seed=i)), (f"{i}.txt", b"a dog %d" % i)]
    return made


def saved(folder: Path, name: str = "x.tar") -> dict[str, bytes]:
    with tarfile.open(folder / "out" / name) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar}


def repair(folder: Path, data: bytes | None = None, **settings) -> Report:
    if data is not None:
        (folder / "x.tar").write_bytes(data)
    report = repair_tars([folder / "x.tar"], folder / "out", **{"check_image": check_decode, **settings})
    assert report.balance
    return report


def ledger(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "out/__mmdata__/repaired.jsonl").read_text().splitlines()]
    assert list(lines[0]) == ["run"]
    assert list(lines[-1]) == ["accounts"]
    return lines[1:-1]


def place(data: bytes, name: str) -> int:
    return data.index(name.encode() + b"\0")


def test_a_cut_in_a_member_drops_its_sample(tmp_path, tar, members):
    data = tar(members)
    at = place(data, "2.jpg")
    report = repair(tmp_path, data[: at + 700])
    assert saved(tmp_path) == dict(members[:4])
    assert report.samples.dropped == {Dropped.NO_IMAGE: 1}
    assert ledger(tmp_path) == [
        {
            "shard": "x.tar",
            "offset": at,
            "member": "2.jpg",
            "reason": "cut",
            "detail": f"a member of {len(members[4][1])} bytes, and the file ends after 188",
        }
        | {"detail": ledger(tmp_path)[0]["detail"]},
        {"shard": "x.tar", "note": "the end blocks are missing: members behind its end may be, too"},
        {"shard": "x.tar", "offset": at, "key": "2", "reason": "no_image", "detail": "no member is left"},
    ]


def test_a_cut_at_a_boundary_keeps_all_and_gets_an_end(tmp_path, tar, members):
    data = tar(members[:4])
    end = place(data, "1.txt") + 1024
    report = repair(tmp_path, data[:end])
    assert (report.copied, report.samples.kept, report.samples.dropped.total()) == (0, 2, 0)
    assert (tmp_path / "out/x.tar").read_bytes() == data[:end] + END


def test_a_damaged_header_loses_only_its_sample(tmp_path, tar, members):
    data = bytearray(tar(members))
    data[place(data, "1.txt")] ^= 1
    report = repair(tmp_path, bytes(data))
    assert saved(tmp_path) == dict(members[:2] + members[4:])
    assert report.samples.dropped == {Dropped.NO_TEXT: 1}
    assert report.members.dropped == {Dropped.OF_DROPPED_SAMPLE: 1}
    assert ledger(tmp_path)[0]["skipped"] == "no header"


def test_zeros_over_a_header_are_not_the_end(tmp_path, tar, members):
    data = tar(members)
    at = place(data, "1.jpg")
    report = repair(tmp_path, data[:at] + bytes(1024) + data[at + 1024 :])
    assert saved(tmp_path) == dict(members[:2] + members[4:])
    assert ledger(tmp_path)[0]["skipped"] == "zeros, and a header follows: damage, or a tar behind the end of another"
    assert report.bytes_skipped >= 1024


def test_concatenated_tars_become_one(tmp_path, tar, members):
    repair(tmp_path, tar(members[:4]) + tar(members[4:]))
    assert saved(tmp_path) == dict(members)


def test_a_sample_that_comes_again_is_kept_once(tmp_path, tar, members):
    report = repair(tmp_path, tar(members) + tar([*members[:2], ("0.json", b"{}")]))
    assert saved(tmp_path) == dict(members)
    assert report.members.dropped == {Dropped.TWICE: 2, Dropped.KEY_COMES_BACK: 1}
    details = [line["detail"] for line in ledger(tmp_path) if "member" in line]
    assert details == ["its sample has a .jpg", "its sample has a .txt", "sample '0' is whole without it"]


def test_members_that_stand_apart_are_put_together(tmp_path, tar, members):
    apart = [one for one in members if one[0].endswith("jpg")] + [one for one in members if one[0].endswith("txt")]
    repair(tmp_path, tar(apart))
    assert list(saved(tmp_path).items()) == members


def test_a_name_twice_outside_of_samples_is_kept_once(tmp_path, tar, members):
    report = repair(tmp_path, tar([("README", b"a"), *members, ("README", b"b")]))
    assert saved(tmp_path) == {"README": b"a", **dict(members)}
    assert ledger(tmp_path)[0]["detail"] == "the tar has a member of this name"
    assert report.samples.found == 4


def test_a_sample_in_two_tars_is_joined(tmp_path, tar, members):
    (tmp_path / "a.tar").write_bytes(tar(members[:3]))
    (tmp_path / "b.tar").write_bytes(tar(members[3:]))
    report = repair_tars([str(tmp_path / "{a,b}.tar")], tmp_path / "out", check_image=check_decode)
    assert saved(tmp_path, "a.tar") == dict(members[:4])
    assert saved(tmp_path, "b.tar") == dict(members[4:])
    assert (report.joined, report.samples.found, report.samples.kept, report.balance) == (1, 4, 4, True)


def test_links_are_dropped_and_what_follows_is_kept(tmp_path, members):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("9.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    report = repair(tmp_path)
    assert saved(tmp_path) == dict(members)
    assert report.members.dropped == {Dropped.NOT_A_FILE: 1}


def test_a_header_that_contradicts_itself_is_refused(tmp_path, tar, members):
    record = b"11 size=10\n"
    info = bytearray(header("x", len(record)))
    info[156:157] = b"x"
    info[148:156] = b" " * 8
    info[148:156] = b"%06o\0 " % sum(info)
    before = bytes(info) + record + padding(len(record))
    report = repair(tmp_path, before + header("9.jpg", 3) + b"abc" + padding(3) + tar(members))
    assert saved(tmp_path) == dict(members)
    assert report.members.dropped == {Dropped.REFUSED: 1}


def test_a_member_that_lost_a_block_does_not_swallow_the_next(tmp_path, tar, members):
    data = tar(members)
    at = place(data, "1.jpg") + 512
    report = repair(tmp_path, data[:at] + data[at + 512 :])
    assert saved(tmp_path) == dict(members[:2] + members[4:])
    assert report.members.dropped[Dropped.CUT] == 1
    assert re.fullmatch(r"the header at byte \d+ stands in its payload", str(ledger(tmp_path)[0]["detail"]))


def test_a_tar_in_a_tar_is_a_payload(tmp_path, tar, members):
    within = tar(members[:4])
    assert repair(tmp_path, tar([*members[4:], ("3.bin", within)])).copied == 1
    assert saved(tmp_path)["3.bin"] == within


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_member_whose_long_name_is_damaged_gets_no_other(tmp_path, tar, members, format):
    long = "n" * 120
    data = bytearray(
        tar([*members[:2], (f"{long}.jpg", members[0][1]), (f"{long}.txt", b"t"), *members[2:]], format=format)
    )
    data[data.index(b"n" * 100) - 512 - (11 if format == tarfile.PAX_FORMAT else 0) + 20] ^= 1
    report = repair(tmp_path, bytes(data))
    assert saved(tmp_path).items() >= dict(members).items()
    assert all(name in dict(members) for name in saved(tmp_path))
    assert report.members.dropped[Dropped.NAME_LOST] == 1
    assert "its header holds the first 100 bytes of a name" in str(ledger(tmp_path))


def test_a_name_in_pax_records_that_are_damaged_is_lost(tmp_path, tar, members):
    data = bytearray(tar([("ä9.jpg", b"x"), *members], format=tarfile.PAX_FORMAT))
    data[20] ^= 1
    repair(tmp_path, bytes(data))
    assert saved(tmp_path) == dict(members)
    assert "the header with its name is damaged" in str(ledger(tmp_path))


def test_a_damaged_image_drops_its_sample_and_nothing_else(tmp_path, tar, members):
    cut = members[2][1][: len(members[2][1]) - 40]
    data = tar([*members[:2], ("1.jpg", cut), *members[3:], ("9.jpg", members[0][1])])
    report = repair(tmp_path, data)
    assert saved(tmp_path) == dict([*members[:2], *members[4:], ("9.jpg", members[0][1])])  # 9 never had a caption
    assert report.members.dropped == {Dropped.DAMAGED_IMAGE: 1, Dropped.OF_DROPPED_SAMPLE: 1}
    assert str(ledger(tmp_path)[0]["detail"]).startswith("corrupt_image: JPEG does not decode")
    (tmp_path / "again").mkdir()
    assert repair(tmp_path / "again", data, check_image=None).copied == 1


def test_the_header_check_decodes_nothing(tmp_path, tar, members):
    cut = members[2][1][: len(members[2][1]) - 20]
    data = tar([*members[:2], ("1.jpg", cut), *members[3:4], ("7.jpg", b"no image"), ("7.txt", b"t")])
    (tmp_path / "x.tar").write_bytes(data)
    report = repair_tars([tmp_path / "x.tar"], tmp_path / "out")
    assert report.members.dropped == {Dropped.DAMAGED_IMAGE: 1, Dropped.OF_DROPPED_SAMPLE: 1}
    assert saved(tmp_path)["1.jpg"] == cut


def test_a_text_of_zeros_is_damage(tmp_path, tar, members):
    report = repair(tmp_path, tar([*members[:2], members[2], ("1.txt", bytes(7))]))
    assert report.members.dropped == {Dropped.ONLY_ZEROS: 1, Dropped.OF_DROPPED_SAMPLE: 1}
    assert ledger(tmp_path)[0]["detail"] == "7 bytes, all of them zero"


def test_an_image_that_cannot_be_decoded_here_is_kept_and_counted(tmp_path, tar, members):
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    bomb = bytearray(members[0][1])
    at = bomb.index(b"\xff\xc0") + 5
    bomb[at : at + 4] = b"\xfd\xe8\xfd\xe8"
    report = repair(tmp_path, tar([*members, ("8.jpg", bytes(bomb)), ("8.txt", b"t"), ("9.svg", svg), ("9.txt", b"t")]))
    assert (report.copied, report.unchecked) == (1, 1)


def test_hashes_of_the_index_are_compared(tmp_path, tar, members):
    (tmp_path / "x.tar").write_bytes(tar(members))
    build_index(tmp_path)
    data = bytearray((tmp_path / "x.tar").read_bytes())
    data[place(data, "1.txt") + 512] ^= 4
    data[place(data, "2.jpg") + 512 + 12] ^= 1  # in the JFIF header: decodes to the same pixels
    report = repair(tmp_path, bytes(data))
    assert saved(tmp_path) == dict(members[:2] + members[6:])
    assert report.members.dropped == {Dropped.CHANGED: 2, Dropped.OF_DROPPED_SAMPLE: 2}
    details = [line["detail"] for line in ledger(tmp_path) if line.get("reason") == "changed"]
    assert details == ["the captions are not those that were indexed", "the image is not the one that was indexed"]


def test_a_damaged_index_is_told_and_not_used(tmp_path, tar, members):
    (tmp_path / "x.tar").write_bytes(tar(members))
    build_index(tmp_path)
    path = tmp_path / "__mmdata__/x.index.arrow"
    path.write_bytes(path.read_bytes()[:-9])
    (note,) = repair(tmp_path).notes
    assert note.startswith("shard 'x.tar': its index is damaged, and was not compared: ")


def test_keep_incomplete_keeps_features(tmp_path, tar):
    data = bytearray(tar([(f"{i}.npy", b"%d" % i) for i in range(4)]))
    data[1024] ^= 1
    with pytest.raises(DataError, match=r"nothing of 1 tar\(s\) can be saved, such as '.*x\.tar'; fetch them again"):
        repair(tmp_path, bytes(data))
    assert not (tmp_path / "out/.mmdata-repair").exists()
    repair(tmp_path, keep_incomplete=True)
    assert list(saved(tmp_path)) == ["0.npy", "2.npy", "3.npy"]


def test_a_partial_sample_is_counted(tmp_path, tar, members):
    data = bytearray(tar([*members[:2], ("0.json", b"{}"), *members[2:]]))
    data[place(data, "0.json")] ^= 1
    assert repair(tmp_path, bytes(data)).partial == 0  # nobody knows whose header it was
    (tmp_path / "b").mkdir()
    cut = tar([*members[:2], ("0.npy", bytes(5000))])[:4000]
    assert repair(tmp_path / "b", cut).partial == 1


@pytest.mark.parametrize("cut", [0, 200, 20])
def test_a_gzipped_tar_is_unpacked_up_to_its_damage(tmp_path, tar, members, cut):
    packed = gzip.compress(tar(members), mtime=0)
    (tmp_path / "x.tar.gz").write_bytes(packed[: len(packed) - cut])
    report = repair_tars([tmp_path], tmp_path / "out", check_image=check_decode)
    assert report.written == ["x.tar"]
    assert saved(tmp_path).items() <= dict(members).items()
    if cut:
        assert report.notes[0] == f"shard 'x.tar.gz': gzip: the compressed file is cut, after {len(packed) - cut} bytes"
    else:
        assert (report.notes, (tmp_path / "out/x.tar").read_bytes()) == ([], tar(members))


def test_a_flipped_byte_and_a_tail_of_a_gzip_are_told(tmp_path, tar, members):
    packed = bytearray(gzip.compress(tar(members), mtime=0))
    (tmp_path / "tail.tgz").write_bytes(packed + b"tail")
    packed[-6] ^= 1  # in the checksum
    (tmp_path / "x.tar.gz").write_bytes(packed)
    first, second = repair_tars([tmp_path], tmp_path / "out").notes
    assert first == "shard 'tail.tgz': gzip: other data follows its end, and was not read"
    assert second == (
        f"shard 'x.tar.gz': gzip: damaged at byte {len(packed) - 5} of the compressed file (Error -3 while "
        "decompressing data: incorrect data check); what follows cannot be unpacked"
    )
    assert saved(tmp_path) == saved(tmp_path, "tail.tar") == dict(members)


# The folder


def test_other_folders_and_tars_are_refused(tmp_path, tar, members):
    (tmp_path / "x.tar").write_bytes(tar(members))
    with pytest.raises(DataError, match="the folder of the damaged tars, which are only read; choose another one"):
        repair_tars([tmp_path / "x.tar"], tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_bytes(b"1")
    with pytest.raises(DataError, match=r"holds 1 file\(s\) that are not a repair's \(mine\); nothing is overwritten"):
        repair(tmp_path)
    assert os.listdir(tmp_path / "out") == ["mine"]
    (tmp_path / "out/mine").unlink()
    repair(tmp_path)
    before = (tmp_path / "out/x.tar").stat()
    assert repair(tmp_path).repeated
    assert (tmp_path / "out/x.tar").stat() == before
    with pytest.raises(DataError, match="holds another repair, of other tars or settings; choose an empty folder"):
        repair(tmp_path, check="none")
    (tmp_path / "out/__mmdata__/repaired.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"repaired\.jsonl': not the ledger of a repair"):
        repair(tmp_path)


def test_sources_that_are_not_there_are_refused(tmp_path, tar, members):
    (tmp_path / "x.tar").write_bytes(tar(members))
    (tmp_path / "x.tgz").write_bytes(gzip.compress(tar(members)))
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo.tar")
    for given, error, message in (
        (["none.tar"], DataError, "none.tar': no such file or folder"),
        (["empty"], DataError, "empty': no .tar in it"),
        (["x.tar", "x.tar"], DataError, "x.tar': named twice; name each tar once"),
        (["x.tar", "x.tgz"], DataError, "both would be written as 'x.tar'; repair one of them into another folder"),
        (["fifo.tar"], DataError, "is a FIFO, and only regular files are read"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            repair_tars([tmp_path / name for name in given], tmp_path / "out")
    with pytest.raises(ConfigError, match="only tars on this machine are read; fetch them first"):
        repair_tars(["https://host/x.tar"], tmp_path / "out")
    with pytest.raises(ConfigError, match="only tars on this machine are read"):
        repair_tars(["pipe:cat x.tar"], tmp_path / "out")


KILLED = """
import os, signal, sys
from pathlib import Path
from mmdata.repair import output, repair_tars
left = [int(sys.argv[2])]
def killing(call):
    def counted(*given):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given)
    return counted
os.rename, os.fsync = killing(os.rename), killing(os.fsync)
repair_tars([sys.argv[1]], sys.argv[1] + "/out")
"""


def test_a_kill_at_any_moment_leaves_whole_tars_and_the_rerun_finishes(tmp_path, tar, members):
    for name, part in (("a", members[:4]), ("b", members[4:])):
        (tmp_path / f"{name}.tar").write_bytes(tar(part)[:-9000] if name == "a" else tar(part))
    repair_tars([tmp_path], tmp_path / "undisturbed")
    expected = {p.name: p.read_bytes() for p in (tmp_path / "undisturbed").rglob("*") if p.is_file()}
    for moment in range(20):
        out = tmp_path / "out"
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(moment)])
        for path in out.glob("*.tar"):
            assert path.read_bytes() == expected[path.name]
        repair_tars([tmp_path], out)
        assert {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()} == expected
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert done.returncode == 0
    assert moment > 6


# The command


def test_repair_ends_with_its_accounts_and_the_index_can_be_made(tmp_path, tar, members):
    data = bytearray(tar(members))
    data[place(data, "1.txt")] ^= 1
    (tmp_path / "x.tar").write_bytes(data)
    (tmp_path / "y.tar").write_bytes(b"<html>" + bytes(600))
    out = tmp_path / "out"
    run = program("repair", tmp_path, "--out", out)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [
        "members: 7 found = 6 kept + 1 dropped (1 of_dropped_sample)",
        "samples: 4 found = 3 kept + 1 dropped (1 no_text)",
        "skipped: 1,630 bytes that belong to no member",
        "note: shard 'y.tar': the end blocks are missing: members behind its end may be, too",
        "empty: 1 tars of which nothing is left are not written: y.tar",
        "tars: 2 read, 0 of them without damage and copied byte for byte",
        f"1 tar in {out}; next: mmdata index {out}",
    ]
    assert build_index(out).accounts["indexed"] == 3
    assert verify(out) == []
    assert "repaired before" in program("repair", tmp_path, "--out", out).stdout


# Verify without an index


def test_verify_says_what_is_wrong_in_each_tar_and_goes_on(tmp_path, tar, members):
    data = tar(members)
    flipped = bytearray(data)
    flipped[place(data, "1.txt")] ^= 1
    for name, content in {
        "a-cut.tar": data[: place(data, "2.jpg") + 700],
        "b-flipped.tar": bytes(flipped),
        "c-packed.tar.gz": gzip.compress(data),
        "d-joined.tar": data + data,
        "e-no-caption.tar": tar([*members, ("9.jpg", members[0][1])]),
        "f-good.tar": data,
        "g-split.tar": tar([("7.jpg", members[0][1])]),
        "h-split.tar": tar([("7.txt", b"a dog")]),
        "i-page.tar": b"<html>" + bytes(600),
    }.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "z.tar")
    run = program("verify", tmp_path)
    assert run.returncode == 1
    *lines, closing = run.stdout.splitlines()
    told = [re.match(r"shard '(.)\S*': (.*)", line).groups() for line in lines]
    assert [name for name, _ in told] == ["a", "b", "c", "d", "e", "g", "h", "h", "i", "z"]
    by_name = dict(told)
    assert re.match(r"byte \d+: a member of \d+ bytes, and the file ends after 188: cut; .*: fetch", by_name["a"])
    assert re.match(r"byte \d+: header checksum does not match: damaged, or not a tar; .*: fetch", by_name["b"])
    assert by_name["c"] == "gzip-compressed, which has no random access; `gunzip` it first"
    assert re.match(r"byte \d+: data behind the end blocks, which other readers never see", by_name["d"])
    assert re.match(r"byte \d+: sample '9' cannot be used: missing_caption", by_name["e"])
    assert "sample '7' ends shard 'g-split.tar' and starts shard 'h-split.tar': split over two" in str(told)
    assert by_name["i"].startswith("is an HTML page, not a tar")
    assert by_name["z"].endswith(
        "is a FIFO, and only regular files are read; it was not opened; write what comes out of it to a file first"
    )
    assert closing == (
        f"10 problems in 9 of 10 shards; next: mmdata repair {tmp_path} --out FOLDER    # saves what can be saved"
    )
    good = program("verify", tmp_path / "f-good.tar")
    assert (good.returncode, good.stdout) == (
        0,
        f"ok: 1 shard, 4 samples, {len(data):,} bytes; no index, so payloads were not compared with hashes\n",
    )


def test_verify_of_an_index_without_its_manifest_is_an_error(shards):
    (shards / "__mmdata__/manifest.json").unlink()
    run = program("verify", shards)
    assert (run.returncode, run.stdout) == (2, "")
    assert "no manifest.json; `mmdata index" in run.stderr


@pytest.mark.parametrize("zeros", [1 << 16, 3 << 16, 1000])
def test_gzip_members_behind_zeros_are_read_however_many_these_are(tmp_path, tar, members, zeros):
    data = tar(members)
    cut = place(data, "2.jpg")
    first, second = gzip.compress(data[:cut]), gzip.compress(data[cut:])
    fill = -(len(first) + zeros) % (1 << 16)  # the zeros end with a chunk of the reader
    (tmp_path / "x.tar.gz").write_bytes(first + bytes(zeros + fill) + second)
    report = repair_tars([tmp_path / "x.tar.gz"], tmp_path / "out")
    assert (report.members.found, report.notes) == (8, [])
    assert saved(tmp_path) == dict(members)


def test_junk_behind_the_zeros_of_gzip_is_told(tmp_path, tar, members):
    packed = gzip.compress(tar(members))
    (tmp_path / "x.tar.gz").write_bytes(packed + bytes(-len(packed) % (1 << 16) + (1 << 16)) + b"JUNK")
    report = repair_tars([tmp_path / "x.tar.gz"], tmp_path / "out")
    assert report.notes == ["shard 'x.tar.gz': gzip: other data follows its end, and was not read"]
    assert saved(tmp_path) == dict(members)


@pytest.mark.parametrize(
    ("ends", "begins", "reason", "kept"),
    [
        (["3.cls"], ["3.jpg", "3.txt"], "key_comes_back", ["3.jpg", "3.txt"]),
        (["3.jpg", "3.txt"], ["3.txt"], "twice", ["3.jpg", "3.txt"]),
        (["3.jpg", "3.txt"], ["3.cls"], "key_comes_back", ["3.jpg", "3.txt"]),
    ],
)
def test_a_sample_in_two_tars_of_which_one_part_is_whole_is_that_part(
    tmp_path, tar, members, ends, begins, reason, kept
):
    def parts(names):
        return [(name, members[6][1] if name.endswith("jpg") else b"1") for name in names]

    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tar").write_bytes(tar([*members[:2], *parts(ends)]))
    (tmp_path / "in/b.tar").write_bytes(tar([*parts(begins), *members[2:4]]))
    report = repair_tars([tmp_path / "in"], tmp_path / "out", check_image=check_decode)
    assert report.balance
    assert (report.joined, report.members.dropped) == (0, {Dropped(reason): 1})
    assert [*saved(tmp_path, "a.tar"), *saved(tmp_path, "b.tar")] == ["0.jpg", "0.txt", *kept, "1.jpg", "1.txt"]
    build_index(tmp_path / "out")
    assert verify(tmp_path / "out") == []


def test_a_whole_part_whose_image_is_damaged_takes_the_other_tars_members(tmp_path, tar, members):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tar").write_bytes(tar([*members[:2], ("3.jpg", b"no image"), ("3.txt", b"a dog")]))
    (tmp_path / "in/b.tar").write_bytes(tar([("3.jpg", members[6][1]), *members[2:4]]))
    report = repair_tars([tmp_path / "in"], tmp_path / "out", check_image=check_decode)
    assert report.balance
    assert saved(tmp_path, "a.tar") == {**dict(members[:2]), "3.jpg": members[6][1], "3.txt": b"a dog"}


def test_a_repair_of_which_a_tar_is_gone_is_no_repair(tmp_path, tar, members):
    repair(tmp_path, tar(members))
    (tmp_path / "out/x.tar").unlink()
    with pytest.raises(DataError, match=r"1 of its 1 repaired tars are gone, such as 'x\.tar'; put them back, or rem"):
        repair(tmp_path)


@pytest.mark.parametrize("name", ["repaired.jsonl", "unfinished.jsonl", ".mmdata-repair", "__mmdata__", "x"])
def test_a_tar_whose_name_is_not_a_tars_is_refused(tmp_path, tar, members, name):
    (tmp_path / name).write_bytes(tar(members))
    with pytest.raises(DataError, match=r"its name does not end in \.tar, \.tar\.gz, \.tgz, .* rename it, such as to"):
        repair_tars([tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out").exists()
