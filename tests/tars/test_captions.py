from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.errors import BadSample, Reason
from mmdata.tars import captions_of, clean_caption
from mmdata.tars.captions import JSON, MAX_CAPTION, TXT


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" a dog \r\n", "a dog"),
        ("a\x00 d\x07og", "a dog"),
        ("\ufeffa dog", "a dog"),
        ("a \u202egod\u202c \u2066dog\u2069\u200f", "a god dog"),
        ("two\x0bwords\x0cand\x85more", "two words and more"),
        ("line\r\nline\tend", "line\nline\tend"),
        ("family \U0001f468\u200d\U0001f469", "family \U0001f468\u200d\U0001f469"),
    ],
)
def test_captions_are_cleaned(text, cleaned):
    assert clean_caption(text) == cleaned


@given(st.text())
def test_cleaning_is_idempotent(text):
    with contextlib.suppress(BadSample):
        cleaned = clean_caption(text)
        assert clean_caption(cleaned) == cleaned


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("", Reason.EMPTY_CAPTION, "caption is empty after cleaning: ''"),
        ("\x00\u202e ", Reason.EMPTY_CAPTION, "caption is empty after cleaning"),
        ("a \ud800", Reason.BAD_CAPTION, "lone surrogate at character 2"),
        (None, Reason.BAD_CAPTION, "caption is NoneType, not a string"),
        (7, Reason.BAD_CAPTION, "caption is int, not a string"),
        ("x" * (MAX_CAPTION + 1), Reason.CAPTION_TOO_LONG, "caption of 65537 characters; at most 65536"),
    ],
)
def test_captions_that_cannot_be_cleaned_have_a_reason(text, reason, detail):
    with pytest.raises(BadSample, match=detail) as caught:
        clean_caption(text)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("content", "captions"),
    [
        ({"captions": ["a", " b "]}, ["a", "b"]),
        ({"captions": "a"}, ["a"]),
        ({"caption": "a", "other": 1}, ["a"]),
        ({"caption": ["a", "b"]}, ["a", "b"]),
        ({"captions": ["a"], "caption": "b"}, ["a"]),
        ({"captions": ["a", "", None]}, ["a"]),
        ({"captions": None, "caption": "b"}, ["b"]),
        ({"captions": [7], "caption": "b"}, ["b"]),
    ],
)
def test_captions_of_json(content, captions):
    assert captions_of(json.dumps(content).encode(), JSON) == captions


def test_captions_of_text():
    assert captions_of(memoryview("\ufeffgröße\n".encode()), TXT) == ["größe"]


@pytest.mark.parametrize(
    ("data", "caption_format", "reason", "detail"),
    [
        (b"gr\xf6\xdfe", TXT, Reason.BAD_CAPTION, "not UTF-8 at byte 2"),
        ("größe".encode("utf-16"), TXT, Reason.BAD_CAPTION, "not UTF-8 at byte 0"),
        (b"x" * (2**20 + 1), TXT, Reason.CAPTION_TOO_LONG, "caption member of 1048577 bytes"),
        (b"{", JSON, Reason.BAD_CAPTION, "JSON member does not parse"),
        (b"[" * 100_000, JSON, Reason.BAD_CAPTION, "JSON member does not parse"),
        (b'["a"]', JSON, Reason.BAD_CAPTION, "JSON member holds list, not an object"),
        (b"{}", JSON, Reason.MISSING_CAPTION, 'neither "captions" nor "caption"'),
        (b'{"captions": []}', JSON, Reason.MISSING_CAPTION, "an empty list of captions"),
        (b'{"captions": ["a", 7]}', JSON, Reason.BAD_CAPTION, "caption is int"),
        (b'{"captions": ["a", "\\ud800"]}', JSON, Reason.BAD_CAPTION, "lone surrogate"),
    ],
)
def test_caption_members_that_cannot_be_read_have_a_reason(data, caption_format, reason, detail):
    with pytest.raises(BadSample, match=detail) as caught:
        captions_of(data, caption_format)
    assert caught.value.reason is reason
