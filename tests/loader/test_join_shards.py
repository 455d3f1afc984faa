"""`data.join: [{shards: …}]`: members of tars in another folder come to the rows by key, as DataCompDR has them."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from mmdata import Loader
from mmdata.errors import ConfigError, DataError
from mmdata.index import build_index
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.joins import load
from tests.loader.member_tars import json_of, npz, write_tar

ROWS = 40
rng = np.random.default_rng(1)
IMAGE = rng.normal(size=(ROWS, 3, 8)).astype(np.float32)  # of 3 augmentations each
TEXT = rng.normal(size=(ROWS, 6, 8)).astype(np.float32)  # of the written caption and 5 synthetic ones
UIDS = [f"{row * 7919 % 1000:032x}" for row in range(ROWS)]


@dataclass(frozen=True)
class Reinforced:
    """Images in `images`, by img2dataset's keys, and what DataCompDR says of them in `dr`, by uid, in another order."""

    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "shards": str(self.folder / "images"),
            "global_batch_size": 8,
            "image_size": 32,
            "seed": 2,
            "loading": {"num_workers": 2, "num_processes": 0, "max_bad_share": 0.5},
            "join": [{"table": str(self.folder / "images" / "*.parquet"), "key": "key"}, self.shards],
            "fields": {
                "image_emb": "join:dr:npz:image_emb",
                "text_emb": "join:dr:npz:text_emb",
                "syn_text": "join:dr:syn.json:syn_text",
                "paug": "join:dr:paug.json:param_aug",
                "url": "join:dr:url.txt",
                "uid": "join:dr:json:uid",
            },
        }

    @property
    def shards(self) -> dict[str, Any]:
        return {"shards": str(self.folder / "dr"), "name": "dr", "key": "uid"}

    def loader(self, **changes: Any) -> Loader:
        return load({**self.settings, **changes})


def sample(row: int) -> dict[str, bytes]:
    """A sample of DataCompDR, as its README lists the members."""
    return {
        "url.txt": f"https://example.com/{row}.jpg".encode(),
        "syn.json": json_of({"syn_text": [f"synthetic {row} {n}" for n in range(5)]}),
        "paug.json": json_of({"param_aug": [[["RandomCrop", row, 0.5]], [["ColorJitter", 1.5]]]}),
        "npz": npz(image_emb=IMAGE[row], text_emb=TEXT[row]),
        "json": json_of({"uid": UIDS[row], "sha256": "0" * 64}),
    }


def write(folder: Path, photo: Callable[..., bytes], samples: dict[int, dict[str, bytes]]) -> Reinforced:
    """Images in 2 tars, and the samples of some rows in 3 others."""
    for shard in range(2):
        rows = range(shard * 20, shard * 20 + 20)
        keys = [f"{shard:05d}{row:04d}" for row in rows]
        images = {
            key: {"jpg": photo(32, 32, seed=row), "txt": f"written {row}".encode()}
            for key, row in zip(keys, rows, strict=True)
        }
        write_tar(folder / "images" / f"{shard:05d}.tar", images)
        table = pa.table({"key": keys, "uid": [UIDS[row] for row in rows]})
        pyarrow.parquet.write_table(table, folder / "images" / f"{shard:05d}.parquet")
    build_index(folder / "images")
    order = [row for row in np.random.default_rng(5).permutation(ROWS).tolist() if row in samples]
    for tar in range(3):
        write_tar(folder / "dr" / f"{tar:08d}.tar", {UIDS[row]: samples[row] for row in order[tar::3]})
    build_index(folder / "dr")
    return Reinforced(folder)


@pytest.fixture
def samples() -> dict[int, dict[str, bytes]]:
    return {row: sample(row) for row in range(ROWS)}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    train_tokenizer([f"synthetic written {row}" for row in range(ROWS)], tmp_path / "tokenizer", vocab_size=300)
    return tmp_path / "tokenizer"


