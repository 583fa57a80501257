"""Triton's layer, prologue and sampling kernels on the CPU: in Triton's interpreter, against torch's operators, and
compiled for GPUs that are not there.

Run as a script this file is the checks themselves: the interpreter must be chosen before triton is imported and must
not leak into other tests. Under pytest it starts that script once and reports each check.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton_interpreter import interpreted_logarithms, outcomes_of, print_outcomes, set_up_interpreter

CHECKS = (
    "rms_norm",
    "silu_and_mul",
    "rotate_and_store",
    "decode_prologue",
    "noise",
    "rotate_and_store_in_fp8",
    "store_latent",
    "store_index",
    "by_head",
    "sample_greedy",
    "sample_from_parts",
    "sample_masks",
    "sample_noise",
    "sample_thresholds",
    "sample_bad_logits",
)

PROGRAMMATIC = (
    "_rms_norm_kernel",
    "_silu_and_mul_kernel",
    "_rotate_and_store_kernel",
    "_store_latent_kernel",
    "_store_index_kernel",
    "_by_head_kernel",
    "_embed_and_join_kernel",
    "_one_row_kernel",
    "_rows_kernel",
    "_quantize_rows_kernel",
    "_route_kernel",
)

results = outcomes_of(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability: int) -> None:
    """To machine code, with dependent launch from sm_90 on where a kernel has it; every wide row is read by 16-byte
    loads. No kernel converts both to E4M3 and back (see ``rotate_store.rounded``). For sm_90 in all variants, for the
    others the last of each."""
    pytest.importorskip("triton", reason="Triton is not installed")
    pdl = capability >= 90
    for name, ptx in compiled(capability, pdl):
        num = int(pdl and name in PROGRAMMATIC)
        waits, launches = (ptx.count(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
        assert waits == launches == num, name
        if name in ("_rms_norm_kernel", "_silu_and_mul_kernel", "_rotate_and_store_kernel", "_piece_kernel"):
            assert "ld.global.v4.b32" in ptx, name
        assert not ("e4m3x2.f32" in ptx and "f16x2.e4m3x2" in ptx), name


def compiled(capability: int, pdl: bool) -> Iterator[tuple[str, str]]:
    """Each kernel's name and PTX, for the shapes of an 8B model."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fenceline.layers.kernels.triton import (
        activation,
        quantized_gemm,
        rms_norm,
        rotate_store,
        routing,
        skinny_gemm,
        store_index,
        store_latent,
    )
    from fenceline.layers.kernels.triton import by_head as by_head_triton
    from fenceline.layers.kernels.triton import decode_prologue as decode_prologue_triton
    from fenceline.layers.kernels.triton import embed_join as embed_join_triton
    from fenceline.layers.kernels.triton import sample as sample_triton

    latents = {
        "NUM_HEADS": 128,
        "QUERY_DIM": 192,
        "RANK": 512,
        "BLOCK_RANK": 512,
        "HALF": 32,
        "BLOCK_HALF": 32,
        "BLOCK_HEADS": 16,
        "QUERY_STRIDE": 128 * 192,
        "ROW_STRIDE": 1536 + 576,
        "ROUNDS": False,
    }
    index = {"HEADS": 64, "DIM": 128, "DIM_PAD": 128, "HALF": 32, "BLOCK_HEADS": 16, "ROUNDS": False}
    by_head = {"N": 512, "K": 192, "BLOCK_N": 64, "BLOCK_K": 256, "ROWS": 64, "X_ROW": 20 * 256, "X_HEAD": 256}
    by_head |= {"WEIGHT_HEAD": 448 * 512, "WEIGHT_N": 1, "WEIGHT_K": 512, "OUT_ROW": 21 * 576, "OUT_HEAD": 576}
    heads = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HALF": 64,
        "BLOCK_HALF": 64,
        "BLOCK_HEADS": 4,
        "HAS_NORMS": True,
        "ROUNDS": False,
    }
    joined = {"EMBEDDING": 4096, "HIDDEN": 4096, "BLOCK": 4096, "HAS_NORMS": True}
    of_draft = dict.fromkeys(("table", "hidden", "embeddings_norm", "hidden_norm", "out"), "*bf16")
    unused = {"thresholds": None, "maxima": None, "ROWS_EACH": 1, "ROWS_EACH_MASK": 1}
    product = {"K": 4096, "HAS_NORM": True, "HAS_BIAS": True, "ADD": False, "GATED": True, "BLOCK_N": 16}
    one = {**product, "INT4": True, "GROUP": 128, "BLOCK_K": 512}
    rows = {"HAS_BIAS": True, "ADD": False, "GATED": True, "BLOCK_N": 64, "BLOCK_K": 128, "EVEN_K": True, "ROWS": 32}
    rows |= {"SEGMENTS": 0, "PROGRAMS": 1}
    scaled = {**rows, "GROUP": 0, "SCALED": True}
    dense = {**rows, "GROUP": 0, "SCALED": False, "x_scales_ptr": None, "scales_ptr": None}
    routes = {
        **routing._route_variant(160, 6, 1, (8, 3, 2), True, True, False, False, pdl).constants,  # groups of 20
        **dict.fromkeys(("order", "ends"), None),
    }
    rounded = {"HAS_NORM": True, "HAS_SCALE": False, "GROUPS": 32, "SIZE": 128, "scale_ptr": None}
    in_fp8 = (
        []
        if capability < 89
        else [
            (rotate_store._rotate_and_store_kernel, 1, heads | {"ROUNDS": True}, IN_FP8),
            (store_latent._store_latent_kernel, 4, latents | {"ROUNDS": True}, IN_FP8),
            (store_index._store_index_kernel, 4, index | {"ROUNDS": True}, OF_INDEX | IN_FP8),
            (quantized_gemm._one_row_kernel, 4, one | {"INT4": False, "zeros_ptr": None}, IN_FP8),
            (skinny_gemm._rows_kernel, 4, scaled, SCALED),
            (skinny_gemm._rows_kernel, 4, scaled | {"GROUP": 128}, SCALED),
            (quantized_gemm._quantize_rows_kernel, 8, rounded, IN_FP8),
        ]
    )
    cases: list[tuple[Any, int, dict[str, Any], dict[str, str]]] = [
        (rms_norm._rms_norm_kernel, 16, {"SIZE": 4096, "STRIDE": 4096, "BLOCK": 4096, "ROWS": 1}, {}),
        (embed_join_triton._embed_and_join_kernel, 16, joined, of_draft),
        *(
            (activation._silu_and_mul_kernel, 4, {"SIZE": 12_288, "BLOCK": 1024, "ACTIVATION": number}, {})
            for number in range(5)
        ),
        (rotate_store._rotate_and_store_kernel, 1, heads, {}),
        (store_latent._store_latent_kernel, 4, latents, {}),
        (store_index._store_index_kernel, 4, index | {"scales": None}, OF_INDEX),
        (by_head_triton._by_head_kernel, 4, by_head, {}),
        (quantized_gemm._one_row_kernel, 4, one, {}),
        (skinny_gemm._rows_kernel, 4, dense, {}),
        (decode_prologue_triton._decode_prologue_kernel, 1, {"PAGE_SIZE": 64, "BLOCK": 32}, {}),
        (sample_triton._piece_kernel, 4, {"STRIDE": 151_936, "VOCAB": 151_936, "BLOCK": 1024, **unused}, {}),
        (sample_triton._combine_kernel, 4, {"PIECES": 149, "BLOCK": 256}, {}),
        *((routing._route_kernel, 4, routes | {"ROWS": rows}, ROUTES) for rows in (1, 32)),
        *in_fp8,
    ]
    if capability != 90:
        cases = list({case[0]: case for case in cases}.values())
    for kernel, warps, constants, types in cases:
        names, fixed = kernel.arg_names, constants | ({"PDL": pdl} if "PDL" in kernel.arg_names else {})
        signature = {name: "constexpr" if name in fixed else (ARGUMENTS | types).get(name, "*i64") for name in names}
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if "*" in t}
        values = {(names.index(name),): value for name, value in fixed.items()}
        source = ASTSource(kernel, signature, values, aligned)
        options = {"num_warps": warps, "launch_pdl": fixed.get("PDL", False)}
        asm = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
        assert asm["cubin"]
        yield kernel.__name__, asm["ptx"]


