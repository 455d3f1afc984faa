"""Pushing to the Hugging Face hub: its own client against a server of its API on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from huggingface_hub import HfFileSystem

import mmdata.push.hub
import mmdata.storage.attempts
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, Manifest
from mmdata.push import PushConfig, open_store, plan_push, push
from mmdata.storage import ShardCache
from tests.programs import PATIENCE_S
from tests.push.hub_server import API, NAME, TOKEN, Hub, serve_hub

URL = f"hf://datasets/{NAME}"
MODEL = f"hf://{NAME}"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub that this process and the programs it starts take for theirs."""
    with serve_hub() as server:
        environment = {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf"),
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)  # read when the module is loaded
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(mmdata.storage.attempts, "WAIT_S", 0.01)
        HfFileSystem.clear_instance_cache()
        yield server
        HfFileSystem.clear_instance_cache()


def push_now(folder: Path, url: str = URL, *, private: bool = False, **settings) -> list[str]:
    """Push, and give the names of the files that were sent."""
    store = open_store(url, private=private)
    plan = plan_push(folder, store, PushConfig(**settings))
    push(plan, store)
    return [file.name for file in [*plan.files, *plan.last]]


def uploads(hub: Hub) -> int:
    return sum(command.startswith("PUT /upload/") for command in hub.commands)


def commits(hub: Hub) -> int:
    return hub.commands.count(f"POST {API}/commit/main")


def test_push_makes_a_dataset_in_one_commit_with_the_files_as_they_are(hub, shards):
    push_now(shards, private=True)
    names = [path.relative_to(shards).as_posix() for path in shards.rglob("[!.]*") if path.is_file()]
    assert {name: hub.files[name] for name in names} == {name: (shards / name).read_bytes() for name in names}
    assert set(hub.files) - set(names) == {".gitattributes", "README.md", "croissant.json"}
    assert (len(hub.commits or []), hub.private) == (2, True)


def test_push_reads_back_the_same_rows(hub, shards, tmp_path):
    push_now(shards)
    here, far = Index.open(shards), Index.open(URL, cache=ShardCache(tmp_path / "cache"))
    assert far.fingerprint == here.fingerprint
    assert far.keys(np.arange(10)) == here.keys(np.arange(10))
    assert far.shard_path(2).read_bytes() == (shards / "000002.tar").read_bytes()


def test_push_again_sends_nothing(hub, shards):
    push_now(shards)
    before = uploads(hub), commits(hub)
    assert push_now(shards) == []
    assert (uploads(hub), commits(hub)) == before == (4, 1)


def test_a_long_push_commits_the_manifest_last(hub, write, tmp_path, monkeypatch):
    monkeypatch.setattr(mmdata.push.hub, "COMMIT_FILES", 4)
    shards = write(tmp_path / "photos", 17)  # five shards, a page and its columns
    push_now(shards)
    manifest = [
        name for name, _ in enumerate(hub.commits or []) if "__mmdata__/manifest.json" in (hub.commits or [])[name]
    ]
    assert manifest == [len(hub.commits or []) - 1] == [2]
    assert Manifest.read(URL, ShardCache(tmp_path / "cache")).root == Manifest.read(shards).root


def test_push_killed_goes_on_with_what_was_not_uploaded(hub, shards):
    hub.held = f"POST {API}/commit/main"
    with subprocess.Popen([sys.executable, "-m", "mmdata", "push", str(shards), URL]) as program:
        assert hub.holding.wait(PATIENCE_S)
        program.send_signal(signal.SIGKILL)
    hub.held = ""
    assert (set(hub.files), uploads(hub)) == ({".gitattributes"}, 4)
    push_now(shards)
    assert uploads(hub) == 4
    assert "__mmdata__/manifest.json" in hub.files
    hub.release.set()


def test_failed_requests_are_repeated(hub, shards):
    hub.faults = {
        f"GET {API}": [503],
        "POST /api/repos/create": [500],
        f"POST {API}/commit": [502, 503],
        "PUT /upload": [500],
    }
    push_now(shards)
    assert not any(hub.faults.values())
    assert "__mmdata__/manifest.json" in hub.files


def test_wrong_bytes_end_the_push_before_a_commit(hub, shards):
    tar = shards / "000001.tar"
    tar.write_bytes(tar.read_bytes()[:-1] + b"x")
    with pytest.raises(
        DataError, match=r"000001\.tar': its SHA-256 is not the one that the manifest names, or it chan"
    ):
        push_now(shards)
    assert commits(hub) == 0


def test_other_shards_there_are_refused_and_replaced_in_one_commit_if_asked(hub, shards, write, tmp_path):
    push_now(shards)
    other = write(tmp_path / "other", 5, seed=50)
    with pytest.raises(
        DataError, match=rf"'{URL}': holds other shards: '__mmdata__/manifest\.json' differs \(rows 10 th"
    ):
        push_now(other)
    push_now(other, overwrite=True)
    assert len(hub.commits or []) == 3
    assert not [name for name in hub.files if "000002" in name]
    assert hub.files["000001.tar"] == (other / "000001.tar").read_bytes()
    assert hub.files["__mmdata__/manifest.json"] == (other / "__mmdata__/manifest.json").read_bytes()


