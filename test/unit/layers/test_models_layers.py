"""Layers: shards add up to the whole, a forward in pieces equals the whole one, rotary tables equal transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import transformers
from model_parity import CHECKPOINTS, SIZES, PagedModel, save_checkpoint
from ranks import Ranks
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fenceline.config.kv_layout import KVLayout
from fenceline.config.model_config import ModelConfig, parse_rope
from fenceline.layers.context import LayerContext, Shard, torch_context
from fenceline.layers.decoder_layer import LayerSite, SelfAttention
from fenceline.layers.forward_batch import AttentionPlan, ForwardBatch, ForwardMode, PieceBuffers
from fenceline.layers.kernels.base import apply_rotary, rotary_angles
from fenceline.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from fenceline.layers.rotary import RotaryEmbedding, inverse_frequencies
from fenceline.layers.weight import WeightSlots, fill_slots
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.models.decoder import CausalLM
from fenceline.models.loader import load_model

F32 = torch.float32
HALVES = [Shard(0, 2), Shard(1, 2)]


def context_of(shard: Shard) -> LayerContext:
    return torch_context(shard, F32)


Layer = TypeVar("Layer", ColumnParallelLinear, RowParallelLinear)


def random_weights(slots: WeightSlots) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(slot.full_shape, generator=generator) for name, slot in slots.items()}


def filled(layers: Sequence[Layer], weights: dict[str, torch.Tensor]) -> list[Layer]:
    """``layers`` with the same checkpoint in each; every weight must be taken by every shard."""
    for layer in layers:
        fill_slots(layer.weight_slots("x."), weights.items())
    return list(layers)


def product(layer: ColumnParallelLinear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The layer's parts of its product with ``x``."""
    return layer.forward(x).split(layer.sizes, dim=-1)


@pytest.mark.parametrize("bias", [False, True])
def test_merged_column_shards_concatenate(bias: bool) -> None:
    def make(shard: Shard) -> MergedColumnParallelLinear:
        return MergedColumnParallelLinear(10, {"gate_proj": 12, "up_proj": 6}, bias, context_of(shard))

    weights = random_weights(make(Shard()).weight_slots("x."))
    whole, *halves = filled([make(Shard()), *map(make, HALVES)], weights)
    x = torch.randn(5, 10)
    for name, part, split in zip(
        ("gate_proj", "up_proj"), product(whole, x), zip(*(product(h, x) for h in halves), strict=True), strict=True
    ):
        expected = nn.functional.linear(x, weights[f"x.{name}.weight"], weights.get(f"x.{name}.bias"))
        torch.testing.assert_close(part, expected)
        torch.testing.assert_close(torch.cat(split, dim=-1), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_row_shards_sum(bias: bool) -> None:
    def make(shard: Shard) -> RowParallelLinear:
        return RowParallelLinear("o_proj", 12, 7, bias, context_of(shard))

    weights = random_weights(make(Shard()).weight_slots("x."))
    whole, *halves = filled([make(Shard()), *map(make, HALVES)], weights)
    x = torch.randn(5, 12)
    expected = nn.functional.linear(x, weights["x.o_proj.weight"], weights.get("x.o_proj.bias"))
    torch.testing.assert_close(whole.forward(x), expected)
    ranks = Ranks(2)
    for half, shard in zip(halves, ranks.shards, strict=True):
        half.shard = shard
    parts = x.chunk(2, -1)
    for sums in ranks.run(lambda rank: halves[rank].forward(parts[rank])):
        torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(2, 2), (1, 2), (4, 2), (2, 4)])
