"""Writes demo-vision as a directory that `transformers` and Fenceline can load, with the names of Qwen3-VL."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from fenceline_demo.documents import END_OF_TEXT, IM_END
from fenceline_demo.picture_chat import CHAT_TEMPLATE, SETTINGS, PictureItem, build_rows
from fenceline_demo.tokenizer import IMAGE_PAD, VISION_END, VISION_START, FastEncoder, save_tokenizer

from .export import named_weights
from .model import rms_norm
from .vision import FRAMES, SECTIONS, Tower, VisionModel, to_device


def _tower_weights(tower: Tower) -> dict[str, Tensor]:
    shape, side = tower.shape, SETTINGS.patch_size
    # Each frame has its share of the weights, because a picture is repeated for all of them.
    patches = (tower.patches[0] / FRAMES).view(-1, 3, 1, side, side).expand(-1, -1, FRAMES, -1, -1)
    found = {"patch_embed.proj.weight": patches, "patch_embed.proj.bias": tower.patch_bias}
    found["pos_embed.weight"] = tower.positions

    def add(name: str, weight: Tensor, bias: Tensor) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = weight, bias

    for i in range(shape.depth):
        own = slice(3 * i, 3 * i + 3)
        add(f"blocks.{i}.attn.qkv", tower.qkv[own].flatten(0, 1), tower.qkv_bias[own].flatten())
        add(f"blocks.{i}.attn.proj", tower.proj[i], tower.proj_bias[i])
        add(f"blocks.{i}.mlp.linear_fc1", tower.fc1[i], tower.fc1_bias[i])
        add(f"blocks.{i}.mlp.linear_fc2", tower.fc2[i], tower.fc2_bias[i])
        for number in (0, 1):
            add(f"blocks.{i}.norm{number + 1}", tower.norms[2 * i + number], tower.norm_biases[2 * i + number])
    mergers = [f"deepstack_merger_list.{i}" for i in range(len(shape.deepstack))] + ["merger"]
    norms = [*zip(tower.deep_norms, tower.deep_norm_biases, strict=True), (tower.merger_norm, tower.merger_norm_bias)]
    for i, (name, norm) in enumerate(zip(mergers, norms, strict=True)):
        add(f"{name}.norm", *norm)
        add(f"{name}.linear_fc1", tower.merger1[i], tower.merger1_bias[i])
        add(f"{name}.linear_fc2", tower.merger2[i], tower.merger2_bias[i])
    return found


def _weights(model: VisionModel) -> dict[str, Tensor]:
    """The weights under their published names, bf16, contiguous, on the CPU."""
    text = named_weights(model.text)
    found = {name.replace("model.", "model.language_model.", 1): weight for name, weight in text.items()}
    for name, weight in _tower_weights(model.tower).items():
        found[f"model.visual.{name}"] = weight.detach().to("cpu", torch.bfloat16).contiguous()
    return found


def _config(model: VisionModel, tokenizer: Tokenizer) -> dict[str, object]:
    text, tower = asdict(model.text.shape), asdict(model.tower.shape)
    for unused in ("num_experts", "num_experts_per_tok"):
        del text[unused]
    end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    rope = {"rope_type": "default", "mrope_section": list(SECTIONS), "mrope_interleaved": True}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id(IMAGE_PAD),
        "video_token_id": model.text.shape.vocab_size - 1,  # none of the tokenizer's
        "vision_start_token_id": tokenizer.token_to_id(VISION_START),
        "vision_end_token_id": tokenizer.token_to_id(VISION_END),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen3_vl_text",
            **text,
            "rope_scaling": rope,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": tower["depth"],
            "hidden_size": tower["hidden_size"],
            "intermediate_size": tower["intermediate_size"],
            "num_heads": tower["num_heads"],
            "num_position_embeddings": tower["position_side"] ** 2,
            "deepstack_visual_indexes": list(tower["deepstack"]),
            "out_hidden_size": model.text.shape.hidden_size,
            "in_channels": 3,
            "patch_size": SETTINGS.patch_size,
            "spatial_merge_size": SETTINGS.merge_size,
            "temporal_patch_size": FRAMES,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
        },
    }


def export(model: VisionModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes configs, tokenizer and bf16 weights into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(model, tokenizer)
    pad = tokenizer.token_to_id(END_OF_TEXT)
    generation = {"do_sample": False, "eos_token_id": [tokenizer.token_to_id(IM_END), pad], "pad_token_id": pad}
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": SETTINGS.min_pixels, "longest_edge": SETTINGS.max_pixels},
        "patch_size": SETTINGS.patch_size,
        "temporal_patch_size": FRAMES,
        "merge_size": SETTINGS.merge_size,
        "image_mean": list(SETTINGS.mean),
        "image_std": list(SETTINGS.std),
    }
    files = {"config": config, "generation_config": generation, "preprocessor_config": preprocessor}
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
    save_tokenizer(tokenizer, directory, model.text.shape.max_position_embeddings, CHAT_TEMPLATE)
    save_file(_weights(model), directory / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def check_export(model: VisionModel, tokenizer: Tokenizer, directory: Path, items: list[PictureItem]) -> float:
    """Loads the export with `transformers` and returns the largest logit difference on `items` (fp32), whose pictures
    it prepares itself. The model's weights are rounded to bf16 first, as they are on disk."""
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reference = VisionModel(torch.float32, compiled=False, shape=model.text.shape)
    reference.load_state_dict({k: v.cpu().bfloat16().float() for k, v in model.state_dict().items()})
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    chat, prepare = AutoTokenizer.from_pretrained(directory), Qwen2VLImageProcessorPil.from_pretrained(directory)
    placeholder, worst = tokenizer.token_to_id(IMAGE_PAD), 0.0
    for item in items:
        rows = build_rows([item.conversation()], 192, FastEncoder(tokenizer))
        batch = to_device(rows, torch.device("cpu"))
        end = int(rows.is_answer[0].nonzero()[0][0])
        pixels = prepare([each.image for each in item.pictures], return_tensors="pt")
        text = chat.apply_chat_template(item.messages(), tokenize=False, add_generation_prompt=True)
        for thw in pixels["image_grid_thw"]:
            text = text.replace(IMAGE_PAD, "<|placeholder|>" * (int(thw.prod()) // SETTINGS.merge_size**2), 1)
        ids = torch.tensor([chat(text.replace("<|placeholder|>", IMAGE_PAD))["input_ids"]])
        assert ids[0].tolist() == rows.ids[0, :end].tolist(), "transformers tokenizes differently"
        found = rms_norm(reference.hidden(batch)[0][:end], reference.text.final_norm, model.text.shape.rms_norm_eps)
        logits = theirs(input_ids=ids, mm_token_type_ids=ids.eq(placeholder).int(), **pixels).logits[0]
        worst = max(worst, float((F.linear(found, reference.text.embed) - logits).abs().max()))
    return worst
