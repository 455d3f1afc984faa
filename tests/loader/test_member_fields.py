"""`data.fields` of members: JSON, arrays and texts in the tars of the samples come with their rows."""

from __future__ import annotations

import logging
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata import Index, Loader
from mmdata.errors import ConfigError, DataError
from mmdata.index import build_index
from tests.loader.member_tars import json_of, npy, npz, packed_npz, write_tar

ROWS = 24
FEATURES = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float16)
LONG = "a folder with a name that is long/" * 4
Members = dict[str, bytes]


def sample(row: int, photo: Callable[..., bytes]) -> Members:
    """A sample whose members stand before and behind the image."""
    before = {"box.npy": npy(np.arange(4, dtype=np.uint16).reshape(2, 2) + row)}
    meta = {"url": f"https://example.com/{row}", "size": {"wide": row + 0.5, "high": row}, "a.b": row % 2 == 0}
    return {
        **before,
        "jpg": photo(32, 32, seed=row),
        "json": json_of({**meta, "tags": ["x"] * (row % 3), "pair": [row, row + 1], "caption": f"picture {row}"}),
        "npy": npy(FEATURES[row]),
        "npz": (npz if row % 2 else packed_npz)(one=FEATURES[row][:2].astype(np.float64), two=np.int64(row)),
        "note.txt": f"note {row}\n".encode(),
    }


def key_of(row: int) -> str:
    return f"{LONG if row % 5 == 0 else ''}{row:04d}"


def write(folder: Path, samples: dict[str, Members], *, format: int = tarfile.GNU_FORMAT) -> dict[str, Any]:
    """Two indexed tars of these samples; returns a section `data`."""
    listed = list(samples.items())
    half = len(listed) // 2
    write_tar(folder / "a.tar", dict(listed[:half]), format=format)
    write_tar(folder / "b.tar", dict(listed[half:]), format=format)
    build_index(folder, max_bad_share=0.5)
    return {
        "shards": str(folder),
        "global_batch_size": 5,
        "image_size": 32,
        "seed": 3,
        "loading": {"num_workers": 2, "num_processes": 0, "max_bad_share": 0.5},
    }


@pytest.fixture
def samples(photo: Callable[..., bytes]) -> dict[str, Members]:
    return {key_of(row): sample(row, photo) for row in range(ROWS)}


