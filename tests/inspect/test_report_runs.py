"""Runs in the report: one table of how each run was made, the settings that differ, and the scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata.errors import DataError
from mmdata.inspect.report import write_report
from mmdata.inspect.runs import differences, read_runs, short_names, table_of_runs
from mmdata.train.log.log import read_lines


def make_run(folder: Path, template: Path, *, data: dict[str, Any], sessions: list[Any], lr: float) -> Path:
    """A run as `mmdata train` leaves it, with settings and starts of its own."""
    shutil.copytree(template, folder)
    settings = {"data": data, "train": {"lr": lr, "output": str(folder), "miner": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    logged = read_lines(template / "metrics.jsonl")
    lines: list[dict[str, Any]] = []
    for first, last, made in sessions:
        lines.append({"kind": "start", "time": "2030-01-02T03:04:05+00:00", "step": first, **made})
        later = [line for line in logged if first < line["step"] <= last]
        lines += [line | {"time": "2030-01-02T03:05:45+00:00"} for line in later]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def start(first_step: int, last_step: int, **changes: Any) -> tuple[int, int, dict[str, Any]]:
    made = {
        "ranks": 2,
        "mmdata": "9.8.7",
        "commit": "abc123-dirty",
        "torch": "2.9",
        "python": "3.12",
    }
    made |= {"system": "Linux", "cpu": "Chip 5", "cores": 16, "gpus": ["H100", "H100"]} | changes
    return first_step, last_step, made


@pytest.fixture
def two_runs(data: dict[str, Any], run_folder: Path, tmp_path: Path) -> list[Path]:
    sessions = [start(0, 40), start(40, 40), start(40, 90, cpu="Chip 6", gpus=[])]
    first = make_run(tmp_path / "a" / "run", run_folder, data=data, sessions=sessions, lr=1e-3)
    second = make_run(tmp_path / "b" / "run", run_folder, data=data | {"seed": 5}, sessions=[start(0, 90)], lr=3e-4)
    return [first, second]


def test_short_names_are_the_ends_of_paths_that_differ(tmp_path: Path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert short_names([tmp_path / "a", tmp_path / "a"]) == [str(tmp_path / "a")] * 2


def rows_of(runs: list[Path]) -> dict[str, list[str]]:
    """The cells of each row of the table of runs."""
    (table,) = table_of_runs(read_runs(runs)).tables
    return {row[0]: list(row[1:]) for row in table.rows}


def test_table_sums_the_starts_and_names_each_machine(two_runs: list[Path]):
    section = table_of_runs(read_runs(two_runs))
    rows = rows_of(two_runs)
    assert (section.title, section.tables[0].head) == ("Runs", ("", "a/run", "b/run"))
    assert rows["wall time"] == ["4 min, 2 starts", "2 min"]
    assert rows["machine"] == ["2 × H100, Chip 5, 16 cores → Chip 6, 16 cores", "2 × H100, Chip 5, 16 cores"]
    assert rows["commit"] == ["abc123-dirty"] * 2
    assert rows["mmdata"] == ["9.8.7"] * 2
    assert "mmdata, commit" not in rows
    assert (rows["updates"], rows["loss, last"], rows["samples/s, last"]) == (["90"] * 2, ["0.04444"] * 2, ["400"] * 2)


def test_only_the_settings_that_differ_are_listed(two_runs: list[Path]):
    runs = read_runs(two_runs)
    assert differences(runs) == {"data.seed": ["–", "5"], "train.lr": ["0.001", "0.0003"]}
    rows = rows_of(two_runs)
    assert (rows["data.seed"], rows["train.lr"]) == (["–", "5"], ["0.001", "0.0003"])
    assert not any(name.startswith(("data.", "train.")) for name in rows_of(two_runs[:1]))
    assert "The settings of the runs do not differ." in table_of_runs([runs[0], runs[0]]).note


def test_scores_of_several_runs_stand_in_one_table(two_runs: list[Path]):
    (two_runs[1] / "evaluation.json").write_text(json.dumps({"step": 90, "text_to_image_r1": 0.25}))
    rows = rows_of(two_runs)
    assert rows["text → image R@1"] == ["51.0%", "25.0%"]
    assert rows["compositional, mean"] == ["accuracy 81.2%, text 70.0%, image 65.0%, group 60.0%", ""]
    assert rows["evaluated after update"] == ["", "90"]
    assert "zero-shot top 1" not in rows
    assert table_of_runs(read_runs(two_runs)).note == (
        "Scores are of the last evaluation, in parentheses with the 95 % interval for so many queries. "
        "Several seeds of each say whether one is better: examples/compare.py of the checkout."
    )


def test_recalls_of_few_queries_have_their_interval(two_runs: list[Path], data: dict[str, Any], tmp_path: Path):
    for run, found in zip(two_runs, (5, 4), strict=True):  # of 48 texts
        scores = {"step": 90, "images": 24, "texts": 48, "text_to_image_r1": found / 48, "chance_r1": 1 / 20}
        (run / "evaluation.json").write_text(json.dumps(scores))
    rows = rows_of(two_runs)
    assert rows["queries, image → text / text → image"] == ["24 / 48"] * 2
    assert rows["text → image R@1"] == ["10.4% (4.5 to 22.2)", "8.3% (3.3 to 19.6)"]
    assert rows["chance R@1"] == ["5.0%"] * 2
    write_report(tmp_path / "r.html", shards=Path(data["shards"]), runs=two_runs)
    assert "<td>10.4% (4.5 to 22.2)</td><td>8.3% (3.3 to 19.6)</td>" in (tmp_path / "r.html").read_text()


def test_scores_of_a_run_that_was_not_evaluated_apart_are_those_of_its_log(two_runs: list[Path]):
    (two_runs[0] / "evaluation.json").unlink()
    assert rows_of(two_runs[:1])["text → image R@1"] == ["60.0%"]
    (two_runs[0] / "metrics.jsonl").unlink()
    assert table_of_runs(read_runs(two_runs[:1])).note.endswith(
        " of run. No evaluation.json in run: `mmdata evaluate` writes it."
    )


def test_report_of_a_run_without_record_says_so(run_folder: Path, tmp_path: Path):
    (run,) = read_runs([run_folder])
    assert table_of_runs([run]).note.startswith("metrics.jsonl does not name machine, version and time of ")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml': not YAML: .*the run's checkpoints hold its settings too"):
        read_runs([tmp_path])


def test_command_takes_several_runs(two_runs: list[Path], tmp_path: Path, command: Any):
    status, _, errors = command("report", *map(str, two_runs), "--query-rows", "0", "--out", str(tmp_path / "r.html"))
    assert (status, errors) == (0, "")
    text = (tmp_path / "r.html").read_text()
    assert "<td>train.lr</td><td>0.001</td><td>0.0003</td>" in text
