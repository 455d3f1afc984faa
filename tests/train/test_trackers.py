"""Where a run's numbers go besides metrics.jsonl. What trackers keep is read by TensorBoard's reader, from wandb's own
records, by a server that speaks wandb's protocol, and by trackio."""

from __future__ import annotations

import gzip
import json
import signal
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mmdata.errors import ConfigError
from mmdata.train.log import trackers
from mmdata.train.log.log import TrackedRun
from tests.logs import of_mmdata
from tests.programs import PATIENCE_S
from tests.train.test_loop import make_trainer, read_metrics, run_small, small

KEY = "a" * 40


class Kept:
    """A tracker that keeps what it is told."""

    told: ClassVar[list[tuple[Any, ...]]] = []

    def begin(self, run: TrackedRun) -> None:
        self.told.append(("begin", run.run_id, run.step))

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        self.told.append((kind, values["step"]))

    def flush(self) -> None:
        self.told.append(("flush",))

    def close(self, exit_code: int) -> None:
        self.told.append(("close", exit_code))


class Offline(Kept):
    """A tracker that has lost its network."""

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        raise ConnectionError("no route to host")


class Hanging(Kept):
    """A tracker that waits for an answer."""

    answer = threading.Event()

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        self.answer.wait()


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "told", [])


def stopping(at: int, number: signal.Signals = signal.SIGTERM) -> Any:
    return small.SmallBatches(lambda batch, rows: signal.raise_signal(number) if batch == at else None)


def failing(at: int) -> Any:
    def fail(batch: int, rows: list[int]) -> None:
        if batch == at:
            raise RuntimeError("power cut")

    return small.SmallBatches(fail)


def test_own_tracker_is_told_what_metrics_jsonl_has(tmp_path: Path):
    trainer = make_trainer(tmp_path, steps=4, trackers=[Kept], evaluate=lambda model: {"score": 0.5})
    assert trainer.run() == 0
    lines = [(line["kind"], line["step"]) for line in map(json.loads, (tmp_path / "metrics.jsonl").open())]
    assert Kept.told[1:] == [*lines, ("flush",), ("close", 0)]


def test_run_keeps_its_id_though_killed_before_its_first_checkpoint(tmp_path: Path):
    with pytest.raises(RuntimeError, match="power cut"):
        make_trainer(tmp_path, failing(1), trackers=[Kept]).run()
    assert make_trainer(tmp_path, stopping(4), trackers=[Kept]).run() == 128 + signal.SIGTERM
    assert make_trainer(tmp_path, trackers=[Kept]).run() == 0
    number = (tmp_path / "run_id").read_text().strip()
    assert [call for call in Kept.told if call[0] in ("begin", "close")] == [
        *[("begin", number, 0), ("close", 1)],
        *[("begin", number, 0), ("close", 128 + signal.SIGTERM)],
        *[("begin", number, 5), ("close", 0)],
    ]


def test_tracker_begins_only_where_something_is_left_of_the_run(tmp_path: Path):
    assert make_trainer(tmp_path, steps=2, trackers=[Kept]).run() == 0
    Kept.told.clear()
    assert make_trainer(tmp_path, steps=2, trackers=[Kept]).run() == 0
    assert not Kept.told
    scored = {"trackers": [Kept], "evaluate": lambda model: {"score": 0.5}}
    assert make_trainer(tmp_path, steps=2, **scored).run() == 0
    assert [call[0] for call in Kept.told] == ["begin", "evaluation", "flush", "close"]


def test_error_of_a_tracker_is_said_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert make_trainer(tmp_path, steps=4, trackers=[Offline]).run() == 0
    first, last = (record.getMessage() for record in of_mmdata(caplog))
    name = f"train.trackers '{__name__}:Offline': "
    assert first.startswith(
        f"{name}ConnectionError: no route to host. The run goes on without; metrics.jsonl has every"
    )
    assert last == f"{name}5 errors in this run"
    assert len(read_metrics(tmp_path)) == 4


def test_tracker_that_hangs_slows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.01)
    monkeypatch.setattr(trackers, "WAITING", 2)
    assert make_trainer(tmp_path, steps=4, trackers=[Hanging]).run() == 0
    Hanging.answer.set()
    said = [record.getMessage() for record in of_mmdata(caplog)]
    assert "2 lines wait for it. The run goes on" in said[0]
    assert len(read_metrics(tmp_path)) == 4