IN_FP8 = dict.fromkeys(("k_cache", "v_cache", "cache_rows", "data_ptr", "numbers_ptr"), "*fp8e4nv")
SCALED = dict.fromkeys(("x_ptr", "weight_ptr"), "*fp8e4nv")
ROUTES = {
    **dict.fromkeys(("logits", "correction", "weights"), "*fp32"),
    **dict.fromkeys(("num_tokens", "num_sink_slots"), "i32"),
    "counts": "*i32",
    "scaling": "fp32",
}
OF_INDEX = dict.fromkeys(("norm_weight", "norm_bias", "weights", "out_weights", "scales"), "*fp32")
OF_INDEX |= {"key": "*bf16", "scale": "fp32"}
# Types of the kernels' arguments that are no int64 tensors.
ARGUMENTS = {
    **dict.fromkeys(("x_ptr", "norm_ptr", "bias_ptr", "out_ptr", "weight_ptr"), "*bf16"),
    **dict.fromkeys(("data_ptr", "zeros_ptr"), "*u8"),
    **dict.fromkeys(("scales_ptr", "x_scales_ptr"), "*fp32"),
    **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
    **dict.fromkeys(("num_rows", "num_out", "k_size", "num_groups", "row_stride", "group_stride"), "i32"),
    **dict.fromkeys(("x", "weight", "out", "gate_up", "qkv", "logits"), "*bf16"),
    **dict.fromkeys(("q_weight", "k_weight", "k_cache", "v_cache"), "*bf16"),
    **dict.fromkeys(("queries", "row", "norm_weight", "cache_rows"), "*bf16"),
    **dict.fromkeys(("table", "temperatures", "noise_scales", "best_scores", "largest"), "*fp32"),
    **dict.fromkeys(("page_table", "best_ids", "masks"), "*i32"),
    **dict.fromkeys(("num_rows", "size", "max_pages", "ahead"), "i32"),
    "eps": "fp32",
}


