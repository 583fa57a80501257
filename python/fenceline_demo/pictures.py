"""Pictures for demo-vision, drawn by Pillow: shapes of some colours, or digits, of any size and with noise."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, Colour] = {
    "red": (215, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220),
    "yellow": (245, 215, 50), "purple": (150, 60, 190), "orange": (250, 140, 30),
}  # fmt: skip
KINDS = ("circle", "square", "triangle", "star")
NOTHING = (0, 0)
"""The label of a place where no thing has its middle."""
_BACKGROUNDS = ((255, 255, 255), (235, 235, 235), (210, 215, 220), (60, 60, 65), (25, 25, 30), (0, 0, 0))
_FINER = 3  # pixels of the drawing, in each direction, for one of the picture: its edges are smooth


def _arc(x: float, y: float, wide: float, high: float, start: int, end: int) -> list[Point]:
    turns = [math.radians(start + (end - start) * step / 14) for step in range(15)]
    return [(x + wide * math.cos(turn), y + high * math.sin(turn)) for turn in turns]


# The strokes of each digit, in a square with sides of 1.
_DIGITS: tuple[tuple[list[Point], ...], ...] = (
    (_arc(0.5, 0.5, 0.45, 0.5, 0, 360),),
    ([(0.2, 0.25), (0.6, 0.0), (0.6, 1.0)],),
    ([*_arc(0.5, 0.28, 0.42, 0.28, 180, 390), (0.05, 1.0), (0.95, 1.0)],),
    (_arc(0.48, 0.25, 0.38, 0.25, 200, 450), _arc(0.48, 0.75, 0.44, 0.25, 270, 520)),
    ([(0.72, 1.0), (0.72, 0.0), (0.02, 0.68), (0.98, 0.68)],),
    ([(0.88, 0.0), (0.2, 0.0), (0.14, 0.45), *_arc(0.48, 0.68, 0.42, 0.31, 240, 500)],),
    ([(0.72, 0.0), (0.12, 0.58)], _arc(0.5, 0.7, 0.42, 0.3, 0, 360)),
    ([(0.03, 0.0), (0.95, 0.0), (0.35, 1.0)],),
    (_arc(0.5, 0.24, 0.36, 0.24, 0, 360), _arc(0.5, 0.74, 0.44, 0.26, 0, 360)),
    (_arc(0.5, 0.3, 0.42, 0.3, 0, 360), [(0.9, 0.36), (0.4, 1.0)]),
)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image and what it shows: ``shapes``, (colour, kind) of each, or ``digits``, all of the colour ``ink``.
    ``middles``: where each thing has its middle, as fractions of width and height."""

    image: Image.Image
    shapes: tuple[tuple[str, str], ...] = ()
    digits: str = ""
    ink: str = ""
    middles: tuple[Point, ...] = ()

    def labels(self, rows: int, columns: int) -> npt.NDArray[np.int64]:
        """For each of ``rows`` x ``columns`` places, [places, 2]: a number for the kind of shape or the digit that has
        its middle there, and one for its colour; NOTHING where there is none."""
        found = np.full((rows, columns, 2), NOTHING, dtype=np.int64)
        colours = list(COLOURS)
        things = [(1 + KINDS.index(kind), 1 + colours.index(colour)) for colour, kind in self.shapes]
        things += [(1 + len(KINDS) + int(digit), 1 + colours.index(self.ink)) for digit in self.digits]
        for (x, y), thing in zip(self.middles, things, strict=True):
            found[min(int(y * rows), rows - 1), min(int(x * columns), columns - 1)] = thing
        return found.reshape(-1, 2)


NUM_LABELS = (1 + len(KINDS) + 10, 1 + len(COLOURS))
"""How many there are of both kinds of ``Picture.labels``."""


def _varied(rng: random.Random, colour: Colour, most: int) -> Colour:
    red, green, blue = (min(max(value + rng.randint(-most, most), 0), 255) for value in colour)
    return red, green, blue