def test_overwrite_in_several_commits_begins_without_a_manifest(hub, write, tmp_path, monkeypatch):
    push_now(write(tmp_path / "photos", 17))
    before = len(hub.commits or [])
    monkeypatch.setattr(mmdata.push.hub, "COMMIT_FILES", 4)
    push_now(write(tmp_path / "other", 15, seed=50), overwrite=True)
    states = ["__mmdata__/manifest.json" in files for files in (hub.commits or [])[before:]]
    assert states == [False] * (len(states) - 1) + [True]
    assert len(states) > 1
    assert "000004.tar" not in hub.files


def test_a_commit_of_somebody_else_ends_the_push(hub, shards):
    store = open_store(URL)
    push_now(shards)
    late = plan_push(shards, store, PushConfig(license="mit"))
    (hub.commits or []).append({**hub.files, "notes.md": b"new"})
    with pytest.raises(DataError, match=rf"'{URL}': somebody else has changed the dataset since this push began .*run"):
        push(late, store)
    assert push_now(shards, license="mit") == ["croissant.json"]
    assert hub.files["notes.md"] == b"new"


def test_an_edited_card_stays(hub, shards):
    push_now(shards)
    (hub.commits or []).append({**hub.files, "README.md": b"edited"})
    assert push_now(shards) == []
    assert hub.files["README.md"] == b"edited"


def test_missing_and_denied_credentials_are_one_line(hub, shards, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ConfigError, match=rf"'{URL}': access denied \(.*401.*HF_TOKEN for hf"):
        push_now(shards)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.faults = {"POST /api/repos/create": [403]}
    with pytest.raises(ConfigError, match=rf"'{URL}': access denied \(.*403.*HF_TOKEN for hf"):
        push_now(shards)
    push_now(shards)
    with pytest.raises(ConfigError, match=rf"'{URL}@draft': no branch 'draft'; make it at the hub, or leave it out"):
        push_now(shards, f"{URL}@draft")
    assert push_now(shards, f"{URL}@main") == []


@pytest.fixture
def exported(hub: Hub, tmp_path: Path) -> Path:
    """A folder as `mmdata export --to open_clip` writes it, and a hub that takes models."""
    hub.kind = "model"
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in ("open_clip_model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(name)
    text = {"width": 64, "hf_tokenizer_name": "exported"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"text_cfg": text}}))
    (folder / "README.md").write_text("---\nlibrary_name: open_clip\n---\n\n# exported\n")
    return folder


def test_push_of_a_model_has_its_files_and_its_card_with_the_license(hub, exported):
    (exported / ".DS_Store").write_text("of the desktop")
    (exported / ".cache").mkdir()
    push_now(exported, MODEL, private=True, license="apache-2.0")
    assert (len(hub.commits or []), hub.private) == (2, True)
    for name in ("open_clip_model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert hub.files[name] == name.encode()
    assert hub.files["README.md"].decode() == "---\nlibrary_name: open_clip\nlicense: apache-2.0\n---\n\n# exported\n"
    assert json.loads(hub.files["open_clip_config.json"])["model_cfg"]["text_cfg"]["hf_tokenizer_name"] == NAME
    assert push_now(exported, MODEL, license="apache-2.0") == []
    assert ".DS_Store" not in hub.files


def test_push_of_a_model_again_sends_what_differs_and_leaves_an_edited_card(hub, exported, shards):
    push_now(exported, MODEL)
    (hub.commits or []).append({**hub.files, "README.md": b"edited"})
    (exported / "open_clip_model.safetensors").write_text("other weights")
    assert push_now(exported, MODEL) == ["open_clip_model.safetensors"]
    assert (hub.files["open_clip_model.safetensors"], hub.files["README.md"]) == (b"other weights", b"edited")
    assert push_now(exported, MODEL, overwrite=True) == ["README.md"]
    (exported / "onnx").mkdir()
    with pytest.raises(
        DataError, match=r"exported' has \['onnx'\], no plain files: a model is a folder of files; move"
    ):
        push_now(exported, MODEL)
    with pytest.raises(
        DataError, match=r"': not a model that `mmdata export` wrote, as hf://OWNER/NAME takes; shards go"
    ):
        push_now(shards, MODEL)


def test_the_program_says_where_to_look(hub, shards):
    command = [sys.executable, "-m", "mmdata", "push", str(shards), URL]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"7 files \([\d,]+ bytes\) sent to hf://datasets/me/photos\n", done.stdout)
    assert done.stdout.splitlines()[1:] == [f"see {hub.url}/datasets/{NAME}", f"load it with data.shards: {URL}"]
