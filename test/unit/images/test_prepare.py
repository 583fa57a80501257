"""Images as the processors of transformers prepare them, by Pillow alone, and their places in prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from vision_cases import film_sides

from fenceline.images.image_input import ImageInput, expand_placeholders
from fenceline.images.prepare import ImageSettings, prepare

QWEN = ImageSettings(
    patch_size=14,
    merge_size=2,
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
GEMMA = ImageSettings(
    patch_size=14,
    merge_size=4,
    min_pixels=1,
    max_pixels=1,
    size=(224, 224),
    resample=2,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
)
QWEN3_VIDEO = ImageSettings(
    patch_size=16,
    merge_size=2,
    min_pixels=4096,
    max_pixels=25_165_824,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    group_size=2,
    shares_pixels=True,
)
SIZES = [(1, 1), (37, 91), (28, 28), (640, 480), (13, 2600), (2600, 13), (1500, 1401), (84, 70)]


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    return Image.fromarray(noise, mode)


def normalised(image: ImageInput, settings: ImageSettings) -> np.ndarray:
    """Channels first."""
    (pixels,) = image.array()
    return np.stack([settings.values()[pixels[..., c], c] for c in range(3)])


@pytest.mark.parametrize("width,height", SIZES)
def test_qwen_images_equal_those_of_transformers(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil()(source := picture(width, height), return_tensors="np")
    ours = prepare(source, QWEN)
    (grid,) = theirs["image_grid_thw"].tolist()
    assert ours.grid == (grid[1] // 2, grid[2] // 2)
    assert ours.num_tokens == QWEN.num_tokens(width, height) <= QWEN.most_tokens
    rows, columns = ours.grid
    values = theirs["pixel_values"].reshape(rows, columns, 2, 2, 3, 2, 14, 14)
    for frame in range(2):
        plane = values[:, :, :, :, :, frame].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, ours.height, ours.width)
        np.testing.assert_array_equal(plane, normalised(ours, QWEN))


@pytest.mark.parametrize("width,height", SIZES[:5])
def test_gemma_images_equal_those_of_transformers(width: int, height: int) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    theirs = Gemma3ImageProcessorPil()(source := picture(width, height), return_tensors="np")
    ours = prepare(source, GEMMA)
    assert ours.grid == (4, 4)
    np.testing.assert_array_equal(theirs["pixel_values"][0], normalised(ours, GEMMA))


def test_a_digest_names_pixels_and_settings() -> None:
    first = prepare(picture(60, 60), QWEN)
    other = picture(60, 60)
    other.putpixel((30, 30), (1, 2, 3))
    smaller = QWEN.with_pixels(28 * 28, 28 * 28 * 2)
    images = [first, prepare(other, QWEN), prepare(picture(60, 60), smaller), prepare(picture(60, 60), GEMMA)]
    assert len({image.digest for image in images}) == 4
    assert first == prepare(picture(60, 60), QWEN)


def test_proportions_that_no_model_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 200 times"):
        prepare(picture(1, 201), QWEN)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 5, 8, 64])
def test_frames_have_the_size_of_transformers(num_frames: int) -> None:
    """Whose limits are each frame's in Qwen2.5-VL, and all frames' together in Qwen3-VL."""
    sizes = [*SIZES, (1280, 720), (31, 31), (16, 900), (4000, 3000)]
    for model_type, settings in (("qwen2_5_vl", replace(QWEN, group_size=2)), ("qwen3_vl", QWEN3_VIDEO)):
        limits = settings.min_pixels, settings.max_pixels
        for size in sizes:
            found = settings.fitted(*size, num_frames)
            assert found == film_sides(model_type, size, num_frames, settings.factor, limits), (model_type, size)
            area = found[0] * found[1] // settings.factor**2
            assert settings.num_tokens(*size, num_frames) == area * ((num_frames + 1) // 2)


def test_limits_of_frames_are_those_of_each() -> None:
    narrow = QWEN3_VIDEO.with_pixels(None, 64 * 1024, 8)
    assert narrow.fitted(1000, 1000, 8) == (256, 256)
    with pytest.raises(ValueError, match="of 8 frames together are no range"):
        QWEN3_VIDEO.with_pixels(10**7, None, 8)


@pytest.mark.parametrize("limits", [{"max_pixels": 783}, {"min_pixels": 0}, {"min_pixels": 10**9}])
def test_limits_without_a_size_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no range of sizes"):
        QWEN.with_pixels(**limits)


def test_each_image_takes_the_place_of_one_placeholder() -> None:
    images = [prepare(picture(56, 56, seed=1), QWEN), prepare(picture(84, 56, seed=2), QWEN)]
    ids, placed = expand_placeholders([5, 9, 6, 9], images, (9, 8))
    assert ids.tolist() == [5, 9, 9, 9, 9, 6, 9, 9, 9, 9, 9, 9]
    assert [(image.offset, image.end) for image in placed] == [(1, 5), (6, 12)]
    with pytest.raises(ValueError, match="1 placeholders of images and 0 of videos' frames, the request 2 images"):
        expand_placeholders([5, 9], images, (9, 8))
