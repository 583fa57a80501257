"""Models that read images: random small checkpoints, transformers' answers, and a scheduler over the real runner."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from scheduler_driver import Driver, request

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.images.image_input import ImageInput, expand_placeholders
from fenceline.images.prepare import prepare
from fenceline.images.video import FrameTimes
from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.layers.context import Shard
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner

IMAGE, VIDEO, BEGIN, END = 110, 111, 112, 113  # ids: of the tokens of images and videos, and of those around them
_TEXT = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _qwen2_5_vl() -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": rope},
        vision_config=tower | {"out_hidden_size": 48},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 3, 1], "mrope_interleaved": True}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "num_position_embeddings": 36}
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | {"rope_parameters": rope, "head_dim": 16, "tie_word_embeddings": True},
        vision_config=tower | {"out_hidden_size": 48, "deepstack_visual_indexes": [0, 1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_moe() -> transformers.PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 3, 1], "mrope_interleaved": True}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "num_position_embeddings": 36}
    config = transformers.Qwen3VLMoeConfig(
        text_config=_TEXT | experts | {"rope_parameters": rope, "head_dim": 16},
        vision_config=tower | {"out_hidden_size": 48, "deepstack_visual_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def _gemma3() -> transformers.PreTrainedModel:
    """An image has more tokens than the window."""
    tower = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {"head_dim": 8, "sliding_window": 10, "layer_types": kinds, "query_pre_attn_scalar": 8, "pad_token_id": 0}
    config = transformers.Gemma3Config(
        text_config=_TEXT | text,
        vision_config=tower | {"image_size": 112, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


VISION_MODELS: Mapping[str, Callable[[], transformers.PreTrainedModel]] = {
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl_moe,
    "Gemma3ForConditionalGeneration": _gemma3,
}


def save_vision_checkpoint(name: str, directory: Path) -> transformers.PreTrainedModel:
    """A random model of this architecture, saved as transformers saves it; float32, in eval mode. Its weights are so
    large that tokens depend on images."""
    torch.manual_seed(0)
    model = VISION_MODELS[name]().eval().requires_grad_(False)
    for key, param in model.named_parameters():
        if ("norm" in key or "ln_q" in key) and not key.endswith("bias"):
            param.normal_(1.0, 0.1)
        else:
            param.normal_(0.0, 0.15 if param.dim() > 1 else 0.3)
    model.lm_head.weight[[IMAGE, VIDEO]] = 0.0  # transformers would take such a token of an answer for one of an image
    model.save_pretrained(directory)
    if model.config.model_type == "qwen3_vl_moe":
        _publish_experts(directory / "model.safetensors")
    processor_of(model).save_pretrained(directory)
    return model


def _publish_experts(path: Path) -> None:
    """Store the experts' matrices as they are published, the inputs before the outputs; transformers reads both."""
    tensors = load_file(path)
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})


def processor_of(model: transformers.PreTrainedModel) -> transformers.BaseImageProcessor:
    """What prepares images for ``model``, with Pillow."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if model.config.model_type == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    if model.config.model_type.startswith("qwen3_vl"):
        return Qwen2VLImageProcessorPil(
            patch_size=16,
            size={"shortest_edge": 2048, "longest_edge": 300_000},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
    return Qwen2VLImageProcessorPil()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A few colours at random, and noise on them."""
    random = np.random.default_rng(seed)
    colours = Image.fromarray(random.integers(0, 200, (3, 3, 3), dtype=np.uint8)).resize((width, height))
    return Image.fromarray(np.asarray(colours) + random.integers(0, 56, (height, width, 3), dtype=np.uint8))


@dataclasses.dataclass(frozen=True)
class Film:
    """A video: frames of one size, ``fps`` in a second."""

    frames: tuple[Image.Image, ...]
    fps: float = 2.0


def film(width: int, height: int, num_frames: int, fps: float = 2.0, seed: int = 0) -> Film:
    """Frames as different as pictures are."""
    return Film(tuple(picture(width, height, 100 * seed + number) for number in range(num_frames)), fps)


Picture = Image.Image | Film
ONE, FILM = [BEGIN, IMAGE, END], [BEGIN, VIDEO, END]
Case = tuple[list[int], list[Picture]]  # a prompt, with one IMAGE for each picture, and one VIDEO for each film
CASES: list[Case] = [
    ([3, 4, 5, *ONE, 7, 8], [picture(60, 90, 1)]),
    ([*ONE, *ONE, 9], [picture(90, 60, 2), picture(1, 1, 3)]),
    ([3, 1, 4, 1, 5, 9], []),
    ([5] * 15 + [*ONE, 6, 7], [picture(140, 140, 5)]),  # a chunk ends at the image's first token
    ([3, 4, 5, *ONE, 7, *ONE, 8, *ONE], [picture(13, 400, 6), picture(200, 30, 7), picture(13, 400, 6)]),
]

