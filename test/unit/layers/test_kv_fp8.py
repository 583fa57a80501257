"""Keys and values in FP8: a token's numbers are the same however its prompt was cut, and checkpoints' scales count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_parity import PagedModel, save_checkpoint
from quantized_checkpoints import FP8_FORMATS, Published, write_published
from safetensors.torch import load_file, save_file

from fenceline.config import ConfigError
from fenceline.config.quantization import read_quantization
from fenceline.layers.context import Shard, fp8_kv_dtype, torch_context
from fenceline.layers.forward_batch import ForwardMode

FP8 = torch.float8_e4m3fn
CONTEXT = torch_context(Shard(), torch.float32)
IN_FP8 = replace(CONTEXT, kv_dtype=FP8)
PROMPT = torch.arange(2, 60)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def logits_of(model: PagedModel, *cuts: int) -> torch.Tensor:
    """Of all tokens of the prompt, computed in parts that end at ``cuts``; the last ten one by one."""
    ends = [*cuts, *range(50, len(PROMPT) + 1)]
    rows = []
    for start, end in zip((0, *ends), ends, strict=False):
        mode = ForwardMode.DECODE if end - start == 1 else ForwardMode.EXTEND
        rows.extend(model.step([(0, PROMPT, start, end)], mode))
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["qwen3", "llama", "deepseek-v2-lite"])
def test_a_prompt_may_be_cut_anywhere(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    whole = logits_of(PagedModel(tmp_path, 16, "cpu", context=IN_FP8), 49)
    parts = logits_of(PagedModel(tmp_path, 16, "cpu", context=IN_FP8), 7, 8, 40)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
    plain = logits_of(PagedModel(tmp_path, 16, "cpu", context=CONTEXT), 49)
    error = (whole - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.3  # numbers are rounded, and not worse than by their format


def test_a_token_takes_a_quarter_of_float32s_bytes(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    plain, ours = (PagedModel(tmp_path, 16, "cpu", context=context).pool for context in (CONTEXT, IN_FP8))
    assert 4 * ours.layout.page_nbytes == plain.layout.page_nbytes
    assert ours.layout.describe() != plain.layout.describe()  # so no server reads the other's files


def test_the_checkpoints_scales_are_used(tmp_path: Path) -> None:
    """E4M3 rounds alike at all powers of two, so nothing changes with those but what would not have fitted."""
    plain = tmp_path / "plain"
    save_checkpoint("qwen3", plain)
    published = FP8_FORMATS["compressed-tensors-channel"]
    write_published(plain, tmp_path, Published({**published.config, "kv_cache_scheme": SCHEME}, published.quantise))
    path = tmp_path / "model.safetensors"
    weights = load_file(path)

    def scaled(k: float, v: float) -> PagedModel:
        for layer in range(3):
            weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([k])
            weights[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(v)
        save_file(weights, path)
        return PagedModel(tmp_path, 16, "cpu", context=IN_FP8)

    once, model = logits_of(scaled(1.0, 1.0), 20), scaled(0.125, 0.25)
    torch.testing.assert_close(logits_of(model, 20), once, atol=5e-2, rtol=5e-2)
    assert model.pool.row(0, "k").dtype == FP8
    saturated = logits_of(scaled(2.0**-9, 1.0), 20)
    assert (saturated - once).norm() > 0.2 * once.norm()
    # A cache that is not in FP8 has no use for them.
    logits_of(PagedModel(tmp_path, 16, "cpu", context=CONTEXT), 20)


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    published = json.loads(json.dumps(FP8_FORMATS["compressed-tensors-channel"].config))
    for scheme in ("static", SCHEME | {"dynamic": True}, SCHEME | {"num_bits": 4}):
        entry = {"quantization_config": published | {"kv_cache_scheme": scheme}}
        with pytest.raises(ConfigError, match="kv_cache_scheme"):
            read_quantization(entry, tmp_path)


def test_a_gpu_that_cannot_convert_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8_kv_dtype(torch.device("cpu")) == FP8
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert fp8_kv_dtype(torch.device("cuda:0")) == FP8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"compute capability 8.9 or more: leave it out"):
        fp8_kv_dtype(torch.device("cuda:0"))
