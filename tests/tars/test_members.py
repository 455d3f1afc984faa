"""Members of samples that are not the usual ones: named, or guessed where only one fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mmdata
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, build_index, verify
from mmdata.loader import Loader
from mmdata.tars.members import Members, Selector, guess_captions, pick
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.loader.member_tars import write_tar

CAPTIONS = ["a red dog", "two cats", "a tall tree"]


@pytest.fixture
def write(tmp_path: Path, tar, photo):
    """`write({"json": […three members…], "txt": […]}) -> folder`: three samples in a tar, with an image each."""

    def make(image: str = "jpg", **members: list[bytes]) -> Path:
        folder = tmp_path / "tars"
        folder.mkdir()
        found = []
        for i in range(3):
            found.append((f"{i}.{image}", photo(24, 24, seed=i)))
            found += [(f"{i}.{name.replace('_', '.')}", data[i]) for name, data in members.items()]
        (folder / "x.tar").write_bytes(tar(found))
        return folder

    return make


def documents(**values: list[object]) -> list[bytes]:
    return [json.dumps({name: value[i] for name, value in values.items()}).encode() for i in range(3)]


def settings(folder: Path, **changes: object) -> dict[str, object]:
    loading = {"num_workers": 0}
    basic = {"shards": str(folder), "global_batch_size": 3, "image_size": 16, "transform": "eval", "shuffle": False}
    return {**basic, "tokenizer": "clip", "loading": loading, **changes}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer, which is read much faster than CLIP's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CAPTIONS, folder, vocab_size=300)
    return str(folder)


def texts_of(batches, tokenizer: str) -> list[str]:
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(tokenizer).batch_decode
    rows = [ids for batch in batches for ids in batch["input_ids"]]
    return sorted(text.strip() for text in decode(rows, skip_special_tokens=True))


@pytest.mark.parametrize(
    ("members", "selector", "guessed"),
    [
        ({"json": documents(TEXT=CAPTIONS, url=CAPTIONS)}, "json:TEXT", True),
        ({"json": documents(title=CAPTIONS)}, "json:title", True),
        ({"caption_txt": [c.encode() for c in CAPTIONS]}, "caption.txt", True),
        ({"json": documents(TEXT=CAPTIONS, title=["", "x", "y"])}, "json:TEXT", True),
        ({"json": documents(a=CAPTIONS), "txt": [b"no"] * 3}, "json:a", False),
        ({"json": documents(a=[None, "", CAPTIONS[2]], b=[*CAPTIONS[:2], "no"])}, "json:a,json:b", False),
        ({"meta_json": documents(alt=CAPTIONS), "json": documents(caption=["no"] * 3)}, "meta.json:alt", False),
        ({"json": documents(a=[["a red dog"], CAPTIONS[1], CAPTIONS[2]])}, "json:a", False),
    ],
)
def test_captions_are_those_of_the_member_that_is_named_or_guessed(write, small, members, selector, guessed):
    folder = write(**members)
    tokenizer = Tokenizer.load(small)
    given = None if guessed else Members.parse(caption=selector)
    report = build_index(folder, members=given, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint)
    assert (report.guessed, report.manifest.members) == (guessed, Members.parse(caption=selector))
    assert texts_of(Loader.from_config(settings(folder, tokenizer=small)), small) == sorted(CAPTIONS)
    assert verify(folder) == []
    stream = mmdata.stream(folder, settings(folder, tokenizer=small, members={"caption": selector}))
    assert texts_of(stream, small) == sorted(CAPTIONS)
    # counted later, from the captions in the tars
    build_index(folder, out=folder / "later", members=given)
    later = build_index(folder, out=folder / "later", count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint)
    assert later.manifest.root == report.manifest.root


@pytest.mark.parametrize(
    "members",
    [
        {"json": documents(TEXT=CAPTIONS, title=CAPTIONS)},  # two of the known names
        {"json": documents(unknown=CAPTIONS)},
        {"json": documents(TEXT=["", "x", "y"])},
    ],
)
def test_nothing_is_guessed_where_not_exactly_one_name_fits(write, members):
    with pytest.raises(DataError, match="3 of 3 samples cannot be used \\(3 missing_caption\\)"):
        build_index(write(**members))


def test_captions_are_guessed_from_the_first_tar_that_has_samples(write, tar):
    folder = write(json=documents(TEXT=CAPTIONS))
    (folder / "a.tar").write_bytes(b"<html>login</html>" + bytes(600))
    (folder / "b.tar").write_bytes(tar([]))
    report = build_index(folder, skip_damaged=True)
    assert (report.guessed, report.manifest.members) == (True, Members.parse(caption="json:TEXT"))
    assert (report.accounts["indexed"], report.quarantined) == (3, [])


def test_usual_captions_are_never_replaced_by_a_guess():
    assert guess_captions([]) is None
    assert guess_captions([(["jpg", "json"], {"TEXT": "a"})]) == Members(caption=(Selector("json", "TEXT"),))


def test_labels_and_images_are_those_that_are_named(write, photo, tar):
    folder = write("png", txt=[c.encode() for c in CAPTIONS], json=documents(breed=["b", "a", "b"]), cls=[b"9"] * 3)
    report = build_index(folder, members=Members.parse(image="jpg,png", label="json:breed,cls"))
    assert Index.open(folder).column("label").tolist() == [0, 1, 0]
    assert report.accounts["classes"] == ["b", "a"]
    assert report.accounts["members"] == {"image": ["jpg", "png"], "label": ["json:breed", "cls"]}
    with pytest.raises(DataError, match=r"no \.jpg or .webp among .png, .txt, .json, .cls"):
        build_index(folder, out=folder / "out", members=Members.parse(image="jpg,webp"))


def test_a_caption_that_is_missing_is_named_as_it_was_asked_for(write):
    folder = write(txt=[c.encode() for c in CAPTIONS])
    with pytest.raises(DataError, match=r"no text in the \.json's \"TEXT\" or \.text\. If this is a packed folder"):
        build_index(folder, members=Members.parse(caption="json:TEXT,text"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"caption": "json:"}, "member 'json:': expected the extension of a member (jpg, caption.txt), or a JSON"),
        ({"caption": "a b"}, "member 'a b': expected"),
        ({"label": "a/b"}, "member 'a/b': expected"),
        ({"image": "json:image"}, "image 'json:image': an image is a member of its own, not a value in JSON"),
        (
            {"caption": "json:TEXT,meta.json:alt"},
            "captions 'json:TEXT,meta.json:alt': keys may be named in one JSON member",
        ),
        (
            {"caption": "txt:alt,txt"},
            "captions 'txt:alt,txt': keys may be named in one JSON member only, and not beside the whole",
        ),
    ],
)
def test_what_is_no_selector_is_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        Members.parse(**given)
    assert message in str(caught.value)


def test_selectors_are_read_as_they_are_written():
    members = Members.parse(caption=".Caption.TXT, json:Some key", label=None, image="")
    assert members.caption == (Selector("caption.txt"), Selector("json", "Some key"))
    assert Members.from_content(members.content()) == members


def test_label_of_nothing_stands_for_no_label(write):
    folder = write(txt=[c.encode() for c in CAPTIONS], cls=[b"3"] * len(CAPTIONS))
    members = Members.parse(label="")
    assert (members.label, Members.from_content(members.content())) == (None, members)
    report = build_index(folder, members=members)
    assert (report.manifest.has_labels, report.manifest.members) == (False, members)
    assert verify(folder) == []


def test_members_of_a_stream_are_refused_with_an_index(write):
    folder = write(txt=[c.encode() for c in CAPTIONS])
    build_index(folder)
    with pytest.raises(ConfigError, match=r"data\.members is for a stream"):
        Loader.from_config(settings(folder, members={"caption": "json:TEXT"}))
    assert np.array_equal(Index.open(folder).column("label"), [-1] * 3)


def test_an_index_of_an_indexed_folder_takes_its_captions_and_classes(tmp_path: Path, photo: Callable[..., bytes]):
    folder, samples = tmp_path / "tars", {}
    for number in range(4):
        of_json = json.dumps({"TEXT": f"long {number}"}).encode()
        cls = ["cat", "dog"][number % 2].encode()
        samples[f"{number:04d}"] = {"jpg": photo(24, 24, seed=number), "txt": b"alt", "json": of_json, "cls": cls}
    write_tar(folder / "a.tar", samples)
    build_index(folder, members=Members.parse(caption="json:TEXT", label="cls"))
    for out in (folder, tmp_path / "other"):
        build_index(folder, out=out, overwrite=True)
        index = Index.open(out)
        assert [index[row].captions for row in range(4)] == [[f"long {row}"] for row in range(4)]
        assert index.class_names == ["cat", "dog"]


def test_an_index_of_a_conversion_knows_its_classes(tmp_path: Path, photo: Callable[..., bytes]):
    source = tmp_path / "classes"
    for number in range(4):
        path = source / ["cat", "dog"][number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(24, 24, seed=number))
    convert(source, tmp_path / "shards", ConvertConfig())
    assert Index.open(tmp_path / "shards").class_names == ["cat", "dog"]
    build_index(tmp_path / "shards", out=tmp_path / "other")
    assert Index.open(tmp_path / "other").class_names == ["cat", "dog"]


BOXES = {"boxes": [{"bbox": [1, 2, 3, 4], "category": "dog"}, {"bbox": None}, 7, [{"category": "cat"}]], "none": []}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("boxes", BOXES["boxes"]),
        ("boxes.category", ["dog", None, None, None]),
        ("boxes.bbox", [[1, 2, 3, 4], None, None, None]),
        ("boxes.bbox.x", [[None] * 4, None, None, None]),
        ("boxes.category.x", [None] * 4),
        ("none.category", []),
        ("absent.category", None),
    ],
)
def test_a_key_behind_a_list_gives_the_value_of_each_of_its_objects(key: str, value: object):
    assert pick(BOXES, Selector("json", key)) == value
    assert pick({"a": BOXES}, Selector("json", f"a.{key}")) == value


def test_a_key_with_dots_is_looked_up_as_it_stands_first():
    assert pick({"a.b": 1, "a": [{"b": 2}]}, Selector("json", "a.b")) == 1


def test_a_member_that_is_a_list_has_no_keys():
    assert pick([{"category": "dog"}], Selector("json", "category")) is None
