"""demo-vision: its pictures and conversations, its model against transformers, and its training."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
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
from fenceline.images.positions import prompt_axes
from fenceline.images.prepare import prepare
from fenceline_demo.picture_chat import (
    CHAT_TEMPLATE,
    GRIDS,
    PICTURE_CATEGORIES,
    SETTINGS,
    PictureRows,
    build_rows,
    conversation,
    describe,
    draw,
    held_out_pictures,
    questions,
)
from fenceline_demo.pictures import COLOURS, Picture, draw_digits, draw_shapes
from fenceline_demo.tokenizer import IMAGE_PAD, FastEncoder

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from demo_training.vision import VisionModel, accuracy, pictures_to_device, to_device
from demo_training.vision_export import check_export, export
from train_demo_model import Progress, load_checkpoint
from train_demo_vision import Trainer, make_tokenizer, parse_args, picture_batches, tower_batches


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


def test_labels_say_what_is_where() -> None:
    picture = Picture(
        draw_shapes(random.Random(0), 64, 96, most=1).image,
        (("red", "circle"), ("green", "star")),
        middles=((0.1, 0.3), (1.0, 0.99)),
    )
    labels = picture.labels(6, 4).reshape(6, 4, 2).tolist()
    assert labels[1][0] == [1, 1] and labels[5][3] == [4, 2]
    assert sum(label != [0, 0] for row in labels for label in row) == 2
    digits = Picture(picture.image, digits="07", ink="orange", middles=((0.0, 0.0), (0.5, 0.5)))
    assert digits.labels(2, 2).tolist() == [[5, 6], [0, 0], [0, 0], [12, 6]]
    rng = random.Random(8)
    for _ in range(20):  # the pixels around the middle of a shape, or of a 1, have its colour
        picture = draw_shapes(rng, 80, 64, most=4)
        for (x, y), (colour, _) in zip(picture.middles, picture.shapes, strict=True):
            pixel = picture.image.getpixel((int(x * 80), int(y * 64)))
            assert max(abs(a - b) for a, b in zip(pixel, COLOURS[colour], strict=True)) < 30


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


def test_questions_name_a_picture_where_there_are_several() -> None:
    for seed in range(80):
        seen = 0
        for message, _ in conversation(random.Random(seed), GRIDS[:1]).document[::3]:
            seen += message.count(IMAGE_PAD)
            if seen and re.search("How many|colour|Which|is in", message):
                named = re.search("in image [123][?]|(first|second|third) image[?]", message) is not None
                assert named == (seen > 1), message


def test_rows_have_pictures_where_the_text_shows_them() -> None:
    tokenizer, rng = _tokenizer(), random.Random(1)
    encoder = FastEncoder(tokenizer)
    talks = [conversation(rng, GRIDS[:2]) for _ in range(24)]
    rows = build_rows(talks, 144, encoder)
    [pad] = encoder.encode(IMAGE_PAD)
    places = np.concatenate([at.ravel() for at in rows.places])
    assert sorted(places) == np.flatnonzero(rows.ids[:, :-1].ravel() == pad).tolist()
    assert not rows.is_answer[:, :-1].ravel()[places].any()
    for row, talk in enumerate(talks):
        images = [prepare(picture.image, SETTINGS) for picture in talk.pictures]
        answers = tokenizer.decode(rows.ids[row][rows.is_answer[row] == 1].tolist(), skip_special_tokens=False)
        assert "".join(text for text, answered in talk.document if answered).startswith(answers)
        assert answers.endswith("<|im_end|>")
        if images and (starts := np.flatnonzero((rows.ids[row, 1:] == pad) & (rows.ids[row, :-1] != pad)) + 1).size:
            size = images[0].height, images[0].width
            [group] = [i for i, own in enumerate(rows.pictures) if own.pixels.shape[1:3] == size]
            number = rows.places[group][:, 0].tolist().index(row * 144 + int(starts[0]))
            assert (rows.pictures[group].pixels[number] == images[0].array()[0]).all()
            assert (rows.pictures[group].labels[number] == talk.pictures[0].labels(*images[0].grid)).all()
    last = build_rows([talks[0]], 144, encoder)
    assert (last.axes[:, 0] == rows.axes[:, 0]).all() and (last.ids[0] == rows.ids[0]).all()
    alone = build_rows([conversation(random.Random(0), GRIDS[:1], 0.0)], 144, encoder)
    assert (alone.axes[:, 0] != prompt_axes((), 0, 144)).any()


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


def test_the_tower_learns_labels(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--max-steps", "0", "--tower-steps", "15", "--pictures-per-step", "16")
    make = tower_batches(0, 16)
    pixels, labels = pictures_to_device(make(1000), trainer.device)

    def loss() -> float:
        with torch.no_grad():
            return trainer.model.tower.label_loss(trainer.model.tower(pixels), labels)[0].item()

    before = loss()
    trainer.run_tower(map(make, itertools.count()))
    assert loss() < 0.8 * before


def _trainer(directory: Path, *flags: str) -> Trainer:
    common = ["--output-dir", str(directory), "--device", "cpu", "--decay-steps", "2", "--warmup-steps", "2"]
    return Trainer(parse_args([*common, "--rows-per-step", "4", *flags]), FastEncoder(_tokenizer()), [])


def _batches(directory: Path, first: int) -> Iterator[PictureRows]:
    _tokenizer().save(str(directory / "tokenizer.json"))
    make = picture_batches(str(directory / "tokenizer.json"), 0, 4, 96, 10)
    yield from map(make, itertools.count(first))


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--max-steps", "12", "--eval-every", "1000")
    held_out = to_device(next(_batches(tmp_path, 1000)), trainer.device)
    with torch.no_grad():
        before = trainer.model(held_out)[0].item()
    trainer.run(Progress(), _batches(tmp_path, 0))
    with torch.no_grad():
        assert trainer.model(held_out)[0].item() < 0.8 * before


def test_the_tower_rests_until_the_rate_decays(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--max-steps", "3", "--eval-every", "1000")

    def weights() -> tuple[torch.Tensor, ...]:
        parts = trainer.model.tower.qkv, trainer.model.tower.qkv_bias, trainer.model.text.embed
        return tuple(part.detach().clone() for part in parts)

    before = weights()
    with pytest.raises(StopIteration):
        trainer.run(Progress(), itertools.islice(_batches(tmp_path, 0), 1))
    resting = weights()
    assert [torch.equal(*pair) for pair in zip(before, resting, strict=True)] == [True, True, False]
    trainer.run(Progress(step=1), _batches(tmp_path, 1))
    assert not any(torch.equal(*pair) for pair in zip(resting, weights(), strict=True))


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "whole", "--max-steps", "3")
    assert whole.run(Progress(), _batches(tmp_path, 0)).step == 3
    broken = _trainer(tmp_path / "broken", "--max-steps", "3", "--eval-every", "2")
    with pytest.raises(StopIteration):  # the data ends after step 2: a crash just behind a checkpoint
        broken.run(Progress(), itertools.islice(_batches(tmp_path, 0), 2))
    resumed = _trainer(tmp_path / "resumed", "--max-steps", "3", "--seed", "9")
    checkpoint = tmp_path / "broken" / "checkpoint"
    progress = load_checkpoint(checkpoint, resumed.model, resumed.optimizer, resumed.device, new_schedule=False)
    assert resumed.run(progress, _batches(tmp_path, 2)).step == 3
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_accuracy_counts_whole_answers_by_category() -> None:
    items = held_out_pictures(0, 20)
    figures = accuracy(_random_model(), FastEncoder(_tokenizer()), items, 8, torch.device("cpu"))
    assert list(figures) == list(PICTURE_CATEGORIES) and set(figures.values()) == {0.0}


def test_what_ships_is_small_and_has_what_was_trained() -> None:
    folder = Path(demo_model_path("demo-vision"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == _tokenizer().to_str()
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    vision = resolve(ServerArgs(model_path="demo-vision", device="cpu")).model.vision
    assert vision is not None and vision.images == SETTINGS