def test_qkv_shards_hold_their_heads(num_kv_heads: int, size: int) -> None:
    num_heads, head_dim = 8, 4

    def make(shard: Shard) -> QKVParallelLinear:
        return QKVParallelLinear(10, num_heads, num_kv_heads, head_dim, True, context_of(shard))

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
    ranks = Ranks(size)
    parts = [VocabParallelEmbedding(vocab_size, 6, context_of(shard)) for shard in ranks.shards]
    for part in parts:
        part.weight_slots("embed")["embed.weight"].load("embed", table)
    ids = torch.arange(vocab_size).flip(0)
    for embedded in ranks.run(lambda rank: parts[rank].forward(ids)):
        torch.testing.assert_close(embedded, table[ids])
    hidden, norm = torch.randn(3, 6), context_of(Shard()).norm(6, 1e-6)
    norm.weight.fill_(1.0)
    out, expected = torch.empty(3, -(-vocab_size // size)), norm.forward(hidden) @ table.T

    def logits(rank: int) -> torch.Tensor:
        own = parts[rank].own_logits(hidden, norm, out if rank == 0 else None)
        return parts[rank].whole_logits(own)

    for whole in ranks.run(logits):
        torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(out, expected[:, : out.shape[1]])


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="up_proj output features 7 cannot be split over 2 ranks"):
        MergedColumnParallelLinear(4, {"gate_proj": 8, "up_proj": 7}, False, context_of(Shard(0, 2)))
    with pytest.raises(ValueError, match="attention heads 6"):
        QKVParallelLinear(4, 6, 2, 4, False, context_of(Shard(0, 4)))
    with pytest.raises(ValueError, match="multiple of 4"):
        QKVParallelLinear(4, 12, 4, 4, False, context_of(Shard(0, 6)))
    with pytest.raises(AssertionError):
        Shard(2, 2)


PROMPTS = [torch.arange(3, 40) % 50, torch.tensor([7]), torch.arange(20, 29)]


def run_steps(model: PagedModel) -> list[torch.Tensor]:
    """Logits of a ragged prefill, of chunks that go on with it, and of a decode step."""
    whole = [(row, prompt, 0, max(len(prompt) - 4, 1)) for row, prompt in enumerate(PROMPTS)]
    rest = [(0, PROMPTS[0], 33, 36), (2, PROMPTS[2], 5, 8)]
    last = [(0, PROMPTS[0], 36, 37), (2, PROMPTS[2], 8, 9)]
    return [
        *model.step(whole, ForwardMode.EXTEND),
        *model.step(rest, ForwardMode.EXTEND),
        *model.step(last, ForwardMode.DECODE),
    ]


# Heads and features that 4 divides.
FOURFOLD: dict[str, object] = {"num_attention_heads": 8, "intermediate_size": 72, "head_dim": 12}


# Of each family the last, and those that ranks divide otherwise; on four ranks one of each kind of layer.
RANKS = [(name, 2) for name in {family: name for name, (family, _) in CHECKPOINTS.items()}.values()]
RANKS += [(name, 2) for name in ("llama-tied-biased", "deepseek-v2", "deepseek-v3", "qwen3-moe-mixed", "gemma3")]
RANKS += [(name, 4) for name in ("qwen3", "gpt-oss", "mixtral", "deepseek-v2", "qwen3-next", "nemotron-h-moe")]
RANKS = list(dict.fromkeys(RANKS))


@pytest.mark.parametrize(("name", "size"), RANKS)
def test_ranks_together_compute_what_one_does(name: str, size: int, tmp_path: Path) -> None:
    others = FOURFOLD if size == 4 else {}
    if CHECKPOINTS[name][1].get("num_key_value_heads") == SIZES["num_attention_heads"]:
        others = others | {"num_key_value_heads": others.get("num_attention_heads", SIZES["num_attention_heads"])}
    save_checkpoint(name, tmp_path, others)
    expected = run_steps(PagedModel(tmp_path, 16, "cpu"))
    ranks = Ranks(size)
    models = [PagedModel(tmp_path, 16, "cpu", context=context_of(shard)) for shard in ranks.shards]
    for logits in ranks.run(lambda rank: run_steps(models[rank])):
        for ours, reference in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "number", "size", "ep_size", "spread"),
    [
        ("qwen3-moe-mixed", "num_experts", 2, 2, "as they fall"),
        ("qwen3-moe-mixed", "num_experts", 4, 4, "all to the same"),
        ("qwen2-moe", "num_experts", 4, 2, "all to the same"),
        ("glm4-moe", "n_routed_experts", 4, 2, "as they fall"),
        ("gpt-oss", "num_local_experts", 4, 2, "as they fall"),
        ("nemotron-h-moe", "n_routed_experts", 4, 2, "as they fall"),
    ],
)
def test_experts_split_over_ranks_compute_what_one_rank_does(
    name: str, number: str, size: int, ep_size: int, spread: str, tmp_path: Path
) -> None:
    """A router without weights sends all tokens to the same experts: one rank has all the work, others have none."""
    save_checkpoint(name, tmp_path, FOURFOLD | {number: 8} if size == 4 else {number: 8})
    for path in tmp_path.glob("*.safetensors") if spread == "all to the same" else ():
        tensors = load_file(path)
        for key in (key for key in tensors if key.endswith((".gate.weight", ".router.weight"))):
            tensors[key].zero_()
        save_file(tensors, path, metadata={"format": "pt"})
    expected = run_steps(PagedModel(tmp_path, 16, "cpu"))
    ranks = Ranks(size)
    shards = [replace(shard, ep_size=ep_size) for shard in ranks.shards]
    models = [PagedModel(tmp_path, 16, "cpu", context=context_of(shard)) for shard in shards]
    for logits in ranks.run(lambda rank: run_steps(models[rank])):
        for ours, reference in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)
    whole = PagedModel(tmp_path, 16, "cpu").model.nbytes
    assert max(paged.model.nbytes for paged in models) < whole


