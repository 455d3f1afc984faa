from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmdata.errors import DataError
from mmdata.index import Index, Manifest, build_index, verify
from tests.index.rewrite import changed, rewrite, shards_of


def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in verify(folder)]


def rewrite_index(folder: Path, number: int, change) -> None:
    """Change a shard's columns as a faulty writer would: hashes and manifest agree with them."""
    shards = shards_of(folder)
    shards[number] = changed(shards[number], change)
    rewrite(folder, shards)


def test_written_and_indexed_shards_have_no_problem(shards, tmp_path):
    assert problems(shards) == []
    build_index(shards, out=tmp_path / "out")
    assert problems(tmp_path / "out") == []


def test_a_flipped_bit_in_a_payload_is_found_and_its_sample_named(shards):
    index = Index.open(shards)
    place = index.take(np.array([5]), ["image_offset", "image_bytes"])
    data = bytearray((shards / "000001.tar").read_bytes())
    data[int(place["image_offset"][0] + place["image_bytes"][0]) - 1] ^= 1
    (shards / "000001.tar").write_bytes(data)
    assert problems(shards) == [
        "shard '000001.tar': its SHA-256 is not the manifest's: the content changed",
        "shard '000001.tar': index column 'image_hash' differs from the tar in 1 rows; the first is sample '0005'",
        "shard '000001.tar': index column 'image_xxh3' differs from the tar in 1 rows; the first is sample '0005'",
    ]


def test_a_changed_caption_is_found(shards):
    path = shards / "000000.tar"
    path.write_bytes(path.read_bytes().replace(b"picture 1 again", b"picture X again"))
    found = problems(shards)
    assert found[1:] == [
        "shard '000000.tar': index column 'caption_hash' differs from the tar in 1 rows; the first is sample '0001'",
        "shard '000000.tar': index column 'members' differs from the tar in 1 rows; the first is sample '0001'",
    ]


def test_a_cut_shard_is_found(shards):
    data = (shards / "000002.tar").read_bytes()
    (shards / "000002.tar").write_bytes(data[:-1024])
    size = len(data)
    found = problems(shards)
    assert found[0] == f"shard '000002.tar': {size - 1024} bytes, and the manifest says {size}"
    assert found[1].startswith(
        f"shard '000002.tar': byte {size - 1024}: the file ends without end blocks: cut; the last"
    )
    assert len(found) == 2


def test_missing_files_are_found(shards):
    (shards / "000000.tar").unlink()
    assert problems(shards) == [f"shard '000000.tar': no such file: '{shards / '000000.tar'}'"]
    (shards / "__mmdata__/index-00000.arrow").unlink()
    with pytest.raises(DataError, match=r"index-00000\.arrow': no such file, and the manifest names it"):
        verify(shards)


def test_a_byte_of_an_index_file_that_no_shard_has_is_found(shards):
    path = shards / "__mmdata__/index-00000.arrow"
    data = bytearray(path.read_bytes())
    data[100] ^= 1  # of the schema, which nobody reads
    path.write_bytes(data)
    assert "'index-00000.arrow': its content is not what the manifest says: it changed" in problems(shards)


@pytest.mark.parametrize("name", ["image_offset", "caption_bytes", "height", "orientation", "label", "image_format"])
def test_a_wrong_number_in_any_column_is_found(shards, name):
    def change(columns):
        values = columns[name].to_numpy().copy()
        values[2] += 1
        columns[name] = pa.array(values)
        return list(columns.values())

    rewrite_index(shards, 1, change)
    assert problems(shards) == [
        f"shard '000001.tar': index column '{name}' differs from the tar in 1 rows; the first is sample '0006'"
    ]


