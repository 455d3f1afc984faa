"""What lies at a path, from its name and first bytes."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from mmdata.recognize import Kind, find_run, recognize


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.csv", b"filepath,caption\n", Kind.TABLE),
        ("a.PARQUET", b"PAR1", Kind.TABLE),
        ("a.yaml", b"data: {}\n", Kind.CONFIG),
        ("a.json", b"{}", Kind.JSON),
        ("a.py", b"import x\n", Kind.PYTHON),
        ("a.jpg", b"\xff\xd8\xff", Kind.IMAGE),
        ("a.pt", b"PK\x03\x04", Kind.WEIGHTS),
        ("a.zip", b"PK\x03\x04", Kind.ZIP),
        ("a", b"\x00\x01", Kind.BINARY),
        ("a.bz2", b"BZh91AY&SY\x90\x01", Kind.BINARY),
        ("a.txt", "à la carte".encode() * 60, Kind.TEXT),  # 512 bytes may end inside a character
        ("a.txt", "à la carte".encode("latin-1"), Kind.TEXT),
        ("a.tar", b"", Kind.EMPTY),
    ],
)
def test_recognize_file(tmp_path: Path, name: str, content: bytes, kind: Kind):
    (tmp_path / name).write_bytes(content)
    assert recognize(tmp_path / name) is kind


def test_recognize_folders_tars_and_what_is_absent(tmp_path: Path):
    assert recognize(tmp_path) is Kind.FOLDER
    assert recognize(tmp_path / "none") is Kind.ABSENT
    assert recognize(Path("a" * 300)) is Kind.ABSENT  # a name that the system refuses
    with tarfile.open(tmp_path / "shard", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.jpg"))
    assert recognize(tmp_path / "shard") is Kind.TAR
    (tmp_path / "shard").rename(tmp_path / "0.tar")
    assert recognize(tmp_path) is Kind.TARS
    (tmp_path / "__mmdata__").mkdir()
    assert recognize(tmp_path) is Kind.SHARDS


def test_recognize_run_and_its_parts(tmp_path: Path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-0000000001"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").write_text("data: {}")
    for name in (".metadata", "run.pt"):
        (checkpoint / name).touch()
    assert recognize(run) is Kind.RUN
    assert recognize(run / "checkpoints") is Kind.CHECKPOINTS
    assert recognize(checkpoint) is Kind.CHECKPOINT
    for part in (run, run / "config.yaml", run / "checkpoints", checkpoint):
        assert find_run(part) == run
    (tmp_path / "config.yaml").write_text("data: {}")
    assert find_run(tmp_path / "config.yaml") is None
