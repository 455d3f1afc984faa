"""Run lengths and polygons are drawn as pycocotools draws them, where the crop of their image has gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image, ImageOps
from pycocotools import mask as coco

from mmdata.errors import BadSample
from mmdata.images.crop import Crop
from mmdata.images.outlines import Frame, Polygons, RunLengths, outline_of
from mmdata.images.regions import Geometry

SIDES = st.integers(1, 40)
MASKS = arrays.arrays(np.uint8, st.tuples(SIDES, SIDES), elements=st.integers(0, 1))


def whole(height: int, width: int) -> Geometry:
    """All of an image, at its size."""
    return Geometry(Crop(0, 0, height, width), (height, width))


def stored(mask: np.ndarray[Any, Any]) -> Frame:
    """The frame of a mask that is upright."""
    height, width = mask.shape
    return Frame((height, width), 1, (height, width))


def compressed(mask: np.ndarray[Any, Any]) -> dict[str, Any]:
    """COCO's compressed run lengths of a mask, as they stand in JSON."""
    run_lengths: Any = coco.encode(np.asfortranarray(mask))
    return {"size": run_lengths["size"], "counts": run_lengths["counts"].decode()}


def plain(mask: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The same as a list of numbers, column by column."""
    ends = np.flatnonzero(np.diff(np.r_[0, mask.T.ravel(), 1 - mask[-1, -1]])).tolist()
    return {"size": list(mask.shape), "counts": np.diff([0, *ends]).tolist()}


@given(MASKS)
@settings(max_examples=300)
def test_run_lengths_are_the_mask_that_pycocotools_has_encoded(mask: np.ndarray[Any, Any]):
    for value in (compressed(mask), plain(mask)):
        outline = outline_of(value, stored(mask))
        assert isinstance(outline, RunLengths)
        assert np.array_equal(outline.draw(whole(*mask.shape)), mask)


def test_run_lengths_of_a_large_image_are_numbers_of_several_characters():
    mask = np.zeros((1100, 1300), np.uint8)
    mask[3:1000, 2:900] = 1
    mask[500, 100] = 0
    outline = outline_of(compressed(mask), stored(mask))
    assert np.array_equal(outline.draw(whole(1100, 1300)), mask)


@given(MASKS, st.data())
def test_run_lengths_follow_a_crop_as_a_mask_of_the_image_does(mask: np.ndarray[Any, Any], data: st.DataObject):
    height, width = mask.shape
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    crop = Crop(top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left)))
    geometry = Geometry(crop, (data.draw(SIDES), data.draw(SIDES)), data.draw(st.booleans()))
    assert np.array_equal(outline_of(compressed(mask), stored(mask)).draw(geometry), geometry.sampled(mask))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_run_lengths_of_a_file_are_turned_as_pillow_turns_its_image(orientation: int):
    mask = np.zeros((5, 8), np.uint8)
    mask[0, 0] = mask[0, 1] = mask[3, 6] = 1
    image = Image.fromarray(mask)
    image.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(image))
    height, width = upright.shape
    frame = Frame((5, 8), orientation, (height, width))
    assert np.array_equal(outline_of(compressed(mask), frame).draw(whole(height, width)), upright)


def test_run_lengths_of_the_original_are_drawn_on_the_shrunk_image():
    mask = np.zeros((40, 60), np.uint8)
    mask[10:20, 30:50] = 1
    drawn = outline_of(compressed(mask), Frame((40, 60), 1, (20, 30))).draw(whole(20, 30))
    expected = np.zeros((20, 30), np.uint8)
    expected[5:10, 15:25] = 1
    assert np.array_equal(drawn, expected)


def edges_of(polygons: list[list[float]], points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The distance of each point (n, 2) to the nearest edge."""
    nearest = np.full(len(points), np.inf)
    for polygon in polygons:
        corners = np.array(polygon).reshape(-1, 2)
        for begin, end in zip(corners, np.roll(corners, -1, axis=0), strict=True):
            along = end - begin
            share = ((points - begin) @ along / max(along @ along, 1e-12)).clip(0, 1)
            nearest = np.minimum(nearest, np.linalg.norm(points - begin - share[:, None] * along, axis=1))
    return nearest


CORNERS = st.lists(st.floats(0, 40, width=32), min_size=6, max_size=6)


@given(st.lists(CORNERS, min_size=1, max_size=3))
def test_polygons_are_those_of_pycocotools_but_for_pixels_on_an_edge(polygons: list[list[float]]):
    expected = np.asarray(coco.decode(coco.frPyObjects(polygons, 40, 40))).any(axis=2)  # pyright: ignore
    outline = outline_of(polygons, Frame((40, 40), 1, (40, 40)))
    assert isinstance(outline, Polygons)
    rows, columns = np.nonzero(outline.draw(whole(40, 40)).astype(bool) != expected)
    if len(rows):
        assert edges_of(polygons, np.stack([columns, rows], axis=1) + 0.5).max() <= 1.5


@pytest.mark.parametrize("flipped", [False, True])
def test_polygons_follow_orientation_crop_and_flip(flipped: bool):
    # The lower left part of a file, which orientation 6 turns to the upper left: rows 0 to 10, columns 0 to 20.
    outline = outline_of([[0, 20, 10, 20, 10, 40, 0, 40]], Frame((40, 60), 6, (60, 40)))
    drawn = outline.draw(Geometry(Crop(0, 0, 20, 40), (20, 40), flipped))
    upright = drawn[:, ::-1] if flipped else drawn
    assert upright[:9, :19].all()
    assert not upright[11:].any()
    assert not upright[:, 21:].any()


def test_corners_far_outside_the_image_are_drawn():
    outline = outline_of([[-1e9, -1e9, 1e9, -1e9, 1e9, 1e9, -1e9, 1e9]], Frame((4, 6), 1, (4, 6)))
    assert outline.draw(whole(4, 6)).all()


def test_an_object_without_an_outline_is_empty():
    assert not outline_of(None, Frame((4, 6), 1, (4, 6))).draw(whole(4, 6)).any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "3; expected run lengths or polygons"),
        ("abc", "'abc'; expected run lengths or polygons"),
        ({"counts": [24]}, "run lengths of size None, and the image has 4 × 6 pixels .height × width."),
        ({"size": [6, 4], "counts": [24]}, r"run lengths of size .*, and the image has 4 × 6"),
        ({"size": [4, 6], "counts": [23]}, "run lengths add up to 23 pixels, and the image has 24"),
        ({"size": [4, 6], "counts": [24, 1]}, "run lengths add up to 25 pixels, and the image has 24"),
        ({"size": [4, 6], "counts": [25, -1]}, "expected whole numbers from 0 on, or a compressed string"),
        ({"size": [4, 6], "counts": [24.0]}, "expected whole numbers from 0 on"),
        ({"size": [4, 6], "counts": [True, 23]}, "expected whole numbers from 0 on"),
        ({"size": [4, 6], "counts": None}, "counts None; expected whole numbers"),
        ({"size": [4, 6], "counts": "é"}, "not a compressed string of run lengths"),
        ({"size": [4, 6], "counts": "ooooooooo0"}, "not a compressed string of run lengths"),
        ({"size": [4, 6], "counts": "o"}, "the compressed string is cut"),
        ({"size": [4, 6], "counts": "0"}, "run lengths add up to 0 pixels"),
        ([[1, 2, 3, 4]], "polygon .*expected x and y of three or more corners"),
        ([[1, 2, 3, 4, 5, 6, 7]], "expected x and y of three or more corners"),
        ([1, 2, 3, 4, 5, 6], "polygon 1; expected x and y"),
        ([[1, 2, 3, 4, 5, float("nan")]], "its corners are not all numbers"),
        ([[1, 2, 3, 4, 5, True]], "its corners are not all numbers"),
    ],
)
def test_outlines_that_are_none_are_refused(value: Any, message: str):
    with pytest.raises(BadSample, match=message):
        outline_of(value, Frame((4, 6), 1, (4, 6)))