# --- the checks, run in the script -------------------------------------------------------------------


def close(actual: torch.Tensor, expected: torch.Tensor, ulps: float = 2.0) -> None:
    """Equal to a few units of the last place of the type, relative or at magnitude one."""
    tolerance = ulps * torch.finfo(expected.dtype).eps if expected.dtype != torch.float32 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_rms_norm() -> None:
    from fenceline.layers.kernels.base import LayerKernels
    from fenceline.layers.kernels.triton.rms_norm import rms_norm

    for dtype in DTYPES:
        for rows, size in ((1, 64), (37, 64), (3, 80), (1, 1024), (2, 2560), (0, 64)):
            x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
            for scale in (weight, weight.float()):
                close(rms_norm(x, scale, 1e-6), LayerKernels().rms_norm(x, scale, 1e-6))


def check_silu_and_mul() -> None:
    from fenceline.layers.kernels.base import ACTIVATIONS, LayerKernels
    from fenceline.layers.kernels.triton.activation import silu_and_mul

    for dtype in DTYPES:
        for rows, size in ((1, 64), (5, 96), (2, 2752), (0, 64)):
            x = random(rows, 2 * size, dtype=dtype) * 4
            for name in ACTIVATIONS:
                expected = LayerKernels().activate(x.float(), name).to(dtype)
                close(silu_and_mul(x, activation=name), expected)


