"""Towers against transformers', image by image, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from vision_cases import VISION_MODELS, picture, processor_of, save_vision_checkpoint

from fenceline.config.model_config import ModelConfig
from fenceline.images.prepare import prepare
from fenceline.layers.context import Shard, torch_context
from fenceline.models.loader import load_model

SIZES = [(1, 1), (37, 91), (640, 480), (13, 2600), (2600, 13), (301, 300), (84, 84)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, transformers.PreTrainedModel]]:
    made: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}

    def get(name: str) -> tuple[Path, transformers.PreTrainedModel]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = directory, save_vision_checkpoint(name, directory)
        return made[name]

    return get


@pytest.mark.parametrize("name", VISION_MODELS)
@torch.inference_mode()
def test_embeddings_are_those_of_transformers(
    saved: Callable[[str], tuple[Path, transformers.PreTrainedModel]], name: str
) -> None:
    directory, reference = saved(name)
    config = ModelConfig.from_dir(str(directory))
    context = torch_context(Shard(), torch.float32)
    tower = load_model(config, "auto", torch.device("cpu"), context, 0, False).vision
    assert tower is not None
    for index, (width, height) in enumerate(SIZES):
        inputs = processor_of(reference)(picture(width, height, index), return_tensors="pt")
        inputs.pop("num_crops", None)
        found = reference.model.get_image_features(**inputs)
        further = [
            level[0] if isinstance(level, tuple) else level for level in getattr(found, "deepstack_features", ())
        ]
        expected = torch.cat((found.pooler_output[0], *further), 1)
        image = prepare(picture(width, height, index), tower.config.images)
        order = tower.order(image.grid)
        pixels = torch.from_numpy(image.array().copy())
        ours = tower.forward(pixels, torch.from_numpy(order.patches), order.windows)
        placed = torch.empty_like(ours).index_copy_(0, torch.from_numpy(order.embeddings), ours)
        assert expected.shape == placed.shape and expected.abs().max() > 0.1
        torch.testing.assert_close(placed, expected, rtol=0, atol=1e-4)
