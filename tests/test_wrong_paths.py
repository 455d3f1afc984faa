"""What a command imports before it has looked at its arguments: a wrong path is told without waiting for torch."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from mmdata import cli
from mmdata.cli.paths import check_source

HEAVY = ("torch", "torchvision", "transformers", "lightning", "ray")
PROGRAM = f"""
import json, sys
from mmdata.cli import main
code = main()
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
NO_CONFIG = "config 'none': no such file; shipped with mmdata: "
NO_RUN = "'none': no such run; `mmdata train CONFIG` makes one"
NO_SHARDS = "data.shards: folder 'none': no such folder"
CONFIG = """
data: {shards: none, tokenizer: clip, global_batch_size: 8}
"""


def imported_by(*words: str, folder: Path) -> tuple[int, list[str], str]:
    """Exit code, heavy packages, and the line on stderr of a command."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=folder, capture_output=True, text=True)
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    return code, heavy, done.stderr


WRONG = [
    (["bench", "none"], NO_CONFIG),
    (["bench", "c.yaml"], NO_SHARDS),
    (["convert", "none", "out"], "source 'none': no such file or folder"),
    (["convert", "none", "out", "--select", "width > 3"], "source 'none': no such file or folder"),
    (["duplicates", "none", "--out", "o.parquet"], "folder 'none': no such folder"),
    (["duplicates", ".", "--against", "none", "--out", "o.parquet"], "folder 'none': no such folder"),
    (["evaluate", "none"], NO_RUN),
    (["evaluate", "shards"], "'shards': a folder of shards, and a run is expected"),
    (["evaluate", "c.yaml"], "'c.yaml': a config, and a run is expected; its run is 'runs/c'"),
    (["evaluate", "run", "--shards", "none"], "folder 'none': no such folder"),
    (["export", "shards", "out"], "'shards': a folder of shards, and a run is expected"),
    (["export", "none", "out"], NO_RUN),
    (["index", "none"], "'none': no such file or folder"),
    (["init", "none"], "source 'none': no such file or folder"),
    (["init", "a.zip/none"], "source 'a.zip/none': no such file or folder"),
    (["join", "none", "t.csv"], NO_CONFIG),
    (["neighbours", "none", "--features", "f.npy", "--size", "2", "--out", "g.npy"], NO_CONFIG),
    (["neighbours", "c.yaml", "--features", "f.npy", "--size", "2", "--out", "g.npy"], NO_SHARDS),
    (["neighbours", ".", "--run", "none", "--size", "2", "--out", "g.npy"], NO_RUN),
    (["plan", "none"], NO_CONFIG),
    (["plan", "c.yaml"], NO_SHARDS),
    (["push", "none", "s3://b/p"], "folder 'none': no such folder"),
    (["replay", "none", "0"], NO_CONFIG),
    (["replay", "c.yaml", "0"], NO_SHARDS),
    (["report", "none"], "folder 'none': no such folder"),
    (["report", "c.yaml"], "folder 'none': no such folder"),
    (["train", "none"], NO_CONFIG),
    (["train", "c.yaml", "train.steps=1"], NO_SHARDS),
    (["train", "c.yaml", "train.steps=1", "data.shards=.", "data.val.shards=none"], "data.val.shards: folder 'none'"),
    (["verify", "none"], "folder 'none': no such folder"),
    (["verify", "c.yaml"], "'c.yaml': a YAML file, and a tar or a folder of tars is expected"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
@pytest.mark.sweep(keep=1)
def test_wrong_path_is_told_before_torch_is_imported(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "shards" / "__mmdata__").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("photos/a.txt", "a photo")
    code, heavy, said = imported_by(*words, folder=tmp_path)
    assert (code, said[: len(message) + 7], len(said.splitlines())) == (2, f"error: {message}", 1), said
    assert heavy == []


def test_wrong_path_is_tried_for_every_command_that_takes_one() -> None:
    without_a_path = {"demo", "doctor", "settings"}
    assert {words[0] for words, _ in WRONG} == {*cli.COMMANDS} - without_a_path


def test_convert_of_photos_imports_no_torch(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("image,caption\na.png,a black square\n")
    code, heavy, said = imported_by("convert", "t.csv", "out", folder=tmp_path)
    assert (code, heavy, said) == (0, [], "")
    assert (tmp_path / "out" / "__mmdata__" / "manifest.json").is_file()


def test_folder_in_an_archive_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("photos/a.txt", "a photo")
    monkeypatch.chdir(tmp_path)
    for source in ("a.zip", "a.zip/photos"):
        check_source(source)
