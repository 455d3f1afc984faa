"""Arrays that are kept in files: made once, by one process, and never read otherwise than they were written."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mmdata.errors import DataError
from mmdata.tables.stored import Arrays, MadeOf, Store
from tests.programs import Program

NUMBERS = np.arange(1000) * 3


def get(store: Store, of: str = "x", *, made: list[str] | None = None) -> np.ndarray:
    """The array of a name; `made` gets an entry each time it is made."""

    def make() -> tuple[MadeOf, Arrays]:
        if made is not None:
            made.append(of)
        return {"of": of}, {"numbers": NUMBERS, "more": np.arange(3, dtype=np.int8)}

    return store.get("name", lambda found: found == {"of": of}, make).arrays["numbers"]


def test_arrays_are_made_once_and_again_for_something_else(tmp_path: Path):
    made: list[str] = []
    for of in ("x", "x", "y", "y", "x"):
        assert get(Store([tmp_path / "joins"]), of, made=made).tolist() == NUMBERS.tolist()
    assert made == ["x", "y", "x"]
    assert sorted(path.name for path in (tmp_path / "joins").iterdir()) == [".name.lock", "name.npz"]


def test_a_damaged_file_is_made_anew_and_never_gives_other_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store, file = Store([tmp_path]), tmp_path / "name.npz"
    get(store)
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    for place in [*range(200), *rng.integers(200, len(good), 300).tolist()]:
        file.write_bytes(good[:place] + bytes([good[place] ^ 1 << int(rng.integers(8))]) + good[place + 1 :])
        assert get(store).tolist() == NUMBERS.tolist(), place
    for length in (0, 1, 100, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:length])
        caplog.clear()
        assert get(store).tolist() == NUMBERS.tolist()
        assert caplog.messages[0].startswith(f"'{file}' cannot be read (")
        assert caplog.messages[0].endswith(") and is made anew")
    assert file.read_bytes() == good


def test_a_folder_that_cannot_be_written_is_replaced_by_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")  # a permission would not stop root
    made: list[str] = []
    for _ in range(2):
        get(Store([tmp_path / "file" / "joins", tmp_path / "cache"]), made=made)
    assert made == ["x"]
    assert (tmp_path / "cache" / "name.npz").is_file()
    assert not caplog.messages
    for _ in range(2):
        get(Store([tmp_path / "file" / "joins"]), made=made)
    assert made == ["x"] * 3
    assert caplog.messages[0] == (
        f"'{tmp_path}/file/joins' and data.loading.cache_dir cannot be written: what is joined is not kept, and is "
        "made anew at each start"
    )


def test_a_file_of_another_folder_is_taken_where_the_first_is_refused(tmp_path: Path):
    def fits(found: MadeOf) -> bool:
        if found["of"] == "old":
            raise DataError("changed")
        return True

    for folder, of in (("one", "old"), ("two", "new")):
        get(Store([tmp_path / folder]), of)
    both = Store([tmp_path / "one", tmp_path / "two"])
    assert both.get("name", fits, lambda: ({}, {})).made_of == {"of": "new"}
    with pytest.raises(DataError, match="changed"):
        Store([tmp_path / "one"]).get("name", fits, lambda: ({}, {}))


PROCESS = """
import sys, time
from pathlib import Path
import numpy as np
from mmdata.tables.stored import Store

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])

def make():
    with (folder / "made").open("a") as file:
        file.write("made\\n")
    time.sleep(seconds)
    return {"of": "x"}, {"numbers": np.arange(1000) * 3}

print(int(Store([folder / "joins"]).get("name", lambda found: True, make).arrays["numbers"].sum()))
"""


def test_of_several_processes_one_makes_what_all_get(tmp_path: Path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path), "0.5"]
    started = [Program(command, stdout=-1, text=True) for _ in range(4)]
    assert [program.communicate()[0] for program in started] == [f"{NUMBERS.sum()}\n"] * 4
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_killed_process_leaves_nothing_that_others_wait_for(tmp_path: Path):
    with Program([sys.executable, "-c", PROCESS, str(tmp_path), "600"], stdout=-1) as program:
        while not (tmp_path / "made").exists():
            assert program.poll() is None
        program.kill()
    assert get(Store([tmp_path / "joins"])).tolist() == NUMBERS.tolist()
