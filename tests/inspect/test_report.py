"""The report is one file that asks nothing of any network, shows what there is, and trusts nothing in data."""

from __future__ import annotations

import html
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mmdata.config import DataConfig
from mmdata.errors import DataError
from mmdata.images import probe
from mmdata.index import Index
from mmdata.inspect.gallery import samples
from mmdata.inspect.report import write_report
from mmdata.inspect.runs import read_runs
from mmdata.tars.write import Sample
from tests.programs import PATIENCE_S, run_program
from tests.shard_writer import ShardWriter

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Elements(HTMLParser):
    """Counts tags, and keeps every attribute that could make a browser load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


@pytest.fixture(scope="module")
def page(data: dict[str, Any], run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "new" / "report.html"
    write_report(out, shards=Path(data["shards"]), data=DataConfig(**data), runs=[run_folder])
    return out


@pytest.fixture
def report(data: dict[str, Any], tmp_path: Path) -> Callable[..., str]:
    """`report(shards, **changes) -> str`: the page on the corpus, or on other shards, with other settings."""

    def text(shards: Path | list[Path] | None = None, **changes: Any) -> str:
        settings = DataConfig.model_validate({**data, **changes})
        write_report(tmp_path / "r.html", shards=shards or Path(data["shards"]), data=settings)
        return (tmp_path / "r.html").read_text()

    return text


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    row = re.search(rf"<tr><td>{re.escape(first)}</td>(.*?)</tr>", text)
    assert row, f"no row '{first}'"
    return [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row[1])]


def test_report_has_every_section_filled(page: Path):
    text = page.read_text()
    titles = ["Samples", "Labels", "Shapes", "Buckets", "Run", "Accounts", "Left out"]
    assert re.findall(r"<h2>(.*?)</h2>", text) == titles
    assert 'class="missing"' not in text
    assert text.count('<article class="card">') == 22
    assert cells(text, "text → image R@1") == ["51.0%"]
    assert cells(text, "matryoshka 64 image to text r1") == ["25.0%"]
    between = "image → text R@1 51.0%, text → image R@1 51.0%"
    assert cells(text, "interpolated weights, alpha 0.25") == [between]
    assert cells(text, "interpolated weights, alpha 1") == [f"{between}, zero-shot top 1 75.0%"]
    assert cells(text, "compositional, colour") == ["accuracy 81.2%, text 70.0%, image 65.0%, group 60.0%"]
    assert cells(text, "compositional, chance") == ["accuracy 50.0%, text 25.0%, image 25.0%, group 16.7%"]
    assert cells(text, "loss, last") == ["0.04444"]
    assert cells(text, "written") == ["22"]
    assert cells(text, "corrupt_image") == ["1"]


def test_report_loads_nothing_and_escapes_captions_and_paths(page: Path):
    text = page.read_text()
    found = Elements(text)
    assert found.tags["script"] == found.tags["link"] == found.tags["iframe"] == 0
    assert found.tags["img"] == 22  # the thumbnails, and none from data
    assert found.loads
    assert all(load.startswith(("data:image/webp;base64,", "#")) for load in found.loads)
    assert found.handlers == []
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;" in text


def test_report_is_small_and_the_same_each_time(data: dict[str, Any], run_folder: Path, page: Path, tmp_path: Path):
    write_report(tmp_path / "again.html", shards=Path(data["shards"]), data=DataConfig(**data), runs=[run_folder])
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()
    assert page.stat().st_size < 300_000


def test_report_without_config_or_run_says_how_to_get_them(data: dict[str, Any], tmp_path: Path):
    write_report(tmp_path / "r.html", shards=Path(data["shards"]))
    missing = re.findall(r'<div class="missing">(.*?)</div>', (tmp_path / "r.html").read_text())
    assert [re.sub(r"(?s)[:;.].*", "", line) for line in missing] == [
        "Give the report a config to see its buckets, and what its plan pads",
        "No run was given",
    ]


def test_report_names_what_plan_names(data: dict[str, Any], report: Callable[..., str], tmp_path: Path, command: Any):
    native = {"image_buckets": None, "image_patches": [9, 16], "text_buckets": [32]}
    for changes, in_report, in_plan in (
        ({}, r"(\d+\.\d%) padded to 32 tokens</span>", "padded to 32 tokens: {}\n"),
        (native, r"<tr><td>32</td><td>(9 patches)</td>", "{}"),
    ):
        (named,) = re.findall(in_report, report(**changes))
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data | changes}))
        code, printed, _ = command("plan", str(tmp_path / "c.yaml"))
        assert code == 0
        assert in_plan.format(named) in printed


def test_report_of_a_corpus_of_labels_only_names_the_classes(photo: Any, tmp_path: Path, command: Any):
    with ShardWriter(tmp_path / "shards") as writer:
        for i in range(30):
            image = photo(40, 40, seed=i)
            writer.write(Sample(f"{i:04d}", image, probe(image), [], label=max(i - 5, 0)))
        writer.close({"rows": 30, "written": 30, "classes": ["<b>", *(f"class {i}" for i in range(1, 25))]})
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump({"data": {"shards": str(tmp_path / "shards"), "global_batch_size": 8, "image_size": 32}})
    )
    out = tmp_path / "r.html"
    for place in (str(tmp_path / "c.yaml"), str(tmp_path / "shards")):
        status, _, errors = command("report", place, "--out", str(out))
        assert (status, errors) == (0, "")
        text = out.read_text()
        assert cells(text, "&lt;b&gt;") == ["6"]
        assert cells(text, "class 19") == ["1"]
        assert cells(text, "5 more classes") == ["5"]
        assert cells(text, "classes") == ["25"]
        assert "40 × 40 JPEG · label &lt;b&gt;" in text
        assert "No caption lengths" not in text
        assert (">no texts</td>" in text) == place.endswith(".yaml")


def test_report_counts_the_rows_and_captions_that_settings_cut(
    data: dict[str, Any], report: Callable[..., str], tmp_path: Path
):
    (tmp_path / "few.txt").write_text("\n".join(Index.open(data["shards"]).keys(np.arange(10))))
    text = report(select=str(tmp_path / "few.txt"), max_length=4, text_buckets=[4])
    assert re.search(r"data.select few.txt .* takes 10 of 22 rows: 12 are in no batch\.", text)
    assert ", 10 used</span>" in text
    assert re.search(r" \d+ captions are longer than max_length \(4 tokens\) and are cut to it\.", text)
    assert "Caption lengths of the captions of epoch 0, 22 rows" in text


def test_report_adds_the_rows_of_training_and_validation_up(
    report: Callable[..., str], two: list[Path], tmp_path: Path
):
    def fact(shards: list[Path], val: dict[str, Any]) -> list[str]:
        pattern = r'<b>([\d,]+)</b><span>validation rows</span><span class="soft">(.*?)</span>'
        return [f"{count}: {note}" for count, note in re.findall(pattern, report(shards, val=val))]

    train, val = two
    assert fact([train], {"shards": str(val)}) == [f"3: {val}; 22 + 3 = 25 rows"]
    assert fact([train, val], {"shards": str(val)}) == ["3: of the 25 rows; 22 others"]
    assert fact([train], {"shards": str(tmp_path / "gone")}) == fact([train], {"shards": "s3://b/val"}) == []
    (found,) = fact([train], {"share": 0.3})
    count, others = map(int, re.fullmatch(r"(\d+): of the 22 rows; (\d+) others", found).groups())  # type: ignore[union-attr]
    assert count + others == 22
    assert f"Epoch 0: {others} rows in " in report(val={"share": 0.3})
    assert fact([train], {}) == []
    text = report()
    assert "Epoch 0: 22 rows in 3 batches, the last of them filled up with 2 masked rows." in text
    assert cells(text, "all")[:3] == ["", "3", "22"]


def test_report_is_named_after_the_corpus_of_a_split(data: dict[str, Any], tmp_path: Path):
    shutil.copytree(data["shards"], tmp_path / "photos" / "train")
    write_report(tmp_path / "r.html", shards=tmp_path / "photos" / "train")
    assert "<title>photos/train</title>" in (tmp_path / "r.html").read_text()


def test_report_shows_an_image_that_does_not_decode_as_such(photo: Any, tmp_path: Path):
    whole = photo(40, 60)
    with ShardWriter(tmp_path / "shards") as writer:
        writer.write(Sample("0000", whole[:20] + bytes(len(whole) - 20), probe(whole), ["a dog"]))
    (card,) = samples(Index.open(tmp_path / "shards")).cards
    assert (card.key, card.picture) == ("0000", "")
    assert card.problem.startswith("corrupt_image: JPEG does not decode")


@pytest.fixture
def two(data: dict[str, Any], photo: Any, tmp_path: Path) -> list[Path]:
    """The corpus, and a folder with three rows and accounts of its own."""
    with ShardWriter(tmp_path / "second") as writer:
        for i in range(3):
            image = photo(40, 40, seed=50 + i)
            writer.write(Sample(f"second-{i}", image, probe(image), ["a cat"]))
        writer.close({"rows": 3, "written": 3})
    return [Path(data["shards"]), tmp_path / "second"]


def test_report_shows_several_folders_as_one_corpus(report: Callable[..., str], two: list[Path]):
    text = report(two)
    assert "<title>shards + second</title>" in text
    assert "24 of 25, evenly over the index" in text
    assert "second-2" in text
    assert all(f"<caption>{folder}</caption>" in text for folder in two)  # of the accounts
    assert text.count("<td>written</td>") == 2


def test_command_reports_on_all_datasets_of_a_config(
    data: dict[str, Any], two: list[Path], tmp_path: Path, command: Any
):
    shards = [{"shards": str(folder)} for folder in two]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": {**data, "shards": shards}}))
    assert command("report", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "r.html"))[0] == 0
    assert "24 of 25, evenly over the index" in (tmp_path / "r.html").read_text()
    status, output, _ = command("plan", str(tmp_path / "c.yaml"))
    assert status == 0
    assert "25 rows in 4 steps" in output


def test_report_lists_rows_masked_in_training(data: dict[str, Any], run_folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    (run / "ledger-rank0.jsonl").write_text('{"epoch": 0, "key": "0003", "reason": "corrupt_image", "detail": "cut"}\n')
    write_report(tmp_path / "r.html", shards=Path(data["shards"]), runs=[run])
    text = (tmp_path / "r.html").read_text()
    assert "1 rows could not be loaded." in text
    for line, wrong in (
        ("[1", "not JSON: .*"),
        ("[1]", "expected a JSON object, got a list"),
        ('{"row": 3}', r"no 'reason' \(str\) in it"),
    ):
        (run / "ledger-rank0.jsonl").write_text(f"{line}\n")
        with pytest.raises(DataError, match=rf"ledger-rank0\.jsonl', line 1: {wrong}; delete the line to go on$"):
            write_report(tmp_path / "r.html", shards=Path(data["shards"]), runs=[run])


def test_damaged_files_of_a_run_are_named(run_folder: Path, tmp_path: Path):
    (run,) = read_runs([run_folder])
    assert [line["step"] for line in run.lines("train")] == [*range(10, 100, 10)]  # a kill has cut the last line
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"st\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl', line 2: not JSON: .*; delete the line to go on"):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").unlink()
    for damaged, wrong in (
        ("{", "not JSON: .*"),
        ("[0.5]", r"expected scores by name, got a value of type list \(1 items\)"),
    ):
        (tmp_path / "evaluation.json").write_text(damaged)
        with pytest.raises(DataError, match=rf"evaluation\.json': {wrong}; make it again with `mmdata evaluate`$"):
            read_runs([tmp_path])


def test_command_finds_config_and_shards_in_the_run(
    data: dict[str, Any], run_folder: Path, tmp_path: Path, command: Any
):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    (run / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    status, output, errors = command("report", str(run), "--out", str(tmp_path / "r.html"))
    assert (status, errors) == (0, "")
    assert re.fullmatch(r".*r\.html: \d+ kB; open it in a browser\n", output)
    missing = re.findall(r'<div class="missing">(.*?)</div>', (tmp_path / "r.html").read_text())
    assert len(missing) == 1
    assert re.match(r"No queries: .*checkpoint", missing[0])  # the log of a run without its checkpoints


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: say what to report on: `mmdata report SHARDS`, or a run, or a config\n"),
        (
            ["configs/demo.yaml", "configs/scenes.yaml"],
            "error: one config at a time: got configs/demo.yaml, ",
        ),
        (["no/shards"], "error: folder 'no/shards': no such folder"),
        (["scenes", "data.shards=no/shards"], "error: folder 'no/shards': no such folder"),
        (["RUNS"], "error: 'RUNS': a folder of runs; give one of them: x\n"),
        (["RUNS/x/checkpoints"], "error: 'RUNS/x/checkpoints': a part of the run 'RUNS/x': give 'RUNS/x'\n"),
    ],
)
def test_command_explains_what_is_missing(arguments: list[str], message: str, command: Any, tmp_path: Path):
    run = tmp_path / "x"
    (run / "checkpoints/step-0000000003").mkdir(parents=True)
    (run / "config.yaml").touch()
    arguments, message = (
        [one.replace("RUNS", str(tmp_path)) for one in arguments],
        message.replace("RUNS", str(tmp_path)),
    )
    status, _, errors = command("report", *arguments)
    assert status == 2
    assert errors.startswith(message)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_report_opens_in_a_browser_without_running_anything_from_data(page: Path, tmp_path: Path):
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    done = run_program(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title
    assert title[1] == "shards"  # a script in a caption would have set it to "owned"
    assert done.stdout.count("<h2>") == 7
    assert "Content Security Policy" not in done.stderr  # the page's own policy had nothing to forbid


def test_report_takes_settings_from_the_command_line(data: dict[str, Any], tmp_path: Path, command: Any):
    np.save(tmp_path / "mask.npy", np.arange(22) < 15)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}))
    for place in (data["shards"], str(tmp_path / "c.yaml")):
        out = tmp_path / "r.html"
        status, _, errors = command("report", place, f"data.select={tmp_path / 'mask.npy'}", "--out", str(out))
        assert (status, errors) == (0, "")
        assert ", 15 used" in out.read_text()
    status, _, errors = command("report", data["shards"], data["shards"], "data.seed=1")
    assert status == 2
    assert "data.seed=1: of several folders of shards settings are given in a config" in errors
