"""Pictures of scenes. A picture is a pure function of (scene, look): scenes under one look differ in nothing else.

Both things lie in the central square of the picture, less `MARGIN`: neither a crop to 1:1, 4:3 or 3:4, whichever is
nearest, nor any crop that keeps 90 % of the picture's area cuts into them.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scene import Colour, Scene, Shape, Size, Thing

MARGIN = 0.1  # of the shorter side: a crop that keeps 90 % of the area takes at most 10 % off one edge
GAP = 0.04  # between the two things
SLANT = (
    0.35  # across the axis of the relation, as a share of the distance along it: no "left of" that looks like "above"
)
DIAMETERS: dict[Size, float] = {"small": 0.21, "medium": 0.28, "large": 0.36}  # of the shorter side
SUPERSAMPLE = 4
RGB: dict[Colour, tuple[int, int, int]] = {
    "red": (222, 24, 28),
    "orange": (255, 132, 0),
    "yellow": (250, 226, 20),
    "green": (16, 150, 46),
    "blue": (28, 60, 224),
    "purple": (140, 36, 190),
    "pink": (255, 150, 190),
    "cyan": (0, 210, 230),
    "lime": (150, 240, 40),
    "magenta": (236, 0, 160),
}
TONES: dict[str, tuple[int, int, int]] = {
    "white": (232, 232, 232),
    "grey": (140, 140, 140),
    "black": (38, 38, 38),
    "beige": (206, 192, 168),
    "brown": (104, 86, 72),
}
TEXTURES = ("plain", "grainy", "shaded", "cloudy")
ASPECTS = {(1, 1): 0.34, (4, 3): 0.24, (3, 4): 0.20, (3, 2): 0.12, (2, 3): 0.10}  # (width, height): share
FORMATS = {"JPEG": 0.70, "PNG": 0.15, "WEBP": 0.15}
EXTENSIONS = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}


@dataclass(frozen=True)
class Spot:
    """Where and how one thing is drawn: y and x of its centre in the central square (shares of its side)."""

    y: float
    x: float
    scale: float
    degrees: float
    tint: tuple[int, int, int]


@dataclass(frozen=True)
class Look:
    """Everything about a picture that its scene leaves open; `spots` hold for the first and the second thing."""

    height: int
    width: int
    format: str
    quality: int
    texture: str
    tone: str
    light: float
    noise: int
    spots: tuple[Spot, Spot]


def make_look(rng: random.Random, scenes: Sequence[Scene]) -> Look:
    """A random look under which each of `scenes` can be drawn (one scene, or several of one axis)."""
    short = rng.randint(80, 112)
    (across, down), *_ = rng.choices(list(ASPECTS), list(ASPECTS.values()))
    unit = short / min(across, down)
    return Look(
        height=round(unit * down),
        width=round(unit * across),
        format=rng.choices(list(FORMATS), list(FORMATS.values()))[0],
        quality=rng.randint(80, 95),
        texture=rng.choice(TEXTURES),
        tone=rng.choice(list(TONES)),
        light=rng.uniform(0, 2 * math.pi),
        noise=rng.getrandbits(64),
        spots=_place(rng, scenes),
    )


def _place(rng: random.Random, scenes: Sequence[Scene]) -> tuple[Spot, Spot]:
    scales = [rng.uniform(0.96, 1.04) for _ in range(2)]
    # The room kept is that of the larger thing at each spot, so that all scenes fit the same spots.
    first = max(DIAMETERS[scene.first.size] for scene in scenes) * scales[0]
    second = max(DIAMETERS[scene.second.size] for scene in scenes) * scales[1]
    slack = 1 - 2 * MARGIN - first - second - GAP
    before, between = sorted(rng.uniform(0, slack) for _ in range(2))
    along = (MARGIN + first / 2 + before, MARGIN + first + GAP + second / 2 + between)
    reach = SLANT * (along[1] - along[0])
    cross_1 = rng.uniform(MARGIN + first / 2, 1 - MARGIN - first / 2)
    low, high = MARGIN + second / 2, 1 - MARGIN - second / 2
    cross_2 = rng.uniform(max(low, cross_1 - reach), min(high, cross_1 + reach))
    spots: list[Spot] = []
    for a, c, scale in zip(along, (cross_1, cross_2), scales, strict=True):
        y, x = (c, a) if scenes[0].relation == "left of" else (a, c)
        red, green, blue = (rng.randint(-10, 10) for _ in range(3))
        spots.append(Spot(y, x, scale, rng.uniform(-12, 12), (red, green, blue)))
    return spots[0], spots[1]


def boxes(scene: Scene, look: Look) -> list[tuple[float, float, float, float]]:
    """(top, left, height, width) in pixels of the first and the second thing."""
    side = min(look.height, look.width)
    top, left = (look.height - side) / 2, (look.width - side) / 2
    found: list[tuple[float, float, float, float]] = []
    for thing, spot in zip((scene.first, scene.second), look.spots, strict=True):
        d = DIAMETERS[thing.size] * spot.scale
        found.append((top + (spot.y - d / 2) * side, left + (spot.x - d / 2) * side, d * side, d * side))
    return found


def draw(scene: Scene, look: Look) -> Image.Image:
    """The picture, RGB, `look.height` x `look.width`, before encoding."""
    rng = random.Random(look.noise)
    image = _background(look, rng)
    for thing, spot, box in zip((scene.first, scene.second), look.spots, boxes(scene, look), strict=True):
        _paint(image, thing, spot, box)
    # Grain over everything, as a sensor makes it: it also keeps JPEG files at the size of real ones.
    amplitude = 44 if look.texture == "grainy" else 14
    bits = np.frombuffer(rng.randbytes(look.height * look.width), np.uint8).reshape(look.height, look.width, 1)
    grain = (bits.astype(np.int16) * amplitude >> 7) - amplitude  # -amplitude … amplitude - 1, the same in all channels
    return Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, look: Look) -> bytes:
    """The picture as a file of the look's format."""
    out = io.BytesIO()
    options = {
        "JPEG": {"quality": look.quality},
        "PNG": {"compress_level": 1},
        "WEBP": {"quality": look.quality, "method": 0},
    }
    image.save(out, look.format, **options[look.format])
    return out.getvalue()


