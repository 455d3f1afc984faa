"""The report's queries: ranks agree with the evaluation's, what is right is marked, and captions are escaped."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmdata.cli.model.report import found_by
from mmdata.index import Index
from mmdata.inspect import queries
from mmdata.inspect.queries import retrieve, sections
from mmdata.train.evaluation.retrieval import retrieval
from tests.inspect.conftest import HOSTILE, ROWS


def ids_of(images: list[int], captions: list[int]) -> Tensor:
    return torch.tensor([images, captions]).T


@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_those_of_the_evaluation(seed: int):
    generator = torch.Generator().manual_seed(seed)
    image, text = (normalize(torch.randn(40, 4, generator=generator)) for _ in range(2))
    found = retrieve(image, text, ids_of([*range(40)], [*range(40)]), rows=torch.arange(40))
    scores = retrieval(image, text)
    for k in (1, 5, 10):
        assert (found.ranks <= k).mean() == pytest.approx(scores[f"text_to_image_r{k}"])


def test_rows_of_one_image_are_one_candidate_and_equal_captions_are_right():
    # Rows 0 and 1 are one image; rows 2 and 3 have one caption.
    image = normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]))
    text = normalize(torch.tensor([[1.0, 0.1], [0.9, 0.0], [0.1, 1.0], [0.1, 1.0]]))
    found = retrieve(image, text, ids_of([7, 7, 8, 9], [1, 2, 3, 3]), rows=torch.tensor([10, 11, 12, 13]))
    assert found.ranks.tolist() == [1, 1, 1, 1]
    assert found.nearest[1].tolist() == [0, 3, 2]
    assert found.right[1].tolist() == [True, False, False]
    assert found.right[3].tolist() == [True, True, False]  # the images of rows 2 and 3


def test_a_tie_and_nan_count_against_the_model():
    same = normalize(torch.ones(4, 2))
    found = retrieve(same, same, ids_of([*range(4)], [*range(4)]), rows=torch.arange(4))
    assert found.ranks.tolist() == [4, 4, 4, 4]
    found = retrieve(same * torch.nan, same, ids_of([*range(4)], [*range(4)]), rows=torch.arange(4))
    assert found.ranks.tolist() == [4, 4, 4, 4]


def test_worst_misses_come_first_and_what_is_found_is_no_miss(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    index = Index.open(data["shards"])
    image = torch.eye(4)
    text = torch.eye(4)[[0, 2, 1, 3]] + 0.1 * torch.eye(4)[[1, 3, 3, 2]]  # the captions of rows 1 and 2 are swapped
    monkeypatch.setattr(queries, "NUM_QUERIES", 2)
    found = retrieve(image, text, ids_of([*range(4)], [*range(4)]), rows=torch.arange(4))
    shown, missed = sections(found, index, "")
    assert [query.note for query in shown.queries] == [
        "rank 1 of 4 · 0000",
        "rank 1 of 4 · 0003",
    ]
    assert [query.note for query in missed.queries] == ["rank 4 of 4 · 0001", "rank 4 of 4 · 0002"]
    assert shown.note.strip() == "The right image is the first for 50.0% of them, among the first five for 100.0%."
    right = [[image.right for image in query.images] for query in shown.queries]
    assert right[0] == [True, True, False, False, False]
    assert all(query.images[0].label == "wanted" for query in [*shown.queries, *missed.queries])
    assert shown.queries[0].images[1].label.startswith("1 · 1.0")
    found = retrieve(image, image, ids_of([*range(4)], [*range(4)]), rows=torch.arange(4))
    assert sections(found, index, "")[1].note == "None: each caption finds its own image first."


def test_no_caption_and_no_image_is_shown_twice(data: dict[str, Any]):
    # Rows 0 and 1 have one caption, rows 2 and 3 one image; each caption finds the image of row 4 first.
    image = normalize(torch.eye(5)[[0, 1, 2, 2, 4]])
    text = normalize(torch.eye(5) + 2 * torch.eye(5)[[4] * 5])
    text[1] = text[0]
    found = retrieve(image, text, ids_of([0, 1, 2, 2, 4], [0, 0, 2, 3, 4]), rows=torch.arange(5))
    shown, missed = sections(found, Index.open(data["shards"]), "")
    assert [query.note.split()[-1] for query in shown.queries] == ["0000", "0002", "0003", "0004"]
    assert [query.note.split()[-1] for query in missed.queries] == ["0003", "0000"]


def test_queries_of_a_trained_run(trained_run: Path, caplog: pytest.LogCaptureFixture):
    shown, missed = found_by([trained_run], max_rows=1000)
    # Fewer rows than a batch of the queries: no advice about data.global_batch_size. torch has records of its own.
    assert [record.getMessage() for record in caplog.records if record.name == "mmdata"] == []
    assert len(shown.queries) == 12
    assert len(missed.queries) == 6
    assert all(len({query.text for query in one.queries}) == len(one.queries) for one in (shown, missed))
    assert f"model of {trained_run}, among all {ROWS} images" in shown.note
    assert all(len(query.images) == 6 for query in shown.queries)
    pictures = [image.picture for query in [*shown.queries, *missed.queries] for image in query.images]
    assert all(picture.startswith("data:image/webp;base64,") for picture in pictures)
    assert found_by([trained_run], max_rows=1000)[0] == shown  # the same each time
    ranks = [int(query.note.split()[1]) for query in missed.queries]
    assert ranks == sorted(ranks, reverse=True)


def test_queries_of_a_part_of_the_images_say_so(trained_run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queries, "BATCH_SIZE", 4)
    shown = found_by([trained_run], max_rows=10)[0]
    assert f"among 10 images drawn from {ROWS}" in shown.note
    assert len(shown.queries) == 10
    monkeypatch.setattr("mmdata.cli.model.report.MAX_SECONDS", 0.0)
    shown = found_by([trained_run], max_rows=1000)[0]
    assert f"among 4 images drawn from {ROWS}" in shown.note
    assert "No more were embedded, as that took 0 s." in shown.note
    assert found_by([trained_run], max_rows=0) == []
    assert found_by([], max_rows=1000) == []


def test_several_runs_get_the_same_queries(trained_run: Path, tmp_path: Path):
    shutil.copytree(trained_run, tmp_path / "other")
    found = found_by([trained_run, tmp_path / "other", tmp_path], max_rows=1000)
    titles = ["What the model finds: run", "Worst misses: run", "What the model finds: other", "Worst misses: other"]
    assert [section.title for section in found] == [*titles, f"What the model finds: {tmp_path.name}"]
    assert found[0].queries == found[2].queries
    assert found[4].missing.startswith(f"No queries: '{tmp_path}': a folder of runs; give one of them: other")


def test_report_of_a_trained_run_escapes_captions_and_has_alternative_texts(
    trained_run: Path, tmp_path: Path, command: Any
):
    status, _, errors = command("report", str(trained_run), "--out", str(tmp_path / "r.html"))
    assert (status, errors) == (0, "")
    text = (tmp_path / "r.html").read_text()
    assert HOSTILE not in text
    assert "<script" not in text
    images = re.findall(r"<img [^>]*>", text)
    assert len(images) == ROWS + text.count('<article class="query">') * 6
    assert all(re.search(r' alt="[^"]+"', image) for image in images)
    assert text.count("✓ right") >= 1
    assert len(text) < 900_000
    assert re.findall(r"<h2>(.*?)</h2>", text)[4:7] == ["Run", "What the model finds", "Worst misses"]


@pytest.mark.parametrize("rows", ["-1", "10001"])
def test_command_refuses_a_search_that_memory_does_not_hold(rows: str, command: Any):
    status, _, errors = command("report", "x", "--query-rows", rows)
    assert (status, errors) == (2, f"error: --query-rows {rows}: give 0 to 10,000\n")