def check_rotate_and_store() -> None:
    from fenceline.layers.kernels.base import HeadLayout, LayerKernels, QKNorm
    from fenceline.layers.kernels.triton.rotate_store import rotate_and_store
    from fenceline.layers.rotary import RotaryEmbedding

    layouts = (HeadLayout(4, 2, 16), HeadLayout(3, 1, 80), HeadLayout(9, 3, 64), HeadLayout(2, 2, 256))
    for index, heads in enumerate(layouts):
        dtype = DTYPES[index % 3]
        dim, num_tokens, num_slots = heads.head_dim, (1, 5)[index % 2], 40
        table = RotaryEmbedding(dim, 64, 10_000.0).table
        weights = random(2, dim, dtype=dtype, seed=7)
        for norms in (None, QKNorm(weights[0], weights[1], 1e-6)):
            width = (heads.num_heads + 2 * heads.num_kv_heads) * dim
            qkv = random(num_tokens, width, dtype=dtype)
            caches = [random(num_slots, heads.num_kv_heads, dim, dtype=dtype, seed=s) for s in (2, 3)]
            positions = torch.arange(num_tokens) * 13
            slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(4))[:num_tokens]
            expected = [qkv.clone(), *(c.clone() for c in caches)]
            LayerKernels().rotate_and_store(
                expected[0], heads, norms, table, positions, expected[1], expected[2], slots
            )
            rotate_and_store(qkv, heads, norms, table, positions, caches[0], caches[1], slots)
            for actual, wanted in zip((qkv, *caches), expected, strict=True):
                close(actual, wanted, ulps=4.0)


def check_store_latent() -> None:
    """For rows of several families and of odd sizes, that lie in a wider product, in every type and rounded to FP8."""
    from fenceline.layers.kernels.base import LayerKernels
    from fenceline.layers.kernels.triton.store_latent import store_latent
    from fenceline.layers.rotary import RotaryEmbedding

    # Heads, features of a query in front of its rotated ones, rank, rotated features, others in front of the row.
    shapes = ((16, 128, 512, 64, 0), (20, 192, 512, 64, 24), (40, 64, 256, 32, 8), (3, 20, 33, 6, 1), (1, 0, 32, 16, 0))
    for index, (num_heads, plain, rank, rope, others) in enumerate(shapes):
        dtype, num_tokens, num_slots = DTYPES[index % 3], (3, 1)[index % 2], 40
        table, weight = RotaryEmbedding(rope, 64, 10_000.0).table, random(rank, dtype=dtype, seed=7)
        queries = random(num_tokens, num_heads, plain + rope, dtype=dtype)
        row = random(num_tokens, others + rank + rope, dtype=dtype, seed=1)[:, others:]
        positions = torch.arange(num_tokens) * 13
        slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(4))[:num_tokens]
        for kv_dtype in (dtype, torch.float8_e4m3fn):
            found, wanted = (
                [
                    random(num_tokens, num_heads + 1, rank + rope, dtype=dtype, seed=2),
                    random(num_slots, 1, rank + rope, dtype=dtype, seed=3).to(kv_dtype),
                ]
                for _ in range(2)
            )
            for store, (out, cache_rows) in ((store_latent, found), (LayerKernels().store_latent, wanted)):
                store(queries, row, weight, 1e-6, table, positions, out, cache_rows, slots)
            if kv_dtype == dtype:
                for actual, expected in zip(found, wanted, strict=True):
                    close(actual, expected, ulps=4.0)
                continue
            close(found[0][:, :-1], wanted[0][:, :-1], ulps=4.0)
            assert torch.equal(found[1][slots].to(dtype), found[0][:, -1:])
            # Norms that differ in their last bit may round to neighbours.
            assert (found[0][:, -1] == wanted[0][:, -1]).float().mean() > 0.98


