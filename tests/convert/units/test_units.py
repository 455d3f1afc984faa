"""However small the units are, the samples are those that the rows give one after the other, as a plain model says."""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from mmdata.index import Index
from mmdata.index.verify import verify

IMAGES = ["a.jpg", "b.jpg", "c.jpg", "copy-of-a.jpg", "gone.jpg"]
LABELS = [None, "cat", "dog", "emu", 0, 3]
CAPTIONS = ["one", "two", "three", ""]


@dataclass
class Model:
    """What becomes of a table's rows, read one after the other, everything in memory."""

    content: dict[str, bytes]
    keep_duplicates: bool
    group: bool
    samples: list[tuple[str, list[str], int | None]] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    classes: list[str] = field(default_factory=list)

    def convert(self, rows: list[dict[str, Any]]) -> None:
        seen: set[bytes] = set()
        takers: dict[str, int] = {}  # of each path, the first row with a usable caption
        taken: dict[int, list[str]] = {}
        followers: dict[int, int] = {}
        new: dict[int, bool] = {}
        if self.group:
            for number, row in enumerate(rows):
                if not row["caption"]:
                    continue
                taker = takers.setdefault(row["image"], number)
                known = taken.setdefault(taker, [])
                if number != taker:
                    followers[number] = taker
                    new[number] = row["caption"] not in known
                if row["caption"] not in known:
                    known.append(row["caption"])
        labels = [row["label"] for row in rows if row["label"] is not None]  # whatever becomes of the rows
        share = sum(isinstance(label, str) for label in labels) / max(1, len(labels))
        names = bool(labels) and (share > 0.5 or (share == 0.5 and isinstance(labels[0], str)))
        self.classes = list(dict.fromkeys(map(str, labels))) if names else []
        fates: dict[int, str] = {}
        for number, row in enumerate(rows):
            if number in followers:
                fate = fates[followers[number]]
                fates[number] = fate if fate != "written" else "merged" if new[number] else "duplicate"
            elif not row["caption"] or row["image"] not in self.content:
                fates[number] = "quarantined"
            else:
                fates[number] = self._write(number, row, taken.get(number, [row["caption"]]), names, seen)
        self.fates = Counter(fates.values())

    def _write(self, number: int, row: dict[str, Any], captions: list[str], names: bool, seen: set[bytes]) -> str:
        label = row["label"]
        if label is not None:
            if names:
                label = self.classes.index(str(label))
            elif isinstance(label, str):
                return "quarantined"
        digest = hashlib.sha256(self.content[row["image"]]).digest()
        if digest in seen and not self.keep_duplicates:
            return "duplicate"
        seen.add(digest)
        self.samples.append((f"{number:09d}", captions, label))
        return "written"


def samples_of(out: Path) -> list[tuple[str, list[str], int | None]]:
    """Keys, captions and labels as they stand in the tars, which Python's own reader reads."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                found.setdefault(key, {})[kind] = tar.extractfile(member).read()  # type: ignore[union-attr]
    samples: list[tuple[str, list[str], int | None]] = []
    for key, members in found.items():
        content = json.loads(members.get("json", b"{}"))
        samples.append((key, content.get("captions", [members["txt"].decode()]), content.get("label")))
    return samples


def keys_of(out: Path, number: int) -> list[str]:
    """Keys of the samples of one shard."""
    with tarfile.open(out / f"{number:06d}.tar") as tar:
        return list(dict.fromkeys(name.partition(".")[0] for name in tar.getnames()))


ROW = st.fixed_dictionaries(
    {
        "image": st.sampled_from(IMAGES),
        "caption": st.sampled_from(CAPTIONS),
        "label": st.sampled_from(LABELS),
    }
)


@pytest.fixture(scope="module")
def pictures(photo: Callable[..., bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for seed, name in enumerate(IMAGES[:3]):
        (root / name).write_bytes(photo(8, 8, seed=seed))
    (root / IMAGES[3]).write_bytes((root / IMAGES[0]).read_bytes())
    return root


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.lists(ROW, min_size=1, max_size=14),
    shard_rows=st.integers(1, 6),
    keep=st.booleans(),
    group=st.booleans(),
)
def test_units_of_any_size_give_the_samples_of_the_model(
    pictures: Path, rows: list[dict[str, Any]], shard_rows: int, keep: bool, group: bool
) -> None:
    content = {name: (pictures / name).read_bytes() for name in IMAGES[:4]}
    model = Model(content, keep, group)
    model.convert(rows)
    if not model.samples:
        return
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder, "t.jsonl"), Path(folder, "out")
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = ConvertConfig(
            images=str(pictures),
            label_column="label",
            shard_rows=shard_rows,
            keep_duplicates=keep,
            group_by="image" if group else "none",
            max_bad_share=1.0,
        )
        report = convert(table, out, config, engine=threads(1))
        assert samples_of(out) == model.samples
        accounts = report.accounts
        assert {name: accounts[name] for name in ("written", "merged", "duplicate", "quarantined")} == {
            name: model.fates[name] for name in ("written", "merged", "duplicate", "quarantined")
        }
        assert accounts.get("classes", []) == model.classes
        assert verify(out) == []
        labels = [-1 if label is None else label for _, _, label in model.samples]
        assert Index.open(out).column("label").tolist() == labels
        listed = pq.read_table(out / "__mmdata__/rows/00000.parquet").to_pylist()
        assert [line["row"] for line in listed] == list(range(len(rows)))
        assert Counter(line["status"] for line in listed) == model.fates
        in_shards = {line["key"]: line["shard"] for line in listed if line["status"] == "written"}
        index = Index.open(out)
        assert list(in_shards) == index.keys(np.arange(len(index)))
        assert list(in_shards.items()) == [
            (key, n) for n in range(report.manifest.num_shards) for key in keys_of(out, n)
        ]
