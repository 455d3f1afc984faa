"""The recipes of public tables of URLs, each on a miniature of its published layout. Real servers on loopback."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import Report, convert, load_recipe
from mmdata.convert.units.engines import threads
from tests.convert.conftest import left_out
from tests.convert.fetch.sites import Answer, Site

CAPTIONS = ['a "very" typical bus station', '" quotes " begin this one', "<PERSON> in Łódź, 50% off"]
"""Captions of the three images; a link of each table is dead."""


@pytest.fixture
def urls(site: Site, photo: Callable[..., bytes]) -> list[str]:
    """Three images, and one that is gone."""
    for number in range(3):
        site.answers[f"/{number}.jpg"] = Answer(200, photo(20, 30, seed=number))
    return [site.url(f"/{name}.jpg", f"127.0.0.{1 + n % 2}") for n, name in enumerate(("0", "1", "2", "gone"))]


@pytest.fixture
def samples(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`samples(source, recipe, **settings)`: the JSON of each sample, once three of four rows are written."""

    def run(source: Path, recipe: str, **settings: Any) -> list[dict[str, Any]]:
        config = load_recipe(recipe, {"allow_private_addresses": True, **settings})
        report: Report = convert(source, tmp_path / "out", config, engine=threads(1))
        assert (report.accounts["rows"], report.accounts["written"]) == (4, 3)
        (line,) = left_out(tmp_path / "out")
        assert (line["reason"], line["path"].rpartition("/")[2]) == ("http_status", "gone.jpg")
        with tarfile.open(tmp_path / "out/000000.tar") as tar:
            texts = [tar.extractfile(one).read() for one in tar if one.name.endswith(".json")]  # type: ignore[union-attr]
        return [json.loads(text) for text in texts]

    return run


def four(captions: Sequence[str]) -> list[str]:
    return [*captions, "a dead link"]


@pytest.mark.parametrize("recipe", ["cc3m", "cc12m"])
def test_conceptual_captions(tmp_path: Path, urls: list[str], samples: Any, recipe: str) -> None:
    rows = [(text, url) if recipe == "cc3m" else (url, text) for text, url in zip(four(CAPTIONS), urls, strict=True)]
    table = tmp_path / {"cc3m": "Train_GCC-training.tsv", "cc12m": "cc12m.tsv"}[recipe]
    table.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    assert samples(table, recipe) == [
        {"captions": [text], "url": url} for text, url in zip(CAPTIONS, urls, strict=False)
    ]


def test_sbu_columns_of_json(tmp_path: Path, urls: list[str], samples: Any) -> None:
    table = tmp_path / "sbu-captions-all.json"
    table.write_text(json.dumps({"image_urls": urls, "captions": four(CAPTIONS), "user_ids": ["a", "b", "c", "d"]}))
    found = samples(table, "sbu")
    assert found[1] == {"captions": [CAPTIONS[1]], "url": urls[1], "user_ids": "b"}


def test_sbu_pasted_files_need_no_recipe(tmp_path: Path, urls: list[str]) -> None:
    (tmp_path / "sbu.tsv").write_text(
        "".join(f"{url}\t{text}\n" for url, text in zip(urls, four(CAPTIONS), strict=True)), encoding="utf-8"
    )
    settings = {"columns": ["url", "caption"], "quotes": False, "max_bad_share": 0.5, "allow_private_addresses": True}
    report = convert(tmp_path / "sbu.tsv", tmp_path / "out", load_recipe(None, settings), engine=threads(1))
    assert report.accounts["written"] == 3


@pytest.mark.parametrize("names", [("URL", "TEXT"), ("url", "caption")])
def test_laion(tmp_path: Path, urls: list[str], samples: Any, names: tuple[str, str]) -> None:
    columns = {
        "SAMPLE_ID": pa.array([1, 2, 3, 4], pa.int64()),
        names[0]: urls,
        names[1]: four(CAPTIONS),
        "HEIGHT": pa.array([20] * 4, pa.int32()),
        "WIDTH": pa.array([30] * 4, pa.int32()),
        "LICENSE": ["?"] * 4,
        "NSFW": ["UNLIKELY", None, "UNSURE", "NSFW"],
        "similarity": [0.31, 0.32, float("nan"), 0.34],
        "hash": pa.array([-1, 2, 3, 4], pa.int64()),
    }
    pq.write_table(pa.table(columns), tmp_path / "part-00000-5114fd87-c000.snappy.parquet")
    found = samples(tmp_path / "part-00000-5114fd87-c000.snappy.parquet", "laion")
    more = {"SAMPLE_ID": 3, "HEIGHT": 20, "WIDTH": 30, "LICENSE": "?", "NSFW": "UNSURE", "similarity": None, "hash": 3}
    assert found[2] == {"captions": [CAPTIONS[2]], "url": urls[2], **more}


