"""Whoever makes the units, and however many there are, the output is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.row.examine import Outcome
from mmdata.convert.sources.rows import InputRow
from mmdata.convert.units.engines import CHUNK, Engine, Progress, in_order, local, processes, threads
from mmdata.convert.units.staging import Receipt
from mmdata.convert.units.unit import Job, Unit
from mmdata.errors import ConfigError, DataError, Reason
from tests.convert.conftest import Killed, content, killing, noting
from tests.programs import PATIENCE_S, run_program

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)")


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
MERGED = ConvertConfig(shard_rows=7, val_share=0.4, max_bad_share=0.3, train_tokenizer=300)
"""Rows of one image lie in several units."""


@pytest.fixture
def expected(table: Path, tmp_path: Path) -> dict[str, bytes]:
    report = convert(table, tmp_path / "one", SETTINGS, engine=threads(1))
    assert report.accounts["rows"] == 4 * 42
    assert report.accounts["reasons"] == {"broken_row": 4 * (8 + 1), "missing_image": 4}
    return content(tmp_path / "one")


@pytest.mark.parametrize("engine", [threads(3), threads(), processes(1), processes(2), processes(4), local()])
@pytest.mark.sweep(keep=1)
def test_engines_give_the_same_bytes(table: Path, tmp_path: Path, expected: dict[str, bytes], engine: Engine) -> None:
    convert(table, tmp_path / "out", SETTINGS, engine=engine)
    assert content(tmp_path / "out") == expected


def test_processes_give_the_same_bytes_with_rows_of_one_image_in_several_units(table: Path, tmp_path: Path) -> None:
    report = convert(table, tmp_path / "one", MERGED, engine=threads(1))
    assert report.accounts["duplicate"] == 3 * 40
    convert(table, tmp_path / "out", MERGED, engine=processes(3))
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_rows_in_flight_are_bounded() -> None:
    taken = 0

    def rows() -> Iterator[InputRow]:
        nonlocal taken
        for number in range(10_000):
            taken = number + 1
            yield InputRow(number, "")

    results = in_order(2, lambda row: row.number, rows())
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert taken <= (2 * 2 + 1) * CHUNK
    assert list(results) == list(range(3, 10_000))


@dataclass(frozen=True)
class Broken:
    """An examiner on a broken disk."""

    def __call__(self, row: InputRow) -> Outcome:
        raise OSError(5, "Input/output error", row.image)


@dataclass(frozen=True)
class Deadly:
    """An examiner that ends its process, as the system does where memory is used up."""

    def __call__(self, row: InputRow) -> Outcome:
        if row.number == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome(row.number, row.place, "", fault=(Reason.FILTERED, ""))


@dataclass(frozen=True)
class DeadlyOnce:
    """Kills its process at a row, unless a process has died of it before."""

    examiner: Any
    mark: Path

    def __call__(self, row: InputRow) -> Any:
        if row.number == 9 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.examiner(row)


def with_examiner(engine: Engine, examiner: Any) -> Engine:
    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        return engine(replace(job, examiner=examiner), units)

    return run


@pytest.mark.parametrize("engine", [threads(2), processes(2)])
def test_error_of_the_system_is_raised_and_publishes_nothing(table: Path, tmp_path: Path, engine: Engine) -> None:
    with pytest.raises(OSError, match=r"Input/output error: 'images/0000.jpg'"):
        convert(table, tmp_path / "out", engine=with_examiner(engine, Broken()))
    assert not (tmp_path / "out/__mmdata__/manifest.json").exists()


def test_process_that_dies_is_an_error_that_names_its_rows_and_the_same_command_goes_on(
    table: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    def deadly(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        return processes(2)(replace(job, examiner=DeadlyOnce(job.examiner, tmp_path / "died")), units)

    with pytest.raises(DataError, match=r"a process died \(signal 9\) at work on rows 7 to 13; .* --workers 1"):
        convert(table, tmp_path / "out", SETTINGS, engine=deadly)
    assert workers_alive() == []
    convert(table, tmp_path / "out", SETTINGS, engine=processes(2))
    assert content(tmp_path / "out") == expected


def workers_alive() -> list[int]:
    """Process ids of the workers that this process has started."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == os.getpid() and b"mmdata.processes" in command:
                found.append(int(folder.name))
    return sorted(found)