def batches(data: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    with Loader.from_config({**data, **changes}) as loader:
        return [dict(batch) for batch in loader]


def by_row(data: dict[str, Any], name: str, **changes: Any) -> dict[int, Any]:
    """The value of an entry for each row, of valid rows only."""
    found: dict[int, Any] = {}
    for batch in batches(data, **changes):
        for place in batch["valid"].nonzero().flatten().tolist():
            found[int(batch["rows"][place])] = plain_of(batch[name][place])
    return found


def plain_of(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


FIELDS = {
    "url": "json:url",
    "wide": "json:size.wide",
    "high": "json:size.high",
    "even": "json:a.b",
    "tags": "json:tags",
    "pair": "json:pair",
    "meta": "json",
    "features": "npy",
    "one": "npz:one",
    "two": "npz:two",
    "box": "box.npy",
    "note": "note.txt",
}


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("loading", [{"num_processes": 0}, {"num_processes": 1}, {"num_workers": 0}])
@pytest.mark.sweep(keep=1)
def test_values_of_members_come_with_their_rows(
    tmp_path: Path, samples: dict[str, Members], loading: dict[str, Any], format: int
):
    data = write(tmp_path / "tars", samples, format=format)
    seen: list[int] = []
    for batch in batches({**data, "loading": {**data["loading"], **loading}}, fields=FIELDS):
        assert {name: batch[name].dtype for name in FIELDS if isinstance(batch[name], torch.Tensor)} == {
            "wide": torch.float64,
            "high": torch.int64,
            "even": torch.bool,
            "pair": torch.int64,
            "features": torch.float16,
            "one": torch.float64,
            "two": torch.int64,
            "box": torch.int32,
        }
        for place, row in enumerate(batch["rows"].tolist()):
            found = {name: batch[name][place] for name in FIELDS}
            plain = {
                name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()
            }
            if row < 0:
                assert plain.pop("features") != plain.pop("one")  # NaN of 4 and of 2
                assert np.isnan(plain.pop("wide"))
                assert plain == {
                    "url": "",
                    "high": 0,
                    "even": False,
                    "tags": None,
                    "pair": [0, 0],
                    "meta": None,
                    "two": 0,
                    "box": [[0, 0], [0, 0]],
                    "note": "",
                }
                continue
            seen.append(row)
            assert batch["keys"][place] == key_of(row)
            assert plain.pop("meta")["size"] == {"wide": row + 0.5, "high": row}
            assert plain == {
                "url": f"https://example.com/{row}",
                "wide": row + 0.5,
                "high": row,
                "even": row % 2 == 0,
                "tags": ["x"] * (row % 3),
                "pair": [row, row + 1],
                "features": FEATURES[row].tolist(),
                "one": FEATURES[row][:2].tolist(),
                "two": row,
                "box": [[row, row + 1], [row + 2, row + 3]],
                "note": f"note {row}\n",
            }
    assert sorted(seen) == list(range(ROWS))


def test_names_with_dots_are_entries_of_their_own(tmp_path: Path, samples: dict[str, Members]):
    names = {"size.high": "json:size.wide", "high": "json:size.high"}
    for batch in batches(write(tmp_path / "tars", samples), fields=names):
        valid = batch["valid"]
        assert torch.equal(batch["size.high"][valid], batch["high"][valid] + 0.5)


def test_samples_that_the_index_left_out_lie_between_the_rows(
    tmp_path: Path, samples: dict[str, Members], photo: Callable[..., bytes]
):
    del samples[key_of(0)]["jpg"]
    del samples[key_of(7)]["json"]  # no caption
    samples[key_of(8)]["jpg"] = b"no image"
    samples[key_of(ROWS - 1)]["jpg"] = b"no image"
    data = write(tmp_path / "tars", samples)
    kept = [row for row in range(ROWS) if row not in (0, 7, 8, ROWS - 1)]
    assert len(Index.open(tmp_path / "tars")) == len(kept)
    assert by_row(data, "two", fields={"two": "npz:two"}) == dict(enumerate(kept))


DAMAGED: list[tuple[str, str, bytes, str]] = [
    ("url", "json", b'{"url": ', "not JSON: "),
    ("url", "json", b'{"url": "\xff"}', "not UTF-8 at byte 9"),
    ("url", "json", b"[" * 100_000, "JSON is nested too deeply"),
    ("url", "json", b'{"url": "a", "url": "b"}', "not JSON: .*key 'url' is there twice"),
    ("url", "json", b'{"url": 3}', "3, and the first rows have texts"),
    ("high", "json", b'{"size": {"high": "3"}}', "'3', and the first rows have int64"),
    ("high", "json", b'{"size": {"high": 18446744073709551615}}', "and the first rows have int64"),
    ("pair", "json", b'{"pair": [1, 2, 3]}', r"int64 \(3,\), and the first rows have int64 \(2,\)"),
    ("pair", "json", b'{"pair": [1, [2]]}', "value of type list .2 items., and the first rows have int64"),
    ("features", "npy", b"\x93NUMPY", "not an array of numpy"),
    ("features", "npy", npy(FEATURES[0]).replace(b"(4,)", b"(4,("), "its header does not parse"),
    ("features", "npy", npy(FEATURES[0]).replace(b"(4,), }", b"(2**62)"), "its header does not parse"),
    ("features", "npy", npy(FEATURES[0])[:-1], "7 bytes of values for an array"),
    ("features", "npy", npy(FEATURES[0][:3]), r"float16 \(3,\), and the first rows have float16 \(4,\)"),
    ("features", "npy", npy(FEATURES[0].astype(np.float32)), r"float32 \(4,\), and the first rows have float16"),
    ("features", "npy", npy(np.array([{}, 1, 2, 3]), allow_pickle=True), "have to be unpickled"),
    ("features", "npy", npy(np.array(["a"])), "an array of <U1; known are"),
    ("features", "npy", pickle.dumps(FEATURES[0]), "not an array of numpy"),
    ("one", "npz", npz(one=[1.0, 2.0])[:-30], "not arrays of numpy"),
    ("one", "npz", npz(one=[1.0, 2.0]).replace(b"\x00\xf0\x3f", b"\x00\xf1\x3f"), "array 'one': .*CRC"),
    ("one", "npz", npz(one=np.array([{}, 1], dtype=object)), "array 'one': .*unpickled"),
    ("note", "note.txt", b"\xc3\x28", "not UTF-8 at byte 0"),
]


@pytest.mark.parametrize(("name", "extension", "content", "message"), DAMAGED)
@pytest.mark.sweep(keep=15)
def test_a_damaged_member_masks_its_row(
    tmp_path: Path, samples: dict[str, Members], name: str, extension: str, content: bytes, message: str
):
    samples[key_of(17)].update({extension: content, "txt": b"a caption"})
    data = {**write(tmp_path / "tars", samples), "fields": {name: FIELDS[name]}}
    with Loader.from_config(data) as loader:
        found: list[Any] = list(loader)
        (entry,) = loader.ledger
    assert (entry.row, entry.stage, entry.reason) == (17, "field", "bad_field")
    assert f"data.fields.{name}: " in entry.detail
    assert extension in entry.detail
    assert re.search(message, entry.detail), entry.detail
    masked = [int(row) for batch in found for row in batch["rows"][~batch["valid"]] if row >= 0]
    assert masked == [17]
    assert all(not batch["pixel_values"][~batch["valid"]].any() for batch in found)


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_missing_values_mask_the_row(
    tmp_path: Path, samples: dict[str, Members], num_processes: int, caplog: pytest.LogCaptureFixture
):
    del samples[key_of(3)]["npy"]
    samples[key_of(4)]["json"] = json_of({"url": None, "size": {"wide": 1.5}, "caption": "x"})
    data = write(tmp_path / "tars", samples)
    data["loading"]["num_processes"] = num_processes
    fields = {name: FIELDS[name] for name in ("url", "high", "tags", "features")}
    with Loader.from_config({**data, "fields": fields}) as loader, caplog.at_level(logging.WARNING, "mmdata"):
        rows = sorted(int(row) for batch in loader for row in batch["rows"][batch["valid"]])
        assert rows == [row for row in range(ROWS) if row not in (3, 4)]
        details = {entry.row: entry.detail for entry in loader.ledger}
        assert {entry.reason for entry in loader.ledger} == {"missing_field"}
    listed = ".box.npy, .json, .npz, .note.txt"
    assert details == {
        3: f"data.fields.features: no member .npy among {listed}",
        4: "data.fields.url: member '0004.json': 'url' is null",
    }


def test_whole_numbers_that_a_float_would_round_are_kept_whole(tmp_path: Path, samples: dict[str, Members]):
    for row in range(ROWS):
        samples[key_of(row)]["json"] = json_of({"id": 2**53 + (row == 5), "caption": "x"})
    data = {**write(tmp_path / "tars", samples), "fields": {"id": "json:id"}}
    assert by_row(data, "id") == {row: 2**53 + (row == 5) for row in range(ROWS)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "score",
            "data.fields.x: no source 'score'; no table is joined .data.join., and members of the samples are written",
        ),
        ("npz", "data.fields.x: member 'npz': name one of its arrays, as in npz:NAME"),
        ("npy:x", "data.fields.x: member 'npy:x': .npy has no keys; write npy"),
        ("json:a:b", "member 'json:a:b': expected the extension"),
        ("json:urll", "none of the first 24 rows has a value: .*'urll' .did you mean 'url'..; it has url, size, a.b"),
        ("npz:tow", "none of the first 24 rows has a value: .*'tow' .did you mean 'two'..; it has one, two"),
        ("syn.json", "none of the first 24 rows has a value: .*no member .syn.json among .box.npy, .json"),
    ],
)
def test_a_source_that_no_row_has_is_refused(tmp_path: Path, samples: dict[str, Members], source: str, message: str):
    data = write(tmp_path / "tars", samples)
    with pytest.raises(ConfigError, match=message):
        Loader.from_config({**data, "fields": {"x": source}})


