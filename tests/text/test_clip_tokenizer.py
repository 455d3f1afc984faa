"""CLIP's tokenizer, which ships with mmdata, and what the name of a tokenizer means."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from transformers import AutoTokenizer, CLIPTokenizerFast

from mmdata.errors import ConfigError
from mmdata.images import ImageInfo
from mmdata.index import Index
from mmdata.loader import Loader
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import CLIP, CLIP_NAMES, Tokenizer, locate_tokenizer, save_tokenizer
from tests.shard_writer import ShardWriter

OPEN_CLIP: list[tuple[str, list[int]]] = json.loads((Path(__file__).parent / "clip_ids.json").read_text("utf-8"))
"""Captions and their ids by open_clip 3.3.0, `SimpleTokenizer.encode`, without the start and the end."""
WEB: list[tuple[str, list[int]]] = [
    ("salt &amp; pepper", [6611, 261, 8253]),
    ("salt &amp;amp; pepper", [6611, 261, 8253]),
    ("it&#39;s 5 &lt; 6", [585, 568, 276, 283, 277]),
    ("caf&eacute;&nbsp;&#x1F98A;", [15304, 6040, 488]),
    ("AT&T r&d &", [536, 261, 339, 337, 261, 323, 261]),
    ("ΟΔΟΣ", [138, 123, 138, 112, 138, 123, 139, 480]),
]
"""Likewise: HTML entities, which are decoded, and a Greek word in capitals."""
START, END = 49406, 49407


def test_ids_are_those_of_open_clip():
    captions, expected = zip(*OPEN_CLIP, *WEB, strict=True)
    tokenizer = Tokenizer.load("clip", max_length=200)
    ids, mask = tokenizer.encode(captions, 200)
    found = [row[: int(length)].tolist() for row, length in zip(ids, mask.sum(1), strict=True)]
    assert found == [[START, *ids, END] for ids in expected]
    assert tokenizer.count(captions) == [len(ids) + 2 for ids in expected]
    assert tokenizer.vocab_size == 49408


def test_it_is_the_tokenizer_that_transformers_makes_of_the_folder():
    captions = [caption for caption, _ in OPEN_CLIP]
    theirs = AutoTokenizer.from_pretrained(CLIP)
    assert isinstance(theirs, CLIPTokenizerFast)
    ours = Tokenizer.load("clip", max_length=16)
    made = {"max_length": 16, "pad_id": theirs.pad_token_id}
    assert ours.identity == Tokenizer(theirs.backend_tokenizer, cleaning="open_clip", **made).identity
    assert ours.identity != Tokenizer(theirs.backend_tokenizer, **made).identity  # other counts of some captions
    encoded = theirs(captions, padding="max_length", truncation=True, max_length=16, return_tensors="np")
    np.testing.assert_array_equal(ours.encode(captions, 16), (encoded["input_ids"], encoded["attention_mask"]))


def test_lengths_in_an_index_and_tokens_in_batches_are_of_decoded_captions(tmp_path, photo, caplog):
    clip = Tokenizer.load("clip")
    with ShardWriter(tmp_path, count_tokens=clip.count, tokenizer=clip.fingerprint) as writer:
        for i, (caption, _) in enumerate(WEB):
            writer.write(Sample(f"{i}", photo(40, 40, seed=i), ImageInfo("JPEG", 40, 40, 1), [caption]))
    _, counts = Index.open(tmp_path).lists("caption_tokens")
    assert counts.tolist() == [len(ids) + 2 for _, ids in WEB]
    data = {"shards": str(tmp_path), "tokenizer": "clip", "global_batch_size": len(WEB), "image_size": 32}
    (batch,) = Loader.from_config(data | {"shuffle": False})
    for i, (_, ids) in enumerate(WEB):
        mask = batch["attention_mask"][batch["rows"] == i][0].bool()
        assert batch["input_ids"][batch["rows"] == i][0][mask].tolist() == [START, *ids, END]
    assert "counted now" not in caplog.text


def test_a_copy_decodes_as_the_tokenizer_does(tmp_path):
    save_tokenizer("clip", tmp_path)
    texts = [text for text, _ in WEB]
    assert Tokenizer.load(tmp_path).count(texts) == [len(ids) + 2 for _, ids in WEB]


@pytest.mark.parametrize("name", sorted(CLIP_NAMES))
def test_names_of_clip_need_no_network(name):
    assert locate_tokenizer(name) == str(CLIP)


def test_the_vocabulary_comes_with_its_licence():
    assert "Copyright (c) 2021 OpenAI" in (CLIP.parent / "LICENSE").read_text()
    assert sorted(path.name for path in CLIP.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    (tmp_path / "clip").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate_tokenizer("clip") == "clip"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./tokenizer", "names on the Hugging Face hub are NAME or OWNER/NAME"),
        ("shards/train/tokenizer", "names on the Hugging Face hub are NAME or OWNER/NAME"),
        ("/data/tokenizer", "names on the Hugging Face hub are NAME or OWNER/NAME"),
        ("shards/tokenizer", "the folder 'shards' exists, so the Hugging Face hub was not asked"),
        (Path("tokenizer"), "it is a path"),
    ],
)
def test_a_missing_folder_is_an_error_without_the_hub(tmp_path, monkeypatch, name, why):
    (tmp_path / "shards").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmdata.text.tokenizer._check_hub", lambda name: pytest.fail("the hub was asked"))
    with pytest.raises(ConfigError, match=f"^tokenizer '{name}': no such folder \\({why}\\); give a folder that Auto"):
        Tokenizer.load(name)


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_both_ways(monkeypatch):
    with socket.socket() as closed:  # a port on which nobody listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        both = "if a folder was meant, check its path; if the hub, connect to it once.*`clip` is CLIP's tokenizer"
        with pytest.raises(ConfigError, match=f"'nobody/nothing': no such folder, and the .* cannot be asked .*{both}"):
            Tokenizer.load("nobody/nothing")


def test_an_offline_hub_is_named(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"cannot be asked .*HF_HUB_OFFLINE"):
        Tokenizer.load("nobody/nothing")
