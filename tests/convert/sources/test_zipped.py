"""Archives of images, read in place: they give what the folders that they unpack to give, or say why not."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.convert import convert_part
from mmdata.convert.preview import preview
from mmdata.convert.row.examine import Examiner
from mmdata.convert.sources.open import open_source
from mmdata.convert.units.engines import local, threads
from mmdata.errors import DataError
from tests.convert.conftest import content, left_out, shards, tolerant

Photo = Callable[..., bytes]


def images(folder: Path, photo: Photo, names: str = "abcdef") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        (folder / f"{name}.jpg").write_bytes(photo(20, 30, seed=seed))
    return [f"{name}.jpg" for name in names]


def with_captions(root: Path, photo: Photo) -> dict[str, Any]:
    for name in [*images(root / "photos", photo), "README.md"]:
        (root / "photos" / name).with_suffix(".txt").write_text(f"a photo, {name}")
    shutil.copy(root / "photos/a.jpg", root / "photos/z.jpg")
    (root / "photos/z.txt").write_text("the first one again")
    (root / "__MACOSX").mkdir()
    (root / "__MACOSX/._a.jpg").write_bytes(b"what macOS adds")
    return {}


def class_folders(root: Path, photo: Photo) -> dict[str, Any]:
    images(root / "flowers/daisy", photo, "ab")
    images(root / "flowers/rose", photo, "abcd")
    return {"keep_duplicates": True}


def split_classes(root: Path, photo: Photo) -> dict[str, Any]:
    for part, names in {"train": "abcd", "test": "ef"}.items():
        for kind in ("cat", "dog"):
            images(root / part / kind, photo, names)
    return {"split": "train", "keep_duplicates": True}


def table_beside_images(root: Path, photo: Photo) -> dict[str, Any]:
    rows = [f'{name},"a photo, {name}"\n' for name in images(root / "Images", photo)]
    (root / "captions.txt").write_text("image,caption\n" + "".join(rows))
    return {}


def table_in_gzip(root: Path, photo: Photo) -> dict[str, Any]:
    table_beside_images(root, photo)
    (root / "captions.csv.gz").write_bytes(gzip.compress((root / "captions.txt").read_bytes()))
    (root / "captions.txt").unlink()
    return {"table": "captions.csv.gz"}


def imagefolder(root: Path, photo: Photo) -> dict[str, Any]:
    for part in ("train", "validation"):
        rows = [{"file_name": name, "text": f"a photo, {name}"} for name in images(root / part, photo)]
        (root / part / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"split": "train"}


def coco_as_roboflow_exports_it(root: Path, photo: Photo) -> dict[str, Any]:
    names = images(root / "train", photo)
    (root / "README.roboflow.txt").write_text("made by Roboflow")
    (root / "train/_annotations.coco.json").write_text(
        json.dumps(
            {
                "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
                "categories": [{"id": 1, "name": "cat"}],
                "annotations": [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 2, 3, 4]}],
            }
        )
    )
    return {"caption_templates": ["a photo of a {}."]}


def pack(folder: Path, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """A .zip of a folder beside it, as Kaggle's and Roboflow's are."""
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w", method) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return folder.with_suffix(".zip")


@pytest.mark.parametrize(
    "build",
    [
        *(with_captions, class_folders, split_classes, table_beside_images, table_in_gzip, imagefolder),
        coco_as_roboflow_exports_it,
    ],
)
def test_zip_gives_what_its_folder_gives(tmp_path: Path, photo: Photo, build: Any) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    config = tolerant(**build(folder, photo))
    archive = pack(folder, zipfile.ZIP_STORED if build is class_folders else zipfile.ZIP_DEFLATED)
    top = [path for path in folder.iterdir() if path.name != "__MACOSX"]
    only = top[0] if len(top) == 1 and top[0].name != "train" else folder
    expected = convert(only, tmp_path / "out", config, engine=threads(1))
    shutil.rmtree(folder)
    report = convert(archive, tmp_path / "zipped", config, engine=threads(1))
    assert shards(tmp_path / "zipped") == shards(tmp_path / "out")
    assert report.accounts.get("classes") == expected.accounts.get("classes")
    assert convert(archive, tmp_path / "zipped", config).was_complete


def test_workers_parts_and_a_preview_read_the_same_zip(tmp_path: Path, photo: Photo) -> None:
    with_captions(tmp_path / "corpus", photo)
    archive, config = pack(tmp_path / "corpus"), tolerant(shard_rows=2)
    found = preview(archive, config)
    for workers in (1, 2, 4):
        report = convert(archive, tmp_path / f"out{workers}", config, engine=local(workers))
        assert report.accounts["written"] == found.statuses["written"].likely
    for number in (1, 2):
        convert_part(archive, tmp_path / "parts", config, part=(number, 2), engine=threads(2))
    convert(archive, tmp_path / "parts", config, finish=True)
    for name in ("out2", "out4", "parts"):
        assert content(tmp_path / name) == content(tmp_path / "out1")


@pytest.mark.parametrize("settings", [{"images": "photos.zip"}, {"images": "photos.zip/photos"}])
def test_table_finds_images_in_a_zip(tmp_path: Path, photo: Photo, settings: dict[str, Any]) -> None:
    names = images(tmp_path / "photos/photos", photo)
    pack(tmp_path / "photos")
    shutil.rmtree(tmp_path / "photos")
    (tmp_path / "t.csv").write_text("image,caption\n" + "".join(f"{name},a photo\n" for name in [*names, "gone.jpg"]))
    report = convert(tmp_path / "t.csv", tmp_path / "out", tolerant(**settings), engine=threads(1))
    assert report.accounts["written"] == 6
    assert [line["detail"] for line in left_out(tmp_path / "out")] == ["'photos/gone.jpg': not in 'photos.zip'"]


class Members:
    """A .zip whose last image is the one in question."""

    def __init__(self, path: Path, photo: Photo) -> None:
        self.path = path
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for seed, name in enumerate("abc"):
                archive.writestr(f"{name}.jpg", photo(20, 30, seed=seed))
                archive.writestr(f"{name}.txt", f"photo {name}")

    def add(self, name: str | zipfile.ZipInfo, data: bytes) -> None:
        with zipfile.ZipFile(self.path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, data)

    def edit(self, find: bytes, put: bytes) -> None:
        data = self.path.read_bytes()
        assert find in data
        self.path.write_bytes(data.replace(find, put))


@pytest.fixture
def members(tmp_path: Path, photo: Photo) -> Members:
    return Members(tmp_path / "corpus.zip", photo)


def test_member_that_leads_out_or_is_a_link_costs_its_row(members: Members, tmp_path: Path, photo: Photo) -> None:
    link = zipfile.ZipInfo("link.jpg")
    link.external_attr = 0o120777 << 16
    members.add(link, b"/etc/hosts")
    for name in ("../up.jpg", "/root.jpg", "photos/../../up.jpg", "link.txt", "/root.txt", "../up.txt"):
        members.add(name, photo(20, 30, seed=9) if name.endswith("jpg") else b"a photo")
    report = convert(members.path, tmp_path / "out", tolerant(), engine=threads(1))
    assert report.accounts["written"] == 3
    assert {line["path"]: (line["reason"], line["detail"]) for line in left_out(tmp_path / "out")} == {
        "../up.jpg": ("outside_root", "'../up.txt' leads out of the corpus's folder"),
        "/root.jpg": ("outside_root", "'/root.txt' leads out of the corpus's folder"),
        "photos/../../up.jpg": ("missing_caption", "no .txt, .caption or .json of the same name"),
        "link.jpg": ("not_a_file", "'link.jpg' is a link in a zip, which is not followed"),
    }
    (tmp_path / "t.csv").write_text("image,caption\n" + "".join(f"{name}.jpg,x\n" for name in ("a", "../up", "/root")))
    convert(tmp_path / "t.csv", tmp_path / "out2", tolerant(images="corpus.zip"), engine=threads(1))
    assert [line["reason"] for line in left_out(tmp_path / "out2")] == ["outside_root"] * 2


def test_bomb_is_refused_by_the_size_that_it_declares_or_does_not(members: Members, tmp_path: Path) -> None:
    for name in ("large", "liar", "broken"):
        members.add(f"{name}.jpg", bytes(3_000_000 if name == "large" else 2_000_000))
        members.add(f"{name}.txt", b"a photo")
    with zipfile.ZipFile(members.path) as archive:
        offset = archive.getinfo("broken.jpg").header_offset
    members.edit(struct.pack("<L", 2_000_000) + b"\x08\0", struct.pack("<L", 1_000) + b"\x08\0")
    data = bytearray(members.path.read_bytes())
    data[offset + 50] ^= 0xFF
    members.path.write_bytes(data)
    convert(members.path, tmp_path / "out", tolerant(max_image_bytes=2_500_000), engine=threads(1))
    assert {line["path"]: (line["reason"], line["detail"]) for line in left_out(tmp_path / "out")} == {
        "large.jpg": ("image_too_large", "'large.jpg' has 3000000 bytes; the limit is 2500000"),
        "liar.jpg": ("corrupt_image", "'liar.jpg' is damaged in the zip: its bytes do not have its CRC"),
        "broken.jpg": ("corrupt_image", "'broken.jpg' is damaged in the zip: its bytes do not have its CRC"),
    }


def test_method_that_is_not_read_costs_its_row(members: Members, tmp_path: Path, photo: Photo) -> None:
    with zipfile.ZipFile(members.path, "a", zipfile.ZIP_LZMA) as archive:
        archive.writestr("d.jpg", photo(20, 30, seed=9))
    members.add("d.txt", b"a photo")
    convert(members.path, tmp_path / "out", tolerant(), engine=threads(1))
    (line,) = left_out(tmp_path / "out")
    assert line["reason"] == "unsupported_format"
    assert line["detail"] == "'d.jpg' is packed by method 14 of zip, which is not read; unpack the archive"


def test_archive_that_cannot_be_trusted_is_an_error(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = members.path.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            convert(members.path, tmp_path / "out")
        members.path.write_bytes(whole)

    members.path.write_bytes(whole[:-30])
    refused(r"zip '.*corpus.zip': not whole \(.*\); fetch it again")
    with pytest.warns(UserWarning, match="Duplicate name"):
        members.add("a.jpg", b"again")
    refused(r"corpus.zip': holds 'a.jpg' twice; make it anew")
    members.add("a.txt/b.jpg", b"in a folder with the name of a file")
    refused(r"corpus.zip': holds 'a.txt' as a file and as a folder; make it anew")
    with zipfile.ZipFile(members.path) as archive:
        last = struct.pack("<L", archive.getinfo("c.txt").header_offset)
    members.edit(last + b"c.txt", struct.pack("<L", 0) + b"c.txt")
    refused(r"corpus.zip': its members overlap, as in a bomb; it is not read")
    entries = members.path.read_bytes()
    members.path.write_bytes(entries.replace(b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\x01\0"))
    refused(r"corpus.zip': is encrypted; unpack it with its password, and convert the folder")
    monkeypatch.setattr("mmdata.convert.sources.files.MAX_MEMBERS", 5)
    members.add("d.txt", b"photo")
    refused(r"corpus.zip': 7 members, and 5 are read at most; unpack it, and convert the folder")


def test_parquet_in_a_zip_says_what_to_do(members: Members, tmp_path: Path) -> None:
    members.add("t.parquet", b"PAR1" + bytes(100))
    with pytest.raises(
        DataError, match=r"t.parquet': parquet in a zip, and only text is read from a stream; unpack it"
    ):
        convert(members.path, tmp_path / "out", ConvertConfig(table="t.parquet"))


def test_zip_that_changed_is_another_source(members: Members, tmp_path: Path, photo: Photo) -> None:
    convert(members.path, tmp_path / "out", engine=threads(1))
    (tmp_path / "t.csv").write_text("image,caption\na.jpg,x\n")
    config = ConvertConfig(images="corpus.zip")
    convert(tmp_path / "t.csv", tmp_path / "out2", config, engine=threads(1))
    with zipfile.ZipFile(members.path, "w") as archive:
        for seed, name in enumerate("abc"):
            archive.writestr(f"{name}.jpg", photo(20, 30, seed=seed))
            archive.writestr(f"{name}.txt", f"Photo {name}")
    for source, out, settings in ((members.path, "out", None), (tmp_path / "t.csv", "out2", config)):
        with pytest.raises(DataError, match="holds another conversion"):
            convert(source, tmp_path / out, settings)


def test_zip_that_changes_while_it_is_converted_is_not_published(
    members: Members, tmp_path: Path, photo: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    examine = Examiner.__call__

    def changing(self: Examiner, row: Any) -> Any:
        if row.number == 1:
            members.add("d.txt", b"more")
        return examine(self, row)

    monkeypatch.setattr(Examiner, "__call__", changing)
    with pytest.raises(DataError, match=r"corpus.zip': has changed since it was opened; run the conversion again"):
        convert(members.path, tmp_path / "out", engine=threads(1))
    assert not (tmp_path / "out/__mmdata__").exists()
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"holds an unfinished conversion .* start anew with --overwrite"):
        convert(members.path, tmp_path / "out", engine=threads(1))
    assert convert(members.path, tmp_path / "out", engine=threads(1), overwrite=True).accounts["written"] == 3


def captioned(folder: Path, photo: Photo) -> Path:
    for name in images(folder, photo):
        (folder / name).with_suffix(".txt").write_text(f"a photo, {name}")
    return folder


def table_and_images(folder: Path, photo: Photo) -> Path:
    table_beside_images(folder, photo)
    return folder / "captions.txt"


@pytest.mark.parametrize("build", [captioned, table_and_images])
def test_archives_beside_a_corpus_may_be_damaged(tmp_path: Path, photo: Photo, build: Any) -> None:
    source = build(tmp_path / "corpus", photo)
    (tmp_path / "corpus/empty.zip").touch()
    (tmp_path / "corpus/cut.zip").write_bytes(b"PK\3\4, and no more")
    assert convert(source, tmp_path / "out", engine=threads(1)).accounts["written"] == 6


def test_archives_that_nobody_named_are_not_looked_into(
    tmp_path: Path, photo: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = captioned(tmp_path / "corpus", photo)
    Members(tmp_path / "corpus/good.zip", photo)
    opened: list[str] = []
    monkeypatch.setattr("mmdata.convert.sources.files.open_zip", opened.append)
    open_source(source, ConvertConfig())
    assert not opened