def test_rerun_makes_only_the_units_that_are_missing(table: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    with pytest.raises(Killed):
        convert(table, tmp_path / "out", SETTINGS, engine=killing(4 * 7))
    made: list[int] = []
    convert(table, tmp_path / "out", SETTINGS, engine=noting(made))
    assert made == list(range(4, 24))
    assert content(tmp_path / "out") == expected


def test_unit_that_another_made_meanwhile_is_kept(table: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    """As a task that was given up, and ends after all."""

    def twice(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        for unit in units:
            for _ in range(2):
                yield from (event for event in threads(1)(job, [unit]) if isinstance(event, Receipt))

    convert(table, tmp_path / "out", SETTINGS, engine=twice)
    assert content(tmp_path / "out") == expected


def test_engine_that_loses_a_unit_is_caught(table: Path, tmp_path: Path) -> None:
    def losing(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        return threads(1)(job, (unit for unit in units if unit.number != 5))

    with pytest.raises(AssertionError, match=r"engine made no unit \[5\]"):
        convert(table, tmp_path / "out", SETTINGS, engine=losing)


def test_source_that_became_shorter_is_an_error(table: Path, tmp_path: Path) -> None:
    def losing(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        return threads(1)(job, (replace(unit, rows=(unit.rows or [])[:-1]) for unit in units))

    with pytest.raises(AssertionError, match="row 7 in place of 6"):
        convert(table, tmp_path / "out", SETTINGS, engine=losing)


def test_rows_that_a_script_makes_are_read_in_its_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import io\nfrom PIL import Image\nfrom mmdata.convert import ConvertConfig, convert\n"
        "def rows():\n"
        "    for i in range(6):\n"
        "        file = io.BytesIO()\n"
        "        Image.new('RGB', (8, 8), (i, 0, 0)).save(file, 'PNG')\n"
        "        yield {'image': file.getvalue(), 'caption': f'c{i}'}\n"
        f"report = convert(rows, {str(tmp_path / 'out')!r}, ConvertConfig(shard_rows=2))\n"
        "print(report.accounts['written'])\n"
    )
    done = run_program([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


def test_processes_run_nothing_of_the_current_folder(
    table: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/json.py").write_text("raise SystemExit('a file of the current folder')")
    monkeypatch.chdir(tmp_path / "here")
    convert(table, tmp_path / "out", SETTINGS, engine=processes(2))
    assert content(tmp_path / "out") == expected


def test_process_that_cannot_read_what_it_is_sent_says_so(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = type("Odd", (), {"__module__": "__main__", "__qualname__": "Odd"})
    monkeypatch.setattr(sys.modules["__main__"], "Odd", odd, raising=False)

    def with_odd_rows(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        strange = (replace(unit, rows=[replace(row, extra={"x": odd()}) for row in unit.rows or []]) for unit in units)
        return processes(2)(job, strange)

    with pytest.raises(AttributeError, match="Can't get attribute 'Odd'"):
        convert(table, tmp_path / "out", SETTINGS, engine=with_odd_rows)
    assert workers_alive() == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster of two nodes, each with processes of its own; its address."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def ray_engine(cluster: str) -> Iterator[Engine]:
    import ray

    from mmdata.convert.units.ray import ray_engine

    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=cluster, log_to_driver=False)
    yield ray_engine()
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)  # Ray has its own


@needs_ray
@pytest.mark.sweep
def test_ray_gives_the_same_bytes(table: Path, tmp_path: Path, ray_engine: Engine) -> None:
    convert(table, tmp_path / "one", MERGED, engine=threads(1))
    convert(table, tmp_path / "out", MERGED, engine=ray_engine)
    assert content(tmp_path / "out") == content(tmp_path / "one")


@needs_ray
@pytest.mark.sweep
def test_ray_makes_the_unit_of_a_killed_worker_again(
    table: Path, tmp_path: Path, expected: dict[str, bytes], ray_engine: Engine
) -> None:
    def deadly(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        return ray_engine(replace(job, examiner=DeadlyOnce(job.examiner, tmp_path / "mark")), units)

    convert(table, tmp_path / "out", SETTINGS, engine=deadly)
    assert (tmp_path / "mark").exists()
    assert content(tmp_path / "out") == expected


@needs_ray
@pytest.mark.sweep
def test_ray_worker_that_dies_each_time_is_an_error_that_names_its_rows(
    table: Path, tmp_path: Path, ray_engine: Engine
) -> None:
    with pytest.raises(DataError, match=r"a Ray worker died 4 times over rows 7 to 13; has it memory enough"):
        convert(table, tmp_path / "out", SETTINGS, engine=with_examiner(ray_engine, Deadly()))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_ray_that_is_not_installed_is_an_error() -> None:
    from mmdata.convert.units.ray import ray_engine

    with pytest.raises(ConfigError, match=r"engine 'ray': Ray is not installed; `pip install mmdata\[ray\]`"):
        ray_engine()