def test_coyo(tmp_path: Path, urls: list[str], samples: Any) -> None:
    columns = {
        "id": pa.array([4896263451343, 2, 3, 4], pa.int64()),
        "url": urls,
        "text": four(CAPTIONS),
        "width": pa.array([30] * 4, pa.int32()),
        "height": pa.array([20] * 4, pa.int32()),
        "image_phash": ["d3a8f1"] * 4,
        "num_faces": [0] * 4,
        "aesthetic_score_laion_v2": pa.array([4.5] * 4, pa.float32()),
    }
    folder = tmp_path / "coyo-700m"
    (folder / "data").mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "data/part-00000-17da4908-c000.snappy.parquet")
    found = samples(folder, "coyo")
    more = {"id": 4896263451343, "width": 30, "height": 20, "image_phash": "d3a8f1", "num_faces": 0}
    assert found[0] == {"captions": [CAPTIONS[0]], "url": urls[0], "aesthetic_score_laion_v2": 4.5, **more}


def test_datacomp_keeps_the_boxes_of_faces(tmp_path: Path, urls: list[str], site: Site, samples: Any) -> None:
    bodies = [site.answers[f"/{n}.jpg"].body for n in range(3)]  # type: ignore[union-attr]
    columns = {
        "uid": [f"{n:032x}" for n in range(4)],
        "url": urls,
        "text": four(CAPTIONS),
        "original_width": [30] * 4,
        "original_height": [20] * 4,
        "clip_b32_similarity_score": pa.array([0.25] * 4, pa.float32()),
        "face_bboxes": pa.array([[[0.1, 0.2, 0.3, 0.4]], [], None, []], pa.list_(pa.list_(pa.float64()))),
        "sha256": [*(hashlib.sha256(body).hexdigest() for body in bodies), "0" * 64],
    }
    pq.write_table(pa.table(columns), tmp_path / "00000.parquet")
    found = samples(tmp_path / "00000.parquet", "datacomp", hash_column="sha256", resize=10)
    assert [one["face_bboxes"] for one in found] == [[[0.1, 0.2, 0.3, 0.4]], [], None]
    assert (found[0]["uid"], found[0]["original_height"], found[0]["url"]) == ("0" * 32, 20, urls[0])


def test_redcaps_keeps_no_names_of_authors(tmp_path: Path, urls: list[str], samples: Any) -> None:
    def annotation(number: int) -> dict[str, Any]:
        return {
            "image_id": f"id{number}",
            "author": "somebody",
            "url": urls[number],
            "raw_caption": f"[OC] Title {number} 🌹",
            "caption": f"title {number}",
            "subreddit": "roses",
            "score": 17,
            "created_utc": 1580000000,
            "permalink": f"/r/roses/comments/{number}/",
            "crosspost_parents": None,
        }

    (tmp_path / "redcaps/annotations").mkdir(parents=True)
    for part in range(2):
        content = {"info": {"version": "1.0"}, "annotations": [annotation(2 * part), annotation(2 * part + 1)]}
        (tmp_path / f"redcaps/annotations/roses_202{part}.json").write_text(json.dumps(content))
    found = samples(tmp_path / "redcaps", "redcaps")
    assert found[2] == {
        "captions": ["title 2"],
        "url": urls[2],
        "image_id": "id2",
        "subreddit": "roses",
        "permalink": "/r/roses/comments/2/",
        "raw_caption": "[OC] Title 2 🌹",
    }


WIT = (
    *("language", "page_url", "image_url", "page_title", "section_title", "hierarchical_section_title"),
    *("caption_reference_description", "caption_attribution_description", "caption_alt_text_description", "mime_type"),
    *("original_height", "original_width", "is_main_image", "attribution_passes_lang_id", "page_changed_recently"),
    *("context_page_description", "context_section_description"),
)


def test_wit_is_read_packed_and_takes_all_captions_of_an_image(tmp_path: Path, urls: list[str], samples: Any) -> None:
    said = [
        ("one", "alt one", "English: of one"),
        ("", "", "English: two"),
        ("three\nin two lines", "", ""),
        ("x", "", ""),
    ]
    text = io.StringIO()
    table = csv.DictWriter(text, WIT, delimiter="\t", lineterminator="\n", restval="")
    table.writeheader()
    for number, (reference, alternative, attribution) in enumerate(said):
        row = {
            "language": "en",
            "page_url": f"https://en.wikipedia.org/wiki/{number}",
            "image_url": urls[number],
            "page_title": f"Page {number}",
            "caption_reference_description": reference,
            "caption_alt_text_description": alternative,
            "caption_attribution_description": attribution,
            "mime_type": "image/jpeg",
            "is_main_image": "true",
        }
        table.writerow(row)
    path = tmp_path / "wit_v1.train.all-00000-of-00010.tsv.gz"
    path.write_bytes(gzip.compress(text.getvalue().encode()))
    found = samples(path, "wit")
    assert [one["captions"] for one in found] == [
        ["one", "alt one", "English: of one"],
        ["English: two"],
        ["three\nin two lines"],
    ]
    assert found[0] | {"captions": []} == {
        "captions": [],
        "url": urls[0],
        "language": "en",
        "page_url": "https://en.wikipedia.org/wiki/0",
        "page_title": "Page 0",
        "mime_type": "image/jpeg",
    }