@pytest.fixture
def reinforced(tmp_path: Path, photo: Callable[..., bytes], samples: dict[int, dict[str, bytes]]) -> Reinforced:
    return write(tmp_path, photo, samples)


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_datacompdr_trains_as_it_lies(reinforced: Reinforced, num_processes: int):
    seen: list[int] = []
    with reinforced.loader(loading={"num_workers": 2, "num_processes": num_processes}) as loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            rows = entries["rows"].tolist()
            seen += rows
            assert torch.equal(entries["image_emb"], torch.from_numpy(IMAGE[rows]))
            assert torch.equal(entries["text_emb"], torch.from_numpy(TEXT[rows]))
            assert entries["url"] == [f"https://example.com/{row}.jpg" for row in rows]
            assert entries["uid"] == [UIDS[row] for row in rows]
            assert entries["syn_text"] == [[f"synthetic {row} {n}" for n in range(5)] for row in rows]
            assert entries["paug"] == [[[["RandomCrop", row, 0.5]], [["ColorJitter", 1.5]]] for row in rows]
    assert sorted(seen) == list(range(ROWS))


def test_rows_match_by_their_own_keys(reinforced: Reinforced):
    index = [f"{row // 20:05d}{row:04d}" for row in range(ROWS)]
    write_tar(
        reinforced.folder / "other" / "x.tar", {index[row]: {"npz": npz(v=[row])} for row in reversed(range(ROWS))}
    )
    build_index(reinforced.folder / "other")
    other = {"shards": str(reinforced.folder / "other"), "name": "other"}
    join, fields = [*reinforced.settings["join"], other], {"v": "join:other:npz:v", "uid": "join:dr:json:uid"}
    with reinforced.loader(join=join, fields=fields) as loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            assert entries["v"].flatten().tolist() == entries["rows"].tolist()
            assert entries["uid"] == [UIDS[row] for row in entries["rows"].tolist()]


def turned_round(reinforced: Reinforced) -> dict[str, Any]:
    """Settings that join the same tars by the uids of another table, which has them in the opposite order."""
    keys = [f"{row // 20:05d}{row:04d}" for row in range(ROWS)]
    path = reinforced.folder / "turned" / "uids.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pa.table({"key": keys, "uid": UIDS[::-1]}), path)
    return {"join": [{"table": str(path), "key": "key"}, reinforced.shards]}


def uids_of(loader: Loader) -> dict[int, str]:
    """The uid that each row gets."""
    found: dict[int, str] = {}
    with loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            found.update(zip(entries["rows"].tolist(), entries["uid"], strict=True))
    return found


def test_two_tables_may_give_the_keys_of_the_same_tars(reinforced: Reinforced):
    turned = turned_round(reinforced)
    assert uids_of(reinforced.loader()) == dict(enumerate(UIDS))
    assert uids_of(reinforced.loader(**turned)) == dict(enumerate(UIDS[::-1]))
    assert uids_of(Loader.from_config(reinforced.settings)) == dict(enumerate(UIDS))


def test_a_match_by_keys_that_changed_since_is_refused(reinforced: Reinforced):
    reinforced.loader().close()
    turned_round(reinforced)
    (reinforced.folder / "turned" / "uids.parquet").replace(reinforced.folder / "images" / "00000.parquet")
    (reinforced.folder / "images" / "00001.parquet").unlink()
    table = reinforced.settings["join"][0]
    reinforced.loader(join=[table], fields={"uid": "join:uid"}).close()  # the table is joined anew, the tars are not
    with pytest.raises(ConfigError, match=r"^data\.join\.1: .* is not joined .* that changed since"):
        Loader.from_config(reinforced.settings)


def test_a_state_goes_on_with_the_same_match_only(reinforced: Reinforced):
    with reinforced.loader() as loader:
        state = loader.state_dict()
    with reinforced.loader(**turned_round(reinforced)) as loader, pytest.raises(ConfigError, match=r"data\.fields"):
        loader.load_state_dict(state)


