"""Conversations about pictures, with which demo-vision was trained, and held-out questions for its evaluation.

Every picture has a number in the text, and where a conversation has several, questions say which one they mean: an
answer is right only if each picture's embeddings are where they belong.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput, expand_placeholders
from fenceline.images.positions import prompt_axes
from fenceline.images.prepare import ImageSettings, prepare

from .documents import END_OF_TEXT, IM_END, IM_START, Document
from .items import Item
from .pictures import COLOURS, KINDS, Picture, draw_digits, draw_shapes
from .tokenizer import IMAGE_PAD, VISION_END, VISION_START, FastEncoder

PICTURE_CATEGORIES = ("count", "total", "colour", "shape", "digits", "ink", "picture", "several", "no_picture")
"""What is asked of one picture; ``several``: any of that, of one of two or three pictures; ``no_picture``: of none."""

CHAT_TEMPLATE = (
    "{% set seen = namespace(images=0) %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{% set seen.images = seen.images + 1 %}"
    "{{ 'Image ' ~ seen.images ~ ': <|vision_start|><|image_pad|><|vision_end|>\n' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SETTINGS = ImageSettings(
    patch_size=8, merge_size=2, min_pixels=64 * 64, max_pixels=80 * 80, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)
"""How the model's images are prepared: one is 16 to 25 tokens."""
GRIDS = ((4, 4), (4, 5), (5, 4), (5, 5), (4, 6), (6, 4), (3, 6), (6, 3), (3, 8), (8, 3))
MOST_SHAPES, MOST_DIGITS = 4, 2
"""The (rows, columns) of embeddings that training pictures have, from the easiest."""

NO_PICTURE = "There is no image."
_ORDINALS = ("first", "second", "third")
_TALK = (
    ("Hello", "Hello! Show me a picture."),
    ("Hi", "Hello! Show me a picture."),
    ("Thank you", "You are welcome!"),
    ("What can you do?", "I name colours, count shapes and read digits."),
    ("Who are you?", "I am the Fenceline vision demo model."),
)


def _plural(kind: str, number: int) -> str:
    return kind if number == 1 else f"{kind}s"


def describe(picture: Picture) -> str:
    """What a picture shows, in one order of colours and kinds."""
    if picture.digits:
        return f"{picture.ink} digits {picture.digits}"
    counts = Counter(picture.shapes)
    sorts = [(colour, kind) for colour in COLOURS for kind in KINDS if counts[colour, kind]]
    return ", ".join(f"{counts[sort]} {sort[0]} {_plural(sort[1], counts[sort])}" for sort in sorts)


def questions(rng: random.Random, picture: Picture, where: str = "") -> list[Item]:
    """One question of each category that the picture can answer, to be taken from the end. ``where``: which picture."""
    found = [("picture", f"What is{where or ' in the image'}?", describe(picture))]
    if picture.digits:
        found.append(("digits", f"Which digits are{where or ' shown'}?", picture.digits))
        found.append(("ink", f"What colour are the digits{where}?", picture.ink))
    else:
        counts = Counter(picture.shapes)
        sort = rng.choice(list(counts))
        if rng.random() < 0.25:
            sort = rng.choice(list(COLOURS)), rng.choice(KINDS)
        found.append(("count", f"How many {sort[0]} {sort[1]}s are there{where}?", str(counts[sort])))
        found.append(("total", f"How many shapes are there{where}?", str(len(picture.shapes))))
        for_kind, for_colour = ({pair[i]: {p for p in counts if p[i] == pair[i]} for pair in counts} for i in (1, 0))
        kinds = [kind for kind, pairs in for_kind.items() if len(pairs) == 1]
        colours = [colour for colour, pairs in for_colour.items() if len(pairs) == 1]
        if kinds:
            kind = rng.choice(kinds)
            [(colour, _)] = for_kind[kind]
            number = counts[colour, kind]
            verb = "is" if number == 1 else "are"
            found.append(("colour", f"What colour {verb} the {_plural(kind, number)}{where}?", colour))
        if colours:
            colour = rng.choice(colours)
            [(_, kind)] = for_colour[colour]
            found.append(("shape", f"Which shape is {colour}{where}?", kind))
    rng.shuffle(found)
    if rng.random() < 0.7:  # taken first, it would give the other answers away
        found.sort(key=lambda each: each[0] != "picture")
    return [Item(category, question, answer, ()) for category, question, answer in found]


def _where(rng: random.Random, number: int, total: int) -> str:
    if total == 1:
        return ""
    return f" in image {number + 1}" if rng.random() < 0.5 else f" in the {_ORDINALS[number]} image"


