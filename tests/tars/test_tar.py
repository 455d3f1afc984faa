from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.errors import DataError
from mmdata.tars.tar import BLOCK, END, header, padding, read_members, split_name

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "folder/" + "x" * 180 + ".jpg"


def members_of(data: bytes) -> list[tuple[str, int, int]]:
    return [(m.name, m.offset, m.size) for m in read_members(io.BytesIO(data), name="toy.tar")]


def by_tarfile(data: bytes) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]


def block(name: bytes = b"a.jpg", *, size: bytes = b"00000000000\0", kind: bytes = b"0", magic: bytes = b"ustar\x0000"):
    """A header block with any fields and a right checksum."""
    raw = bytearray(BLOCK)
    raw[0 : len(name)] = name
    raw[124:136] = size
    raw[148:156] = b" " * 8
    raw[156:157] = kind
    raw[257:265] = magic
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def extended(kind: bytes, payload: bytes) -> bytes:
    return block(b"././ext", size=b"%011o\0" % len(payload), kind=kind) + payload + padding(len(payload))


def refuse(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        members_of(data)


GOOD = header("a.jpg", 3) + b"abc" + padding(3)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_reader_agrees_with_tarfile(tar, format):
    names = ["a.jpg", "sub/b.txt", "größe.png", "p" * 90 + "/" + "q" * 90 + ".jpg"]
    names += [LONG] if format != tarfile.USTAR_FORMAT else []
    data = tar([(name, b"x" * (i * 300)) for i, name in enumerate(names)], format=format)
    assert members_of(data) == by_tarfile(data)
    assert [name for name, _, _ in members_of(data)] == names


NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.integers(0, 3000)), max_size=6, unique_by=lambda pair: pair[0]),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_reader_agrees_with_tarfile_for_any_names_and_sizes(members, format):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, size in members:
            info = tarfile.TarInfo("d/" + name)
            info.size = size
            tar.addfile(info, io.BytesIO(b"\xff" * size))
    data = buffer.getvalue()
    assert members_of(data) == by_tarfile(data)
    assert [(name, size) for name, _, size in members_of(data)] == [("d/" + name, size) for name, size in members]


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program here")
@pytest.mark.parametrize("format", ["v7", "ustar", "oldgnu", "gnu", "posix"])
def test_reader_takes_what_the_tar_program_writes(tmp_path: Path, format):
    names = ["a.jpg", "sub/b.txt"] + ([LONG] if format in ("gnu", "oldgnu", "posix") else [])
    for i, name in enumerate(names):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(bytes(700 * i))
    made = tmp_path / "out.tar"
    program = subprocess.run(
        ["tar", f"--format={format}", "-cf", made, "-C", tmp_path / "in", "."], capture_output=True, text=True
    )
    if program.returncode:
        pytest.skip(f"this tar has no --format={format}")
    data = made.read_bytes()
    assert members_of(data) == by_tarfile(data) or format == "v7"
    assert sorted((name, size) for name, _, size in members_of(data)) == sorted(
        ("./" + name, 700 * i) for i, name in enumerate(names)
    )


def test_reader_passes_over_directories_and_global_comments():
    data = extended(b"g", b"24 comment=a git commit\n") + block(b"d/", kind=b"5") + block(b"old/", kind=b"\0")
    data += GOOD + END
    assert members_of(data) == [("a.jpg", 5 * BLOCK, 3)]


def test_reader_writes_bytes_that_are_not_utf8_as_escapes():
    assert members_of(block(b"caf\xe9.jpg") + END) == [("caf\\xe9.jpg", BLOCK, 0)]