def test_ranks_hold_parts_of_the_same_dummy_weights(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    config = ModelConfig.from_dir(str(tmp_path))

    def slots(shard: Shard) -> WeightSlots:
        return load_model(config, "dummy", torch.device("cpu"), context_of(shard), 5, False).weight_slots()

    whole = slots(Shard())
    for shard in HALVES:
        for name, slot in slots(shard).items():
            part = whole[name].dest.narrow(slot.dim, slot.start, slot.dest.shape[slot.dim])
            assert torch.equal(slot.dest, part), name


@pytest.mark.parametrize(
    "name",
    ["llama-tied-biased", "qwen3", "qwen2-moe", "qwen3-moe-mixed", "qwen3-next", "qwen3.5", "kimi-linear", "lfm2"]
    + ["nemotron-h-moe"],
)
def test_a_forward_in_pieces_equals_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(name, tmp_path)
    expected = run_steps(PagedModel(tmp_path, 16, "cpu"))
    paged = PagedModel(tmp_path, 16, "cpu")

    def in_pieces(model: CausalLM, batch: ForwardBatch) -> torch.Tensor:
        fields = model.arena_fields()
        tensors = {f.name: torch.full((batch.num_tokens, *f.shape), torch.nan) for f in fields}
        batch = replace(batch, buffers=PieceBuffers(tensors))
        for index in range(model.num_layers):
            model.run_piece(index, batch)
            model.attend(index, batch)
        model.run_piece(model.num_layers, batch)
        return tensors["hidden"]

    monkeypatch.setattr(CausalLM, "hidden_states", in_pieces)
    for ours, reference in zip(run_steps(paged), expected, strict=True):
        assert torch.equal(ours, reference)


def test_layers_of_one_width_may_lay_out_their_heads_differently(tmp_path: Path) -> None:
    """They share the buffer that pieces hand on, not how it is looked at."""
    save_checkpoint("qwen3", tmp_path)
    config = ModelConfig.from_dir(str(tmp_path))
    size = 6 * config.head_dim
    rotary = RotaryEmbedding(config.head_dim, 16, config.rope_theta)
    layers = [
        SelfAttention(LayerSite(replace(config, num_heads=num, num_kv_heads=num_kv), context_of(Shard()), rotary, 0, 0))
        for num, num_kv in ((2, 2), (4, 1))
    ]
    fields = [field for layer in layers for field in layer.arena_fields()]
    buffers = PieceBuffers({field.name: torch.zeros(3, *field.shape) for field in fields})
    assert sum(name == f"qkv_{size}" for name in buffers.tensors) == 1
    seen: list[tuple[int, int]] = []

    class Attention(AttentionPlan):
        def forward(
            self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            seen.append((q.shape[1], k.shape[1]))
            return torch.ones_like(q)

    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=torch.zeros(3, dtype=torch.int64),
        positions=(torch.arange(3),),
        out_slots=torch.arange(3),
        logits_index=None,
        attn=Attention(),
        kv_pool=KVPool(2, KVLayout.uniform(16, 1, 1, config.head_dim, "float32"), torch.device("cpu")),
        buffers=buffers,
    )
    for layer in layers:
        layer.attend_between_pieces(batch)
    assert seen == [(2, 2), (4, 1)]
    assert all(buffers.tensors[f"attended_{n * config.head_dim}"].all() for n in (2, 4))


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
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_table_equals_transformers_at_far_positions(name: str) -> None:
    hf = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=dict(ROPES[name])
    )
    positions = torch.tensor([0, 1, 77, 8191, 8192, 32769, 131071])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    theta, scaling = parse_rope({"rope_parameters": ROPES[name]}, 131072)
    ours_cos, ours_sin = rotary_angles(RotaryEmbedding(32, 131072, theta, scaling).table, positions)
    torch.testing.assert_close(ours_cos[:, 0], cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours_sin[:, 0], sin[0, :, :16], atol=1e-6, rtol=0)


def test_attn_factor_of_deepseek_r1_0528_cancels_temperature() -> None:
    """vLLM's and SGLang's attn_factor multiplies the factor of the paper, which transformers uses without it."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    _, scaling = parse_rope({"rope_scaling": {**rope, "attn_factor": 0.8782488562869419}}, 131072)
    assert inverse_frequencies(128, 1e6, scaling)[1] == pytest.approx(1.0, abs=1e-12)
    _, stated = parse_rope({"rope_scaling": {**rope, "attn_factor": 0.5, "attention_factor": 1.2}}, 131072)
    assert inverse_frequencies(128, 1e6, stated)[1] == 1.2


def test_rotation_keeps_half_precision_results_close_to_float32() -> None:
    x = torch.randn(6, 3, 32)
    cos, sin = rotary_angles(RotaryEmbedding(32, 64, 1e4).table, torch.tensor([0, 1, 5, 20, 40, 63]))
    exact = apply_rotary(x.bfloat16().float(), cos, sin)
    rotated = apply_rotary(x.bfloat16(), cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, exact.bfloat16())
    torch.testing.assert_close(exact.norm(dim=-1), x.bfloat16().float().norm(dim=-1))


def test_rms_norm_takes_statistics_in_float32() -> None:
    norm = torch_context(Shard(), torch.bfloat16).norm(64, 1e-6)
    norm.weight.fill_(2.0)
    x = (torch.randn(5, 64) * 300).bfloat16()
    expected = 2 * x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = norm.forward(x)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), expected, atol=0, rtol=2**-8)