def test_rows_that_the_tars_lack_are_kept_left_out_or_an_error(
    tmp_path: Path, photo: Callable[..., bytes], samples: dict[int, dict[str, bytes]], caplog: pytest.LogCaptureFixture
):
    del samples[4], samples[31]
    del samples[7]["npz"]
    data = write(tmp_path, photo, samples)
    table, fields = data.settings["join"][0], {"emb": "join:dr:npz:image_emb", "url": "join:dr:url.txt"}
    with data.loader(fields=fields) as loader:
        batches: list[dict[str, Any]] = [dict(batch) for batch in loader]
        assert not len(loader.ledger)
    said = f"data.join.1: 2 of 40 rows have no row in '{tmp_path / 'dr'}'"
    assert said in caplog.messages
    bare = {row for batch in batches for row in batch["rows"][batch["emb"].isnan().all(dim=(1, 2))].tolist()}
    assert bare == {4, 7, 31}
    urls = {row: url for batch in batches for row, url in zip(batch["rows"].tolist(), batch["url"], strict=True)}
    assert {row for row, url in urls.items() if not url} == {4, 31}
    with data.loader(fields=fields, join=[table, {**data.shards, "missing": "mask"}]) as loader:
        rows = sorted(int(row) for batch in loader for row in batch["rows"][batch["valid"]])
        (entry,) = loader.ledger
    assert rows == [row for row in range(ROWS) if row not in (4, 7, 31)]
    assert (entry.row, entry.reason) == (7, "missing_field")
    assert entry.detail == "data.fields.emb: no member .npz among .url.txt, .syn.json, .paug.json, .json"
    with pytest.raises(ConfigError, match=f"^{said}, such as '000000004'; leave them out"):
        data.loader(fields=fields, join=[table, {**data.shards, "missing": "error"}])


@pytest.mark.parametrize(
    ("extension", "content", "message"),
    [
        ("npz", npz(image_emb=IMAGE[9], text_emb=TEXT[9])[:-40], "not arrays of numpy"),
        ("npz", npz(image_emb=IMAGE[9][:2]), r"float32 \(2, 8\), and the first rows have float32 \(3, 8\)"),
        ("syn.json", b"{'syn_text'", "not JSON"),
    ],
)
def test_a_damaged_member_masks_its_row_and_is_named(
    tmp_path: Path,
    photo: Callable[..., bytes],
    samples: dict[int, dict[str, bytes]],
    extension: str,
    content: bytes,
    message: str,
):
    samples[9][extension] = content
    data = write(tmp_path, photo, samples)
    fields = {"emb": "join:dr:npz:image_emb", "syn": "join:dr:syn.json:syn_text"}
    with data.loader(fields=fields) as loader:
        rows = sorted(int(row) for batch in loader for row in batch["rows"][batch["valid"]])
        (entry,) = loader.ledger
    assert rows == [row for row in range(ROWS) if row != 9]
    assert (entry.row, entry.stage, entry.reason) == (9, "field", "bad_field")
    assert extension in entry.detail
    table, shards = data.settings["join"][0], {**data.shards, "missing": "error"}
    where = f"shard '.*0000000.*tar', sample '{UIDS[9]}': data.fields"
    with (
        data.loader(fields=fields, join=[table, shards]) as loader,
        pytest.raises(DataError, match=f"{where}.*{message}.*; missing: mask in data.join masks such rows"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": "nowhere"}, "data.join.1: folder '.*nowhere': no such folder"),
        ({"shards": "https://host/dr"}, "a folder on this disk is needed here"),
        ({"key": "udi"}, r"data.join.1: key: no column 'udi' of texts .did you mean 'uid'..; there are uid"),
        ({"key": None}, "40 of 40 rows have no row in .*: keys are like '000000000', and those of '.*dr' like '0"),
        ({"name": "d r"}, "name"),
        ({"name": None}, "shards have a name"),
        ({"table": "x.parquet"}, "give either table .* or shards"),
    ],
)
def test_wrong_shards_are_refused(reinforced: Reinforced, change: dict[str, Any], message: str):
    if "shards" in change and "://" not in change["shards"]:
        change = {"shards": str(reinforced.folder / change["shards"])}
    join = [reinforced.settings["join"][0], {**reinforced.shards, **change}]
    with pytest.raises((ConfigError, DataError), match=message):
        reinforced.loader(join=join)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("join:rd:npz:image_emb", "no source 'join:rd:npz:image_emb'; joined are join:uid, join:dr:MEMBER, and memb"),
        ("join:dr:npz:image", "none of the first 40 rows has a value: .*'image'.*; it has image_emb, text_emb"),
        ("join:dr:jpg", "member 'jpg': its extension does not say what values it has; known are json"),
        ("join:dr:", "member '': expected the extension of a member"),
    ],
)
def test_a_wrong_source_of_joined_tars_is_refused(reinforced: Reinforced, source: str, message: str):
    with pytest.raises(ConfigError, match=message):
        reinforced.loader(fields={"x": source})


