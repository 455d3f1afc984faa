"""Several runs in one report: one chart for each number, the settings that differ, and how each run was made."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata.errors import DataError
from mmdata.inspect.curves import curves
from mmdata.inspect.report import write_report
from mmdata.inspect.run_sections import duration, evaluations, overview
from mmdata.inspect.runs import differences, read_metrics, read_runs, short_names


def make_run(folder: Path, template: Path, *, data: dict[str, Any], sessions: list[dict[str, Any]], lr: float) -> Path:
    """A run as `mmdata train` leaves it, with settings and starts of its own."""
    shutil.copytree(template, folder)
    settings = {"data": data, "train": {"lr": lr, "output": str(folder), "miner": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "run.json").write_text(json.dumps({"sessions": sessions}))
    return folder


def start(first_step: int, step: int, **changes: Any) -> dict[str, Any]:
    made = {"first_step": first_step, "step": step, "wall_s": 100.4, "started": "2030-01-02T03:04:05+00:00", "ranks": 2}
    made |= {"mmdata": "9.8.7", "mmdata_commit": None, "commit": "abc123-dirty", "torch": "2.9", "python": "3.12"}
    return made | {"system": "Linux", "cpu": "Chip 5", "cores": 16, "gpus": ["H100", "H100"]} | changes


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


def test_overview_says_up_to_which_update_the_time_is_known(tmp_path: Path, run_folder: Path):
    run = make_run(tmp_path / "run", run_folder, data={}, sessions=[start(0, 60)], lr=1.0)  # killed after update 90
    rows = {row[0]: row[1] for row in overview(read_runs([run])).tables[0].rows}
    assert rows["updates"] == "90"
    assert rows["wall time"].endswith(", up to update 60")


def test_overview_sums_the_starts_and_names_each_machine(two_runs: list[Path]):
    section = overview(read_runs(two_runs))
    rows = {row[0]: list(row[1:]) for row in section.tables[0].rows}
    assert section.tables[0].head == ("", "a/run", "b/run")
    assert rows["wall time"] == ["3 min 21 s, 2 starts", "1 min 40 s"]
    assert rows["machine"] == ["2 × H100, Chip 5, 16 cores → Chip 6, 16 cores", "2 × H100, Chip 5, 16 cores"]
    assert rows["commit"] == ["abc123-dirty"] * 2
    assert rows["mmdata"] == ["9.8.7"] * 2
    assert "mmdata, commit" not in rows
    assert rows["updates"] == ["90", "90"]
    assert section.note == ""


def test_only_the_settings_that_differ_are_listed(two_runs: list[Path]):
    runs = read_runs(two_runs)
    assert differences(runs) == {"data.seed": ["–", "5"], "train.lr": ["0.001", "0.0003"]}
    assert overview(runs).tables[1].rows == [("data.seed", "–", "5"), ("train.lr", "0.001", "0.0003")]
    assert differences(runs[:1]) == {}
    assert overview([runs[0], runs[0]]).tables[1].rows == [("none", "", "")]


def test_scores_of_several_runs_stand_in_one_table(two_runs: list[Path]):
    (two_runs[1] / "evaluation.json").write_text(json.dumps({"step": 90, "text_to_image_r1": 0.25}))
    section = evaluations(read_runs(two_runs))
    rows = {row[0]: list(row[1:]) for row in section.tables[0].rows}
    assert rows["text → image R@1"] == ["51.0%", "25.0%"]
    assert rows["compositional, mean"] == ["81.2%", ""]
    assert "zero-shot top 1" not in rows
    assert section.note == (
        "The last evaluation of each run: b/run after step 90. In parentheses the 95 % interval for so many queries. "
        "Whether one way to train is better than another, several seeds of each say: `mmdata compare`."
    )


def test_report_draws_several_runs_into_the_same_charts(two_runs: list[Path], data: dict[str, Any], tmp_path: Path):
    write_report(tmp_path / "r.html", shards=Path(data["shards"]), run=two_runs)
    text = (tmp_path / "r.html").read_text()
    titles = re.findall(r'<svg viewBox="[^"]*" role="img" aria-label="([^"]*) over step"', text)
    assert titles == ["loss", "image → text R@1", "text → image R@1", "share of time", "samples/s"]
    assert text.count("</svg>a/run</span>") == text.count("</svg>b/run</span>") == 5
    assert "× chance" not in text, "no run is called the best"


def test_recalls_of_few_queries_have_their_interval(two_runs: list[Path], data: dict[str, Any], tmp_path: Path):
    for run, found in zip(two_runs, (5, 4), strict=True):  # of 48 texts
        scores = {"step": 90, "images": 24, "texts": 48, "text_to_image_r1": found / 48, "chance_r1": 1 / 20}
        (run / "evaluation.json").write_text(json.dumps(scores))
    rows = {row[0]: list(row[1:]) for row in evaluations(read_runs(two_runs)).tables[0].rows}
    assert rows["queries, image → text / text → image"] == ["24 / 48"] * 2
    assert rows["text → image R@1"] == ["10.4% (4.5 to 22.2)", "8.3% (3.3 to 19.6)"]
    write_report(tmp_path / "r.html", shards=Path(data["shards"]), run=two_runs[:1])
    text = (tmp_path / "r.html").read_text()
    assert "2 × chance; 4.5% to 22.2% by 48 queries" in text
    assert "24 / 48 queries (image → text / text → image). In parentheses the 95 % interval" in text


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"global_batch_size": 17}},
        {"train": {"queue": 47}},
        {"train": {"loss": "siglip"}},
        {"train": {"miner": {"name": "top_k", "k": 4}}},
    ],
)
def test_losses_that_do_not_compare_are_not_drawn_into_one_chart(
    two_runs: list[Path], tmp_path: Path, changed: dict[str, dict[str, Any]]
):
    path = two_runs[1] / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({name: settings[name] | changed.get(name, {}) for name in settings}))
    charts = curves(read_runs(two_runs)).charts
    losses = [chart for chart in charts if " over step" in chart.svg and 'aria-label="loss over' in chart.svg]
    assert [("a/run" in chart.svg, "b/run" in chart.svg) for chart in losses] == [(True, False), (False, True)]
    said = "Runs with another loss or other negatives have a chart of their own: such losses do not compare."
    assert [chart.caption.endswith(said) for chart in losses] == [True, True]
    speed = next(chart for chart in charts if 'aria-label="samples/s over' in chart.svg)
    assert [name in speed.svg for name in ("a/run", "b/run")] == [True, True]


def test_recalls_among_other_numbers_of_rows_are_not_drawn_into_one_chart(two_runs: list[Path]):
    for run, count in zip(two_runs, (48, 5000), strict=True):
        (run / "evaluation.json").write_text(json.dumps({"step": 60, "images": count, "texts": count}))
    charts = curves(read_runs(two_runs)).charts
    recalls = [chart for chart in charts if 'aria-label="text → image R@1 over' in chart.svg]
    assert [("a/run" in chart.svg, "b/run" in chart.svg) for chart in recalls] == [(True, False), (False, True)]
    assert recalls[0].caption.endswith("Runs that search among other numbers of rows have a chart of their own.")


def test_numbers_that_were_logged_once_are_a_table_and_no_chart(two_runs: list[Path]):
    for run in two_runs:
        lines = [line for line in read_metrics(run) if line["kind"] == "train" or line["step"] == 60]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = curves(read_runs(two_runs[:1]))
    drawn = re.findall(r'aria-label="(.*?) over', "".join(chart.svg for chart in section.charts))
    assert drawn == ["loss", "share", "samples/s"]
    (table,) = section.tables
    assert table.rows == [("image → text R@1", "run", "60", "66.7%"), ("text → image R@1", "run", "60", "60.0%")]
    (table,) = curves(read_runs(two_runs)).tables
    assert table.rows[:2] == [("image → text R@1", name, "60", "66.7%") for name in ("a/run", "b/run")]
    (two_runs[0] / "metrics.jsonl").write_text('{"kind": "train", "step": 2, "loss": 1.23456}\n')
    section = curves(read_runs(two_runs[:1]))
    assert (section.charts, section.tables[0].rows) == ([], [("loss", "run", "2", "1.235")])


def test_report_of_a_run_without_record_says_so(run_folder: Path, tmp_path: Path):
    (run,) = read_runs([run_folder])
    assert overview([run]).note.startswith("No run.json, which tells machine, version and time, in ")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml': not YAML: .*the run's checkpoints hold its settings too"):
        read_runs([tmp_path])


def test_command_takes_several_runs(two_runs: list[Path], tmp_path: Path, command: Any):
    runs = [word for run in two_runs for word in ("--run", str(run))]
    status, _, errors = command("report", *runs, "--query-rows", "0", "--out", str(tmp_path / "r.html"))
    assert (status, errors) == (0, "")
    text = (tmp_path / "r.html").read_text()
    assert "<td>train.lr</td><td>0.001</td><td>0.0003</td>" in text
    assert "Of the first run, or of --config. Under Runs are those that differ." in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (75.3, "1 min 15 s"), (4000, "1 h 6 min"), (360_000, "100 h 0 min")],
)
def test_duration(seconds: float, words: str):
    assert duration(seconds) == words