def _background(look: Look, rng: random.Random) -> Image.Image:
    size = (look.width, look.height)
    tone = np.asarray(TONES[look.tone], np.int16)
    if look.texture == "shaded":
        y, x = np.linspace(-1, 1, look.height)[:, None], np.linspace(-1, 1, look.width)
        light = 30 * (x * math.cos(look.light) + y * math.sin(look.light))
    elif look.texture == "cloudy":
        clouds = Image.frombytes("L", (6, 6), rng.randbytes(36)).resize(size, Image.Resampling.BICUBIC)
        light = (np.asarray(clouds, np.float32) - 128) * 0.3
    else:
        return Image.new("RGB", size, TONES[look.tone])
    return Image.fromarray((light.astype(np.int16)[..., None] + tone).clip(0, 255).astype(np.uint8))


def _paint(image: Image.Image, thing: Thing, spot: Spot, box: tuple[float, float, float, float]) -> None:
    """Draw one thing, anti-aliased: its mask at `SUPERSAMPLE` times the size, averaged down."""
    top, left, diameter, _ = box
    y, x = math.floor(top), math.floor(left)
    side = math.ceil(diameter) + 2
    mask = Image.new("L", (side * SUPERSAMPLE, side * SUPERSAMPLE))
    pen = ImageDraw.Draw(mask)
    turn, centre = math.radians(spot.degrees), diameter / 2
    cos, sin = math.cos(turn) * diameter * SUPERSAMPLE, math.sin(turn) * diameter * SUPERSAMPLE
    origin = (left - x + centre) * SUPERSAMPLE, (top - y + centre) * SUPERSAMPLE
    for outline, value in OUTLINES[thing.shape]:
        points = [(origin[0] + px * cos - py * sin, origin[1] + px * sin + py * cos) for px, py in outline]
        pen.polygon(points, fill=value)
    red, green, blue = (min(255, max(0, c + t)) for c, t in zip(RGB[thing.colour], spot.tint, strict=True))
    image.paste((red, green, blue), (x, y), mask.reduce(SUPERSAMPLE))


def _round(radii: Sequence[float], points: int, *, start: float = -90.0) -> list[tuple[float, float]]:
    """Points on circles about the origin, the radii taken in turn; y grows downwards, so -90 degrees is the top."""
    angles = [math.radians(start + 360 * i / points) for i in range(points)]
    return [(radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a)) for i, a in enumerate(angles)]


_ARM, _BAR = 0.46, 0.155
# Closed outlines inside a box of side 1 about the origin, also when turned by 12 degrees; 0 cuts a hole.
OUTLINES: dict[Shape, list[tuple[list[tuple[float, float]], int]]] = {
    "circle": [(_round([0.48], 48), 255)],
    "square": [(_round([0.57], 4, start=-45), 255)],
    "triangle": [([(x, y + 0.11) for x, y in _round([0.50], 3)], 255)],
    "cross": [
        ([(-_ARM, -_BAR), (_ARM, -_BAR), (_ARM, _BAR), (-_ARM, _BAR)], 255),
        ([(-_BAR, -_ARM), (_BAR, -_ARM), (_BAR, _ARM), (-_BAR, _ARM)], 255),
    ],
    "ring": [(_round([0.48], 48), 255), (_round([0.27], 48), 0)],
    "star": [(_round([0.50, 0.20], 10), 255)],
    "diamond": [([(0, -0.50), (0.28, 0), (0, 0.50), (-0.28, 0)], 255)],
    "bar": [([(-0.48, -0.13), (0.48, -0.13), (0.48, 0.13), (-0.48, 0.13)], 255)],
}