def test_tars_of_another_size_or_gone_are_an_error(reinforced: Reinforced):
    tar = reinforced.folder / "dr" / "00000001.tar"
    content = tar.read_bytes()
    tar.write_bytes(content[:-512])
    with pytest.raises(DataError, match=r"shard '.*00000001.tar': \d+ bytes, and its index was made of \d+; the"):
        list(reinforced.loader())
    tar.unlink()
    with pytest.raises(DataError, match=r"shard '.*00000001.tar': no such file, and the manifest names it"):
        list(reinforced.loader())


def test_rows_without_a_key_are_told_from_a_key(reinforced: Reinforced):
    table = pa.table(
        {
            "key": [f"{row // 20:05d}{row:04d}" for row in range(ROWS)],
            "own": pa.array([None if row % 2 else UIDS[row] for row in range(ROWS)]),
            "none": pa.array([None if row else "x" for row in range(ROWS)]),
        }
    )
    pyarrow.parquet.write_table(table, reinforced.folder / "keys.parquet")
    for key, message in (
        ("own", r"20 of 40 rows have no row in '.*', such as '000000001'; leave them out"),
        ("none", r"40 of 40 rows have no row in it: keys are like 'x', and those of '.*dr' like '0"),
    ):
        join = [
            {"table": str(reinforced.folder / "keys.parquet")},
            {**reinforced.shards, "key": key, "missing": "error"},
        ]
        with pytest.raises(ConfigError, match=message):
            reinforced.loader(join=join)


def rewritten(data: Reinforced, samples: dict[int, dict[str, bytes]], rows: list[int]) -> None:
    """Other embeddings of the same size for some rows, in tars that are otherwise as they were."""
    for row in rows:
        samples[row]["npz"] = npz(image_emb=IMAGE[row] + 1, text_emb=TEXT[row])
    order = [row for row in np.random.default_rng(5).permutation(ROWS).tolist() if row in samples]
    for tar in range(3):
        path = data.folder / "dr" / f"{tar:08d}.tar"
        size = path.stat().st_size
        write_tar(path, {UIDS[row]: samples[row] for row in order[tar::3]})
        assert path.stat().st_size == size


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_values_that_were_rewritten_in_place_mask_their_rows(
    reinforced: Reinforced, samples: dict[int, dict[str, bytes]], num_processes: int
):
    rewritten(reinforced, samples, [3, 30])
    loading = {"num_workers": 2, "num_processes": num_processes, "max_bad_share": 0.5}
    with reinforced.loader(loading=loading) as loader:
        rows = sorted(int(row) for batch in loader for row in batch["rows"][batch["valid"]])
        entries = list(loader.ledger)
    assert rows == [row for row in range(ROWS) if row not in (3, 30)]
    assert sorted(entry.row for entry in entries) == [3, 30]
    for entry in entries:
        assert (entry.stage, entry.reason) == ("field", "file_changed")
        assert f"member '{UIDS[entry.row]}.npz': its bytes are not those that were indexed; see" in entry.detail
    with reinforced.loader(fields={"url": "join:dr:url.txt"}) as loader:  # what did not change is used
        assert sum(int(batch["valid"].sum()) for batch in loader) == ROWS
    rewritten(reinforced, samples, list(range(ROWS)))
    with pytest.raises(ConfigError, match=r"none of the first 40 rows has a value: .*are not those that were indexed"):
        reinforced.loader(loading=loading)