def test_tracker_that_does_not_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.01)
    monkeypatch.setattr(Hanging, "answer", threading.Event())
    assert make_trainer(tmp_path, steps=1, trackers=[Hanging]).run() == 0
    Hanging.answer.set()
    assert "Hanging': it has not ended within 0.01 s. The run goes on" in of_mmdata(caplog)[0].getMessage()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("wanbd", r"'wanbd': expected tensorboard, wandb, trackio or 'module:Class'; did you mean 'wandb'\?"),
        ("nowhere:Kept", r"'nowhere:Kept': cannot be imported: No module named 'nowhere'; a file of the current"),
        (f"{__name__}:Nobody", r":Nobody': cannot be imported: .* has no attribute 'Nobody'"),
        ("builtins:dict", r"'builtins:dict': expected a class with the methods begin, record, flush and close"),
    ],
)
def test_tracker_that_is_none_is_an_error_before_the_run(tmp_path: Path, target: str, said: str):
    with pytest.raises(ConfigError, match=f"^train.trackers .*{said}"):
        make_trainer(tmp_path, trackers=[target])
    assert make_trainer(tmp_path, steps=1).run() == 0, "the folder is free again"


@pytest.mark.parametrize(
    ("tracker", "module", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard", r"mmdata\[tensorboard\]"),
        ("wandb", "wandb", r"mmdata\[wandb\]"),
        ("trackio", "trackio", "trackio"),
    ],
)
def test_tracker_that_is_not_installed_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, module: str, package: str
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"train.trackers '{tracker}' needs {tracker}: pip install '{package}'"):
        make_trainer(tmp_path, trackers=[tracker])


def test_run_without_trackers_imports_and_writes_nothing_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "mmdata.train.log.trackers")
    make_trainer(tmp_path, steps=1).run()
    assert "mmdata.train.log.trackers" not in sys.modules
    assert not (tmp_path / "run_id").exists()


def losses(output: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(output)}


def test_tensorboard_of_a_resumed_run_has_each_step_once(tmp_path: Path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(RuntimeError, match="power cut"):
        make_trainer(tmp_path, failing(7), trackers=["tensorboard"]).run()
    make_trainer(tmp_path, trackers=["tensorboard"], evaluate=lambda model: {"score": 0.5}).run()
    read = reader.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in read.Scalars("train/loss")] == list(range(1, 13))
    assert {event.step: event.value for event in read.Scalars("train/loss")} == pytest.approx(losses(tmp_path))
    assert [event.step for event in read.Scalars("evaluation/score")] == [8, 12]
    assert not {name for name in read.Tags()["scalars"] if name.startswith("start/") or name.endswith("/epoch")}


def test_only_rank_0_tracks(tmp_path: Path):
    done = run_small(tmp_path, torchrun=2, train={"steps": 2, "trackers": ["tensorboard"]})
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.fixture
def wandb(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library in a home of its own, as a new process would find it."""
    library = pytest.importorskip("wandb")
    home = str(tmp_path_factory.mktemp("home"))
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, home)
    monkeypatch.setenv("NETRC", f"{home}/netrc")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(trackers, "CLOSE_S", PATIENCE_S)
    library.teardown()
    yield library
    library.teardown()


def read_offline(path: Path) -> list[Any]:
    """The records of a .wandb file: leveldb's log format after a head of 7 bytes."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # as at the end of a process: the file is then complete
    data, at, found, parts = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def test_wandb_offline_keeps_id_and_steps_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "photos")
    with pytest.raises(RuntimeError, match="power cut"):
        make_trainer(tmp_path, failing(7), trackers=["wandb"]).run()
    wandb.teardown()
    (tmp_path / "resumed").mkdir()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "resumed"))  # the folders of two runs of one second have one name
    make_trainer(tmp_path, trackers=["wandb"], evaluate=lambda model: {"score": 0.5}).run()
    number, logged, codes = (tmp_path / "run_id").read_text().strip(), [], []
    for folder in (tmp_path, tmp_path / "resumed"):
        (path,) = folder.glob(f"wandb/offline-run-*/run-{number}.wandb")
        records = read_offline(path)
        (run,) = [record.run for record in records if record.HasField("run")]
        assert (run.run_id, run.project, run.display_name) == (number, "photos", tmp_path.name)
        axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.HasField("metric")}
        assert axes["*"] == "step"
        codes += [record.exit.exit_code for record in records if record.HasField("exit")]
        for record in records:
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            logged += [items] if "train/loss" in items else []
    assert codes == [1, 0]
    assert [line["step"] for line in logged] == [*range(1, 8), *range(7, 13)], "step 7 comes again"
    assert {line["step"]: line["train/loss"] for line in logged} == losses(tmp_path)


def test_wandb_without_a_login_is_an_error_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(
        ConfigError, match="'wandb': no login; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=off"
    ):
        make_trainer(tmp_path, trackers=["wandb"])


