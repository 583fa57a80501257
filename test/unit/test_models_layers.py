"""Layers: shards add up to the whole, rotary tables equal transformers', pieces of a layer are pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from model_parity import save_checkpoint
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fenceline.config.model_config import ModelConfig
from fenceline.config.rope_scaling import parse_rope
from fenceline.layers.embedding import VocabParallelEmbedding
from fenceline.layers.kernels.torch_kernels import TorchLayerKernels
from fenceline.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from fenceline.layers.norm import RMSNorm
from fenceline.layers.rotary import RotaryEmbedding, apply_rotary, rotary_angles
from fenceline.layers.shard import Shard
from fenceline.layers.weight_slot import WeightSlots
from fenceline.models.decoder import CausalLM, DecoderLayer
from fenceline.models.loader import load_model
from fenceline.models.weights import fill_slots

F32 = torch.float32
HALVES = [Shard(0, 2), Shard(1, 2)]


def random_weights(slots: WeightSlots) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(slot.full_shape, generator=generator) for name, slot in slots.items()}


def filled(layers: Sequence[nn.Module], weights: dict[str, torch.Tensor]) -> list[nn.Module]:
    """``layers`` with the same checkpoint in each; every weight must be taken by every shard."""
    for layer in layers:
        fill_slots(layer.weight_slots("x."), weights.items())  # type: ignore[operator]
    return list(layers)


def product(layer: ColumnParallelLinear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The layer's parts of its product with ``x``."""
    return nn.functional.linear(x, layer.weight, layer.bias).split(layer.sizes, dim=-1)


@pytest.mark.parametrize("bias", [False, True])
def test_merged_column_shards_concatenate(bias: bool) -> None:
    def make(shard: Shard) -> MergedColumnParallelLinear:
        return MergedColumnParallelLinear(10, {"gate_proj": 12, "up_proj": 6}, bias, shard, F32)

    weights = random_weights(make(Shard()).weight_slots("x."))
    whole, *halves = filled([make(Shard()), *map(make, HALVES)], weights)
    x = torch.randn(5, 10)
    for name, part, split in zip(
        ("gate_proj", "up_proj"),
        product(whole, x),
        zip(*(product(h, x) for h in halves), strict=True),
        strict=True,
    ):
        expected = nn.functional.linear(x, weights[f"x.{name}.weight"], weights.get(f"x.{name}.bias"))
        torch.testing.assert_close(part, expected)
        torch.testing.assert_close(torch.cat(split, dim=-1), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_row_shards_sum(bias: bool) -> None:
    def make(shard: Shard) -> RowParallelLinear:
        return RowParallelLinear("o_proj", 12, 7, bias, shard, F32)

    weights = random_weights(make(Shard()).weight_slots("x."))
    whole, *halves = filled([make(Shard()), *map(make, HALVES)], weights)
    x = torch.randn(5, 12)
    expected = nn.functional.linear(x, weights["x.o_proj.weight"], weights.get("x.o_proj.bias"))
    kernels = TorchLayerKernels()

    def add(layer: RowParallelLinear, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear_add(residual, x, layer.weight, layer.own_bias)

    torch.testing.assert_close(add(whole, torch.ones(5, 7), x), expected + 1)
    total = torch.zeros(5, 7)
    for half, part in zip(halves, x.chunk(2, -1), strict=True):
        add(half, total, part)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(2, 2), (1, 2), (4, 2), (2, 4)])