def test_an_index_that_is_damaged_is_refused(reinforced: Reinforced):
    for path in (reinforced.folder / "dr" / "__mmdata__").glob("*.arrow"):
        data = path.read_bytes()
        place = len(data) // 2
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DataError, match=path.name):
            reinforced.loader()
        path.write_bytes(data)


def test_a_key_that_comes_twice_in_joined_tars_is_refused(reinforced: Reinforced, samples: dict[int, dict[str, bytes]]):
    with tarfile.open(reinforced.folder / "dr" / "00000000.tar") as opened:
        first = opened.getnames()[0].partition(".")[0]
    write_tar(reinforced.folder / "dr" / "00000009.tar", {first: sample(0)})
    build_index(reinforced.folder / "dr", overwrite=True)
    places = rf"shard '00000000.tar', sample '{first}' and shard '00000009.tar', sample '{first}'"
    message = rf"data.join.1: the key '{first}' comes twice: in {places}"
    with pytest.raises(ConfigError, match=message):
        reinforced.loader()


def test_tars_without_images_are_no_corpus(reinforced: Reinforced):
    with pytest.raises(ConfigError, match=r"data.shards: '.*dr': samples without images, whose members come to the ro"):
        reinforced.loader(shards=str(reinforced.folder / "dr"), join=[], fields={})


SYN = "join:dr:syn.json:syn_text"


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_rows_draw_captions_of_joined_tars(reinforced: Reinforced, num_processes: int, tokenizer: Path):
    changes = {
        "captions": {"shards": 0.25, SYN: 0.75},
        "tokenizer": str(tokenizer),
        "fields": {},
        "loading": {"num_workers": 2, "num_processes": num_processes},
    }
    drawn: dict[int, list[str]] = {row: [] for row in range(ROWS)}
    with reinforced.loader(**changes) as loader:
        for _ in range(8):
            for batch in loader:
                entries: dict[str, Any] = dict(batch)
                chosen = zip(entries["captions"], entries["caption_sources"], entries["caption_numbers"], strict=True)
                for row, (text, source, number) in zip(entries["rows"].tolist(), chosen, strict=True):
                    assert text == (f"synthetic {row} {number}" if source == SYN else f"written {row}")
                assert entries["input_ids"].shape[1] >= int(entries["attention_mask"].sum(dim=1).max())
                for row, text in zip(entries["rows"].tolist(), entries["captions"], strict=True):
                    drawn[row].append(text)
        state, identity = loader.state_dict(), loader.identity["captions"]
    for row, texts in drawn.items():
        assert set(texts) <= {f"written {row}", *(f"synthetic {row} {n}" for n in range(5))}
    synthetic = sum(text.startswith("synthetic") for texts in drawn.values() for text in texts)
    assert 0.66 < synthetic / (8 * ROWS) < 0.84
    assert len({text for text in drawn[3] if text.startswith("synthetic")}) > 1
    with reinforced.loader(**changes) as loader:
        loader.load_state_dict(state)
        assert loader.identity["captions"] == identity


def test_the_same_tars_by_two_keys_are_two_sources_of_captions(reinforced: Reinforced, tokenizer: Path):
    path = reinforced.folder / "others.parquet"
    keys = [f"{row // 20:05d}{row:04d}" for row in range(ROWS)]
    pyarrow.parquet.write_table(pa.table({"key": keys, "other": UIDS[::-1]}), path)
    other = {**reinforced.shards, "name": "other", "key": "other"}
    join = [*reinforced.settings["join"], {"table": str(path), "key": "key"}, other]
    sources = {SYN: 0.5, SYN.replace("join:dr", "join:other"): 0.5}
    with reinforced.loader(join=join, fields={}, captions=sources, tokenizer=str(tokenizer)) as loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            drawn = zip(entries["captions"], entries["caption_sources"], entries["caption_numbers"], strict=True)
            for row, (text, source, number) in zip(entries["rows"].tolist(), drawn, strict=True):
                assert text == f"synthetic {row if source == SYN else ROWS - 1 - row} {number}"


