"""Tokenizers: what is counted is what is encoded, and both are what transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mmdata.errors import ConfigError
from mmdata.text.tokenizer import Tokenizer, train_tokenizer

CAPTIONS = [
    "a red circle left of a blue square",
    "A Red Circle",
    "",
    "Ein Café in Köln, 東京 und 🦊🏽!",
    "words " * 60,
    "supercalifragilisticexpialidocious",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 400 entries."""
    path = tmp_path_factory.mktemp("text") / "tokenizer"
    train_tokenizer(["a red circle left of a blue square", "two dogs near a tree"] * 20, path, vocab_size=400)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, max_length=24)


def test_tokenizer_encodes_as_transformers_does(folder: Path, tokenizer: Tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)(
        CAPTIONS, padding="max_length", truncation=True, max_length=24, return_tensors="np"
    )
    input_ids, attention_mask = tokenizer.encode(CAPTIONS, 24)
    np.testing.assert_array_equal(input_ids, theirs["input_ids"])
    np.testing.assert_array_equal(attention_mask, theirs["attention_mask"])
    assert (input_ids.dtype, attention_mask.dtype) == (np.int64, np.int64)


def test_tokenizer_counts_what_transformers_counts(folder: Path, tokenizer: Tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.count(CAPTIONS) == [len(theirs(caption)["input_ids"]) for caption in CAPTIONS]
    assert tokenizer.count([]) == []


@given(st.lists(st.text(max_size=60), max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_tokenizer_count_is_what_encode_fills(tokenizer: Tokenizer, captions: list[str]):
    input_ids, attention_mask = tokenizer.encode(captions, 24)
    counts = np.minimum(tokenizer.count(captions), 24)
    np.testing.assert_array_equal(attention_mask.sum(1), counts)
    places = np.arange(24)[None] < counts[:, None]
    np.testing.assert_array_equal(attention_mask.astype(bool), places)
    assert (input_ids[~places] == tokenizer.pad_id).all()
    assert input_ids.max(initial=0) < tokenizer.vocab_size


def test_tokenizer_truncation_keeps_the_end_token(folder: Path, tokenizer: Tokenizer):
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    input_ids, _ = tokenizer.encode(["words " * 60], 24)
    assert input_ids[0, -1] == end
    assert (input_ids[0, :-1] != end).all()


def test_tokenizer_needs_room_beside_its_special_tokens(folder: Path):
    assert Tokenizer.load(folder, max_length=3).encode(["a dog"], 3)[1].tolist() == [[1, 1, 1]]
    with pytest.raises(ConfigError, match=r"^max_length 2: 2 special tokens alone are that long; set data\.max_length"):
        Tokenizer.load(folder, max_length=2)


def test_tokenizer_row_is_the_same_in_any_company(tokenizer: Tokenizer):
    together, _ = tokenizer.encode(CAPTIONS, 24)
    for row, caption in enumerate(CAPTIONS):
        alone, _ = tokenizer.encode([caption], 24)
        np.testing.assert_array_equal(alone[0], together[row])


def test_tokenizer_serves_many_threads_at_once(tokenizer: Tokenizer):
    expected = (tokenizer.count(CAPTIONS), tokenizer.encode(CAPTIONS, 24)[0].tolist())
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(lambda: (tokenizer.count(CAPTIONS), tokenizer.encode(CAPTIONS, 24)[0].tolist()))
            for _ in range(40)
        ]
        assert all(call.result() == expected for call in calls)


def test_tokenizer_that_was_trained_decodes_to_the_lower_cased_text(folder: Path):
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.model_max_length == 77
    for caption in CAPTIONS:
        ids = theirs(caption)["input_ids"]
        assert ids[0] == theirs.bos_token_id
        assert ids[-1] == theirs.eos_token_id
        assert theirs.decode(ids, skip_special_tokens=True).strip() == caption.lower().strip()


def test_train_tokenizer_gives_the_same_bytes_twice(folder: Path, tmp_path: Path):
    train_tokenizer(["a red circle left of a blue square", "two dogs near a tree"] * 20, tmp_path / "t", vocab_size=400)
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == names
    for name in names:
        assert (tmp_path / "t" / name).read_bytes() == (folder / name).read_bytes()


def test_train_tokenizer_keeps_to_its_vocabulary(folder: Path, tokenizer: Tokenizer):
    assert tokenizer.vocab_size <= 400
    assert len(AutoTokenizer.from_pretrained(folder)) == tokenizer.vocab_size


def test_tokenizer_fingerprint_is_that_of_its_ids(folder: Path, tokenizer: Tokenizer, tmp_path: Path):
    assert Tokenizer.load(folder, max_length=77).fingerprint == tokenizer.fingerprint
    train_tokenizer(["other words"] * 9, tmp_path / "t", vocab_size=400)
    assert Tokenizer.load(tmp_path / "t").fingerprint != tokenizer.fingerprint
    assert len(tokenizer.fingerprint) == 16


def test_tokenizers_of_clip_and_that_was_trained_are_loaded_without_transformers(folder: Path):
    program = f"""
import sys
from mmdata.text.tokenizer import Tokenizer
Tokenizer.load("clip")
Tokenizer.load({str(folder)!r})
print("transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"False\n"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"pad_token": "<end>"},
        {"pad_token": None},
        {"pad_token": "<new>"},
        {"unk_token": "new"},
        {"extra_special_tokens": ["<new>"]},
        {"add_bos_token": False},
        {"added_tokens_decoder": {"0": {"content": "<pad>", "special": True}}},
    ],
)
def test_tokenizer_of_a_folder_is_the_one_that_transformers_makes(
    folder: Path, tmp_path: Path, more: dict[str, object]
):
    config = json.loads((folder / "tokenizer_config.json").read_text()) | more
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    pad_id = theirs.eos_token_id if theirs.pad_token_id is None else theirs.pad_token_id
    of_theirs = Tokenizer(theirs.backend_tokenizer, max_length=24, pad_id=pad_id)
    ours = Tokenizer.load(tmp_path, max_length=24)
    assert (ours.fingerprint, ours.pad_id, ours.vocab_size) == (of_theirs.fingerprint, pad_id, len(theirs))
    np.testing.assert_array_equal(ours.encode(CAPTIONS, 24), of_theirs.encode(CAPTIONS, 24))


def test_train_tokenizer_needs_room_for_all_bytes(tmp_path: Path):
    with pytest.raises(ConfigError, match="a byte-level vocabulary needs at least 300 entries: got 299"):
        train_tokenizer(["a"], tmp_path / "t", vocab_size=299)


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_tokenizer_that_cannot_be_loaded_is_named(folder: Path, tmp_path: Path, content: str):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    (broken / "tokenizer.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"^tokenizer '.*broken': cannot be loaded \(.+\); give a folder that AutoTok"
    ):
        Tokenizer.load(broken)


def test_tokenizer_of_a_folder_with_a_model_alone_is_refused(tmp_path: Path):
    """transformers makes a tokenizer of it that knows no word."""
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ConfigError, match=r"it has special tokens only, .* a model and no tokenizer files; .*`clip`$"):
        Tokenizer.load(tmp_path)
