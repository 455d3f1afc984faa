"""A user's function of captions: equal for equal rows, and cut to a length with the end of the text kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mmdata.errors import BadSample, ConfigError, Reason
from mmdata.text.tokenizer import CLIP, Tokenizer
from mmdata.text.transform import TextTransform

USERS = """
import random

def drop_words(text, rng):
    return " ".join(word for word in text.split() if rng.random() < 0.5)

def with_random(text, rng):
    return f"{text} {random.random()}"

def counted(text, rng, seen=[]):
    seen.append(text)
    return f"{text} {len(seen)}"

def nothing(text, rng):
    return None

def surrogate(text, rng):
    return "a dog \\ud800"

def raises(text, rng):
    return text[1000]

def alone(text):
    return text

NUMBER = 5
"""

TEXT = "a small dog runs after a large red ball in the park"


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with text transforms."""
    name = f"users_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_row_has_the_same_text_in_any_order_and_thread(users: str):
    transform = TextTransform(f"{users}:drop_words", seed=3)
    rows = [(number, epoch) for number in range(50) for epoch in (0, 1)]
    alone = [transform(TEXT, number=number, epoch=epoch) for number, epoch in rows]
    assert len(set(alone)) > 80  # of 100: rows and epochs differ
    assert transform(TEXT, number=3, epoch=1) == alone[7]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda row: transform(TEXT, number=row[0], epoch=row[1]), rows[::-1]))[::-1]
    assert found == alone
    other = TextTransform(f"{users}:drop_words", seed=4)
    assert [other(TEXT, number=number, epoch=epoch) for number, epoch in rows] != alone


def test_nothing_is_changed_without_a_function():
    transform = TextTransform()
    assert not transform
    assert transform(TEXT, number=0, epoch=0) == TEXT
    assert set(transform.identity().values()) == {None}


def test_the_identity_says_the_name_and_the_content_of_the_file(users: str):
    found = TextTransform(f"{users}:drop_words").identity()
    assert found["text_transform"] == f"{users}:drop_words"
    assert len(found["text_transform_source"]) == 16
    assert TextTransform(lambda text, rng: text).identity()["text_transform"].endswith("<lambda>")


@pytest.mark.parametrize("name", ["with_random", "counted"])
def test_a_text_that_differs_when_made_again_is_an_error(users: str, name: str):
    transform = TextTransform(f"{users}:{name}")
    with pytest.raises(ConfigError, match=rf"text_transform '{users}:{name}': called again .* it gave another text"):
        transform(TEXT, number=0, epoch=0)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("nothing", "returned NoneType, not a text"),
        ("surrogate", r"returned 'a dog \ud800': a lone surrogate"),
        ("raises", "IndexError: string index out of range"),
    ],
)
def test_a_text_that_cannot_be_used_names_its_fault(users: str, name: str, detail: str):
    with pytest.raises(BadSample) as caught:
        TextTransform(f"{users}:{name}")(TEXT, number=0, epoch=0)
    assert (caught.value.reason, caught.value.detail) == (Reason.TEXT_TRANSFORM_FAILED, detail)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lower", r"text_transform 'lower': expected 'module:callable', a function \(text, rng\)"),
        ("no_such_module:f", r"text_transform 'no_such_module:f': No module named 'no_such_module'"),
        ("USERS:drop_word", r"text_transform '.*:drop_word': module '.*' has no attribute 'drop_word'"),
        ("USERS:NUMBER", r"text_transform '.*:NUMBER': expected 'module:callable', a function \(text, rng\)"),
        (
            "USERS:alone",
            r"text_transform '.*:alone': takes \(text\); expected \(text, rng\), the caption and the row's",
        ),
    ],
)
def test_what_is_no_text_transform_is_refused(users: str, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        TextTransform(name.replace("USERS", users))


@pytest.fixture(scope="session")
def clip() -> Tokenizer:
    return Tokenizer.load("clip", max_length=40)


@pytest.fixture(scope="session")
def theirs() -> Any:
    return tokenizers.Tokenizer.from_file(str(CLIP / "tokenizer.json"))


@given(st.lists(st.text("ab <|endoftext|>.", max_size=60), max_size=4), st.integers(2, 40))
def test_texts_are_cut_as_by_the_truncation_of_tokenizers(clip: Tokenizer, theirs: Any, texts: list[str], length: int):
    input_ids, attention_mask, num_cut = clip.encode_cut(texts, length)
    theirs.enable_truncation(length)
    for row, encoding in enumerate(theirs.encode_batch(texts)):
        missing = length - len(encoding)
        assert input_ids[row].tolist() == encoding.ids + [clip.pad_id] * missing
        assert attention_mask[row].tolist() == [1] * len(encoding) + [0] * missing
    assert num_cut == sum(min(count, 40) > length for count in clip.count(texts))


def test_a_cut_text_keeps_its_end(clip: Tokenizer):
    input_ids, _, num_cut = clip.encode_cut([TEXT, "a dog"], 6)
    whole = clip.encode([TEXT], 40)[0][0].tolist()
    assert input_ids[0].tolist() == [*whole[:5], 49407]
    assert num_cut == 1