FILM_CASES: list[Case] = [
    ([3, *FILM, 5, 6], [film(84, 60, 5, fps=0.5)]),  # whose positions go on for longer than its tokens
    ([*ONE, 7, *FILM, 8, *FILM], [picture(60, 60, 8), film(60, 84, 2, seed=1), film(30, 30, 1, seed=2)]),
]


def cases_of(name: str) -> list[Case]:
    """Those that the model of this architecture reads."""
    return CASES if name.startswith("Gemma3") else CASES + FILM_CASES


def vision_driver(
    directory: Path,
    device: Device | str = "cpu",
    num_embedding_rows: int | None = None,
    shard: Shard = Shard(),
    attention: str | None = None,
    **flags: object,
) -> Driver:
    """A scheduler over a ModelRunner; ``flags`` are ServerArgs fields. Chunks of 32 tokens end within
    some images."""
    device = open_device(device) if isinstance(device, str) else device
    flags = {"tp_size": shard.size} | flags
    sizes: dict[str, object] = {"max_total_tokens": 512, "page_size": 4, "chunked_prefill_size": 32}
    sizes |= {"random_seed": 1, "max_running_requests": 6, "skip_tokenizer_init": True, "dtype": "float32"}
    flags = sizes | flags
    config = resolve(ServerArgs(model_path=str(directory), device=device.kind, **flags))  # type: ignore[arg-type]
    if num_embedding_rows is not None:
        config = dataclasses.replace(config, num_embedding_rows=num_embedding_rows)
    if attention is not None:
        config = dataclasses.replace(config, prefill_attention_backend=attention, decode_attention_backend=attention)
    return Driver(config, ModelRunner(config, device, show_progress=False, shard=shard))


def image_request(
    driver: Driver, rid: str, ids: Sequence[int], pictures: Sequence[Picture], **params: object
) -> TokenizedGenerateReq:
    """A request whose prompt ``ids`` has one IMAGE for each of ``pictures`` and one VIDEO for each film; greedy, 8
    tokens. Where a model reads times, a token of the prompt stands for each."""
    vision = driver.config.model.vision
    assert vision is not None
    images: list[ImageInput] = []
    ids, films = list(ids), [each for each in pictures if isinstance(each, Film)]
    for place in reversed([index for index, token in enumerate(ids) if token == VIDEO]):
        form, one = vision.video, films.pop()
        assert form is not None
        frames = [prepare(frame, form.settings, len(one.frames)) for frame in one.frames]
        groups = form.groups(frames, FrameTimes(one.fps))
        if form.tokens_per_second:
            ids[place : place + 1] = [VIDEO] * len(groups)
        else:
            ids[place - 1 : place + 2] = [id for number in range(len(groups)) for id in (30 + number, *FILM)]
        images = groups + images
    images += [prepare(each, vision.images) for each in pictures if not isinstance(each, Film)]
    expanded, placed = expand_placeholders(ids, images, vision.placeholders)
    params = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0} | params
    return msgspec.structs.replace(request(rid, expanded.tolist(), **params), images=list(placed))


def theirs(
    model: transformers.PreTrainedModel, ids: Sequence[int], pictures: Sequence[Picture], num_tokens: int = 8
) -> list[int]:
    """The tokens that transformers answers with, greedily. ``ids`` are expanded as the request's are. Everything is
    computed again for each token: ``generate`` takes the answer to a prompt that ends with an image for more of it.
    The same question is answered once for each model."""
    shown = [(each.fps, each.frames) if isinstance(each, Film) else (0.0, (each,)) for each in pictures]
    facts = [(fps, *[(frame.tobytes(), frame.size) for frame in frames]) for fps, frames in shown]
    question = type(model), num_tokens, *ids, *facts
    if question not in _ANSWERS:
        _ANSWERS[question] = _answer(model, ids, pictures, num_tokens)
    return _ANSWERS[question]


_ANSWERS: dict[tuple[object, ...], list[int]] = {}


def _answer(
    model: transformers.PreTrainedModel, ids: Sequence[int], pictures: Sequence[Picture], num_tokens: int
) -> list[int]:
    images = [each for each in pictures if not isinstance(each, Film)]
    films = [each for each in pictures if isinstance(each, Film)]
    inputs = dict(processor_of(model)(images, return_tensors="pt")) if images else {}
    inputs.pop("num_crops", None)
    values, grids = zip(*[film_values(model, each) for each in films], strict=True) if films else ((), ())
    if films:
        inputs |= {"pixel_values_videos": torch.cat(values), "video_grid_thw": torch.tensor(grids)}
    kinds = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    tokens = list(ids)
    for _ in range(num_tokens):
        prompt = torch.tensor([tokens])
        given = inputs | {kinds: (prompt == IMAGE).int() + 2 * (prompt == VIDEO).int()}
        if films and model.config.model_type == "qwen2_5_vl":
            spans = iter(inputs.get("image_grid_thw", torch.empty(0, 3)).tolist()), iter(grids)
            given["position_ids"] = published_positions(tokens, *spans, [each.fps for each in films])
        logits = model(input_ids=prompt, use_cache=False, **given).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(ids) :]


