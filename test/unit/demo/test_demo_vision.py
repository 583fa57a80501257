"""demo-vision: its pictures and conversations, and its model against transformers."""

from __future__ import annotations

import json
import random
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fenceline import demo_model_path
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.images.prepare import prepare
from fenceline_demo.picture_chat import (
    CHAT_TEMPLATE,
    GRIDS,
    PICTURE_CATEGORIES,
    SETTINGS,
    describe,
    draw,
    held_out_pictures,
    questions,
)
from fenceline_demo.pictures import COLOURS, Picture, draw_digits, draw_shapes

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from demo_training.vision import VisionModel
from demo_training.vision_export import check_export, export
from train_demo_vision import make_tokenizer


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return make_tokenizer()


def _colours_in(picture: Picture) -> set[str]:
    """The colours of which the picture has more than a few pixels."""
    pixels = np.asarray(picture.image, dtype=np.int16).reshape(-1, 3)
    near = {name: int((abs(pixels - value).max(1) < 30).sum()) for name, value in COLOURS.items()}
    return {name for name, count in near.items() if count > 12}


def test_pictures_show_what_they_say() -> None:
    rng = random.Random(3)
    for index in range(40):
        grid = GRIDS[index % len(GRIDS)]
        shapes, digits = draw(rng, grid, category="count"), draw(rng, grid, category="digits")
        assert _colours_in(shapes) == {colour for colour, _ in shapes.shapes}
        assert _colours_in(digits) == {digits.ink} and digits.digits.isdecimal()
        for picture in (shapes, digits):
            assert prepare(picture.image, SETTINGS).grid == grid
    one = draw_shapes(random.Random(1), 64, 64, most=1)
    assert len(one.shapes) == 1 and describe(one) == "1 {} {}".format(*one.shapes[0])
    assert len({draw_digits(random.Random(seed), 64, 64, most=1).digits for seed in range(80)}) == 10


def test_answers_are_those_of_the_picture() -> None:
    rng = random.Random(2)
    shapes = (("blue", "star"), ("red", "circle"), ("blue", "star"), ("blue", "square"))
    picture = Picture(draw(rng, GRIDS[0]).image, shapes)
    assert describe(picture) == "1 red circle, 1 blue square, 2 blue stars"
    answers: dict[str, str] = {}
    for _ in range(60):
        asked = questions(rng, picture, " in image 2")
        assert all(item.question.endswith("in image 2?") for item in asked)
        assert sorted(item.category for item in asked) == ["colour", "count", "picture", "shape", "total"]
        answers |= {item.question: item.answer for item in asked}
    for question, answer in {
        "How many blue stars are there in image 2?": "2",
        "How many red circles are there in image 2?": "1",
        "How many green circles are there in image 2?": "0",
        "How many shapes are there in image 2?": "4",
        "What colour are the stars in image 2?": "blue",
        "What colour is the circle in image 2?": "red",
        "Which shape is red in image 2?": "circle",
        "What is in image 2?": describe(picture),
    }.items():
        assert answers[question] == answer
    assert "Which shape is blue in image 2?" not in answers  # there are two kinds


def test_held_out_questions_are_always_the_same() -> None:
    items = held_out_pictures(5, 36)
    assert [item.prompt() for item in items] == [item.prompt() for item in held_out_pictures(5, 36)]
    assert len({item.prompt() for item in [*items, *held_out_pictures(6, 36)]}) > 60
    assert [item.item.category for item in items[: len(PICTURE_CATEGORIES)]] == list(PICTURE_CATEGORIES)
    for item in items:
        several = item.item.category == "several"
        assert len(item.pictures) in ((2, 3) if several else (0,) if item.item.category == "no_picture" else (1,))
        assert several == (" in image " in item.item.question or item.item.question.endswith(("st image?", "d image?")))
    with pytest.raises(ValueError, match="choose from count"):
        held_out_pictures(0, 1, ("sums",))


def test_the_chat_template_writes_what_was_trained() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    for item in held_out_pictures(5, 36):
        document = item.conversation().document
        assert template.render(item.messages()) == document[0][0]
        reply: dict[str, object] = {"role": "assistant", "content": item.item.answer}
        both = [*item.messages(), reply]
        assert template.render(both, add_generation_prompt=False) == "".join(text for text, _ in document)


def _random_model(scale: float = 0.15) -> VisionModel:
    torch.manual_seed(1)
    model = VisionModel(torch.float32, compiled=False)
    with torch.no_grad():  # at first layers pass everything on as it is, and deepstack adds nothing
        for param in model.parameters():
            param.add_(torch.randn_like(param) * scale * param.shape[-1] ** -0.25)
    return model


def test_the_export_is_a_qwen3_vl_of_transformers(tmp_path: Path) -> None:
    """Pixels that transformers prepares itself, positions, towers, deepstack: the same logits."""
    model = _random_model()
    export(model, _tokenizer(), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8_000_000
    items = held_out_pictures(2, 4, ("several", "picture"))
    assert check_export(model, _tokenizer(), tmp_path, items) < 1e-4
    with torch.no_grad():
        model.tower.merger2[0] *= 1.1  # deepstack's
    assert check_export(model, _tokenizer(), tmp_path, items[:1]) > 1e-3
    names = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    assert names["deepstack_visual_indexes"] == [1]


def test_what_ships_is_small_and_has_what_was_trained() -> None:
    folder = Path(demo_model_path("demo-vision"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == _tokenizer().to_str()
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    vision = resolve(ServerArgs(model_path="demo-vision", device="cpu")).model.vision
    assert vision is not None and vision.images == SETTINGS
