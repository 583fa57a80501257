"""Writes behind each command of docs/use/recipes what memory it needs.

Nothing is loaded: a published config.json says the sizes, and the model is made on torch's device without memory.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.quantization import QuantConfig
from fenceline.config.server_args import parse_args
from fenceline.layers.context import LayerContext, Shard, torch_context
from fenceline.mem_cache.state_pool import request_nbytes
from fenceline.models.draft_families import make_draft_model
from fenceline.models.families import make_model
from fenceline.models.loader import dummy_names

_ROOT = Path(__file__).parents[1]
FOLDER = _ROOT / "docs" / "use" / "recipes"
COMMAND = re.compile(r"^fenceline serve ((?:[^#\n\\]|\\\n)+?) *(#.*)?$", re.MULTILINE)
_GPU_BYTES = (79 * 2**30, 139 * 2**30)  # what torch reports for GPUs of 80 and 141 GB
# The config.json of each model in the pages: a name in published_configs.json, or a folder of benchmark/h200/models.
_CONFIGS = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B": "llama-3.1-8b/eagle3",
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": "llama-3.1-8b/eagle",
    "meta-llama/Llama-3.1-70B-Instruct": "Llama-3.1-70B",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "zai-org/GLM-4.5-Air": "GLM-4.5-Air",
    "zai-org/GLM-4.7-Flash": "glm-4.7-flash",
    "deepseek-ai/DeepSeek-V3": "DeepSeek-V3",
    "zai-org/GLM-5.2": "GLM-5.2",
    "moonshotai/Kimi-K2-Instruct": "Kimi-K2",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "Qwen3-Next-80B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": "qwen3-next-80b-fp8",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "Kimi-Linear-48B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "Nemotron-3-Nano-30B-A3B",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "Qwen/Qwen3-VL-8B-Instruct": "Qwen3-VL-8B",
    "google/gemma-3-12b-it": "Gemma-3-12b",
    "openbmb/MiniCPM-SALA": "MiniCPM-SALA",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """What one GPU needs, in bytes: weights, the draft's among them, the cache of one token, and the states of one
    request. ``tokens``: how many fit into GPUs of ``_GPU_BYTES``, in all requests together; 0 where weights do not."""

    weights: int
    token: int
    request: int
    tokens: tuple[int, ...]


def resolve_command(argv: Sequence[str], folder: Path) -> EngineConfig:
    """The configuration of a server on a GPU, which is not needed. Folders for config.json are made in ``folder``.
    Raises ConfigError as a start would."""
    args = parse_args(argv)
    draft = args.speculative_draft_model_path
    args = replace(
        args,
        model_path=_model_dir(args.model_path, folder),
        speculative_draft_model_path=draft and _model_dir(draft, folder),
        load_format="dummy",
        hicache_size=0.0,  # of another machine's memory
        skip_tokenizer_init=True,
    )
    return resolve(args, cuda_probe=lambda: True)


def _model_dir(name: str, folder: Path) -> str:
    source, found = _CONFIGS[name], folder / name.replace("/", "--")
    found.mkdir(exist_ok=True)
    path = _ROOT / "benchmark" / "h200" / "models" / source / "config.json"
    text = path.read_text() if path.exists() else json.dumps(_published()[source]["config"])
    (found / "config.json").write_text(text)
    return str(found)


@cache
def _published() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(
        (_ROOT / "test" / "support" / "published_configs.json").read_text()
    )
    return found


def memory(config: EngineConfig) -> Memory:
    """What one GPU of a server needs."""
    args, model, draft = config.server_args, config.model, config.speculative and config.speculative.draft
    shard = Shard(0, args.tp_size, ep_size=args.ep_size)
    with torch.device("meta"):
        made = make_model(replace(model, context_length=1), _context(shard, model.quantization))
        weights, specs = made.nbytes, made.state_specs
        if draft is not None:
            small = replace(draft, model=replace(draft.model, context_length=1))
            context = _context(shard, draft.model.quantization)
            weights += make_draft_model(small, context, made, dummy_names(small, made)).nbytes
    token = config.kv_layout.page_nbytes // args.page_size
    request = request_nbytes(specs, config.most_undone)
    share = 1 + args.mamba_full_memory_ratio if request else 1
    room = (total * config.mem_fraction_static - weights for total in _GPU_BYTES)
    return Memory(weights, token, request, tuple(max(0, int(left / share / token)) for left in room))


def _context(shard: Shard, quantization: QuantConfig | None) -> LayerContext:
    stored = None if quantization is None else quantization.on_line()
    return replace(torch_context(shard, torch.bfloat16), format=stored)


def note(argv: Sequence[str], folder: Path) -> str:
    """What stands behind a command."""
    found = memory(resolve_command(argv, folder))
    sizes = [f"{found.weights / 1e9:.1f} GB", f"{found.token / 1024:.3g} KiB"]
    sizes += [f"{found.request / 1e6:.0f} MB"] if found.request else []
    return f"# {', '.join(sizes)}: {' / '.join(f'{number // 1000:,}' if number else 'no' for number in found.tokens)}"


def with_notes(page: str) -> str:
    """A page with the note behind each of its commands."""
    with tempfile.TemporaryDirectory() as folder:

        def add(match: re.Match[str]) -> str:
            argv = shlex.split(match[1].replace("\\\n", " "))
            return f"fenceline serve {match[1]}  {note(argv, Path(folder))}"

        return COMMAND.sub(add, page)


if __name__ == "__main__":
    for path in FOLDER.glob("*.md"):
        path.write_text(with_notes(path.read_text(encoding="utf-8")), encoding="utf-8")
