"""VisionConfig: the vision tower of a model, and how its images are prepared, read from the model's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fenceline.config import ConfigError, require
from fenceline.config.config_reader import ConfigReader
from fenceline.config.model_files import read_optional, token_text
from fenceline.images.prepare import ImageSettings
from fenceline.images.video import VideoForm

_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A tower that makes embeddings of ``out_size`` features from the patches of an image, with the published names of
    config.json where they differ little: ``depth`` layers of ``num_heads`` heads. ``images``: what it is given.
    ``placeholder``: the id of the token that stands for one embedding in a prompt. ``written``: what chat templates
    write for an image, and what the tokenizer gets in its place; None: that itself. ``video``: None for a model
    that reads none. A patch is of ``temporal_patch_size`` frames, for which that of an image is repeated. Layers
    attend to all patches of an image (``full_layers``), or within windows of ``window`` x ``window`` embeddings.
    ``style`` says of which kind they are and how the checkpoint names them. ``position_side``: of the square of
    learned positions, which is stretched over an image; 0: there are none. ``sees_whole``: in the text model the
    tokens of one image attend to one another, not only to those before them. ``deepstack``: the layers after each
    of which further embeddings are made. These are added to the hidden states of images' tokens after the text
    model's first layers, one after the other (DeepStack, arXiv:2406.04334)."""

    images: ImageSettings
    placeholder: int
    written: tuple[str, str] | None = None
    video: VideoForm | None = None
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    temporal_patch_size: int
    full_layers: frozenset[int]
    window: int
    style: Literal["qwen2_5_vl", "qwen3_vl", "siglip"] = "qwen2_5_vl"
    position_side: int = 0
    sees_whole: bool = False
    deepstack: tuple[int, ...] = ()

    @property
    def placeholders(self) -> tuple[int, int]:
        """The tokens that stand for embeddings of images and of videos; -1 is none."""
        return self.placeholder, -1 if self.video is None else self.video.placeholder