def test_reader_takes_signed_checksums():
    raw = bytearray(block(b"caf\xe9.jpg"))
    raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + 8 * 32 + sum(raw[156:]) - 256)
    assert members_of(bytes(raw) + END) == [("caf\\xe9.jpg", BLOCK, 0)]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_no_flipped_bit_of_a_header_loses_a_member(tar, format):
    names = ["0001.jpg", "0001.txt"] + ([LONG] if format != tarfile.USTAR_FORMAT else ["0002.jpg"])
    data = tar([(name, b"payload") for name in names], format=format)[: -(-len(END) // 10240) * 10240 or None]
    whole = members_of(data)
    offsets = {offset - BLOCK for _, offset, _ in whole} | {m.start for m in read_members(io.BytesIO(data), name="t")}
    caught = kept = 0
    for offset in sorted(offsets):
        for bit in range(8 * BLOCK):
            flipped = bytearray(data)
            flipped[offset + bit // 8] ^= 1 << bit % 8
            try:
                assert members_of(bytes(flipped)) == whole
                kept += 1
            except DataError:
                caught += 1
    # Only fill characters of the checksum field itself may change without a word: they carry nothing.
    assert caught + kept == len(offsets) * 8 * BLOCK
    assert kept <= 8 * len(offsets)


def test_no_flipped_bit_of_the_end_blocks_goes_unseen(tar):
    data = GOOD + END + bytes(8192)
    for position in range(len(GOOD), len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(DataError, match=r"shard 'toy\.tar', byte \d+: "):
            members_of(bytes(flipped))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_cut_anywhere_before_the_end_is_an_error(tar, format):
    name = LONG if format != tarfile.USTAR_FORMAT else "c.jpg"
    data = tar([("a.jpg", b"x" * 1000), ("a.txt", b"y"), (name, b"z" * 513)], format=format)
    end = max(offset + size + len(padding(size)) for _, offset, size in members_of(data)) + len(END)
    for cut in [*range(0, end, BLOCK), *range(1, end, 97)]:
        with pytest.raises(DataError, match=r"shard 'toy\.tar', byte \d+: .*cut"):
            members_of(data[:cut])
    assert members_of(data[:end]) == members_of(data)


def test_a_cut_names_the_last_good_sample_and_the_remedy(tar):
    data = tar([("0001.jpg", b"x" * 600), ("0001.txt", b"y"), ("0002.jpg", b"z" * 2000)])
    refuse(
        data[: 3072 + 1000],
        "shard 'toy.tar', byte 2560: a member of 2000 bytes, and the file ends after 1000: cut; the last sample that "
        "is surely good ends at byte 2560: fetch or convert the shard again, or cut the file there",
    )


def test_cutting_as_the_remedy_says_gives_a_good_shard(tar):
    data = tar([("0001.jpg", b"x" * 600), ("0001.txt", b"y"), ("0002.jpg", b"z" * 2000)])[:4000]
    with pytest.raises(DataError) as caught:
        members_of(data)
    cut = int(re.search(r"surely good ends at byte (\d+)", str(caught.value))[1])
    assert [name for name, _, _ in members_of(data[:cut] + bytes(1024))] == ["0001.jpg", "0001.txt"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (b"1", "a hard link"),
        (b"2", "a symbolic link"),
        (b"3", "a character device"),
        (b"4", "a block device"),
        (b"6", "a FIFO"),
        (b"S", "a sparse file"),
        (b"M", "a continued file"),
        (b"V", "of unknown type b'V'"),
    ],
)
def test_only_regular_files_are_taken(kind, what):
    refuse(GOOD + block(b"b.jpg", kind=kind) + END, f"byte 1024: member 'b.jpg' is {what}")


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (b"\xff" * 11 + b"\xfe", "a negative size"),
        (b"\x80" + b"\x00" * 2 + b"\xff" * 9, "a member of 4722366482869645213695 bytes, and the file ends"),
        (b"77777777777\0", "a member of 8589934591 bytes, and the file ends after 1024: cut"),
        (b"-0000000001\0", "size field b'-0000000001\\x00' is no number"),
        (b"0000000001\x009", "size field b'0000000001\\x009' is no number"),
        (bytes(12), "is no number"),
        (b"\x81" + bytes(11), "is no number"),
    ],
)
def test_sizes_that_cannot_be_are_refused(size, what):
    refuse(block(size=size) + END, what)


def test_a_size_in_base_256_is_taken():
    assert members_of(block(size=b"\x80" + bytes(10) + b"\x03") + b"abc" + padding(3) + END) == [("a.jpg", 512, 3)]


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (extended(b"x", b"11 size=10\n"), "a pax record that overrides the size: b'10'"),
        (extended(b"g", b"11 size=10\n"), "a pax record that overrides the size"),
        (extended(b"x", b"22 GNU.sparse.major=1\n"), "a sparse file (pax)"),
        (extended(b"g", b"14 path=b.jpg\n"), "a global pax header that names a member"),
        (extended(b"x", b"99 path=b.jpg\n"), "pax records do not parse"),
        (extended(b"x", b"path=b.jpg\n"), "pax records do not parse"),
        (extended(b"x", b"14 path=b.jpg\n\0\0"), "pax records do not parse"),
        (extended(b"x", b"14 path=b\0jpg\n"), "a name that is empty or holds a NUL"),
        (extended(b"L", b"\0"), "a name that is empty or holds a NUL"),
        (extended(b"L", b"b.jpg\0") * 2, "two extended headers of one kind"),
        (
            extended(b"L", b"b.jpg\0") + extended(b"x", b"14 path=c.jpg\n"),
            "two names for one member: ['b.jpg', 'c.jpg']",
        ),
        (extended(b"L", bytes(2**20 + 1)), "an extended header of 1048577 bytes"),
        (block(b"d/", kind=b"5", size=b"00000000003\0") + b"abc" + padding(3), "directory 'd/' with a payload of 3"),
        (block(magic=b"tar\0\0\0\0\0"), "not a tar header: magic"),
        (
            b"<html>" + bytes(506),
            "is an HTML page, not a tar: a page of login or of an error was saved in its place; op",
        ),
        (b"\n<!DOCTYPE html>" + bytes(497), "is an HTML page, not a tar"),
        (b'{"error": "denied"}' + bytes(493), "is text, not a tar: a server's error was saved in its place; read it"),
        (b"PK\x03\x04" + bytes(508), "is a ZIP archive or a Parquet table, not a tar; use `mmdata convert`"),
        (b"PAR1" + bytes(508), "or a Parquet table, not a tar; use `mmdata convert`"),
        (
            b"version https://git-lfs.github.com/spec/v1" + bytes(470),
            "is a pointer of Git LFS, not a tar; fetch the file",
        ),
        (b"xml" + bytes(509), "header checksum does not match: damaged, or not a tar"),
        (block(b""), "a name that is empty"),
    ],
)
def test_headers_that_readers_disagree_on_are_refused(before, what):
    refuse(before + GOOD + END, what)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (GOOD + extended(b"L", b"b.jpg\0") + END, "byte 1024: an extended header with no member behind it"),
        (GOOD + END + block(b"b.jpg") + END, "byte 2048: data behind the end blocks, which other readers never see"),
        (GOOD + bytes(BLOCK), "byte 1024: a lone zero block where two must end the tar"),
        (GOOD + bytes(BLOCK) + GOOD + END, "byte 1024: a lone zero block"),
        (GOOD + GOOD + END, "byte 1024: member 'a.jpg' stands already at byte 0"),
        (b"\x1f\x8b\x08\0" + bytes(600), "shard 'toy.tar': compressed, which has no random access; unpack it first"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "is a pointer of Git LFS"),
        (b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>", "is text, not a tar: a server's error"),
    ],
)
def test_what_other_readers_skip_or_end_on_is_refused(data, what):
    refuse(data, what)