def test_a_number_is_whole_if_the_first_values_are(
    tmp_path: Path, samples: dict[str, Members], monkeypatch: pytest.MonkeyPatch
):
    samples[key_of(20)]["json"] = json_of({"size": {"high": 20.5}, "caption": "x"})
    data = {**write(tmp_path / "tars", samples), "fields": {"high": "json:size.high"}}
    assert by_row(data, "high")[20] == 20.5
    monkeypatch.setattr("mmdata.loader.entries.fields.PROBED_VALUES", 20)  # rows 0 to 19
    with Loader.from_config(data) as loader:
        assert {batch["high"].dtype for batch in loader} == {torch.int64}  # pyright: ignore
        (entry,) = loader.ledger
    assert entry.detail.startswith("data.fields.high: member '")
    assert entry.detail.endswith("/0020.json': float64 (20.5), and the first rows have int64")


def test_a_tar_that_is_another_of_the_same_size_masks_its_rows(tmp_path: Path, samples: dict[str, Members]):
    data = write(tmp_path / "tars", samples)
    content = (tmp_path / "tars" / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "tars" / "b.tar") as tar:
        member = tar.getmember("0017.npy")
    end = member.offset_data + member.size
    (tmp_path / "tars" / "b.tar").write_bytes(content[: end - 1] + b"X" + content[end:])
    with Loader.from_config({**data, "fields": {"features": "npy"}}) as loader:
        list(loader)
        details = {entry.row: entry.detail for entry in loader.ledger}
    changed = "data.fields.features: member '0017.npy': its bytes are not those that were indexed; see `mmdata verify`"
    assert details == {17: changed}