def qwen2_5_vl(hf: Mapping[str, object], directory: Path) -> VisionConfig:
    """The tower of Qwen2.5-VL. ``hf`` is the whole config.json."""
    reader = _inside(hf, "vision_config")
    sizes = _sizes(hf, directory, reader, patch_size=14, depth=32, hidden=(1280, 3420), activation="silu")
    factor = sizes.images.factor
    window = reader.size("window_size", 112)
    require(
        window % factor == 0,
        f"config.json: window_size {window} must be a multiple of {factor}, the pixels of an embedding",
    )
    full = reader.numbers("fullatt_block_indexes") or (7, 15, 23, 31)
    tokens_per_second = reader.number("tokens_per_second", 4.0)
    require(tokens_per_second > 0.0, f"config.json: tokens_per_second must be above 0, got {tokens_per_second}")
    video = VideoForm(
        settings=_video_settings(directory, sizes, (128 * 28 * 28, 768 * 28 * 28)),
        placeholder=ConfigReader(hf).count("video_token_id", default=151_656),
        written=_VIDEO_PAD,
        group=_VIDEO_PAD,
        tokens_per_second=tokens_per_second,
    )
    return replace(sizes, full_layers=frozenset(full), window=window // factor, video=video)


def qwen3_vl(hf: Mapping[str, object], directory: Path) -> VisionConfig:
    """The tower of Qwen3-VL. ``hf`` is the whole config.json."""
    reader = _inside(hf, "vision_config")
    act = "gelu_pytorch_tanh"
    sizes = _sizes(hf, directory, reader, patch_size=16, depth=27, hidden=(1152, 4304), activation=act)
    num_positions = reader.size("num_position_embeddings", 2304)
    side, deepstack = math.isqrt(num_positions), reader.numbers("deepstack_visual_indexes")
    require(
        side * side == num_positions,
        f"config.json: num_position_embeddings {num_positions} must be the square of a whole number",
    )
    if "deepstack_visual_indexes" not in reader.values:
        deepstack = (8, 16, 24)
    ascends = list(deepstack) == sorted({layer for layer in deepstack if 0 <= layer < sizes.depth})
    require(ascends, f"config.json: deepstack_visual_indexes {list(deepstack)} must be layers of the tower, ascending")
    written = f"<|vision_start|>{_VIDEO_PAD}<|vision_end|>"
    video = VideoForm(
        settings=replace(_video_settings(directory, sizes, (128 * 32 * 32, 768 * 32 * 32)), shares_pixels=True),
        placeholder=ConfigReader(hf).count("video_token_id", default=151_656),
        written=written,
        group=f"<{{}} seconds>{written}",
    )
    return replace(sizes, style="qwen3_vl", position_side=side, deepstack=deepstack, video=video)


def gemma3(hf: Mapping[str, object], directory: Path) -> VisionConfig | None:
    """The tower of Gemma 3, which is SigLIP (arXiv:2303.15343). ``hf`` is the whole config.json."""
    if "vision_config" not in hf:
        return None
    reader, text, outer = _inside(hf, "vision_config"), _inside(hf, "text_config"), ConfigReader(hf)
    patch, side = reader.size("patch_size", 16), reader.size("image_size", 224)
    num_tokens = outer.size("mm_tokens_per_image", 256)
    num_rows, num_patches = math.isqrt(num_tokens), side // patch
    require(
        num_rows**2 == num_tokens and side % patch == 0 and num_patches % num_rows == 0,
        f"config.json: images of {side} pixels in patches of {patch} cannot be {num_tokens} tokens"
        " (mm_tokens_per_image), a square whose side divides theirs",
    )
    for key, computed in (("hidden_act", "gelu_pytorch_tanh"), ("layer_norm_eps", 1e-6)):
        stated = reader.values.get(key, computed)
        require(stated == computed, f"config.json: {key} {stated!r} of the tower is not supported, {computed} is")
    size, num_heads = reader.size("hidden_size", 768), reader.size("num_attention_heads", 12)
    require(size % num_heads == 0, f"config.json: the tower's hidden_size {size} is no multiple of {num_heads} heads")
    depth = reader.size("num_hidden_layers", 12, most=_MOST_LAYERS)
    placeholder = "image_token_id" if "image_token_id" in hf else "image_token_index"
    return VisionConfig(
        images=_square_settings(directory, patch, num_patches // num_rows, side),
        placeholder=outer.count(placeholder, default=262_144),
        written=_gemma_text(directory),
        depth=depth,
        hidden_size=size,
        intermediate_size=reader.size("intermediate_size", 3072),
        num_heads=num_heads,
        out_size=text.size("hidden_size", 2304),
        temporal_patch_size=1,
        full_layers=frozenset(range(depth)),
        window=1 << 20,
        style="siglip",
        position_side=num_patches,
        sees_whole=True,
    )


def _gemma_text(directory: Path) -> tuple[str, str]:
    """``VisionConfig.written``: the token that begins an image, and that token with the others around the image."""
    config = read_optional(directory / "tokenizer_config.json")
    names = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    begin, image, end = (token_text(config.get(key)) or usual for key, usual in names.items())
    return begin, f"\n\n{begin}{image}{end}\n\n"


def _sizes(
    hf: Mapping[str, object],
    directory: Path,
    reader: ConfigReader,
    patch_size: int,
    depth: int,
    hidden: tuple[int, int],
    activation: str,
) -> VisionConfig:
    """What Qwen's towers have in common, without windows. ``reader``: of vision_config. The sizes are defaults;
    ``activation`` is the only one that is computed."""
    patch, merge = reader.size("patch_size", patch_size), reader.size("spatial_merge_size", 2)
    depth = reader.size("depth", depth, most=_MOST_LAYERS)
    stated = reader.values.get("hidden_act", activation)
    require(stated == activation, f"config.json: hidden_act {stated!r} of the tower is not supported, {activation} is")
    size, num_heads = reader.size("hidden_size", hidden[0]), reader.size("num_heads", 16)
    require(
        size % (4 * num_heads) == 0,
        f"config.json: the tower's hidden_size {size} must be a multiple of four times its {num_heads} heads",
    )
    return VisionConfig(
        images=_image_settings(directory, patch, merge),
        placeholder=ConfigReader(hf).count("image_token_id", default=151_655),
        depth=depth,
        hidden_size=size,
        intermediate_size=reader.size("intermediate_size", hidden[1]),
        num_heads=num_heads,
        out_size=reader.size("out_hidden_size", 3584),
        temporal_patch_size=reader.size("temporal_patch_size", 2),
        full_layers=frozenset(range(depth)),
        window=1 << 20,
    )


def _inside(values: Mapping[str, object], key: str) -> ConfigReader:
    inside = values.get(key)
    if not isinstance(inside, Mapping):
        raise ConfigError(f"config.json: {key} must be an object; download the file again")
    return ConfigReader(inside)


_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_VIDEO_PAD = "<|video_pad|>"


def _video_settings(directory: Path, sizes: VisionConfig, pixels: tuple[int, int]) -> ImageSettings:
    """How the frames of videos are prepared; ``pixels``: the defaults of their limits. As in transformers, a checkpoint
    that does not say is one whose videos are prepared as its images are."""
    stated = read_optional(directory / "processor_config.json").get("video_processor")
    if not isinstance(stated, dict):
        stated = read_optional(directory / "video_preprocessor_config.json")
    found = _checked(stated) if stated else _processor(directory)
    patch, merge = sizes.images.patch_size, sizes.images.merge_size
    size = ConfigReader(found).size("temporal_patch_size", sizes.temporal_patch_size)
    require(
        size == sizes.temporal_patch_size,
        f"video_preprocessor_config.json: temporal_patch_size {size} is not config.json's {sizes.temporal_patch_size}",
    )
    require(
        not ConfigReader(found).switch("cap_pixels_per_frame"),
        "video_preprocessor_config.json: cap_pixels_per_frame true is not supported, false is",
    )
    return replace(_settings_of(found, patch, merge, pixels), group_size=size)


def _image_settings(directory: Path, patch_size: int, merge_size: int) -> ImageSettings:
    """How the images of Qwen's models are prepared."""
    return _settings_of(_processor(directory), patch_size, merge_size, (56 * 56, 28 * 28 * 1280))


def _settings_of(
    found: Mapping[str, object], patch_size: int, merge_size: int, pixels: tuple[int, int]
) -> ImageSettings:
    """The settings that a processor's file says. Entries that are missing have the defaults of transformers'
    Qwen2VLImageProcessor, and ``pixels`` for the limits. Raises ``ConfigError`` for what is not computed here."""
    reader = ConfigReader(found)
    for key, wanted in (("patch_size", patch_size), ("merge_size", merge_size)):
        stated = reader.size(key, wanted)
        require(stated == wanted, f"preprocessor_config.json: {key} {stated} is not config.json's, which is {wanted}")
    size = ConfigReader(inside if isinstance(inside := found.get("size"), Mapping) else {})
    mean, std = _channels(found, "image_mean", _CLIP_MEAN), _channels(found, "image_std", _CLIP_STD)
    require(min(std) > 0.0, f"preprocessor_config.json: image_std must be above 0, got {list(std)}")
    return ImageSettings(
        patch_size=patch_size,
        merge_size=merge_size,
        min_pixels=reader.size("min_pixels", size.size("shortest_edge", pixels[0], most=1 << 30), most=1 << 30),
        max_pixels=reader.size("max_pixels", size.size("longest_edge", pixels[1], most=1 << 30), most=1 << 30),
        resample=reader.count("resample", default=3),
        rescale_factor=reader.number("rescale_factor", 1 / 255),
        mean=mean,
        std=std,
    )


def _square_settings(directory: Path, patch_size: int, merge_size: int, side: int) -> ImageSettings:
    """The same for images that are all resized to ``side`` x ``side`` pixels, with the defaults of Gemma 3."""
    found = _processor(directory)
    reader = ConfigReader(found)
    size = found.get("size")
    require(
        size in (None, {"height": side, "width": side}),
        f"preprocessor_config.json: size {size} is not the image_size of config.json, {side} x {side}",
    )
    require(
        not reader.switch("do_pan_and_scan"),
        "preprocessor_config.json: do_pan_and_scan true is not supported, false is",
    )
    return ImageSettings(
        patch_size=patch_size,
        merge_size=merge_size,
        min_pixels=1,
        max_pixels=1 << 30,
        size=(side, side),
        resample=reader.count("resample", default=2),
        rescale_factor=reader.number("rescale_factor", 1 / 255),
        mean=_channels(found, "image_mean", (0.5, 0.5, 0.5)),
        std=_channels(found, "image_std", (0.5, 0.5, 0.5)),
    )


def _processor(directory: Path) -> Mapping[str, object]:
    """What preprocessor_config.json says, or in a folder that transformers 5 has written processor_config.json."""
    found = read_optional(directory / "preprocessor_config.json")
    inside = read_optional(directory / "processor_config.json").get("image_processor")
    if not found and isinstance(inside, dict):
        found = inside
    return _checked(found)


def _checked(found: Mapping[str, object]) -> Mapping[str, object]:
    for key in ("do_resize", "do_rescale", "do_normalize"):
        stated = ConfigReader(found).switch(key, True)
        require(stated, f"preprocessor_config.json: {key} false is not supported, only true is")
    return found


def _channels(
    values: Mapping[str, object], key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Three numbers, one for each channel."""
    given = values.get(key)
    if given is None:
        return default
    if not isinstance(given, list) or len(given) != 3 or not all(isinstance(one, int | float) for one in given):
        raise ConfigError(f"preprocessor_config.json: {key} must be three numbers, got {given!r}")
    red, green, blue = (float(one) for one in given)
    return red, green, blue