class Server(ThreadingHTTPServer):
    """What wandb needs of its server: `history` has the values that came; `status` is its answer to all."""

    def __init__(self, status: int = 200) -> None:
        self.history: list[dict[str, Any]] = []
        self.runs: set[str] = set()
        self.status = status
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += map(json.loads, lines)
            return {}
        if not path.startswith("/graphql"):
            return {}
        query = json.loads(body)
        project = {"id": "p", "name": "photos", "entity": {"id": "e", "name": "me"}}
        user = {"id": "v", "username": "me", "entity": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        data: dict[str, Any] = {"model": None, "viewer": user}
        name = query.get("variables", {}).get("name")
        bucket = {"id": "b", "name": name, "displayName": "photos", "config": "{}"}
        if "RunResumeStatus" in query["query"] and name in self.runs:
            tail = json.dumps([json.dumps(self.history[-1])])
            lines = {"historyLineCount": len(self.history), "historyTail": tail, "eventsTail": "[]", "tags": []}
            bucket |= {"summaryMetrics": "{}", "logLineCount": 0, "eventsLineCount": 0, "wandbConfig": '{"t": 1}'}
            data = {"model": {**project, "bucket": {**bucket, **lines}}}
        elif "upsertBucket" in query["query"]:
            self.runs.add(name)
            data = {"upsertBucket": {"bucket": {**bucket, "project": project, "historyLineCount": 0}, "inserted": True}}
        elif "createRunFiles" in query["query"]:
            place = f"http://127.0.0.1:{self.server_port}/"
            files = [{"name": name, "uploadUrl": place + name} for name in query["variables"]["files"]]
            data = {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"data": data}


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer = json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def serve(monkeypatch: pytest.MonkeyPatch, status: int = 200) -> Server:
    server = Server(status)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return server


def test_wandb_sends_what_metrics_jsonl_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any):
    server = serve(monkeypatch)
    assert make_trainer(tmp_path, steps=4, trackers=["wandb"]).run() == 0
    assert {line["step"]: line["train/loss"] for line in server.history if "train/loss" in line} == losses(tmp_path)


def test_wandb_continues_the_run_that_its_server_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any):
    server = serve(monkeypatch)
    with pytest.raises(RuntimeError, match="power cut"):
        make_trainer(tmp_path, failing(7), trackers=["wandb"]).run()
    wandb.teardown()
    assert make_trainer(tmp_path, trackers=["wandb"], keep_checkpoints=5).run() == 0
    wandb.teardown()
    assert server.runs == {(tmp_path / "run_id").read_text().strip()}
    assert [line["_step"] for line in server.history] == list(range(13)), "wandb's own steps never go back"
    assert [line["step"] for line in server.history] == [*range(1, 8), *range(7, 13)]


def test_wandb_whose_server_dies_in_the_run_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any):
    server = serve(monkeypatch)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")

    def die(batch: int, rows: list[int]) -> None:
        if batch == 2:
            server.shutdown()
            server.server_close()

    assert make_trainer(tmp_path, small.SmallBatches(die), trackers=["wandb"]).run() == 0
    make_trainer(tmp_path / "alone").run()
    assert losses(tmp_path) == losses(tmp_path / "alone")
    (kept,) = tmp_path.glob("wandb/run-*/run-*.wandb")
    assert len([1 for record in read_offline(kept) if record.HasField("history")]) == 12, "for `wandb sync`"


def test_wandb_logs_offline_where_the_server_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wandb: Any
):
    serve(monkeypatch).server_close()
    begin = wandb.init

    def begin_online_for_a_second(**given: Any) -> Any:
        given["settings"] |= {} if "mode" in given else {"init_timeout": 1}
        return begin(**given)

    monkeypatch.setattr(wandb, "init", begin_online_for_a_second)
    assert make_trainer(tmp_path, steps=2, trackers=["wandb"]).run() == 0
    assert "It logs offline; `wandb sync` uploads the run later" in of_mmdata(caplog)[0].getMessage()
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert len([1 for record in read_offline(kept) if record.HasField("history")]) == 2


def test_wandb_whose_server_refuses_the_key_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any
):
    serve(monkeypatch, 401)
    with pytest.raises(
        ConfigError, match=r"'wandb': .*returned error 401.*; run `wandb login --relogin`, or set WANDB_MODE"
    ):
        make_trainer(tmp_path, trackers=["wandb"])


def test_trackio_keeps_run_and_steps_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it when it is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    with pytest.raises(RuntimeError, match="power cut"):
        make_trainer(tmp_path / "photos", failing(7), trackers=["trackio"]).run()
    make_trainer(tmp_path / "photos", trackers=["trackio"]).run()
    number = (tmp_path / "photos" / "run_id").read_text().strip()
    (name,) = SQLiteStorage.get_runs("mmdata")
    assert name == f"photos-{number}"
    logged = SQLiteStorage.get_logs("mmdata", name)
    assert {line["step"]: line["train/loss"] for line in logged} == losses(tmp_path / "photos")