def check_store_index() -> None:
    """For sizes of several families and odd ones, in every type and rounded to FP8 as the pool keeps it."""
    from fenceline.layers.kernels.base import LayerKernels
    from fenceline.layers.kernels.triton.store_index import store_index
    from fenceline.layers.rotary import RotaryEmbedding

    # Heads, features, rotated features, whether the pool is in FP8.
    for num_heads, dim, rope in ((64, 128, 64), (32, 128, 64), (17, 32, 16), (3, 28, 16), (1, 16, 16)):
        for dtype in DTYPES[:2] if dim & (dim - 1) else (*DTYPES[:2], torch.uint8):
            x_type = torch.float32 if dtype == torch.uint8 else dtype
            num_tokens, num_slots = 3, 9
            table = RotaryEmbedding(rope, 64, 10_000.0).table
            queries, key = (
                random(num_tokens, num_heads, dim, dtype=x_type),
                random(num_tokens, dim, dtype=x_type, seed=1),
            )
            f32 = {"dtype": torch.float32}
            norm, weights = (
                (random(dim, **f32, seed=2), random(dim, **f32, seed=3)),
                random(3, num_heads, **f32, seed=4),
            )
            slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(4))[:num_tokens]
            found, wanted = (
                [
                    torch.empty_like(queries),
                    torch.empty_like(weights),
                    torch.zeros(num_slots, 1, dim + 4 if dtype == torch.uint8 else dim, dtype=dtype),
                ]
                for _ in range(2)
            )
            for store, made in ((store_index, found), (LayerKernels().store_index, wanted)):
                positions = torch.arange(num_tokens) * 13
                store(queries, key, *norm, 1e-6, table, positions, weights, 0.4, *made, slots)
            if dtype != torch.uint8:
                for actual, expected in zip(found, wanted, strict=True):
                    close(actual, expected, ulps=8.0)
                continue
            close(found[1], wanted[1], ulps=32.0)
            for actual, expected in ((found[0], wanted[0]), (found[2][..., :-4], wanted[2][..., :-4])):
                assert (actual == expected).float().mean() > 0.99  # others round to neighbours
            assert not found[2][torch.ones(num_slots).bool().index_fill_(0, slots, False)].any()
            scales = [made[2][slots, 0, -4:].contiguous().view(torch.float32) for made in (found, wanted)]
            close(*scales, ulps=32.0)


def check_by_head() -> None:
    """Into and out of parts of wider rows, with matrices of every order, against torch in float64."""
    from fenceline.layers.kernels.triton.by_head import by_head

    for num_rows, num_heads, k, n in (
        (1, 3, 192, 512),
        (3, 2, 512, 256),
        (17, 5, 20, 32),
        (64, 1, 33, 24),
        (0, 2, 8, 8),
    ):
        for dtype in (torch.float32, torch.float16):
            x = random(num_rows, num_heads, k + 64, dtype=dtype)[..., :k]
            for shape in ((num_heads, k, n), (num_heads, n, k)):
                stored = random(*shape, dtype=dtype, seed=1) / k**0.5
                weight = stored if shape[1] == n else stored.transpose(1, 2)
                rows = torch.full((num_rows, num_heads + 1, n + 64), 7.0, dtype=dtype)
                by_head(x, weight, rows[:, :num_heads, :n])
                wanted = torch.einsum("thk,hnk->thn", x.double(), weight.double()).to(dtype)
                close(rows[:, :num_heads, :n], wanted, ulps=4.0)
                assert (rows[:, num_heads] == 7).all() and (rows[..., n:] == 7).all()


