"""What errors say reaches a terminal as text, whatever the names in it hold."""

from __future__ import annotations

import io
import logging
import pickle
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.errors import (
    BadSample,
    ConfigError,
    DataError,
    LoadError,
    Problems,
    Reason,
    did_you_mean,
    nearest,
    printable,
)
from mmdata.index import build_index
from tests.logs import messages
from tests.programs import run_program

HOSTILE = "\x1b]0;owned\x07\x1b[31m\n\r\x9b2J\u202egpj.\u200b\u2028\udce9é漢"
ESCAPED = r"\x1b]0;owned\x07\x1b[31m\n\r\x9b2J\u202egpj.\u200b\u2028\udce9é漢"


def test_printable_escapes_what_a_terminal_would_obey():
    assert printable(HOSTILE) == ESCAPED
    assert printable("a\tb\nc", keep="\n") == "a\\tb\nc"
    assert printable("plain 'text' \\ é漢🙂") == "plain 'text' \\ é漢🙂"


def test_problems_are_listed_one_a_line_whatever_is_in_them():
    assert str(Problems("no such folder")) == "no such folder"
    several = Problems(HOSTILE, "no such file")
    assert str(several) == f"2 things do not fit:\n- {ESCAPED}\n- no such file"
    assert str(pickle.loads(pickle.dumps(several))) == str(several)


@given(st.text(st.characters(exclude_categories=())))
def test_printable_text_is_printable_and_stays_as_it_is(text: str):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    printable(text).encode()


@pytest.mark.parametrize("kind", [DataError, ConfigError, LoadError])
def test_errors_escape_the_names_in_their_messages(kind: type[Exception]):
    error = kind(f"sample '{HOSTILE}': cut")
    assert str(error) == f"sample '{ESCAPED}': cut"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_bad_sample_escapes_its_detail():
    bad = BadSample(Reason.MISSING_IMAGE, f"'{HOSTILE}' is a URL")
    assert bad.detail == f"'{ESCAPED}' is a URL"
    assert str(bad) == f"missing_image: {bad.detail}"


def test_log_records_escape_the_names_in_them(caplog: pytest.LogCaptureFixture):
    logging.getLogger("mmdata").warning("shard '%s', %s, %s, %d rows", HOSTILE, Path("\x1b.tar"), OSError("\x1b"), 3)
    assert messages(caplog) == [f"shard '{ESCAPED}', \\x1b.tar, \\x1b, 3 rows"]


def test_programs_print_no_control_characters_of_keys_and_file_names(tmp_path: Path, photo):
    def tar(name: str, members: list[tuple[str, bytes]]) -> Path:
        (tmp_path / name).mkdir()
        path = tmp_path / name / "\x1b[31m.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    key = "\x1b]0;owned\x07\u202e"
    whole = [(f"{key}.jpg", photo(8, 8)), (f"{key}.txt", b"a dog"), ("b.jpg", photo(8, 8)), ("b.txt", b"a cat")]
    good = tar("good", whole)
    build_index(good.parent)
    other = tar("other", [(f"{key}.jpg", photo(8, 8, seed=1)), *whole[1:]])
    good.write_bytes(other.read_bytes())
    twice = tar("twice", [*whole, (f"{key}.json", b"{}")])
    lost = tmp_path / "lost\udce9\x1b"
    for arguments, status, said in (
        (["verify", str(good.parent)], 1, r"\x1b[31m.tar'"),
        (["index", str(twice)], 2, r"sample '\x1b]0;owned\x07\u202e' starts at byte"),
        (["index", str(lost)], 2, r"lost\udce9\x1b': no such file or folder"),
        (["convert", str(twice), str(tmp_path / "out")], 2, r"sample '\x1b]0;owned\x07\u202e' starts at byte"),
        (["\x1b[31m"], 2, r"error: no command '\x1b[31m'"),
    ):
        done = run_program([sys.executable, "-m", "mmdata", *arguments], capture_output=True, check=False)
        printed = (done.stdout + done.stderr).decode()
        assert done.returncode == status, printed
        assert said in printed
        assert printable(printed, keep="\n") == printed


COMMANDS = ["bench", "convert", "doctor", "evaluate", "plan", "replay", "report", "train", "verify"]


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("trian", COMMANDS, "train"),
        ("eval", COMMANDS, "evaluate"),
        ("Verfiy", COMMANDS, "verify"),
        ("xyzzy", COMMANDS, None),
        ("help", COMMANDS, None),
        ("ViT-B-16", ["tiny", "vit_b_16"], "vit_b_16"),
        ("topk", ["all", "top_k", "ratio"], "top_k"),
        ("foo", ["dropout", "loss", "for_all"], None),
        ("lrr", ["lr", "k"], "lr"),
        ("ab", ["bc"], None),  # half of two letters is no likeness
        ("gpu", ["auto", "cpu", "cuda"], None),
        ("", COMMANDS, None),
        ("x", [], None),
    ],
)
def test_nearest_is_a_name_that_was_probably_meant(word: str, known: list[str], found: str | None):
    assert nearest(word, known) == found
    assert did_you_mean(word, known) == (f"; did you mean '{found}'?" if found else "")