def test_wrong_token_lengths_are_found(shards):
    def change(columns):
        tokens = columns["caption_tokens"]
        values = pa.array(tokens.values.to_numpy() + 1)
        columns["caption_tokens"] = pa.ListArray.from_arrays(tokens.offsets, values, type=tokens.type)
        return list(columns.values())

    rewrite_index(shards, 0, change)
    assert problems(shards) == [
        "shard '000000.tar': the manifest's cells of it are not those of its columns in the index"
    ]


def test_a_manifest_that_miscounts_a_shard_is_found(shards):
    (first, data), *others = shards_of(shards)
    counts = first.counts.copy()
    counts[0] += 1
    wrong = replace(first, captions=first.captions + 1, labels=first.labels + 2, counts=counts)
    rewrite(shards, [(wrong, data), *others])
    assert problems(shards) == [
        "shard '000000.tar': the manifest's captions, labels, counts of it are not those of its columns in the index"
    ]


def test_a_top_that_miscounts_its_pages_is_found(shards):
    manifest = Manifest.read(shards)
    wrong = replace(manifest, bytes=manifest.bytes + 1, captions=99, lengths=[(3, 19)], has_labels=False)
    (shards / "__mmdata__/manifest.json").write_bytes(wrong.to_json())
    assert problems(shards) == [
        "'manifest.json': its bytes, captions, lengths, has_labels are not those of its shards",
    ]


def test_a_damaged_list_of_shards_is_an_error(shards):
    path = shards / "__mmdata__/index-00000.arrow"
    path.write_bytes(path.read_bytes().replace(b"000001.tar", b"000002.tar"))
    with pytest.raises(DataError, match=r"index-00000\.arrow', list of shards: SHA-256 differs from manifest\.json's"):
        verify(shards)


def test_a_row_that_the_index_lost_is_found(shards):
    rewrite_index(shards, 1, lambda columns: [column.take(pa.array([0, 1, 3])) for column in columns.values()])
    found = problems(shards)
    assert found[0] == (
        "shard '000001.tar': 1 samples are neither in the index nor in quarantine.jsonl; the first is '0006'"
    )


def test_rows_in_another_order_are_found(shards):
    rewrite_index(shards, 1, lambda columns: [column.take(pa.array([1, 0, 2, 3])) for column in columns.values()])
    found = problems(shards)
    assert found[0] == "shard '000001.tar': the samples of the index stand in another order in the tar"


def test_a_row_that_the_tar_does_not_hold_is_found(shards):
    def change(columns):
        columns["key"] = pa.array(["0004", "0005", "ghost", "0007"])
        return list(columns.values())

    rewrite_index(shards, 1, change)
    found = problems(shards)
    assert "the index names samples that the tar does not hold or cannot use: ['ghost']" in found[1]


def test_quarantined_samples_are_no_problem_and_unlisted_ones_are(tmp_path, tar, photo):
    members = [("a.jpg", photo(20, 30)), ("a.txt", b"t"), ("b.txt", b"t"), ("c.jpg", photo(3, 90)), ("c.txt", b"t")]
    (tmp_path / "x.tar").write_bytes(tar(members))
    assert build_index(tmp_path, max_bad_share=1.0).accounts["quarantined"] == 2
    assert problems(tmp_path) == []
    lines = (tmp_path / "__mmdata__/quarantine.jsonl").read_text().splitlines()
    (tmp_path / "__mmdata__/quarantine.jsonl").write_text(json.dumps(["not ours"]) + "\nbroken {\n" + lines[0] + "\n")
    assert problems(tmp_path) == [
        f"'manifest.json': its ledger '{tmp_path / '__mmdata__/quarantine.jsonl'}' has 3 lines, and its accounts say "
        "that 2 rows were left out",
        "shard 'x.tar': 1 samples are neither in the index nor in quarantine.jsonl; the first is 'c'",
    ]


def test_progress_ends_at_the_bytes_of_all_shards(shards):
    seen: list[tuple[int, int]] = []
    verify(shards, lambda done, total: seen.append((done, total)))
    total = Manifest.read(shards).bytes
    assert seen[-1] == (total, total)