def check_rotate_and_store_in_fp8() -> None:
    from fenceline.layers.kernels.base import HeadLayout, KVScales, LayerKernels, QKNorm
    from fenceline.layers.kernels.triton.rotate_store import rotate_and_store
    from fenceline.layers.rotary import RotaryEmbedding

    heads, fp8, f32 = HeadLayout(4, 2, 16), torch.float8_e4m3fn, torch.float32
    table = RotaryEmbedding(16, 64, 10_000.0).table
    norms = QKNorm(random(16, dtype=f32, seed=7), random(16, dtype=f32, seed=8), 1e-6)
    qkv = random(5, 8 * 16, dtype=f32) * 8
    qkv[0, -16:] *= 1e6  # beyond the largest number
    caches = [random(40, 2, 16, dtype=f32, seed=s).to(fp8) for s in (2, 3)]
    expected = [qkv.clone(), *(c.clone() for c in caches)]
    positions, slots = torch.arange(5) * 13, torch.tensor([3, 9, 30, 31, 2])
    scales = KVScales(0.5, 2.0)
    LayerKernels().rotate_and_store(
        expected[0], heads, norms, table, positions, expected[1], expected[2], slots, scales
    )
    rotate_and_store(qkv, heads, norms, table, positions, caches[0], caches[1], slots, kv_scales=scales)
    close(qkv[:, : 4 * 16], expected[0][:, : 4 * 16], ulps=4.0)
    for actual, wanted in ((qkv[:, 4 * 16 :], expected[0][:, 4 * 16 :]), *zip(caches, expected[1:], strict=True)):
        assert (actual.float() == wanted.float()).float().mean() > 0.98
    assert torch.equal(caches[1].float()[slots].flatten(1), qkv[:, 6 * 16 :])

    # Each finite number of 16 bits, as values, which are not rotated.
    heads, table = HeadLayout(1, 1, 512), RotaryEmbedding(512, 128, 10_000.0).table
    values = torch.arange(1 << 16).to(torch.int16).view(torch.float16).nan_to_num(0).reshape(128, 512)
    qkv = torch.cat((torch.zeros(128, 1024, dtype=torch.float16), values), 1)
    k_cache, v_cache = (torch.zeros(128, 1, 512, dtype=fp8) for _ in range(2))
    every = torch.arange(128)
    rotate_and_store(qkv, heads, None, table, every, k_cache, v_cache, every)
    rounded = values.float().clamp(-448, 448).to(fp8)
    assert torch.equal(v_cache[:, 0].float(), rounded.float()) and torch.equal(qkv[:, 1024:].float(), rounded.float())


def check_decode_prologue() -> None:
    from fenceline.layers.kernels.triton import decode_prologue as decode_prologue_triton
    from fenceline.model_executor.decode_runner import decode_prologue

    for size, num_live, page_size in ((1, 1, 1), (8, 5, 16), (8, 0, 16), (200, 131, 64), (64, 64, 7)):
        generator = torch.Generator().manual_seed(size)
        num_rows = 220
        rows = torch.randperm(num_rows - 1, generator=generator)[:size] + 1
        rows[num_live:] = 0
        plan_seq_lens = torch.randint(1, 400, (size,), generator=generator)
        num_steps = torch.randint(0, 9, (size,), generator=generator)
        shape = num_rows, 410 // page_size + 1
        page_table = torch.randint(0, 1 << 30, shape, generator=generator, dtype=torch.int32)
        page_table[0] = 0
        last_tokens = torch.randint(0, 1000, (num_rows,), generator=generator)
        plan = rows, plan_seq_lens, num_steps
        state = page_table, last_tokens
        expected, actual = ([torch.full((size,), -7) for _ in range(4)] for _ in range(2))
        decode_prologue(*plan, *state, page_size, *expected)
        decode_prologue_triton.launch(plan, state, page_size, (actual[0], actual[1], actual[2], actual[3]))
        assert all(map(torch.equal, actual, expected)), (size, num_live)
        for b in range(size):  # in plain Python, once
            length = int(plan_seq_lens[b] + num_steps[b]) if b < num_live else 1
            column, offset = divmod(length - 1, page_size)
            slot = int(page_table[rows[b], column]) * page_size + offset
            assert [int(t[b]) for t in actual] == [length, length - 1, slot, int(last_tokens[rows[b]])]