def draw(rng: random.Random, grid: tuple[int, int], ease: float = 1.0, category: str = "") -> Picture:
    """A picture that is prepared to ``grid``: half of them have exactly its size, others are resized. ``ease``: from
    0, one thing alone, to 1. A picture for ``category``, if there is one."""
    height, width = (side * SETTINGS.factor for side in grid)
    size = width, height
    if rng.random() < 0.5:
        scale = rng.choice((1.0, 1.0, 1.5, 2.0))
        other = round(width * scale) + rng.randint(-7, 7), round(height * scale) + rng.randint(-7, 7)
        if SETTINGS.fitted(*other) == (height, width):
            size = other
    if category in ("digits", "ink") or (category in ("", "picture") and rng.random() < 0.45):
        return draw_digits(rng, *size, most=1 + round((MOST_DIGITS - 1) * ease))
    return draw_shapes(rng, *size, most=1 + round((MOST_SHAPES - 1) * ease))


def _shown(number: int) -> str:
    return f"Image {number + 1}: {VISION_START}{IMAGE_PAD}{VISION_END}\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A document as training reads it, with ``IMAGE_PAD`` once for each of its pictures."""

    document: Document
    pictures: tuple[Picture, ...]


def conversation(rng: random.Random, grids: tuple[tuple[int, int], ...], ease: float = 1.0) -> Conversation:
    """One with one to three pictures, each of one of ``grids``; few have none. It may be longer than a row."""
    total = 0 if rng.random() < 0.04 else rng.choices((1, 2, 3), (3.0, 2.0 * ease, 1.0 * ease))[0]
    pictures = tuple(draw(rng, rng.choice(grids), ease) for _ in range(total))
    # Mostly all are shown at once; otherwise the last comes with a later question, and is asked for from then on.
    known = total if total < 2 or rng.random() < 0.7 else total - 1

    def ask_all() -> list[list[Item]]:
        return [questions(rng, each, _where(rng, i, known)) for i, each in enumerate(pictures[:known])]

    unasked = ask_all()
    document: Document = []
    new = list(range(known))
    for turn in range(12):
        if turn == 2 and known < total:
            new, known = [known], total
            unasked = ask_all()
        if total == 0 or rng.random() < 0.02:
            about, answer = rng.choice(_TALK)
            if total == 0 and rng.random() < 0.7:
                other = draw(rng, GRIDS[0], 0.0)
                about, answer = rng.choice(questions(rng, other)).question, NO_PICTURE
        else:
            open_ones = [number for number in range(known) if unasked[number]]
            if not open_ones:
                break
            item = unasked[new[0] if turn == 2 and new else rng.choice(open_ones)].pop()
            about, answer = item.question, item.answer
        shown = "".join(_shown(number) for number in new)
        message = about + shown if rng.random() < 0.3 else shown + about
        document.append((f"{IM_START}user\n{message}{IM_END}\n{IM_START}assistant\n", False))
        document.append((f"{answer}{IM_END}", True))
        document.append(("\n", False))
        new = []
    return Conversation(document, pictures)


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """Pictures of one size: ``pixels`` [N, height, width, 3] uint8, and ``labels`` [N, tokens, 2] int64, what has its
    middle in each embedding's square."""

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


