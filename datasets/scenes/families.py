"""Families of scenes that swaps take into each other, and their deal to train and a gallery. Draws and words nothing.

The two things of such a scene differ in colour, size and shape, so that each of the four swaps leads to another scene.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from itertools import combinations, product

from scene import COLOURS, SHAPES, SWAPS, Colour, Relation, Scene, Shape, Size, Split, Swap, Thing, swapped

ALL_SIZES: tuple[Size, ...] = ("small", "medium", "large")
ALL_COLOURS: tuple[Colour, ...] = (*COLOURS, "pink", "cyan", "lime", "magenta")
ALL_SHAPES: tuple[Shape, ...] = (*SHAPES, "star", "diamond", "bar")
AXES: tuple[Relation, ...] = ("left of", "above")
SCENES_OF_FAMILY = 8
GALLERY: tuple[Swap | None, ...] = (None, *SWAPS)
"""What stands in the gallery for a scene of the test: itself, and what each swap makes of it."""


@dataclass(frozen=True)
class Family:
    """Two colours, two sizes and two shapes, which two things share in every way there is: 8 scenes an axis."""

    colours: tuple[Colour, Colour]
    sizes: tuple[Size, Size]
    shapes: tuple[Shape, Shape]

    def scenes(self, axis: Relation) -> list[Scene]:
        """The 8 scenes of "left of" or of "above"; each is one swap from four others, and two from three."""
        return [
            Scene(
                Thing(self.sizes[size], self.colours[colour], self.shapes[shape]),
                Thing(self.sizes[1 - size], self.colours[1 - colour], self.shapes[1 - shape]),
                axis,
            )
            for colour, size, shape in product((0, 1), repeat=3)
        ]


@functools.lru_cache(maxsize=1)
def all_families() -> dict[Family, int]:
    """Every family and its number: 45 pairs of colours x 3 of sizes x 28 of shapes = 3,780."""
    pairs = product(combinations(ALL_COLOURS, 2), combinations(ALL_SIZES, 2), combinations(ALL_SHAPES, 2))
    return {Family(*choice): number for number, choice in enumerate(pairs)}


def family_number(scene: Scene) -> int:
    """Number of the family of a scene, which is the label of its picture."""
    a, b = scene.first, scene.second
    colours = sorted((a.colour, b.colour), key=ALL_COLOURS.index)
    sizes = sorted((a.size, b.size), key=ALL_SIZES.index)
    shapes = sorted((a.shape, b.shape), key=ALL_SHAPES.index)
    return all_families()[Family((colours[0], colours[1]), (sizes[0], sizes[1]), (shapes[0], shapes[1]))]


def deal_families(seed: int, *, test: int, train: int, siblings: bool) -> Split:
    """Deal families to the test and to train; no family is in both, on either axis.

    Args:
        seed: of the deal. With one seed and one `test`, a deal with more families of train holds those of fewer.
        test: scenes of the test, each of another family.
        train: families to train on.
        siblings: all 8 scenes of each family of train, on one axis; else one scene.

    Returns:
        `train`: each scene once. `val`: the gallery, the five scenes of `GALLERY` for each scene of the test, in turn.

    Raises:
        ValueError: more families than exist.
    """
    families = list(all_families())
    if test + train > len(families):
        raise ValueError(
            f"{test} test scenes and {train} families do not fit: only {len(families)} families exist, and each test "
            "scene takes one; ask for fewer with --val or --families"
        )
    random.Random(f"{seed}/families").shuffle(families)
    scenes: list[Scene] = []
    for family in families[test : test + train]:
        members, one = _members(seed, family)
        scenes += members if siblings else [one]
    gallery: list[Scene] = []
    for family in families[:test]:
        _, one = _members(seed, family)
        for swap in GALLERY:
            other = one if swap is None else swapped(one, swap)
            assert other is not None, "both things differ in colour, size and shape"
            gallery.append(other)
    return Split(train=scenes, val=gallery, pairs=[])


def _members(seed: int, family: Family) -> tuple[list[Scene], Scene]:
    """The scenes of a family on the axis that chance gives it, and the one of them that stands for it."""
    rng = random.Random(f"{seed}/family/{all_families()[family]}")
    members = family.scenes(rng.choice(AXES))
    return members, rng.choice(members)
