"""Whatever stands in the place of a value, a source gives rows or an error that names the file, and raises no other."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.convert import ConvertConfig
from mmdata.convert.row.examine import Examiner
from mmdata.convert.sources.open import open_coco
from mmdata.convert.sources.rows import Source
from mmdata.errors import BadSample, ConfigError, DataError
from mmdata.tars.texts import Loss, SampleTexts
from tests.convert.sources.corpora import make_coco

INSTANCES = "coco/annotations/instances_val2017.json"
JUNK = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=3)),
    st.sampled_from([[], {}, [[]], {"id": 1}, "\ud800", "../../x", "/", "a\0b", "10" * 400, 10**400]),
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> Path:
    root = tmp_path_factory.mktemp("corpora")
    make_coco(root, photo)
    return root


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are in a document."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places_in(inner, (*path, key))


def put(document: Any, path: tuple[Any, ...], junk: Any) -> None:
    with suppress(KeyError, IndexError, TypeError):  # junk is there already
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = junk


def check_rows(source: Source, config: ConvertConfig) -> None:
    """Every row has a fault, or fields that can be stored, or is refused as a bad sample."""
    examiner = Examiner.from_config(source, config)
    rows = list(source.rows())
    assert [row.number for row in rows] == list(range(source.num_rows))
    for row in rows:
        assert set(row.losses) <= {Loss.BOX_UNUSABLE}
        with suppress(BadSample):
            texts = examiner.fields(row)
            assert isinstance(texts, SampleTexts)
            json.dumps(texts.metadata, allow_nan=False, ensure_ascii=False).encode()
            assert all(len(box["bbox"]) == 4 for box in texts.metadata["boxes"])
        with suppress(BadSample):
            examiner.read_image(row)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_junk_in_json_gives_rows_or_an_error_that_names_the_file(corpora: Path, data: st.DataObject) -> None:
    whole = json.loads((corpora / INSTANCES).read_text())
    places = list(places_in(whole))
    document = copy.deepcopy(whole)
    for path in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        put(document, path, data.draw(JUNK))
    junk = (corpora / INSTANCES).with_name("junk.json")
    junk.write_text(json.dumps(document))
    config = ConvertConfig(caption_templates=["a {}"], keep=("*", "path", "segmentation"))
    said = str(junk)
    try:
        source = open_coco([junk], config)
    except (DataError, ConfigError) as error:
        source, said = None, str(error)
    assert "junk.json" in said
    if source is not None:
        check_rows(source, config)