def test_qkv_shards_hold_their_heads(num_kv_heads: int, size: int) -> None:
    num_heads, head_dim = 8, 4

    def make(shard: Shard) -> QKVParallelLinear:
        return QKVParallelLinear(10, num_heads, num_kv_heads, head_dim, True, shard, F32)

    shards = [Shard(rank, size) for rank in range(size)]
    weights = random_weights(make(Shard()).weight_slots("x."))
    whole, *parts = filled([make(Shard()), *map(make, shards)], weights)
    x = torch.randn(3, 10)
    q, k, v = (y.unflatten(-1, (-1, head_dim)) for y in product(whole, x))
    group = num_heads // num_kv_heads
    for rank, part in enumerate(parts):
        assert part.num_heads == num_heads // size
        assert part.num_kv_heads == max(num_kv_heads // size, 1)
        ours = [y.unflatten(-1, (-1, head_dim)) for y in product(part, x)]
        heads = range(rank * part.num_heads, (rank + 1) * part.num_heads)
        torch.testing.assert_close(ours[0], q[:, list(heads)])
        for local, head in enumerate(heads):  # each query head meets the key/value head it belongs to
            local_kv = local // (part.num_heads // part.num_kv_heads)
            torch.testing.assert_close(ours[1][:, local_kv], k[:, head // group])
            torch.testing.assert_close(ours[2][:, local_kv], v[:, head // group])


@pytest.mark.parametrize(("vocab_size", "size"), [(10, 2), (11, 2), (5, 4), (2, 4)])
def test_vocabulary_shards_sum_and_concatenate(vocab_size: int, size: int) -> None:
    table = torch.randn(vocab_size, 6)
    shards = [VocabParallelEmbedding(vocab_size, 6, Shard(rank, size), F32) for rank in range(size)]
    for shard in shards:
        shard.weight_slot().load("embed", table)
    ids = torch.arange(vocab_size).flip(0)
    torch.testing.assert_close(sum(shard(ids) for shard in shards), table[ids])
    hidden = torch.randn(3, 6)
    logits = torch.cat([hidden @ shard.weight.T for shard in shards], dim=-1)
    torch.testing.assert_close(logits[:, :vocab_size], hidden @ table.T)
    assert logits[:, vocab_size:].count_nonzero() == 0


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="up_proj output features 7 cannot be split over 2 ranks"):
        MergedColumnParallelLinear(4, {"gate_proj": 8, "up_proj": 7}, False, Shard(0, 2), F32)
    with pytest.raises(ValueError, match="attention heads 6"):
        QKVParallelLinear(4, 6, 2, 4, False, Shard(0, 4), F32)
    with pytest.raises(ValueError, match="multiple of 4"):
        QKVParallelLinear(4, 12, 4, 4, False, Shard(0, 6), F32)
    with pytest.raises(AssertionError):
        Shard(2, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
        0, 1
    )


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen2", "qwen3"])
def test_a_decoder_layer_of_two_ranks_sums_to_the_whole(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    config = ModelConfig.from_dir(str(tmp_path))

    def load(shard: Shard) -> CausalLM:
        return load_model(config, "auto", torch.device("cpu"), shard, 0, progress=False)

    models = [load(shard) for shard in (Shard(), *HALVES)]
    x = torch.randn(9, config.hidden_size)
    kernels = TorchLayerKernels()

    def attention_and_mlp(model: CausalLM) -> tuple[torch.Tensor, torch.Tensor]:
        layer = model.layers[1]
        assert isinstance(layer, DecoderLayer)
        attended = attend(*rotated(model, layer, x, kernels))
        p = layer.params
        added = kernels.linear_add(torch.zeros_like(x), attended.flatten(1), p.o, p.o_bias)
        h = kernels.norm_gate_up(x, p.mlp_norm, p.eps, p.gate_up, p.gate_up_bias)
        return added, kernels.linear_add(torch.zeros_like(x), h, p.down, p.down_bias)

    whole, *halves = [attention_and_mlp(model) for model in models]
    for expected, first, second in zip(whole, *halves, strict=True):
        torch.testing.assert_close(first + second, expected, atol=1e-5, rtol=1e-5)


def rotated(
    model: CausalLM, layer: DecoderLayer, x: torch.Tensor, kernels: TorchLayerKernels
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of tokens at positions 0 .. len(x) - 1; keys and values also go to a pool, and must agree with it."""
    qkv = layer.before_attention(x, kernels)
    attn, positions = layer.self_attn, torch.arange(len(x))
    heads = attn.heads
    k_cache = torch.zeros(len(x) + 1, heads.num_kv_heads, heads.head_dim)
    v_cache = torch.zeros_like(k_cache)
    kernels.rotate_and_store(
        qkv, heads, attn.norms, model.rotary.table, positions, k_cache, v_cache, positions + 1
    )
    q, k, v = heads.split(qkv)
    assert torch.equal(k_cache[1:], k)
    assert torch.equal(v_cache[1:], v)
    return q, k, v


def test_the_pieces_of_a_layer_change_the_residual_stream_alone(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    model = load_model(
        ModelConfig.from_dir(str(tmp_path)), "auto", torch.device("cpu"), Shard(), 0, progress=False
    )
    layer, kernels = model.layers[0], TorchLayerKernels()
    assert isinstance(layer, DecoderLayer)
    x = torch.randn(4, 48)
    attended = attend(*rotated(model, layer, x, kernels))
    before = [x.clone(), attended.clone()]
    residual = x.clone()
    result = layer.after_attention(residual, attended, kernels)
    assert result is residual
    assert torch.equal(x, before[0])
    assert torch.equal(attended, before[1])
    assert torch.equal(layer.after_attention(x.clone(), attended, kernels), result)


ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3.1": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_table_equals_transformers_at_far_positions(name: str) -> None:
    hf = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters=dict(ROPES[name]),
    )
    positions = torch.tensor([0, 1, 77, 8191, 8192, 32769, 131071])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    theta, scaling = parse_rope({"rope_parameters": ROPES[name]}, 131072)
    ours_cos, ours_sin = rotary_angles(RotaryEmbedding(128, 131072, theta, scaling).table, positions)
    torch.testing.assert_close(ours_cos[:, 0], cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours_sin[:, 0], sin[0, :, :64], atol=1e-6, rtol=0)


def test_rotation_keeps_half_precision_results_close_to_float32() -> None:
    x = torch.randn(6, 3, 32)
    cos, sin = rotary_angles(RotaryEmbedding(32, 64, 1e4).table, torch.tensor([0, 1, 5, 20, 40, 63]))
    exact = apply_rotary(x.bfloat16().float(), cos, sin)
    rotated = apply_rotary(x.bfloat16(), cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, exact.bfloat16())
    torch.testing.assert_close(exact.norm(dim=-1), x.bfloat16().float().norm(dim=-1))


def test_rms_norm_takes_statistics_in_float32() -> None:
    norm = RMSNorm(64, 1e-6, torch.bfloat16)
    norm.weight.fill_(2.0)
    x = (torch.randn(5, 64) * 300).bfloat16()
    expected = 2 * x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = TorchLayerKernels().rms_norm(x, norm.weight, norm.eps)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), expected, atol=0, rtol=2**-8)