def _outline(kind: str, x: float, y: float, radius: float, turn: float) -> list[Point]:
    """The corners of a square, triangle or star around x, y, upright but for ``turn``."""
    corners = {"square": 4, "triangle": 3, "star": 10}[kind]
    points = []
    for corner in range(corners):
        reach = radius * (0.42 if kind == "star" and corner % 2 else 1.0)
        angle = turn + 2 * math.pi * (corner / corners - (0.125 if kind == "square" else 0.25))
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def _finished(rng: random.Random, drawing: Image.Image) -> Image.Image:
    image, noise = drawing.reduce(_FINER), rng.choice((0, 0, 6, 14))
    if noise:
        pixels = np.asarray(image, dtype=np.int16)
        values = np.random.default_rng(rng.getrandbits(32)).integers(-noise, noise + 1, pixels.shape, dtype=np.int16)
        image = Image.fromarray((pixels + values).clip(0, 255).astype(np.uint8))
    return image


def _canvas(rng: random.Random, width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    colour = _varied(rng, rng.choice(_BACKGROUNDS), 8)
    drawing = Image.new("RGB", (width * _FINER, height * _FINER), colour)
    return drawing, ImageDraw.Draw(drawing)


def draw_shapes(rng: random.Random, width: int, height: int, most: int) -> Picture:
    """Up to ``most`` shapes of one to three sorts, which do not touch."""
    drawing, pen = _canvas(rng, width, height)
    sorts = [(rng.choice(list(COLOURS)), rng.choice(KINDS)) for _ in range(rng.randint(1, min(3, most)))]
    unit = min(width, height) * _FINER
    places: list[tuple[float, float, float]] = []
    shapes = []
    for number in range(rng.randint(len(sorts), most)):
        colour, kind = sorts[number] if number < len(sorts) else rng.choice(sorts)
        for _ in range(40):
            radius = rng.uniform(0.11, 0.18 if most > 4 else 0.21) * unit
            x = rng.uniform(radius + 2, drawing.width - radius - 2)
            y = rng.uniform(radius + 2, drawing.height - radius - 2)
            if all(math.hypot(x - a, y - b) > radius + c + 0.03 * unit for a, b, c in places):
                break
        else:
            continue  # there is no room for it
        places.append((x, y, radius))
        shapes.append((colour, kind))
        fill = _varied(rng, COLOURS[colour], 12)
        if kind == "circle":
            radius *= 0.92
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
        else:
            pen.polygon(_outline(kind, x, y, radius, rng.uniform(-0.3, 0.3)), fill)
    middles = tuple((x / drawing.width, y / drawing.height) for x, y, _ in places)
    return Picture(_finished(rng, drawing), tuple(shapes), middles=middles)


def draw_digits(rng: random.Random, width: int, height: int, most: int) -> Picture:
    """One to ``most`` digits beside each other."""
    drawing, pen = _canvas(rng, width, height)
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, most)))
    ink = rng.choice(list(COLOURS))
    fill = _varied(rng, COLOURS[ink], 12)
    step = rng.uniform(0.72, 0.9)  # from one digit to the next, in heights
    room = min(drawing.height * 0.8, (drawing.width * 0.92) / (step * len(digits)))
    high = min(room, _FINER * max(14, room / _FINER * rng.uniform(0.55, 1.0)))
    wide, thick, slant = high * rng.uniform(0.48, 0.6), high * rng.uniform(0.09, 0.15), rng.uniform(-0.12, 0.18)
    left = rng.uniform(0.04 * drawing.width, 0.96 * drawing.width - high * step * len(digits))
    top = rng.uniform(0.08 * drawing.height, 0.92 * drawing.height - high)
    middles = []
    for number, digit in enumerate(digits):
        x, y = left + high * step * number + thick, top + rng.uniform(-0.04, 0.04) * high
        middles.append(((x + wide / 2) / drawing.width, (y + high / 2) / drawing.height))
        for stroke in _DIGITS[int(digit)]:
            points = [(x + wide * a + slant * high * (0.5 - b), y + high * b) for a, b in stroke]
            pen.line(points, fill, width=max(round(thick), 2), joint="curve")
    return Picture(_finished(rng, drawing), digits=digits, ink=ink, middles=tuple(middles))
