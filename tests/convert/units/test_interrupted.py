"""However a conversion is cut, resumed, shared out over jobs, or begun anew with other settings: the bytes are those of
an undisturbed one, and no reader sees a half of it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmdata.convert import ConvertConfig, conversion, convert, convert_part
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.index.verify import verify
from tests.convert.conftest import Killed, content, killing, noting, tolerant
from tests.convert.fetch.sites import Answer, Site
from tests.logs import messages

ROWS = 11
IMAGES = ["a.jpg", "b.jpg", "c.jpg", "d.jpg", "gone.jpg"]


def is_of_another(error: DataError) -> bool:
    """Whether the folder was refused because it holds a conversion with other settings."""
    return "another conversion" in str(error) or "an unfinished conversion" in str(error)


class Conversions(RuleBasedStateMachine):
    """A folder that conversions of one table are made in, one after the other, most of them not to their end."""

    pictures: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.out = self.folder / "out"
        self.undisturbed: dict[str, dict[str, bytes]] = {}
        self.published: str | None = None  # settings of what the folder holds

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(
        rows=st.lists(
            st.tuples(st.sampled_from(IMAGES), st.sampled_from(["x", "y", "z"]), st.sampled_from(["cat", "dog"])),
            min_size=ROWS,
            max_size=ROWS,
        )
    )
    def write(self, rows: list[tuple[str, str, str]]) -> None:
        lines = [{"image": image, "caption": caption, "label": label} for image, caption, label in rows]
        lines += [{"image": image, "caption": "last", "label": "emu"} for image in IMAGES[:4]]
        self.table = self.folder / "t.jsonl"
        self.table.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.config = self.settings(3, "image")

    def settings(self, shard_rows: int, group: Any) -> ConvertConfig:
        return ConvertConfig(images=str(self.pictures), shard_rows=shard_rows, group_by=group, max_bad_share=0.9)

    def expected(self) -> dict[str, bytes]:
        name = self.config.model_dump_json()
        if name not in self.undisturbed:
            out = self.folder / f"undisturbed-{len(self.undisturbed)}"
            convert(self.table, out, self.config, engine=threads(1))
            self.undisturbed[name] = content(out)
        return self.undisturbed[name]

    @rule(shard_rows=st.integers(2, 6), group=st.sampled_from(["image", "none", "content"]))
    def change_settings(self, shard_rows: int, group: str) -> None:
        self.config = self.settings(shard_rows, group)

    @rule(rows=st.integers(0, ROWS + 4), overwrite=st.booleans())
    def kill(self, rows: int, overwrite: bool) -> None:
        try:
            convert(self.table, self.out, self.config, engine=killing(rows), overwrite=overwrite)
        except Killed:
            return
        except DataError as error:
            if overwrite or not is_of_another(error):
                raise
            return
        self.published = self.config.model_dump_json()

    @rule(part=st.integers(1, 3))
    def make_part(self, part: int) -> None:
        try:
            convert_part(self.table, self.out, self.config, part=(part, 3), engine=threads(1))
        except DataError as error:
            if not is_of_another(error):
                raise

    @rule(finish=st.booleans())
    def convert_whole(self, finish: bool) -> None:
        try:
            convert(self.table, self.out, self.config, engine=threads(1), finish=finish)
        except DataError as error:
            if finish and "to make, as parts have not run" in str(error):
                return
            if not is_of_another(error):
                raise
            convert(self.table, self.out, self.config, engine=threads(1), overwrite=True)
        self.published = self.config.model_dump_json()
        assert content(self.out) == self.expected()

    @invariant()
    def readers_see_all_or_nothing(self) -> None:
        if not (self.out / "__mmdata__/manifest.json").exists():
            assert self.published is None
            return
        assert self.published is not None
        assert verify(self.out) == []
        public = {name: data for name, data in content(self.out).items() if not name.startswith(".mmdata-convert/")}
        assert public == self.undisturbed.get(self.published, public)


@pytest.mark.sweep
def test_conversions_end_in_the_same_bytes(photo: Callable[..., bytes], tmp_path: Path) -> None:
    for seed, name in enumerate(IMAGES[:3]):
        (tmp_path / name).write_bytes(photo(8, 8, seed=seed))
    (tmp_path / IMAGES[3]).write_bytes((tmp_path / IMAGES[0]).read_bytes())

    class OfThese(Conversions):
        pictures = tmp_path

    case = OfThese.TestCase()
    case.settings = settings(max_examples=25, stateful_step_count=14)
    case.runTest()


@pytest.fixture
def site() -> Iterator[Site]:
    """A server without content."""
    with Site() as one:
        yield one


@pytest.fixture
def corpus_with_a_broken_image(photo: Callable[..., bytes], tmp_path: Path) -> Path:
    """Six rows, whose first image is none."""
    for seed in range(6):
        (tmp_path / f"{seed}.jpg").write_bytes(photo(8, 8, seed=seed) if seed else b"not an image")
    table = tmp_path / "t.csv"
    table.write_text("image,caption\n" + "".join(f"{number}.jpg,photo {number}\n" for number in range(6)))
    return table


def test_overwriting_reads_repaired_images_and_goes_on_when_it_is_killed(
    corpus_with_a_broken_image: Path, tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    table, out, config = corpus_with_a_broken_image, tmp_path / "out", ConvertConfig(shard_rows=2, max_bad_share=0.5)
    with pytest.raises(Killed):
        convert(table, out, config, engine=killing(3))
    (tmp_path / "0.jpg").write_bytes(photo(8, 8, seed=9))
    with pytest.raises(Killed):
        convert(table, out, config, engine=killing(3), overwrite=True)
    made: list[int] = []
    assert convert(table, out, config, engine=noting(made), overwrite=True).accounts["written"] == 6
    assert made == [1, 2]


def test_overwriting_asks_again_for_what_a_killed_run_could_not_fetch(
    site: Site, tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    table, out, config = tmp_path / "t.csv", tmp_path / "out", tolerant(shard_rows=2, allow_private_addresses=True)
    table.write_text("url,caption\n" + "".join(f"{site.url(f'/{number}.jpg')},photo\n" for number in range(6)))
    with pytest.raises(Killed):
        convert(table, out, config, engine=killing(3))
    site.answers.update({f"/{number}.jpg": Answer(200, photo(8, 8, seed=number)) for number in range(6)})
    assert convert(table, out, config, engine=threads(1), overwrite=True).accounts["written"] == 6


def test_complete_conversion_says_that_it_removes_units_of_one_that_did_not_end(
    corpus_with_a_broken_image: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, out, config = corpus_with_a_broken_image, tmp_path / "out", ConvertConfig(max_bad_share=0.5)
    convert(table, out, config, engine=threads(1))
    with pytest.raises(Killed):
        convert(table, out, tolerant(shard_rows=2), engine=killing(3), overwrite=True)
    assert convert(table, out, config).was_complete
    assert messages(caplog) == [f"output '{out}': holds this conversion; the units of one that did not end are removed"]
    assert not (out / ".mmdata-convert").exists()


def test_conversion_ends_as_soon_as_it_cannot_succeed(
    corpus_with_a_broken_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out, config = corpus_with_a_broken_image, tmp_path / "out", ConvertConfig(shard_rows=2)
    monkeypatch.setattr(conversion, "EARLY", 1)
    made: list[int] = []
    message = (
        "1 rows are unusable so far, over max_bad_share=0.05 of all 6 rows; nothing is published. One of them: "
        "not_an_image (t.csv, line 2: "
    )
    with pytest.raises(
        DataError, match=re.escape(message) + ".*--plan, or allow more with a larger max_bad_share; where"
    ):
        convert(table, out, config, engine=noting(made))
    assert made == [0]
    enough = ConvertConfig(shard_rows=2, max_bad_share=0.2)
    assert convert(table, out, enough, engine=noting(made)).accounts["written"] == 5
    assert made == [0, 1, 2]


def test_refused_conversion_reads_again_what_was_repaired(
    corpus_with_a_broken_image: Path, tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    table, out, config = corpus_with_a_broken_image, tmp_path / "out", ConvertConfig(shard_rows=2)
    with pytest.raises(DataError, match="1 of 6 rows are unusable"):
        convert(table, out, config, engine=threads(1))
    (tmp_path / "0.jpg").write_bytes(photo(8, 8, seed=9))
    assert convert(table, out, config, engine=threads(1)).accounts["written"] == 6


def test_conversion_with_val_share_does_not_remove_an_unfinished_one(
    corpus_with_a_broken_image: Path, tmp_path: Path
) -> None:
    table, out = corpus_with_a_broken_image, tmp_path / "out"
    with pytest.raises(Killed):
        convert(table, out, ConvertConfig(shard_rows=2, max_bad_share=0.5), engine=killing(3))
    divided = ConvertConfig(shard_rows=2, max_bad_share=0.5, val_share=0.5)
    with pytest.raises(DataError, match="an unfinished conversion without --val-share; run that again, which goes on"):
        convert(table, out, divided, engine=threads(1))
    convert(table, out, divided, engine=threads(1), overwrite=True)
    assert not (out / ".mmdata-convert").exists()
