"""The README and the pages of docs/: links lead somewhere, code parses, commands and settings exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pydantic import ValidationError

from mmdata.cli import COMMANDS
from mmdata.config import Config
from mmdata.config.explain import mistakes
from mmdata.images.crop import Crop
from mmdata.images.regions import Geometry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SKILL.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [code for _, found, code in FENCED.findall(text_of(page)) if found == language]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page: Path):
    for target in LINK.findall(FENCED.sub("", text_of(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(linked), f"{target}: no such heading in {named(linked)}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_blocks_parse(page: Path):
    for code in blocks(page, "python"):
        ast.parse(code)


def test_filter_of_captions_in_the_page_on_conversion_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    captions = ["a red ball on a table", "short", "a Stock Photo of a man", "a dog, and\na cat", None]
    paths = [f"{i}.png" for i in range(len(captions))]
    (tmp_path / "corpus").mkdir()
    table = tmp_path / "corpus" / "captions.csv"
    pd.DataFrame({"filepath": paths, "caption": captions}).to_csv(table, index=False)
    (code,) = [block for block in blocks(ROOT / "docs" / "convert.md", "python") if "import pandas" in block]
    exec(code, {})
    left = pd.read_csv(tmp_path / "corpus" / "wanted.csv")
    assert left.to_dict("list") == {"filepath": ["0.png", "3.png"], "caption": [captions[0], captions[3]]}


def test_losses_in_code_in_their_page_run():
    (code,) = [block for block in blocks(ROOT / "docs" / "mine.md", "python") if "ContrastiveLoss" in block]
    found: dict[str, Any] = {}
    for line in ("clip_loss", "triplet"):
        assert line in code
    exec(code, found)
    assert found["loss"].isfinite()
    found["loss"].backward()


def test_points_move_through_crop_and_flip_as_in_the_page_on_regions():
    (code,) = blocks(ROOT / "docs" / "regions.md", "python")
    found: dict[str, Any] = {}
    exec(code, found)
    rng = np.random.default_rng(0)
    crops, points = rng.uniform(1, 300, (6, 4)).astype(np.float32), rng.uniform(-50, 600, (6, 5, 2))
    flipped = rng.random(6) < 0.5
    batch = {
        "pixel_values": torch.zeros(6, 3, 48, 64, dtype=torch.uint8),
        "crop": torch.from_numpy(crops),
        "flipped": torch.from_numpy(flipped),
    }
    moved = found["in_batch"](torch.from_numpy(points), batch).numpy()
    for i, (crop, flip) in enumerate(zip(crops, flipped, strict=True)):
        expected = Geometry(Crop(*crop.tolist()), (48, 64), bool(flip)).points(points[i])
        assert np.allclose(moved[i], expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_exist(page: Path):
    shell = "\n".join(blocks(page, "sh")) + "\n".join(re.findall(r"`(mmdata [^`]*)`", text_of(page)))
    for command in re.findall(r"(?:^|-m |PYTHONPATH=\S+ |&& |\n)mmdata ([a-z]+)", shell):
        assert command in COMMANDS, f"mmdata {command}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_yaml_blocks_name_settings_that_exist(page: Path):
    for code in blocks(page, "yaml"):
        content = yaml.safe_load(code)
        if isinstance(content, dict) and content.keys() <= Config.model_fields.keys():
            unknown = unknown_settings(content)
            assert not unknown, f"{unknown} in\n{code}"


def unknown_settings(content: dict[str, Any]) -> list[str]:
    """Keys that no setting has, in all sections."""
    try:
        Config.model_validate(content)
    except ValidationError as error:
        return [mistake.key for mistake in mistakes(Config, content, error) if mistake.is_unknown]
    return []


def test_each_page_is_linked_from_the_readme_or_a_page_that_is():
    """A page that nothing links to is found by nobody."""
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for target in LINK.findall(text_of(page)):
            path = (page.parent / target.partition("#")[0]).resolve()
            if "://" not in target and path.is_file():
                waiting.append(path)
    assert set(PAGES) <= seen, sorted(named(page) for page in set(PAGES) - seen)
