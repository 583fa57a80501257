"""Towers against transformers', image by image, in float32 on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from vision_cases import VISION_MODELS, film, film_values, picture, processor_of, save_vision_checkpoint

from fenceline.config.model_config import ModelConfig
from fenceline.images.image_input import ImageInput
from fenceline.images.prepare import prepare
from fenceline.images.video import FrameTimes
from fenceline.layers.context import Shard, torch_context
from fenceline.mem_cache.kv_pool import EmbeddingPool
from fenceline.model_executor.image_encoder import ImageEncoder
from fenceline.model_executor.step import Encode
from fenceline.models import vision
from fenceline.models.loader import load_model
from fenceline.models.vision import VisionTower

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


def encode(tower: VisionTower, images: Sequence[ImageInput], together: bool = True) -> torch.Tensor:
    """The embeddings of ``images``, row by row of each."""
    pool = EmbeddingPool(1 + sum(image.num_tokens for image in images), tower.width, torch.float32, torch.device("cpu"))
    encoder = ImageEncoder(tower, pool, together)
    ends = [*accumulate([image.num_tokens for image in images], initial=1)]
    encodes = [Encode(image, np.arange(*span)) for image, span in zip(images, pairwise(ends), strict=True)]
    arrays = encoder.arrays(encodes)
    encoder.encode(encodes, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    return pool.rows[1:]


def tower_of(directory: Path) -> VisionTower:
    config = ModelConfig.from_dir(str(directory))
    context = torch_context(Shard(), torch.float32)
    tower = load_model(config, "auto", torch.device("cpu"), context, 0, False).vision
    assert tower is not None
    return tower


@pytest.mark.parametrize("name", VISION_MODELS)
@torch.inference_mode()
def test_embeddings_are_those_of_transformers(
    saved: Callable[[str], tuple[Path, transformers.PreTrainedModel]], name: str
) -> None:
    directory, reference = saved(name)
    tower = tower_of(directory)
    for index, (width, height) in enumerate(SIZES):
        inputs = processor_of(reference)(picture(width, height, index), return_tensors="pt")
        inputs.pop("num_crops", None)
        found = reference.model.get_image_features(**inputs)
        further = [
            level[0] if isinstance(level, tuple) else level for level in getattr(found, "deepstack_features", ())
        ]
        expected = torch.cat((found.pooler_output[0], *further), 1)
        ours = encode(tower, [prepare(picture(width, height, index), tower.config.images)])
        assert expected.shape == ours.shape and expected.abs().max() > 0.1
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in VISION_MODELS if name.startswith("Qwen")])
@torch.inference_mode()
def test_embeddings_of_frames_are_those_of_transformers(
    saved: Callable[[str], tuple[Path, transformers.PreTrainedModel]], name: str
) -> None:
    directory, reference = saved(name)
    tower = tower_of(directory)
    form = tower.config.video
    assert form is not None
    for width, height, num_frames in ((1, 1, 1), (200, 131, 5), (13, 400, 2), (640, 480, 4)):
        one = film(width, height, num_frames)
        values, grid = film_values(reference, one)
        found = reference.model.get_video_features(values, torch.tensor([grid]))
        further = [
            level[0] if isinstance(level, tuple) else level for level in getattr(found, "deepstack_features", ())
        ]
        expected = torch.cat((found.pooler_output[0], *further), 1)
        frames = [prepare(frame, form.settings, num_frames) for frame in one.frames]
        torch.testing.assert_close(encode(tower, form.groups(frames, FrameTimes())), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", VISION_MODELS)
@torch.inference_mode()
def test_embeddings_do_not_depend_on_the_company(
    saved: Callable[[str], tuple[Path, transformers.PreTrainedModel]], name: str
) -> None:
    """Images of other sizes before and behind, and one of the same size; one after the other, to the last bit."""
    tower = tower_of(saved(name)[0])
    images = [prepare(picture(*size, seed), tower.config.images) for seed, size in enumerate([*SIZES, SIZES[1]])]
    alone = [encode(tower, [image]) for image in images]
    assert not torch.equal(alone[1], alone[-1])
    assert torch.equal(encode(tower, images, together=False), torch.cat(alone))
    together = encode(tower, images).split([image.num_tokens for image in images])
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        torch.testing.assert_close(other, one, rtol=0, atol=2e-6 * float(one.abs().max()), msg=f"image {number}")


def test_models_of_text_start_without_torchs_compiler() -> None:
    """Which takes two seconds to import, and comes with torch's attention to many images. And without sympy, which
    checks on the device meta import, and transformers, which the library for grammars imports."""
    program = (
        "import sys, torch, fenceline.scheduler.process\n"
        "from fenceline.config.engine_config import resolve\n"
        "from fenceline.config.server_args import ServerArgs\n"
        "from fenceline.constrained.matcher import GrammarStore\n"
        "from fenceline.layers.context import Shard, torch_context\n"
        "from fenceline.models.loader import load_model\n"
        "model = resolve(ServerArgs(model_path='demo', device='cpu')).model\n"
        "load_model(model, 'auto', torch.device('cpu'), torch_context(Shard(), torch.float32), 0, progress=False)\n"
        "GrammarStore([1]).prepare()\n"
        "assert 'xgrammar' in sys.modules\n"
        "found = {'torch._dynamo', 'sympy', 'transformers'} & sys.modules.keys()\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", VISION_MODELS)
@torch.inference_mode()
def test_segments_are_the_same_by_their_bounds(
    saved: Callable[[str], tuple[Path, transformers.PreTrainedModel]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU is told of them, whose attention a loop stands for here."""
    tower = tower_of(saved(name)[0])
    images = [prepare(picture(*size, seed), tower.config.images) for seed, size in enumerate(SIZES)]
    expected = encode(tower, images)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, of_keys: torch.Tensor, *longest: int
    ) -> torch.Tensor:
        spans = [*pairwise(bounds.tolist())]
        assert bounds is of_keys and bounds.dtype == torch.int32 and {*longest} == {max(b - a for a, b in spans)}
        parts = [[each[a:b].transpose(0, 1) for each in (q, k, v)] for a, b in spans]
        return torch.cat([F.scaled_dot_product_attention(*part).transpose(0, 1) for part in parts])

    monkeypatch.setattr(vision, "_has_varlen", lambda q: True)
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    torch.testing.assert_close(encode(tower, images), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@torch.inference_mode()
def test_a_gpu_attends_to_all_images_at_once(
    saved: Callable[[str], tuple[Path, transformers.PreTrainedModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without values: nothing asks for a value, which would make the host wait for a GPU, and each layer
    attends once, whatever the number of images and windows."""
    monkeypatch.setattr(vision, "_has_varlen", lambda q: True)
    config = ModelConfig.from_dir(str(saved("Qwen2_5_VLForConditionalGeneration")[0])).vision
    assert config is not None
    images = [prepare(picture(*size), config.images) for size in SIZES]
    calls: list[tuple[int, int]] = []
    attend = varlen.varlen_attn

    def counted(*args: Any) -> Any:
        calls.append((len(args[3]) - 1, args[5]))
        return attend(*args)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = VisionTower(config, torch.bfloat16)
        pool = EmbeddingPool(8192, tower.width, torch.bfloat16, torch.device("cpu"))
        encoder = ImageEncoder(tower, pool, together=True)
        encodes = [Encode(image, np.arange(image.num_tokens)) for image in images]
        arrays = encoder.arrays(encodes)
        kinds = {name: torch.from_numpy(array.copy()).dtype for name, array in arrays.items()}
        views = {name: torch.empty(array.shape, dtype=kinds[name]) for name, array in arrays.items()}
        encoder.encode(encodes, views)
    most = max(image.num_tokens for image in images) * 4
    assert len(calls) == config.depth == 3
    assert calls[1] == (len(images), most) and calls[0] == calls[2] and calls[0][0] > len(images) and calls[0][1] == 64
