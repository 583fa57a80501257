"""Checkpoints with which the demo model's weights can be replaced, and checkpoints with which they cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import fenceline


def demo_tensors() -> dict[str, torch.Tensor]:
    return load_file(Path(fenceline.demo_model_path()) / "model.safetensors")


def changed_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The demo model's tensors, each slightly changed, so that answers differ."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() + 0.03 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in demo_tensors().items()
    }


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> str:
    """A directory like the demo model's with these tensors; ``config`` replaces entries of config.json."""
    shutil.copytree(fenceline.demo_model_path(), folder, ignore=shutil.ignore_patterns("eagle3"))
    save_file(tensors, folder / "model.safetensors")
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


NAME = "model.layers.1.mlp.up_proj.weight"


def misfits(folder: Path) -> dict[str, tuple[str, str]]:
    """Checkpoints that do not fit, each with a part of its error message."""
    tensors = demo_tensors()
    few = {name: tensor for name, tensor in tensors.items() if name != NAME}
    short = tensors | {NAME: tensors[NAME][:-1].contiguous()}
    whole = tensors | {NAME: tensors[NAME].to(torch.int32)}
    broken = write_checkpoint(folder / "broken", tensors)
    path = Path(broken, "model.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    return {
        "lacks": (write_checkpoint(folder / "lacks", few), f"the checkpoint lacks weights: {NAME}"),
        "more": (
            write_checkpoint(folder / "more", tensors | {"model.extra": torch.ones(2)}),
            "the model does not have: model.extra",
        ),
        "shape": (write_checkpoint(folder / "shape", short), f"weight {NAME} has shape"),
        "type": (write_checkpoint(folder / "type", whole), f"weight {NAME} is torch.int32"),
        "model": (
            write_checkpoint(folder / "model", tensors, rope_theta=5e4),
            "another model than the one that is served: its rope_theta is 50000.0, not 100000.0",
        ),
        "architecture": (
            write_checkpoint(folder / "architecture", tensors, architectures=["LlamaForCausalLM"]),
            "its architecture is LlamaForCausalLM, not Qwen3ForCausalLM",
        ),
        "broken": (broken, "truncated or damaged"),
    }
