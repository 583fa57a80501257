"""A Qwen3-like model small enough for hundreds of runs a minute, and the scheduler over it on any device."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from scheduler_driver import Driver, request

from fenceline.config.resolve import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.layers.shard import Shard
from fenceline.managers.io_struct import TokenizedGenerateReq
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.models.registry import make_model

VOCAB_SIZE = 101
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
    "bos_token_id": 1,
}


@lru_cache
def tiny_model_path() -> str:
    """A directory with the model; written once a process."""
    directory = Path(tempfile.mkdtemp(prefix="fenceline-tiny-"))
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    config = resolve(ServerArgs(model_path=str(directory), device="cpu", load_format="dummy")).model
    generator = torch.Generator().manual_seed(11)
    weights = {}
    for name, slot in make_model(config, Shard()).weight_slots().items():
        offset = 1.0 if len(slot.full_shape) == 1 else 0.0
        weights[name] = torch.randn(slot.full_shape, generator=generator) * 0.3 + offset
    save_file(weights, directory / "model.safetensors")
    return str(directory)


def tiny_driver(device: Device | str = "cpu", num_rows: int = 6, **flags: object) -> Driver:
    """A scheduler over a ModelRunner with the tiny model; ``flags`` are ServerArgs fields."""
    device = open_device(device) if isinstance(device, str) else device
    flags = {"max_total_tokens": 256, "page_size": 4, "random_seed": 1, "chunked_prefill_size": 16} | flags
    args = ServerArgs(model_path=tiny_model_path(), device=device.kind, **flags)  # type: ignore[arg-type]
    config = dataclasses.replace(resolve(args), max_running_requests=num_rows)
    return Driver(config, ModelRunner(config, device, show_progress=False))


def tiny_requests(num_tokens: int = 6) -> list[TokenizedGenerateReq]:
    """Greedy and sampled requests of different lengths, two of them with a common prefix."""
    prompts = [[3, 1, 4, 1, 5], list(range(2, 25)), list(range(2, 20)), [7] * 9, [2, 2]]
    return [
        request(
            f"r{i}", ids, seed=i, temperature=0.9 * (i % 2), max_new_tokens=num_tokens + i, ignore_eos=True
        )
        for i, ids in enumerate(prompts)
    ]


def answers(driver: Driver, reqs: list[TokenizedGenerateReq]) -> list[list[int]]:
    """The tokens of each request, all sent at once."""
    driver.send(*reqs)
    driver.run()
    return [driver.answers[req.rid].output_ids for req in reqs]
