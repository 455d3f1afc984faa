"""An index as a sequence of samples to look at: key, captions, label, image."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmdata.cli import main
from mmdata.errors import DataError
from mmdata.images import probe
from mmdata.index import Index, build_index
from mmdata.tars.write import Sample
from tests.shard_writer import ShardWriter


def test_index_gives_key_captions_label_and_image_of_a_row(shards: Path, samples: list[Sample]):
    index = Index.open(shards)
    for row, sample in enumerate(samples):
        found = index[row]
        assert (found.row, found.key, found.label) == (row, sample.key, sample.label)
        assert found.captions == sample.captions
        assert found.image_bytes == sample.image
        assert found.image.size == (30, 20 + row)
    assert index[0].image.tobytes() == Image.open(io.BytesIO(samples[0].image)).tobytes()


def test_index_takes_numbers_from_both_ends_and_slices(shards: Path):
    index = Index.open(shards)
    assert index[-1] == index[9] == index[np.arange(10)[9]]
    assert index[-10].key == "0000"
    assert [one.key for one in index[7:]] == ["0007", "0008", "0009"]
    assert [one.row for one in index[::-4]] == [9, 5, 1]
    assert [one.key for one in index] == [f"{i:04d}" for i in range(10)]


@pytest.mark.parametrize("row", [10, -11])
def test_index_of_a_row_that_is_not_there_is_an_index_error(shards: Path, row: int):
    with pytest.raises(IndexError, match=rf"^row {row} of an index of 10 rows, 0 to 9$"):
        Index.open(shards)[row]


def test_index_asked_for_a_key_in_brackets_says_how_to_look_it_up(shards: Path):
    with pytest.raises(
        TypeError, match=r"^an index has rows 0 to 9: index\[0\]; index\.sample\('0003'\) looks up a key"
    ):
        Index.open(shards)["0003"]  # type: ignore[call-overload]


def test_index_finds_the_sample_of_a_key(shards: Path):
    index = Index.open(shards)
    assert index.sample("0005") == index[5]
    with pytest.raises(KeyError, match=r"key '00055': none of 10 rows has it; did you mean '0005'\?"):
        index.sample("00055")
    with pytest.raises(KeyError, match=r"key 'zebra': none of 10 rows has it; the first key is '0000'"):
        index.sample("zebra")


def test_index_of_two_shards_with_the_same_key_names_both_rows(tmp_path: Path, samples: list[Sample]):
    for name in ("a", "b"):
        with ShardWriter(tmp_path / name) as writer:
            writer.write(
                samples[3] if name == "a" else samples[3].__class__("0003", samples[4].image, samples[4].info, ["b"])
            )
    with pytest.raises(KeyError, match=r"key '0003': rows 0, 1 have it; give the number of the row"):
        Index.open([tmp_path / "a", tmp_path / "b"]).sample("0003")


def test_index_image_is_turned_as_datasets_turns_it(tmp_path: Path, photo: Callable[..., bytes]):
    datasets = pytest.importorskip("datasets")
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.open(io.BytesIO(photo(24, 40))).save(file, "JPEG", exif=exif)
    with ShardWriter(tmp_path / "s") as writer:
        writer.write(Sample("turned", file.getvalue(), probe(file.getvalue()), ["a photo"]))
    found = Index.open(tmp_path / "s")[0].image
    expected = datasets.Image().decode_example({"bytes": file.getvalue(), "path": None})
    assert found.size == (24, 40)
    assert (found.mode, found.tobytes()) == (expected.mode, expected.tobytes())


def test_index_sample_with_a_label_alone_has_no_captions(
    tmp_path: Path, samples: list[Sample], tar: Callable[..., bytes]
):
    (tmp_path / "a.tar").write_bytes(tar([("0.jpg", samples[0].image), ("0.cls", b"3")]))
    build_index(tmp_path)
    found = Index.open(tmp_path)[0]
    assert (found.captions, found.label) == ([], 3)
    assert repr(found) == "Sample(row 0, key '0', JPEG 20 × 30, label 3, in 'a.tar')"


def test_index_sample_without_an_image_says_so(tmp_path: Path, tar: Callable[..., bytes]):
    (tmp_path / "a.tar").write_bytes(tar([("0.json", b'{"uid": "a"}'), ("1.json", b'{"uid": "b"}')]))
    build_index(tmp_path)
    found = Index.open(tmp_path)
    assert [(sample.key, sample.format, sample.captions) for sample in found] == [("0", "", []), ("1", "", [])]
    assert repr(found[1]) == "Sample(row 1, key '1', no image, in 'a.tar')"
    with pytest.raises(DataError, match=r"^shard 'a\.tar', sample '1': no image: .*\(data\.join\)$"):
        found[1].image  # noqa: B018


@pytest.mark.parametrize("command", ["report", "duplicates"])
def test_commands_that_show_images_refuse_an_index_without_any(
    tmp_path: Path,
    tar: Callable[..., bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "a.tar").write_bytes(tar([("0.json", b'{"uid": "a"}')]))
    build_index(tmp_path / "features")
    out = tmp_path / "out.parquet"
    assert main([command, str(tmp_path / "features"), "--out", str(out)]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "features': samples without images, whose members come to the rows of others: data.join" in line
    assert not out.exists()


def test_index_and_sample_are_shown_in_a_line(shards: Path):
    index = Index.open(shards)
    assert repr(index) == f"Index(10 rows in 3 shards of '{shards}', 19 captions, with labels)"
    assert repr(index[4]) == "Sample(row 4, key '0004', PNG 24 × 30, 2 captions, label 4, in '000001.tar')"
    assert repr(index[3]) == "Sample(row 3, key '0003', JPEG 23 × 30, 1 caption, in '000000.tar')"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds open shards in /proc")
def test_many_samples_share_their_open_shards(shards: Path, samples: list[Sample]):
    """Each file is open once, however many samples are held, and closed with the last of them."""
    index = Index.open(shards)

    def num_open() -> int:
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(link.suffix == ".tar" and link.parent == shards.resolve() for link in links)

    held = [*index[:], *(index[row] for row in range(10))]
    assert [one.captions for one in held] == 2 * [sample.captions for sample in samples]
    assert num_open() == index.num_shards == 3
    del held
    assert num_open() == 0


def test_index_of_a_shard_that_changed_gives_no_other_image_or_caption(shards: Path):
    path = shards / "000000.tar"
    place = int(Index.open(shards).take(np.array([0]), ["image_offset"])["image_offset"][0])
    data = bytearray(path.read_bytes().replace(b"picture 1 again", b"picture X again"))
    data[place + 12] ^= 1  # in the JFIF header: decodes to the same pixels
    path.write_bytes(data)
    index = Index.open(shards)
    with pytest.raises(DataError, match="'0000': the image is not the one that was indexed; `mmdata verify` says what"):
        _ = index[0].image_bytes
    with pytest.raises(DataError, match="'0001': the captions are not those that were indexed; `mmdata verify` says"):
        _ = index[1].captions
