"""Boxes and crops in the pictures of `mmdata report` and `mmdata replay`."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mmdata import Index, Loader, cli
from mmdata.config import DataConfig
from mmdata.images import probe
from mmdata.inspect.gallery import samples
from mmdata.inspect.page import Card
from mmdata.inspect.replay import find_step, replay
from mmdata.inspect.report import write_report
from mmdata.picture import BOX_COLOURS, GAP
from mmdata.plan import Plan
from mmdata.plan.from_config import build_plan
from mmdata.tars.write import Sample
from tests.shard_writer import ShardWriter

HEIGHT, WIDTH = 120, 160
LEFT, RIGHT = {"bbox": [20, 30, 40, 50], "category": "dog"}, {"bbox": [100, 30, 50, 60], "category": "cat"}
WHOLE: dict[str, Any] = {"transform": "eval", "image_buckets": [[HEIGHT, WIDTH]]}
"""Settings whose crop is the whole image."""
Made = Callable[..., dict[str, Any]]


def black(orientation: int = 1) -> bytes:
    """A black PNG that is upright with HEIGHT × WIDTH pixels."""
    size = (HEIGHT, WIDTH) if orientation >= 5 else (WIDTH, HEIGHT)
    image, exif, buffer = Image.new("RGB", size), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """`made(boxes, …, **settings)`: a section `data` of shards with a black image for each list of boxes."""

    def write(*boxes: Any, orientation: int = 1, **settings: Any) -> dict[str, Any]:
        image = black(orientation)
        with ShardWriter(tmp_path / "shards") as writer:
            for i, of_row in enumerate(boxes):
                writer.write(Sample(f"{i:04d}", image, probe(image), [f"row {i}"], extra={"boxes": of_row}))
        basic = {"shards": str(tmp_path / "shards"), "global_batch_size": len(boxes), "image_buckets": [[64, 64]]}
        return {**basic, "seed": 1, **settings}

    return write


def gallery(data: dict[str, Any]) -> list[Card]:
    index, plan = Index.open(data["shards"]), cast(Plan, Loader.from_config(data).plan)
    return list(samples(index, DataConfig(**data), plan).cards)


def pixels(card: Card) -> NDArray[np.int64]:
    """The picture of a card, HEIGHT × WIDTH."""
    assert card.picture, card.problem
    data = base64.b64decode(card.picture.removeprefix("data:image/webp;base64,"))
    found = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(np.int64)
    assert found.shape == (HEIGHT, WIDTH, 3)
    return found


def is_like(seen: NDArray[np.int64], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    return np.abs(seen - colour).sum(axis=-1) < 120  # WebP has half as many colours as pixels


def has_box(seen: NDArray[np.int64], box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> bool:
    """Whether most of the edges of a box (left, top, right, bottom) have a colour, and its middle has not."""
    left, top, right, bottom = box
    edges = [seen[top, left:right], seen[bottom - 1, left:right], seen[top:bottom, left], seen[top:bottom, right - 1]]
    share = np.concatenate([is_like(edge, colour) for edge in edges]).mean()
    return bool(share > 0.8) and not is_like(seen[(top + bottom) // 2, (left + right) // 2], colour)


@pytest.mark.parametrize("name", ["category", "phrase"])
def test_report_draws_boxes_with_their_words(made: Made, name: str):
    boxes = [{"bbox": box["bbox"], name: box["category"]} for box in (LEFT, RIGHT)]
    words = {"box_labels": f"json:boxes.{name}", "box_classes": ["cat", "dog"]}
    (card,) = gallery(made(boxes, **WHOLE, targets={"boxes": "json:boxes", **words}))
    seen = pixels(card)
    assert has_box(seen, (20, 30, 60, 80), BOX_COLOURS[0])
    assert has_box(seen, (100, 30, 150, 90), BOX_COLOURS[1])
    assert (seen[33:45, 24:50] > 180).all(axis=2).any()  # light edges of the letters


def test_report_turns_boxes_with_their_image(made: Made):
    # Orientation 8: the file lies on its side, and its first column is the upright image's bottom.
    stored = [30, WIDTH - 60, 50, 40]  # x, y, width and height in the file
    boxes = [{"bbox": stored, "category": "dog"}]
    (card,) = gallery(made(boxes, orientation=8, **WHOLE, targets={"boxes": "json:boxes"}))
    image = Image.new("RGB", (HEIGHT, WIDTH))
    x, y, width, height = stored
    ImageDraw.Draw(image).rectangle((x, y, x + width - 1, y + height - 1), fill=(255, 255, 255))
    rows, columns = np.asarray(image.transpose(Image.Transpose.ROTATE_90)).any(axis=2).nonzero()
    left, top, right, bottom = map(int, (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
    assert has_box(pixels(card), (left, top, right, bottom), BOX_COLOURS[0])


def test_report_draws_no_boxes_that_no_config_describes(made: Made):
    data = made([LEFT, RIGHT], **WHOLE)
    for cards in (samples(Index.open(data["shards"])).cards, gallery(data)):
        assert not pixels(cards[0]).any()


def test_report_draws_no_boxes_of_rows_that_are_in_no_batch(made: Made):
    data = made([LEFT], [LEFT], **WHOLE, targets={"boxes": "json:boxes"}, select="key == '0001'")
    without, with_box = map(pixels, gallery({**data, "global_batch_size": 1}))
    assert not without.any()
    assert has_box(with_box, (20, 30, 60, 80), BOX_COLOURS[0])


def test_report_with_a_users_transform_draws_the_boxes_of_the_config_and_no_crop(made: Made):
    targets = {"boxes": "json:boxes", "box_format": "xyxy"}
    data = DataConfig(**made([[20, 30, 60, 80]], transform="on_another:machine", targets=targets))
    index = Index.open(str(data.shards))
    (card,) = samples(index, data, build_plan(data, index, None)).cards
    seen = pixels(card)
    assert has_box(seen, (20, 30, 60, 80), BOX_COLOURS[0])
    assert not seen[:, 70:].any()


def test_report_of_a_config_draws_its_boxes_and_greys_what_the_crop_leaves_out(made: Made):
    boxes = [[20, 30, 60, 80], [100, 30, 150, 90]]
    targets = {"boxes": "json:boxes", "box_format": "xyxy"}
    data = made(boxes, boxes, transform="train", crop_scale=[0.2, 0.4], targets=targets)
    loader = Loader.from_config(data)
    (batch,) = list(loader)
    for place, row in enumerate(batch["rows"].tolist()):
        seen = pixels(gallery(data)[row])
        top, left, height, width = (float(side) for side in batch["crop"][place])  # type: ignore[typeddict-item]
        rows, columns = np.mgrid[:HEIGHT, :WIDTH] + 0.5
        outwards = np.stack([top - rows, rows - top - height, left - columns, columns - left - width]).max(axis=0)
        is_black = is_like(seen, (0, 0, 0))
        of_boxes = np.zeros((HEIGHT, WIDTH), bool)
        for box_left, box_top, box_right, box_bottom in boxes:
            of_boxes[box_top - 6 : box_bottom + 6, box_left - 6 : box_right + 6] = True
            of_boxes[box_top + 6 : box_bottom - 6, box_left + 6 : box_right - 6] = False
        assert is_black[(outwards < -6) & ~of_boxes].all()
        assert not is_black[(outwards > 6) & ~of_boxes].any()


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        ([{"bbox": [200, 30, 40, 50], "category": "dog"}], ""),  # outside
        ([{"bbox": [20, 30, 0, 50], "category": "dog"}], ""),
        ([{"bbox": [20, 30, -5, 50], "category": "dog"}], "its width or height is negative"),
        ([{"bbox": [20, 30, "5", 50], "category": "dog"}], "expected four numbers"),
        ([{"bbox": [1e300, 0, 1e300, 9]}], "expected four numbers"),
        ([{"category": "dog"}], "expected four numbers"),
        ([{"bbox": [1, 2, 3, 4], "category": 7}], ""),
        ({"bbox": [1, 2, 3, 4]}, "expected a list"),
        ("boxes", "expected a list"),
        ([], ""),
        (None, "'boxes' is null"),
    ],
)
def test_faulty_boxes_do_not_break_the_report(made: Made, boxes: Any, told: str):
    first, second = gallery(made([LEFT, RIGHT], boxes, targets={"boxes": "json:boxes"}))
    assert has_box(pixels(first), (20, 30, 60, 80), BOX_COLOURS[0])
    assert told in second.note
    assert ("data.targets" in second.note) == bool(told)
    pixels(second)


def test_page_of_a_config_has_its_boxes(made: Made, tmp_path: Path):
    data = made([LEFT], transform="eval", targets={"boxes": "json:boxes"})
    write_report(tmp_path / "r.html", shards=Path(data["shards"]), data=DataConfig(**data))
    (card,) = gallery(data)
    assert card.picture in (tmp_path / "r.html").read_text()


def test_replay_says_what_became_of_boxes(made: Made):
    outside = {"bbox": [500, 0, 5, 5], "category": "dog"}
    data = made([LEFT, RIGHT, outside], [LEFT], transform="eval", targets={"boxes": "json:boxes", "box_buckets": [1]})
    loader = Loader.from_config(data)
    said = []
    for row in (0, 1):
        found = replay(loader.builder, find_step(loader.plan, row, 0))
        said += [words for name, words, _ in found.stages() if name == "boxes"]
    room, area = "left out, for want of room in the batch", "left out, without area or of another class"
    assert said == [f"3, 1 {room}, 1 {area}", "1"]


def test_replay_says_how_many_boxes_the_crop_leaves_out(made: Made):
    # The crop is the middle of the image, columns 20 to 140: nothing is left of one box, and a fifth of the other.
    boxes = [{"bbox": [0, 0, 20, 9]}, {"bbox": [136, 0, 20, 9]}, {"bbox": [50, 50, 9, 9]}]
    loader = Loader.from_config(made(boxes, transform="eval", targets={"boxes": "json:boxes"}))
    found = replay(loader.builder, find_step(loader.plan, 0, 0))
    assert ("boxes", "3, 2 left out by the crop", None) in list(found.stages())


def test_replay_program_draws_the_crop_beside_the_pixels(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    targets = {"boxes": "json:boxes", "box_labels": "json:boxes.category", "box_classes": ["cat", "dog"]}
    data = made([LEFT, RIGHT], transform="eval", targets=targets)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}))
    assert cli.main(["replay", str(tmp_path / "c.yaml"), "0", "--save", str(tmp_path / "row.png")]) == 0
    assert "row-crop.png" in capsys.readouterr().out
    assert np.asarray(Image.open(tmp_path / "row.png")).shape == (64, 64, 3)
    drawn = np.asarray(Image.open(tmp_path / "row-crop.png")).astype(np.int64)
    original, batch = drawn[:HEIGHT, :WIDTH], drawn[:, WIDTH + GAP :]
    assert has_box(original, (20, 30, 60, 80), BOX_COLOURS[0])  # inside the crop, columns 20 to 140
    assert not original[:30, 22:138].any()
    assert (original[:, :18] > 100).all()  # grey
    assert (original[:, 142:] > 100).all()
    scale = 64 / 120
    box = (0, 16, round(40 * scale), int(80 * scale))
    assert has_box(batch[GAP:, GAP:], box, BOX_COLOURS[0])


def test_replay_draws_an_image_that_a_cache_keeps(made: Made, tmp_path: Path):
    data = made([LEFT, RIGHT], transform="eval", shorter_side=80, targets={"boxes": "json:boxes"})
    data["loading"] = {"cache_pixels_gb": 0.1, "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}))
    for name in ("first", "kept"):
        assert cli.main(["replay", str(tmp_path / "c.yaml"), "0", "--save", str(tmp_path / f"{name}.png")]) == 0
    first, kept = ((tmp_path / f"{name}-crop.png").read_bytes() for name in ("first", "kept"))
    assert first == kept
    drawn = np.asarray(Image.open(tmp_path / "kept-crop.png")).astype(np.int64)
    assert has_box(drawn[:HEIGHT, :WIDTH], (20, 30, 60, 80), BOX_COLOURS[0])


def test_replay_of_an_image_without_boxes_draws_it(made: Made, tmp_path: Path):
    data = made([], transform="eval")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}))
    assert cli.main(["replay", str(tmp_path / "c.yaml"), "0", "--save", str(tmp_path / "row.png")]) == 0
    assert not np.asarray(Image.open(tmp_path / "row-crop.png"))[:HEIGHT, 22:138].any()