def check_noise() -> None:
    from gumbel_probe import kernel_noise

    from fenceline.sampling.gumbel import GumbelSampler, _row_keys, mix_seeds

    seed_keys = torch.from_numpy(mix_seeds([0, -1, 2**63 - 1, -(2**63), *range(5, 20)]))
    positions = torch.arange(len(seed_keys)) * 1001
    sampler = GumbelSampler(1024, torch.device("cpu"))
    sampler._dtype = torch.float32
    expected = sampler._noise(*_row_keys(seed_keys, positions))
    with interpreted_logarithms():
        actual = kernel_noise(seed_keys, positions, 1024)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # numpy's logarithm for torch's


class Draw:
    """Inputs of one sampling call, and the same call to both implementations."""

    def __init__(self, num_reqs: int, vocab_size: int, dtype: torch.dtype) -> None:
        from fenceline.layers.kernels.triton.sample import DrawInputs
        from fenceline.sampling.gumbel import mix_seeds

        # Exact in every type and with many ties.
        self.logits = (random(num_reqs, vocab_size, dtype=torch.float32) * 8).round().div(4).to(dtype)
        self.num_reqs = num_reqs
        self.inputs = DrawInputs(
            temperatures=torch.rand(num_reqs) + 0.5,
            noise_scales=torch.tensor([1.0, 0.0, 1.0] * num_reqs)[:num_reqs].contiguous(),
            seed_keys=torch.from_numpy(mix_seeds(range(num_reqs))),
            positions=torch.arange(num_reqs) * 1001,
            thresholds=None,
            maxima=None,
        )

    def kernel(self) -> torch.Tensor:
        from fenceline.layers.kernels.triton import sample as sample_triton

        next_tokens, last_tokens = torch.full((self.num_reqs,), -1), torch.full((self.num_reqs + 3,), -1)
        rows, steps = torch.arange(self.num_reqs) + 2, torch.arange(self.num_reqs) + 41
        with interpreted_logarithms():
            sample_triton.launch(self.logits, self.inputs, rows, last_tokens, next_tokens, steps)
        assert last_tokens.tolist() == [-1, -1, *next_tokens.tolist(), -1]
        assert steps.tolist() == list(range(42, 42 + self.num_reqs))
        return next_tokens

    def reference(self) -> torch.Tensor:
        from fenceline.sampling.draw_kernels import sample_tokens

        i, next_tokens, last_tokens = (self.inputs, torch.full((self.num_reqs,), -1), torch.arange(self.num_reqs))
        rows, steps = torch.arange(self.num_reqs), torch.zeros(self.num_reqs, dtype=torch.int64)
        sample_tokens(
            self.logits, i.temperatures, i.noise_scales, i.seed_keys, i.positions, rows, last_tokens,
            next_tokens, steps, i.maxima, masks=i.masks, thresholds=i.thresholds,
        )  # fmt: skip
        assert (steps == 1).all() and torch.equal(last_tokens, next_tokens)
        return next_tokens