@pytest.mark.parametrize("name", ["bzh0.jpg", "BZh9.jpg", "par1/0.jpg", "PAR0.jpg"])
def test_a_first_member_whose_name_resembles_another_format_is_read(tar, name):
    assert [member[0] for member in members_of(tar([(name, b"x")]))] == [name]


def test_an_empty_tar_has_no_members(tar):
    assert members_of(END) == []
    assert members_of(tar([])) == []


def test_written_headers_are_read_by_tarfile_with_nothing_of_this_machine():
    data = header("größe/0001.jpg", 5) + b"12345" + padding(5) + END
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        (member,) = tar.getmembers()
        assert tar.extractfile(member).read() == b"12345"
    assert (member.name, member.mtime, member.mode) == ("größe/0001.jpg", 0, 0o644)
    assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")


def test_a_name_too_long_for_ustar_is_refused():
    with pytest.raises(ValueError, match="name is too long"):
        header("x" * 101, 1)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("a.b/0001.Seg.PNG", ("a.b/0001", "seg.png")),
        ("./0001.txt", ("./0001", "txt")),
        ("README", None),
        ("dir/.hidden", None),
        ("0001.", None),
        ("__meta__/x.json", None),
        ("__index__", None),
    ],
)
def test_split_name_cuts_at_the_first_dot_of_the_last_part(name, parts):
    assert split_name(name) == parts


@settings(max_examples=200, deadline=None)
@given(NAMES, st.integers(0, 8**11 - 1))
def test_header_is_that_of_tarfile(name, size):
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    try:
        expected = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError:
        with pytest.raises(ValueError, match=r"(name|prefix) is too long"):
            header(name, size)
    else:
        assert header(name, size) == expected
