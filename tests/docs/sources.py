"""The data that walk-through pages begin with: `<!-- setup: NAME -->` calls the function NAME with an empty folder."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

BALLS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 210), "yellow": (230, 200, 40)}
WALLS = {"white": 230, "black": 30}


def photos(folder: Path) -> None:
    """`photos/BALL-WALL-NN.jpg`, balls before a wall, and `photos/captions.csv` with columns filepath, caption."""
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir()
    with (folder / "photos" / "captions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filepath", "caption"])
        for number in range(80):
            ball, wall = list(BALLS)[number % 4], list(WALLS)[number // 4 % 2]
            noise = rng.normal(WALLS[wall], 12, (48, 48, 3)).clip(0, 255).astype(np.uint8)  # no two images are equal
            image = Image.fromarray(noise)
            left, top = (int(x) for x in rng.integers(2, 18, 2))
            ImageDraw.Draw(image).ellipse((left, top, left + 26, top + 26), BALLS[ball])
            name = f"{ball}-{wall}-{number:02d}.jpg"
            image.save(folder / "photos" / name, quality=92)
            table.writerow([name, f"a {ball} ball before a {wall} wall"])