def test_captions_of_joined_tars_are_counted_once(
    reinforced: Reinforced, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    changes = {"captions": {"shards": 0.25, SYN: 0.75}, "tokenizer": str(tokenizer), "fields": {}}
    counted: list[int] = []
    count = Tokenizer.count

    def counting(self: Tokenizer, captions: list[str]) -> Any:
        counted.append(sum(text.startswith("synthetic") for text in captions))
        return count(self, captions)

    monkeypatch.setattr(Tokenizer, "count", counting)
    with reinforced.loader(**changes) as loader:
        found = [dict(batch)["captions"] for batch in loader]
    assert sum(counted) == 5 * ROWS
    with Loader.from_config({**reinforced.settings, **changes}) as loader:
        assert [dict(batch)["captions"] for batch in loader] == found
    assert sum(counted) == 5 * ROWS
    samples = {uid: {"syn.json": json_of({"syn_text": [f"other {row}"]})} for row, uid in enumerate(UIDS)}
    for tar in (reinforced.folder / "dr").glob("*.tar"):
        tar.unlink()
    write_tar(reinforced.folder / "dr" / "00000000.tar", samples)
    build_index(reinforced.folder / "dr", overwrite=True)  # other captions: what was kept does not fit
    with pytest.raises(ConfigError, match=r"^data\.join\.1: .* is not joined with .*; run `mmdata join CONFIG`$"):
        Loader.from_config({**reinforced.settings, **changes})
    with reinforced.loader(**changes) as loader:
        texts = {text for batch in loader for text in dict(batch)["captions"]}
    assert any(text.startswith("other") for text in texts)
    assert not any(text.startswith("synthetic") for text in texts)


def test_samples_without_usable_captions_draw_from_other_sources(
    tmp_path: Path,
    photo: Callable[..., bytes],
    samples: dict[int, dict[str, bytes]],
    caplog: pytest.LogCaptureFixture,
    tokenizer: Path,
):
    del samples[2], samples[3]["syn.json"]
    samples[4]["syn.json"] = b'{"syn_text": '
    samples[5]["syn.json"] = json_of({"syn_text": ["", "a\x00 dog"]})
    samples[6]["syn.json"] = json_of({"syn_text": "one"})
    data = write(tmp_path, photo, samples)
    changes = {"captions": {"shards": 0, SYN: 1.0}, "fields": {}, "tokenizer": str(tokenizer)}
    with data.loader(**changes) as loader:
        found = {
            row: text
            for batch in loader
            for row, text in zip(batch["rows"].tolist(), dict(batch)["captions"], strict=True)
        }
    assert [found[row] for row in (2, 3, 4, 5, 6)] == ["written 2", "written 3", "written 4", "a dog", "one"]
    assert all(text.startswith(f"synthetic {row} ") for row, text in found.items() if row > 6)
    (line,) = [line for line in caplog.messages if "without a caption in it" in line]
    assert line.startswith(f"data.captions {SYN}: 2 samples without a caption in it; the first: shard ")
    assert "no member .syn.json" in line or f"sample '{UIDS[4]}': bad_field: not JSON: " in line
    assert f"data.captions: 3 of 40 rows have no caption in {SYN}, and draw from the other sources" in caplog.messages
    with pytest.raises(ConfigError, match=f"3 of 40 rows have no caption in {SYN}, such as row 2 "):
        data.loader(**{**changes, "captions": {SYN: 1.0}})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "join:dr:x.txt",
            "none of 40 samples has a caption in x.txt: shard '.*', sample '.*': missing_field: no ",
        ),
        ("join:dr:json:syn", "none of 40 samples has a caption in json:syn: .*: no 'syn'.*; it has uid, sha256"),
        ("join:dr:npz:image_emb", "'npz:image_emb': captions are in json:KEY or txt"),
        ("join:dr:json", "'json': captions are in json:KEY or txt"),
        ("join:dr:jpg", "'jpg': its extension does not say what values it has"),
        ("join:rd:url.txt", "no source 'join:rd:url.txt'; there are shards, join:uid, join:dr:MEMBER"),
    ],
)
def test_captions_that_are_not_there_are_refused(reinforced: Reinforced, source: str, message: str):
    with pytest.raises(ConfigError, match=message):
        reinforced.loader(captions={source: 1.0})