def test_selected_rows_decide_what_an_entry_is(tmp_path: Path, samples: dict[str, Members]):
    samples[key_of(0)]["npy"] = npy(FEATURES[0][:1])
    data = write(tmp_path / "tars", samples)
    (tmp_path / "keys.txt").write_text("\n".join(key_of(row) for row in range(12, ROWS)))
    (tmp_path / "tars" / "a.tar").unlink()  # a shard without a selected row is not opened
    found = by_row(data, "x", fields={"x": "npy"}, select=str(tmp_path / "keys.txt"))
    assert found == {row: FEATURES[row].tolist() for row in range(12, ROWS)}


def test_blank_batches_have_the_entries(tmp_path: Path, samples: dict[str, Members]):
    data = write(tmp_path / "tars", samples)
    with Loader.from_config({**data, "fields": {"features": "npy", "url": "json:url"}}) as loader:
        blanks: list[Any] = [make() for _, make in loader.blank_batches()]
    assert [(tuple(one["features"].shape), one["url"]) for one in blanks] == [((5, 4), [""] * 5)]


def test_an_array_that_unpacks_to_more_than_the_limit_is_not_unpacked(
    tmp_path: Path, samples: dict[str, Members], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mmdata.tars.members.MAX_BYTES", 10_000)
    samples[key_of(17)]["npz"] = packed_npz(two=np.zeros(100_000))
    data = write(tmp_path / "tars", samples)
    with Loader.from_config({**data, "fields": {"two": "npz:two"}}) as loader:
        list(loader)
        (entry,) = loader.ledger
    assert entry.detail == "data.fields.two: member '0017.npz': array 'two' of 800,128 bytes; at most 10,000"


def test_many_rows_without_a_value_say_what_to_do(tmp_path: Path, samples: dict[str, Members]):
    for row in range(6):
        del samples[key_of(row)]["npy"]
    data = write(tmp_path / "tars", samples)
    data["loading"]["max_bad_share"] = 0.1
    message = r"missing_field 6\), more than .*leave such rows out \(data.select\), or the entry out of data.fields"
    with (
        Loader.from_config({**data, "fields": {"features": FIELDS["features"]}}) as loader,
        pytest.raises(DataError, match=message) as caught,
    ):
        list(loader)
    assert "mmdata verify" not in str(caught.value)
