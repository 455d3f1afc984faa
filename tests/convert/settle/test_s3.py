"""Conversions whose output is on S3, a real server of its protocol (moto) behind a proxy: the bytes of a local one."""

from __future__ import annotations

import json
import logging
import pickle
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import moto.s3.models
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

import mmdata.storage.attempts as attempts_module
import tests.convert.settle.killed_s3
from mmdata.convert import ConvertConfig, Report, convert, convert_part
from mmdata.convert.conversion import Conversion
from mmdata.convert.settle.s3_output import S3Output
from mmdata.convert.units.engines import processes, threads
from mmdata.convert.units.s3_staging import S3Staging, StoredUnit
from mmdata.convert.units.unit import Job
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index
from mmdata.index.verify import verify
from mmdata.storage.s3 import S3Folder
from tests.convert.conftest import content, jsonl, make_parts, start
from tests.programs import PATIENCE_S, run_program
from tests.storage.servers import Server, serve_s3

URL = "s3://bucket/a/photos"
MANIFEST = "__mmdata__/manifest.json"
SETTINGS = ConvertConfig(shard_rows=3, max_bad_share=0.5)
FLAGS = ["--shard-rows", 3, "--max-bad-share", 0.5]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request takes a tenth of the time
    with serve_s3(tmp_path_factory.mktemp("empty")) as server:
        yield server


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    """A server with an empty bucket; who asks again does so at once."""
    monkeypatch.setattr(attempts_module, "WAIT_S", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of programs, some of which are killed
    server.answers.clear()
    s3fs.S3FileSystem.clear_instance_cache()
    server.commands.clear()
    objects().clear()
    return server


@pytest.fixture
def table(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Seven rows, in three units of three: two are of one image, and one has none."""
    root = tmp_path / "corpus"
    root.mkdir()
    for seed, name in enumerate("abcde"):
        (root / f"{name}.jpg").write_bytes(photo(20, 30, seed=seed))
    (root / "again.jpg").write_bytes((root / "b.jpg").read_bytes())
    names = ["a", "b", "c", "again", "d", "gone", "e"]
    return jsonl(root / "table.jsonl", [{"image": f"{name}.jpg", "caption": f"photo {name}"} for name in names])


def objects() -> Any:
    """The store of moto, which runs in this process: the proxy counts what is asked of it, and not this."""
    return moto.s3.models.s3_backends["123456789012"]["aws"].buckets["bucket"].keys


def there(prefix: str = "a/photos/") -> dict[str, bytes]:
    """The files below a prefix."""
    names = [name for name in list(objects()) if name.startswith(prefix)]
    return {name.removeprefix(prefix): objects()[name].value for name in sorted(names)}


def on_disk(table: Path, folder: Path, config: ConvertConfig = SETTINGS) -> dict[str, bytes]:
    """What a conversion into a folder gives."""
    convert(table, folder, config, engine=threads(1))
    return {name: data for name, data in content(folder).items() if not name.endswith(".mmdata.lock")}


def to_s3(table: Path, config: ConvertConfig = SETTINGS, **options: Any) -> Report:
    return convert(table, URL, config, engine=threads(1), **options)


def test_s3_output_has_the_bytes_of_a_folder_and_is_complete_the_second_time(s3, table, tmp_path):
    expected = on_disk(table, tmp_path / "out")
    report = to_s3(table)
    assert there() == expected
    assert (report.manifest.rows, report.accounts["duplicate"], report.accounts["quarantined"]) == (5, 1, 1)
    for name, data in there().items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    assert verify(tmp_path / "copy") == []
    s3.commands.clear()
    assert to_s3(table).was_complete
    assert not [command for command in s3.commands if not command.startswith("GET")]


def test_s3_units_are_fetched_at_once(s3, table, monkeypatch):
    make_parts(table, URL, SETTINGS, 1)
    first_two, both, download = {0, 1}, threading.Barrier(2), S3Staging._download

    def together(staging: S3Staging, stored: StoredUnit, file: str, path: Path) -> None:
        if (unit := stored.receipt.unit) in first_two:
            first_two.remove(unit)
            both.wait(PATIENCE_S)
        download(staging, stored, file, path)

    monkeypatch.setattr(S3Staging, "_download", together)
    to_s3(table, finish=True)
    assert not first_two


def test_s3_units_of_files_that_have_changed_are_made_again(s3, table, tmp_path):
    make_parts(table, URL, SETTINGS)
    (table.parent / "c.jpg").write_bytes((table.parent / "e.jpg").read_bytes())
    with pytest.raises(DataError, match="1 unit to make, as parts have not run or files have changed"):
        to_s3(table, finish=True)
    convert_part(table, URL, SETTINGS, part=(1, 2), engine=threads(1))
    to_s3(table, finish=True)
    assert there() == on_disk(table, tmp_path / "out")


def test_s3_folder_of_a_conversion_that_has_not_ended_says_so(s3, table):
    convert_part(table, URL, SETTINGS, part=(1, 2), engine=threads(1))
    message = r"folder 's3://bucket/a/photos': a conversion into it was stopped or refused, or still runs; run the same"
    with pytest.raises(DataError, match=message):
        Index.open(URL)


def test_s3_whole_tars_are_copied_on_the_servers_side(s3, table):
    to_s3(table)
    sent = [name for command in s3.commands if (name := re.fullmatch(r"PUT /bucket/a/photos/(.*\.tar)", command))]
    units = r"\.mmdata-convert/units-\w{16}/"
    # The first unit is written whole. Of the other two, a row is a duplicate and one has no image: they share a shard.
    assert re.fullmatch(units + r"000000/\w{32}/0-000000.tar", sent[0][1])
    assert re.fullmatch(units + "made/out/000001.tar", sent[3][1])
    assert sorted(name[1] for name in sent[4:]) == ["000000.tar", "000001.tar"]
    fetched = [c for c in s3.commands if re.fullmatch(r"GET .*/\d{6}/\w{32}/\d-\d{6}.tar", c)]
    assert len(fetched) == 2


def test_s3_output_with_validation_and_class_names_has_the_bytes_of_folders(s3, tmp_path, photo):
    images = [photo(20, 30, seed=seed) for seed in range(9)]
    rows = pa.table({"image": images, "caption": [f"photo {n}" for n in range(9)], "label": list("xyzyyxzxz")})
    pq.write_table(rows, tmp_path / "table.parquet")
    config = ConvertConfig(shard_rows=3, val_share=0.4)
    expected = on_disk(tmp_path / "table.parquet", tmp_path / "out", config)
    convert(tmp_path / "table.parquet", URL, config, engine=processes(2))
    assert there() == expected
    assert {name.partition("/")[0] for name in expected} == {"train", "val"}
    assert any("/made/val/" in command for command in s3.commands)


def test_s3_trained_tokenizer_goes_up_with_the_shards(s3, table, tmp_path):
    config = SETTINGS.model_copy(update={"train_tokenizer": 300})
    expected = on_disk(table, tmp_path / "out", config)
    to_s3(table, config)
    assert there() == {name: data for name, data in expected.items() if not name.startswith("tokenizer/")}
    assert "__mmdata__/tokenizer/tokenizer.json" in there()


def test_s3_parts_of_two_programs_and_two_that_finish_give_the_bytes_of_one(s3, table, tmp_path):
    jobs = [start(table, URL, *FLAGS, "--part", f"{part}/2", "--workers", 1) for part in (1, 2)]
    outputs = [job.communicate(timeout=PATIENCE_S) for job in jobs]
    assert [(job.returncode, stderr) for job, (_, stderr) in zip(jobs, outputs, strict=True)] == [(0, "")] * 2
    assert outputs[0][0].startswith(
        "part 1 of 2: 4 rows done, of which 0 cannot be used; when all parts are done, run "
    )
    assert not [name for name in there() if not name.startswith(".mmdata-convert/")]
    last = [start(table, URL, *FLAGS, "--finish") for _ in range(2)]
    said = [job.communicate(timeout=PATIENCE_S) for job in last]
    assert 0 in [job.returncode for job in last]
    for job, (stdout, stderr) in zip(last, said, strict=True):
        if job.returncode:  # it came so late that units were removed under its hands
            assert "is gone: another process has published this conversion meanwhile" in stderr
        else:
            assert "2 shards in s3://bucket/a/photos: 5 images, 5 captions; 2 left out, each with its reason in " in (
                " ".join(stdout.split())
            )
    if any(job.returncode for job in last):
        assert to_s3(table).was_complete  # and removes what the one that came so late has left
    assert there() == on_disk(table, tmp_path / "out")


@pytest.mark.parametrize(("owner", "step"), [(S3Output, "staging"), (Conversion, "make_units")])
@pytest.mark.sweep(keep=1)
def test_s3_finish_that_another_outran_is_complete_and_leaves_nothing(s3, table, tmp_path, monkeypatch, owner, step):
    make_parts(table, URL, SETTINGS, 1)
    whole = getattr(owner, step)

    def outrun(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, step, whole)
        assert not to_s3(table, finish=True).was_complete
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, step, outrun)
    assert to_s3(table, finish=True).was_complete
    assert there() == on_disk(table, tmp_path / "out")


@pytest.mark.sweep
def test_s3_killed_between_any_two_requests_goes_on_and_shows_no_half(s3, table, tmp_path, monkeypatch):
    expected = on_disk(table, tmp_path / "out")
    halves: list[str] = []

    def look(path: str, range_: str | None) -> None:
        found = list(objects())
        if f"a/photos/{MANIFEST}" in found and (missing := set(expected) - set(there())):
            halves.append(f"at {path}: {sorted(missing)}")

    monkeypatch.setattr(s3, "next_fault", look)
    report = killed_anywhere(table, "fresh")
    assert report["killed"] > 5
    assert report["wrong"] == []
    assert halves == []
    assert there() == expected


@pytest.mark.sweep
def test_s3_overwrite_that_is_killed_between_any_two_requests_goes_on_and_shows_no_half(s3, table, tmp_path):
    report = killed_anywhere(table, "overwrite")
    assert report["killed"] > 5
    assert report["wrong"] == []
    assert there() == on_disk(table, tmp_path / "out")


def killed_anywhere(table: Path, scenario: str) -> dict[str, Any]:
    """What killed_s3.py prints."""
    command = [sys.executable, tests.convert.settle.killed_s3.__file__, str(table), URL, scenario]
    done = run_program(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("fault", ["reset", "error", "cut"])
@pytest.mark.sweep(keep=1)
def test_s3_each_request_may_fail_once(s3, table, tmp_path, monkeypatch, fault):
    """Before it is done (reset), after it, so that the answer is lost (error), or in the middle of the answer (cut)."""
    seen: set[str] = set()

    def next_fault(path: str, range_: str | None) -> str | None:
        command = re.sub(r"[0-9a-f]{32}", "", s3.commands[-1])
        if command in seen:
            return None
        seen.add(command)
        return fault

    monkeypatch.setattr(s3, "next_fault", next_fault)
    to_s3(table)
    assert len(seen) > 40
    assert there() == on_disk(table, tmp_path / "out")


def test_s3_second_attempt_of_a_unit_removes_what_it_sent(s3, table, tmp_path):
    again: list[dict[str, bytes]] = []

    def twice(job: Job, units: Any) -> Iterator[Any]:
        units = list(units)
        late = pickle.loads(pickle.dumps(job))  # as another process has it
        yield from threads(1)(job, units)
        before = there()
        for _ in threads(1)(late, units):
            pass
        again.append(before)
        assert there() == before

    convert(table, URL, SETTINGS, engine=twice)
    assert len([name for name in again[0] if name.endswith("/receipt.json")]) == 3
    assert there() == on_disk(table, tmp_path / "out")


def test_s3_attempt_that_ends_after_all_is_published_changes_nothing(s3, table, tmp_path):
    jobs: list[tuple[Job, list[Any]]] = []

    def remember(job: Job, units: Any) -> Iterator[Any]:
        jobs.append((pickle.loads(pickle.dumps(job)), units := list(units)))
        yield from threads(1)(job, units)

    convert(table, URL, SETTINGS, engine=remember)
    expected = there()
    (late, units), *_ = jobs
    s3.answers.clear()
    for _ in threads(1)(late, units[:1]):
        pass
    assert {name: data for name, data in there().items() if not name.startswith(".")} == expected
    assert there() != expected
    assert to_s3(table).was_complete  # and removes what the zombie has left
    assert there() == expected == on_disk(table, tmp_path / "out")


def test_s3_unit_whose_files_are_not_all_there_is_made_again(s3, table, tmp_path):
    make_parts(table, URL, SETTINGS, 1)
    lost = [name for name in list(objects()) if re.search(r"/000001/\w{32}/records.arrow", name)]
    assert len(lost) == 1
    del objects()[lost[0]]
    with pytest.raises(DataError, match="1 unit to make, as parts have not run or files have changed"):
        to_s3(table, finish=True)
    made = convert_part(table, URL, SETTINGS, part=(1, 1), engine=threads(1))
    assert (made.units, made.rows) == (3, 7)
    to_s3(table, finish=True)
    assert there() == on_disk(table, tmp_path / "out")


def test_s3_unit_that_changed_is_an_error(s3, table):
    make_parts(table, URL, SETTINGS, 1)
    (name,) = (name for name in list(objects()) if re.search(r"/000001/\w{32}/records.arrow", name))
    data = objects()[name].value
    objects()[name].value = data[:-1] + b" "
    with pytest.raises(DataError, match=r"records\.arrow': not what was written there; remove it, and run the same"):
        to_s3(table, finish=True)
    assert MANIFEST not in there()


def test_s3_other_settings_are_an_error_that_names_them_until_overwrite(s3, table, tmp_path):
    other = SETTINGS.model_copy(update={"min_side": 9})
    convert_part(table, URL, SETTINGS, part=(1, 2), engine=threads(1))
    with pytest.raises(DataError, match=r"'s3://bucket/a/photos': holds an unfinished conversion \(min_side"):
        convert_part(table, URL, other, part=(2, 2), engine=threads(1))
    to_s3(table, other, overwrite=True)
    assert there() == on_disk(table, tmp_path / "other", other)
    with pytest.raises(DataError, match=r"holds another conversion \(min_side: was 9, is 2\); choose another"):
        to_s3(table)


def test_s3_overwrite_removes_what_the_new_manifest_does_not_name(s3, table, tmp_path):
    small = SETTINGS.model_copy(update={"shard_rows": 1})
    to_s3(table, small)
    assert "000004.tar" in there()
    to_s3(table, overwrite=True)
    assert there() == on_disk(table, tmp_path / "out")


def test_s3_run_that_lost_the_folder_to_another_publishes_nothing(s3, table, tmp_path):
    other = SETTINGS.model_copy(update={"min_side": 9})

    def slow(job: Job, units: Any) -> Iterator[Any]:
        yield from threads(1)(job, units)
        to_s3(table, other, overwrite=True)

    with pytest.raises(DataError, match=r"holds another conversion \(min_side: was 9, is 2\)"):
        convert(table, URL, SETTINGS, engine=slow)
    published = {name: data for name, data in there().items() if not name.startswith(".")}
    assert published == on_disk(table, tmp_path / "other", other)


def test_s3_damaged_conversion_is_an_error_until_overwrite(s3, table):
    to_s3(table)
    expected = there()
    objects()["a/photos/000001.tar"].value = b"cut"
    with pytest.raises(DataError, match=r"damaged \('000001.tar' has 3 bytes of \d+\); make it anew"):
        to_s3(table)
    del objects()["a/photos/__mmdata__/index-00000.arrow"]
    with pytest.raises(DataError, match=r"damaged \('__mmdata__/index-00000.arrow' is missing\); make it anew with"):
        to_s3(table)
    to_s3(table, overwrite=True)
    assert there() == expected


@pytest.mark.parametrize("name", ["notes.txt", "other/000000.tar", "__mmdata__/notes.txt"])
@pytest.mark.sweep(keep=2)
def test_s3_foreign_files_are_refused(s3, table, name):
    S3Folder.of_url(URL).put_new(name, b"mine")
    shown = name.replace("other/000000.tar", "other")
    with pytest.raises(DataError, match=rf"'s3://bucket/a/photos': holds 1 file.* \({shown}\); nothing is deleted"):
        to_s3(table)
    assert there() == {name: b"mine"}


def test_s3_foreign_files_beside_train_and_val_are_refused(s3, table):
    S3Folder.of_url(URL).put_new("notes.txt", b"mine")
    with pytest.raises(DataError, match=r"holds 1 file.* \(notes\.txt\); nothing is deleted"):
        to_s3(table, SETTINGS.model_copy(update={"val_share": 0.5}))


def test_s3_too_many_bad_rows_publish_nothing_and_the_list_of_them_stays_on_the_disk(s3, table):
    with pytest.raises(DataError, match=r"over max_bad_share=0\.0; nothing is published") as caught:
        to_s3(table, ConvertConfig(shard_rows=3, max_bad_share=0.0))
    ledger = re.search(r"Each has a line in '(.+?)'", str(caught.value))[1]
    reasons = [json.loads(line)["reason"] for line in Path(ledger).read_text().splitlines()]
    assert sorted(reasons) == ["duplicate_image", "missing_image"]
    assert there() == {}


@pytest.mark.parametrize("status", [501, 400])
def test_s3_store_that_refuses_conditions_is_an_error_with_the_remedy(s3, table, status):
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(status if "If-None-Match" in handler.headers else 404)

    s3.answers["/bucket/a/photos/.mmdata-convert/run.json"] = refuse
    with pytest.raises(
        ConfigError, match=r"cannot write a file only if there is none \(Client.*send it with `mmdata pu"
    ):
        to_s3(table)


def test_s3_file_is_put_under_a_condition_also_after_a_conflict(s3):
    refused: list[str] = []

    def conflict(handler: BaseHTTPRequestHandler) -> None:
        refused.append(handler.headers["If-None-Match"])
        del s3.answers["/bucket/a/photos/one"]
        handler.send_error(409)

    bucket = S3Folder.of_url(URL)
    s3.answers["/bucket/a/photos/one"] = conflict
    assert bucket.put_new("one", b"1")
    assert refused == ["*"]
    assert not bucket.put_new("one", b"2")
    first = bucket.get("one")
    assert first.data == b"1"
    assert bucket.put_new("one", b"3", instead_of=first.tag)
    assert not bucket.put_new("one", b"4", instead_of=first.tag)
    assert bucket.get("one").data == b"3"
    bucket.remove(["one"])
    assert not bucket.put_new("one", b"5", instead_of=first.tag)
    assert bucket.get("one") is None


def test_s3_file_of_this_machine_that_is_gone_is_not_said_to_be_missing_in_the_store(s3, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.tar"):
        S3Folder.of_url(URL).put("0.tar", tmp_path / "gone.tar", "00" * 32)


def test_s3_store_that_ignores_conditions_is_an_error(s3, table):
    def ignore(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    s3.answers["/bucket/a/photos/.mmdata-convert/run.json"] = ignore
    with pytest.raises(
        ConfigError, match=r"only if there is none \(it wrote over a file under the condition that there"
    ):
        to_s3(table)
    s3.answers.clear()
    assert there() == {}


def test_s3_outputs_that_cannot_be_are_an_error(s3, table):
    with pytest.raises(
        ConfigError, match="shard_bytes 6000000000: an output on S3 has shards of at most 5,000,000,000 b"
    ):
        to_s3(table, SETTINGS.model_copy(update={"shard_bytes": 6_000_000_000}))
    with pytest.raises(ConfigError, match=r"'gs://b/x': a folder on this disk or s3://BUCKET/PREFIX is needed here"):
        convert(table, "gs://b/x", SETTINGS)