def film_values(model: transformers.PreTrainedModel, one: Film) -> tuple[torch.Tensor, list[int]]:
    """``pixel_values_videos`` and ``video_grid_thw`` of a film. transformers' own video processors need torchvision, so
    this is their formula: all frames of one size, pairs of them in a patch, the last one twice if it has none beside
    it."""
    processor = processor_of(model)
    patch, limits = processor.patch_size, (processor.size["shortest_edge"], processor.size["longest_edge"])
    sides = film_sides(model.config.model_type, one.frames[0].size, len(one.frames), 2 * patch, limits)
    frames = [frame.resize(sides[::-1], Image.Resampling.BICUBIC) for frame in one.frames]
    frames += frames[-1:] * (len(frames) % 2)
    found = [processor(frame, do_resize=False, return_tensors="pt")["pixel_values"] for frame in frames]
    halves = [each.unflatten(1, (3, 2, -1))[:, :, 0] for each in found]
    pairs = [torch.stack(halves[index : index + 2], 2).flatten(1) for index in range(0, len(halves), 2)]
    return torch.cat(pairs), [len(pairs), sides[0] // patch, sides[1] // patch]


def film_sides(
    model_type: str, size: tuple[int, int], num_frames: int, factor: int, limits: tuple[int, int]
) -> tuple[int, int]:
    """(height, width) to which transformers resizes the frames of a video that are of ``size`` (width, height)."""
    if model_type == "qwen2_5_vl":
        module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        return module.smart_resize(size[1], size[0], factor, *limits)  # type: ignore[no-any-return]
    module = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    return module.smart_resize(max(num_frames, 2), size[1], size[0], 2, factor, *limits)  # type: ignore[no-any-return]


def published_positions(
    tokens: Sequence[int], images: Iterator[Sequence[int]], videos: Iterator[Sequence[int]], fps: Iterable[float]
) -> torch.Tensor:
    """The positions [3, 1, T] of Qwen2.5-VL as it was published: what follows begins behind the largest before it.
    ``images``, ``videos``: their grids (frames, rows, columns) of patches. transformers 5.3 to 5.23 let the text behind
    a video begin where the times may still go on (huggingface/transformers#45381), and go on elsewhere in the
    answer."""
    parts: list[torch.Tensor] = []
    rates = iter(fps)
    for kind, group in groupby(tokens, lambda token: token if token in (IMAGE, VIDEO) else 0):
        first = int(parts[-1].max()) + 1 if parts else 0
        if not kind:
            parts.append((first + torch.arange(len(list(group)))).expand(3, -1))
            continue
        times, rows, columns = next(images if kind == IMAGE else videos)
        step = 4.0 * 2 / next(rates) if kind == VIDEO else 0.0
        axes = torch.meshgrid(
            (torch.arange(times) * step).long(), torch.arange(rows // 2), torch.arange(columns // 2), indexing="ij"
        )
        parts.append(first + torch.stack(axes).flatten(1))
    return torch.cat(parts, 1).unsqueeze(1)


def sizes_of_14193(directory: Path, bucket: int, again: int = 2) -> list[Case]:
    """What sglang#14193's client sends, one token again and again, and the like: prompts around a captured size of
    ``bucket`` tokens, and with an image that ends at its edge, a token before it, or a token behind it, each ``again``
    times. The checkpoint in ``directory`` gets positions for them."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = 2 * bucket
    path.write_text(json.dumps(config))
    num_of_image = 4  # of a picture of 60 x 60 pixels
    random, ends = Random(3), (bucket - 1, bucket, bucket + 1)
    cases: list[Case] = [([0] * ends[-1], [])]
    cases += [(random.choices(range(3, 90), k=end), []) for end in ends]
    for end in ends:
        begin = random.choices(range(3, 90), k=end - num_of_image - 1)
        cases.append(([*begin, BEGIN, IMAGE, END], [picture(60, 60, end % 2)]))
    return cases * again


def answers_around(
    directory: Path, cases: Sequence[Case], device: Device | str, shard: Shard = Shard(), **flags: object
) -> list[list[int]]:
    """The answers to ``cases``, one after the other, without a prefix cache."""
    sizes: dict[str, object] = {"max_total_tokens": 4096, "chunked_prefill_size": 2048, "context_length": None}
    driver = vision_driver(directory, device, shard=shard, **sizes | {"disable_radix_cache": True} | flags)
    for index, case in enumerate(cases):
        driver.send(image_request(driver, f"r{index}", *case))
        driver.run()
    runner = driver.worker
    assert isinstance(runner, ModelRunner)
    if "piecewise_cuda_graph_tokens" in flags:
        assert runner.prefill_graphs is not None and runner.prefill_graphs.stats.replays
    return [driver.answers[f"r{index}"].output_ids for index in range(len(cases))]
