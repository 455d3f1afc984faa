"""Whoever examines the rows, the output is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.engines import CHUNK, Engine, threads
from mmdata.convert.examine import Examine, Examined
from mmdata.convert.rows import Row
from mmdata.errors import ConfigError, DataError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


BOXES: list[Any] = [[], [[0.1, 0.2, 0.6, 0.9]], "[[0, 0, 0.3, 0.3], [0.5, 0.5, 1, 1]]", [[0.5, 0.5, 0.4, 0.9]], None]
"""Of rows in turn: none, one, two as text, a bad one, none."""


@pytest.fixture
def table(raw_corpus: Path) -> Path:
    """The corpus's table, four times over, with boxes in a part of the rows, and faulty rows in between."""
    path = raw_corpus / "captions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({**row, "boxes": BOXES[i % len(BOXES)]}) for i, row in enumerate(rows)]
    bad = ['{"image": "gone.jpg", "captions": ["x"]}', "{broken"]
    path.write_text("".join(f"{line}\n" for line in [*lines, *bad]) * 4)
    return path


SETTINGS = ConvertConfig(shard_rows=7, keep_duplicates=True, resize=44, blur_boxes="boxes", max_bad_share=0.5)
"""A part of the images is larger than that."""


@pytest.fixture
def expected(table: Path, tmp_path: Path) -> dict[str, bytes]:
    report = convert(table, tmp_path / "one", SETTINGS, engine=threads(1))
    assert report.accounts["rows"] == 4 * 42
    assert report.accounts["reasons"] == {"broken_row": 4 * (8 + 1), "missing_image": 4}
    return content(tmp_path / "one")


@pytest.mark.parametrize("num_workers", [2, 7, None])
def test_threads_give_the_same_bytes(
    table: Path, tmp_path: Path, expected: dict[str, bytes], num_workers: int | None
) -> None:
    convert(table, tmp_path / "out", SETTINGS, engine=threads(num_workers))
    assert content(tmp_path / "out") == expected


def test_rows_in_flight_are_bounded() -> None:
    taken = 0

    def rows() -> Iterator[Row]:
        nonlocal taken
        for number in range(10_000):
            taken = number + 1
            yield Row(number, "")

    results = threads(2)(lambda row: Examined(row.number, "", ""), rows())
    assert [next(results).row for _ in range(3)] == [0, 1, 2]
    assert taken <= (2 * 2 + 1) * CHUNK
    assert [result.row for result in results] == list(range(3, 10_000))


def test_error_in_a_worker_is_raised_and_ends_it(table: Path, tmp_path: Path) -> None:
    def failing(examine: Examine, rows: Iterable[Row]) -> Iterator[Examined]:
        def fail(row: Row) -> Examined:
            raise OSError(5, "Input/output error", row.image)

        return threads(2)(fail, rows)

    with pytest.raises(OSError, match=r"Input/output error: 'images/0000.jpg'"):
        convert(table, tmp_path / "out", engine=failing)
    assert not (tmp_path / "out/__mmdata__/manifest.json").exists()


def test_engine_that_loses_a_row_is_caught(table: Path, tmp_path: Path) -> None:
    def losing(examine: Examine, rows: Iterable[Row]) -> Iterator[Examined]:
        return (examined for examined in threads(1)(examine, rows) if examined.row < 100)

    with pytest.raises(DataError, match="accounts do not balance: 168 rows came in, 100 are accounted for"):
        convert(table, tmp_path / "out", SETTINGS, engine=losing)


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[Engine]:
    import ray

    from mmdata.integrations.ray import ray_engine

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray_engine(2)
    ray.shutdown()


@needs_ray
def test_ray_gives_the_same_bytes(table: Path, tmp_path: Path, expected: dict[str, bytes], ray_engine: Engine) -> None:
    convert(table, tmp_path / "out", SETTINGS, engine=ray_engine)
    assert content(tmp_path / "out") == expected


@needs_ray
def test_ray_worker_that_is_killed_is_an_error_that_names_its_rows(ray_engine: Engine) -> None:
    def kill(row: Row) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    rows = (Row(number, f"t.csv, line {number + 2}") for number in range(9))
    with pytest.raises(DataError, match=r"died 2 times over rows 0 to 8 \(t.csv, line 2 to t.csv, line 10\)"):
        next(ray_engine(kill, rows))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_ray_that_is_not_installed_is_an_error() -> None:
    from mmdata.integrations.ray import ray_engine

    with pytest.raises(ConfigError, match=r"engine 'ray': Ray is not installed; `pip install mmdata\[ray\]`"):
        ray_engine()
