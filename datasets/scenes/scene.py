"""What is in a picture, and which scenes belong to which split. Nothing here draws or words anything.

A scene is canonical: "A left of B" and "B right of A" are one `Scene`: held out once, held out in every wording.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Literal, get_args

Size = Literal["small", "medium", "large"]
Colour = Literal["red", "orange", "yellow", "green", "blue", "purple", "pink", "cyan", "lime", "magenta"]
Shape = Literal["circle", "square", "triangle", "cross", "ring", "star", "diamond", "bar"]
Relation = Literal["left of", "above", "right of", "below"]
Swap = Literal["colour", "size", "shape", "relation"]

# What scenes are made of, unless families (families.py) are asked for: those have more.
SIZES: tuple[Size, ...] = ("small", "large")
COLOURS: tuple[Colour, ...] = ("red", "orange", "yellow", "green", "blue", "purple")
SHAPES: tuple[Shape, ...] = ("circle", "square", "triangle", "cross", "ring")
SWAPS: tuple[Swap, ...] = get_args(Swap)
INVERSE: dict[Relation, Relation] = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
}


@dataclass(frozen=True)
class Thing:
    """One object of a picture."""

    size: Size
    colour: Colour
    shape: Shape


@dataclass(frozen=True)
class Scene:
    """Two different things; `relation` is that of `first` to `second`: "left of" or "above", never the inverse.

    Make one with `Scene.of`, which takes any of the four relations.
    """

    first: Thing
    second: Thing
    relation: Relation

    @classmethod
    def of(cls, a: Thing, relation: Relation, b: Thing) -> Scene:
        """The canonical scene of "a relation b".

        Example:
            Scene.of(a, "right of", b) == Scene.of(b, "left of", a)
        """
        return cls(b, a, INVERSE[relation]) if relation in ("right of", "below") else cls(a, b, relation)


def all_scenes() -> list[Scene]:
    """Every canonical scene: 60 x 59 ordered pairs of different things, side by side or one above the other: 7,080."""
    things = [Thing(*choice) for choice in product(SIZES, COLOURS, SHAPES)]
    relations: tuple[Relation, ...] = ("left of", "above")
    return [Scene(a, b, relation) for a, b in permutations(things, 2) for relation in relations]


def swapped(scene: Scene, swap: Swap) -> Scene | None:
    """The scene that differs in one exchange between the two things, or None where a caption could not tell.

    Both colour and shape must differ, so that "a red circle and a blue square" is false of the swapped picture
    whatever else the caption leaves out; for a size swap the sizes must differ too.
    """
    a, b = scene.first, scene.second
    if a.colour == b.colour or a.shape == b.shape or (swap == "size" and a.size == b.size):
        return None
    if swap == "colour":
        return Scene(replace(a, colour=b.colour), replace(b, colour=a.colour), scene.relation)
    if swap == "size":
        return Scene(replace(a, size=b.size), replace(b, size=a.size), scene.relation)
    if swap == "shape":
        return Scene(replace(a, shape=b.shape), replace(b, shape=a.shape), scene.relation)
    return Scene(b, a, scene.relation)


@dataclass(frozen=True)
class Split:
    """Disjoint sets of scenes.

    Attributes:
        train: scenes to draw pictures of, over and over.
        val: distinct scenes.
        pairs: (swap, scene, swapped scene); all scenes of all pairs are distinct.
    """

    train: list[Scene]
    val: list[Scene]
    pairs: list[tuple[Swap, Scene, Scene]]


def split_scenes(seed: int, *, val: int, pairs_per_type: int) -> Split:
    """Deal all scenes to pairs, val and train, in this order; depends on nothing but the arguments.

    Raises:
        ValueError: fewer scenes exist than were asked for, or none would be left to train on.
    """
    scenes = all_scenes()
    random.Random(f"{seed}/split").shuffle(scenes)
    free = dict.fromkeys(scenes)  # an ordered set
    pairs: list[tuple[Swap, Scene, Scene]] = []
    for swap in SWAPS:
        found = 0
        for scene in scenes:
            if found == pairs_per_type:
                break
            other = swapped(scene, swap)
            if other is not None and scene in free and other in free:
                del free[scene], free[other]
                pairs.append((swap, scene, other))
                found += 1
    if len(pairs) < pairs_per_type * len(SWAPS) or len(free) <= val:
        raise ValueError(
            f"{val} val scenes and {pairs_per_type} pairs a type do not fit: only {len(scenes)} scenes exist, a pair "
            "takes two and train needs one; ask for fewer with --val or --pairs"
        )
    rest = list(free)
    return Split(train=rest[val:], val=rest[:val], pairs=pairs)


def label(scene: Scene) -> int:
    """Class of a scene, 0 to 14: the two shapes in it, in no order, as `grammar.class_names` lists them."""
    low, high = sorted((SHAPES.index(scene.first.shape), SHAPES.index(scene.second.shape)))
    return sum(len(SHAPES) - i for i in range(low)) + high - low