def by_size(pictures: Iterable[tuple[Picture, ImageInput]]) -> dict[tuple[int, int], Pictures]:
    """The pictures, as they were prepared, of each size, by (rows, columns) of embeddings; their order is kept."""
    groups: dict[tuple[int, int], list[tuple[ImageInput, Picture]]] = {}
    for picture, image in pictures:
        groups.setdefault(image.grid, []).append((image, picture))
    return {
        grid: Pictures(
            np.stack([image.array()[0] for image, _ in group]),
            np.stack([picture.labels(*grid) for _, picture in group]),
        )
        for grid, group in groups.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class PictureRows:
    """Rows of conversations. ``ids`` [rows, length + 1] uint16 and ``is_answer``, the same shape, uint8; ``axes``
    [3, rows, length] int64: the tokens' positions. ``pictures``: those of each size; and ``places``, [N, tokens] int64
    for each, where in the rows, end to end, their embeddings are."""

    ids: npt.NDArray[np.uint16]
    is_answer: npt.NDArray[np.uint8]
    axes: npt.NDArray[np.int64]
    pictures: tuple[Pictures, ...]
    places: tuple[npt.NDArray[np.int64], ...]


def build_rows(conversations: list[Conversation], length: int, encoder: FastEncoder) -> PictureRows:
    """A row of each, cut behind the last answer that fits."""
    [pad], [placeholder] = encoder.encode(END_OF_TEXT), encoder.encode(IMAGE_PAD)
    ids = np.full((len(conversations), length + 1), pad, dtype=np.uint16)
    is_answer = np.zeros(ids.shape, dtype=np.uint8)
    axes = np.zeros((3, len(conversations), length), dtype=np.int64)
    shown: list[tuple[Picture, ImageInput]] = []
    starts: dict[tuple[int, int], list[int]] = {}
    for row, one in enumerate(conversations):
        images = [prepare(picture.image, SETTINGS) for picture in one.pictures]
        tokens: list[int] = []
        marks: list[int] = []
        used = 0
        for part in range(0, len(one.document), 3):
            new, mask = [], []
            for text, answered in one.document[part : part + 3]:
                encoded = encoder.encode(text)
                new += encoded
                mask += [int(answered)] * len(encoded)
            num_images = new.count(placeholder)
            more = sum(image.num_tokens - 1 for image in images[: used + num_images])
            if len(tokens) + len(new) + more > length + 1:
                break
            tokens, marks, used = tokens + new, marks + mask, used + num_images
        expanded, placed = expand_placeholders(tokens, images[:used], (placeholder, -1))
        found = np.asarray(expanded)
        ids[row, : len(found)] = found
        is_answer[row, np.flatnonzero(found != placeholder)] = np.array(marks)[np.array(tokens) != placeholder]
        axes[:, row] = prompt_axes(placed, 0, length)
        shown += zip(one.pictures, placed, strict=False)
        for image in placed:
            starts.setdefault(image.grid, []).append(row * length + image.offset)
    pictures = by_size(shown)
    places = tuple(np.array(starts[h, w])[:, None] + np.arange(h * w) for h, w in pictures)
    return PictureRows(ids, is_answer, axes, tuple(pictures.values()), places)


@dataclass(frozen=True, slots=True)
class PictureItem:
    """A held-out question with its pictures; what ``evaluation.EvalItem`` is for text."""

    item_id: str
    item: Item
    pictures: tuple[Picture, ...]
    shown_first: bool = True

    def conversation(self) -> Conversation:
        """The question and its answer as training has them."""
        shown = "".join(_shown(number) for number in range(len(self.pictures)))
        message = shown + self.item.question if self.shown_first else self.item.question + shown
        turn = [(f"{IM_START}user\n{message}{IM_END}\n{IM_START}assistant\n", False)]
        return Conversation([*turn, (f"{self.item.answer}{IM_END}", True), ("\n", False)], self.pictures)

    def prompt(self) -> str:
        """What identifies the question; it cannot be sent as text."""
        digests = (hashlib.blake2b(each.image.tobytes(), digest_size=8).hexdigest() for each in self.pictures)
        return " ".join((str(self.shown_first), *digests, self.item.question))

    def messages(self) -> list[dict[str, object]]:
        """The question as a chat message, with PNG files."""
        parts: list[dict[str, object]] = []
        for picture in self.pictures:
            file = io.BytesIO()
            picture.image.save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        text: dict[str, object] = {"type": "text", "text": self.item.question}
        return [{"role": "user", "content": [*parts, text] if self.shown_first else [text, *parts]}]


def held_out_pictures(seed: int, num_items: int, categories: tuple[str, ...] = PICTURE_CATEGORIES) -> list[PictureItem]:
    """``num_items`` questions of each category in turn; the same seed gives the same ones. Training draws its pictures
    from other seeds. Raises ValueError for a category that does not exist."""
    unknown = sorted(set(categories) - set(PICTURE_CATEGORIES))
    if unknown or not categories:
        raise ValueError(f"unknown categories {unknown}: choose from {', '.join(PICTURE_CATEGORIES)}")
    found = []
    for i in range(num_items):
        category, number = categories[i % len(categories)], i // len(categories)
        rng = random.Random(f"pictures:{seed}:{category}:{number}")
        total = {"several": rng.randint(2, 3), "no_picture": 0}.get(category, 1)
        item = None
        while item is None:
            wanted = "" if category in ("several", "no_picture") else category
            pictures = tuple(draw(rng, rng.choice(GRIDS[:6]), category=wanted) for _ in range(max(total, 1)))
            asked = rng.randrange(len(pictures))
            items = questions(rng, pictures[asked], _where(rng, asked, total) if total else "")
            item = next((each for each in items if each.category == wanted or not wanted), None)
        answer = item.answer if total else NO_PICTURE
        item = Item(category, item.question, answer, ())
        found.append(PictureItem(f"{category}-{number}", item, pictures[:total], rng.random() < 0.7))
    return found
