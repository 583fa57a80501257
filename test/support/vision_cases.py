"""Models that read images: random small checkpoints, transformers' answers, and a scheduler over the real runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from scheduler_driver import Driver, request

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.images.image_input import expand_placeholders
from fenceline.images.prepare import prepare
from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.layers.context import Shard
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner

IMAGE, BEGIN, END = 110, 112, 113  # ids: of an image's tokens, and of those around them
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
        video_token_id=111,
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
        video_token_id=111,
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
    model.lm_head.weight[IMAGE] = 0.0  # transformers would take such a token of an answer for one of an image
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


ONE = [BEGIN, IMAGE, END]
Case = tuple[list[int], list[Image.Image]]  # a prompt, with one IMAGE for each picture
CASES: list[Case] = [
    ([3, 4, 5, *ONE, 7, 8], [picture(60, 90, 1)]),
    ([*ONE, *ONE, 9], [picture(90, 60, 2), picture(1, 1, 3)]),
    ([3, 1, 4, 1, 5, 9], []),
    ([5] * 15 + [*ONE, 6, 7], [picture(140, 140, 5)]),  # a chunk ends at the image's first token
    ([3, 4, 5, *ONE, 7, *ONE, 8, *ONE], [picture(13, 400, 6), picture(200, 30, 7), picture(13, 400, 6)]),
]


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
    flags = sizes | {"random_seed": 1, "max_running_requests": 6, "skip_tokenizer_init": True} | flags
    config = resolve(ServerArgs(model_path=str(directory), device=device.kind, **flags))  # type: ignore[arg-type]
    if num_embedding_rows is not None:
        config = dataclasses.replace(config, num_embedding_rows=num_embedding_rows)
    if attention is not None:
        config = dataclasses.replace(config, prefill_attention_backend=attention, decode_attention_backend=attention)
    return Driver(config, ModelRunner(config, device, show_progress=False, shard=shard))


def image_request(
    driver: Driver, rid: str, ids: Sequence[int], pictures: Sequence[Image.Image], **params: object
) -> TokenizedGenerateReq:
    """A request whose prompt ``ids`` has one IMAGE for each of ``pictures``; greedy, 8 tokens."""
    vision = driver.config.model.vision
    assert vision is not None
    images = [prepare(each, vision.images) for each in pictures]
    expanded, placed = expand_placeholders(ids, images, vision.placeholder)
    params = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0} | params
    return msgspec.structs.replace(request(rid, expanded.tolist(), **params), images=list(placed))


def theirs(
    model: transformers.PreTrainedModel, ids: Sequence[int], pictures: Sequence[Image.Image], num_tokens: int = 8
) -> list[int]:
    """The tokens that transformers answers with, greedily. ``ids`` are expanded as the request's are. Everything is
    computed again for each token: ``generate`` takes the answer to a prompt that ends with an image for more of it.
    The same question is answered once for each model."""
    question = (
        type(model),
        num_tokens,
        *ids,
        *[each.tobytes() for each in pictures],
        *[each.size for each in pictures],
    )
    if question not in _ANSWERS:
        _ANSWERS[question] = _answer(model, ids, pictures, num_tokens)
    return _ANSWERS[question]


_ANSWERS: dict[tuple[object, ...], list[int]] = {}


def _answer(
    model: transformers.PreTrainedModel, ids: Sequence[int], pictures: Sequence[Image.Image], num_tokens: int
) -> list[int]:
    inputs = dict(processor_of(model)(list(pictures), return_tensors="pt")) if pictures else {}
    inputs.pop("num_crops", None)
    kinds = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    tokens = list(ids)
    for _ in range(num_tokens):
        prompt = torch.tensor([tokens])
        logits = model(input_ids=prompt, use_cache=False, **{kinds: (prompt == IMAGE).int()}, **inputs).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(ids) :]