def check_sample_from_parts() -> None:
    """Ranks draw from their parts of the vocabulary, of which the last one ends with padding, and compare all pieces:
    the token of the whole vocabulary."""
    from fenceline.layers.kernels.triton.sample import DrawInputs, launch_combine, launch_part

    for num_reqs, vocab_size, size in ((3, 41, 2), (2, 5000, 2), (5, 2050, 4)):
        draw = Draw(num_reqs, vocab_size, torch.float32)
        columns = -(-vocab_size // size)
        padded = torch.full((num_reqs, size * columns), -torch.inf)
        padded[:, :vocab_size] = draw.logits
        i, parts = draw.inputs, []
        for rank in range(size):
            own = padded[:, rank * columns : (rank + 1) * columns].contiguous()
            inputs = DrawInputs(
                i.temperatures, i.noise_scales, i.seed_keys, i.positions, None, None, first_id=rank * columns
            )
            with interpreted_logarithms():
                parts.append(launch_part(own, inputs))
        scores, ids = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        tokens = torch.full((num_reqs,), -1)
        launch_combine(scores, ids, None, None, tokens, None)
        assert torch.equal(tokens, draw.kernel()), (vocab_size, size)


def check_sample_greedy() -> None:
    from dataclasses import replace

    for dtype in (torch.float32, torch.bfloat16):
        for num_reqs, vocab_size in ((1, 24), (3, 5000), (2, 1024)):
            draw = Draw(num_reqs, vocab_size, dtype)
            best = draw.logits.float().argmax(dim=-1)  # many ties: the lowest id
            draw.inputs = replace(draw.inputs, noise_scales=torch.zeros(num_reqs))
            assert torch.equal(draw.kernel(), best) and torch.equal(draw.reference(), best)
            draw.inputs = replace(draw.inputs, seed_keys=None, noise_scales=None, temperatures=None)
            assert torch.equal(draw.kernel(), best) and torch.equal(draw.reference(), best)


def check_sample_masks() -> None:
    """Only what a mask allows is drawn; with one mask for several rows, the first of them has it."""
    from dataclasses import replace

    for num_reqs, vocab_size in ((6, 40), (9, 2100)):
        draw = Draw(num_reqs, vocab_size, torch.float32)
        words = torch.randint(-(2**31), 2**31, (num_reqs, -(-vocab_size // 32)), dtype=torch.int64)
        words &= torch.randint(-(2**31), 2**31, words.shape)
        for masks in (words, words[: num_reqs // 3].clone()):
            free = draw.kernel()
            draw.inputs = replace(draw.inputs, masks=masks.int())
            drawn, each = draw.kernel(), num_reqs // len(masks)
            assert torch.equal(drawn, draw.reference()) and not torch.equal(drawn, free)
            allowed = masks[range(len(masks)), drawn[::each] // 32] >> (drawn[::each] % 32) & 1
            assert allowed.all(), "a token was drawn that its mask forbids"
            free[::each] = drawn[::each]
            assert torch.equal(drawn, free), "rows without a mask draw from all tokens"
            draw.inputs = replace(draw.inputs, masks=None)


def check_sample_noise() -> None:
    from dataclasses import replace

    from fenceline.sampling.gumbel import mix_seeds

    for num_reqs, vocab_size in ((60, 30), (9, 2100)):
        draw = Draw(num_reqs, vocab_size, torch.float32)
        seeds = [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, *range(5, num_reqs)]
        draw.inputs = replace(draw.inputs, seed_keys=torch.from_numpy(mix_seeds(seeds)))
        assert torch.equal(draw.kernel(), draw.reference())
        draw.inputs = replace(draw.inputs, noise_scales=None, temperatures=None)
        assert torch.equal(draw.kernel(), draw.reference())


def check_sample_thresholds() -> None:
    from dataclasses import replace

    draw = Draw(40, 1500, torch.float32)
    inputs = draw.inputs
    assert inputs.temperatures is not None
    scaled = (draw.logits - draw.logits.amax(-1, keepdim=True)) / inputs.temperatures[:, None]
    thresholds = scaled.topk(5).values[:, -1].contiguous()
    thresholds[::4] = -torch.inf
    draw.inputs = replace(inputs, thresholds=thresholds, maxima=draw.logits.amax(-1))
    tokens = draw.kernel()
    assert torch.equal(tokens, draw.reference())
    assert (scaled.gather(1, tokens[:, None])[:, 0] >= thresholds).all()


def check_sample_bad_logits() -> None:
    draw = Draw(6, 1030, torch.float32)
    draw.logits[0] = torch.nan
    draw.logits[1, 7] = torch.nan
    draw.logits[2] = torch.inf
    draw.logits[3] = -torch.inf
    draw.logits[4, 1029] = torch.inf
    assert draw.inputs.temperatures is not None
    draw.inputs.temperatures[5] = 0.0  # no request's: a padded row may hold anything
    tokens = draw.kernel()
    assert ((tokens >= 0) & (tokens < 1030)).all()
    assert tokens[1] != 7 and tokens[4] == 1029


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: globals()[f"check_{name}"] for name in CHECKS})
