"""Sums in a fixed order, in Triton's interpreter: the bits of a row do not depend on the rows beside it, nor on how
work is divided. Operands lie in front of NaN, which shows a read past their ends.

Run as a script this file is the checks themselves: see ``triton_interpreter``. There, products add up one input after
the other, so that another order shows in the bits.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton_interpreter import (
    add_in_order,
    check_shared_sums,
    in_front_of_nan,
    outcomes_of,
    print_outcomes,
    set_up_interpreter,
)

from fenceline.config.quantization import QuantConfig
from fenceline.layers.quantized import QuantizedFormat, make_format
from fenceline.layers.weight import fill_slots
from fenceline.sampling.logprobs import first_of_best

pytestmark = pytest.mark.long

ROWS = (1, 2, 17, 64, 130)
FORMATS = {
    "fp8-rows": QuantConfig(method="on-line", kind="fp8"),
    "fp8-blocks": QuantConfig(method="on-line", kind="fp8", scales="block"),
    "int4": QuantConfig(method="on-line", kind="int4", group_size=64),
    "int8": QuantConfig(method="on-line", kind="int8"),
}
PRODUCTS = (
    *("dense norm", "dense gated", "dense residual", "fp8-rows gated", "fp8-blocks residual"),
    *("int4 gated", "int4 residual", "int8 residual"),
)
OTHERS = (
    *("segments", "attention", "attention_with_rules", "attention_over_fp8", "attention_of_many_heads", "trees"),
    *("attention_over_latents", "products_by_head"),
    *("layers", "log_sums", "model"),
)

MACHINE_CODE = (
    *("one row", "many rows", "many gated rows", "fp8", "experts"),
    *("decode", "verify", "tree", "short prefill", "long prefill", "wide heads", "latents", "latent prefill"),
)

results = outcomes_of(__file__)
compiled = outcomes_of(__file__, "compile")


@pytest.mark.parametrize("name", MACHINE_CODE)
def test_one_instruction_multiplies_in_all_shapes(name: str, compiled: dict[str, str]) -> None:
    """Hopper's asynchronous one for 64 rows. And no product is joined with a sum into one operation."""
    assert compiled[name] == ""


@pytest.mark.parametrize("name", (*PRODUCTS, *OTHERS))
def test_interpreted(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


def test_alternatives_are_the_first_of_the_best() -> None:
    rows = torch.tensor([[-2.0, 0.0, -2.0, -torch.inf], [torch.nan, -1.0, -1.0, -torch.inf]])
    assert first_of_best(rows, 3).tolist() == [[1, 0, 2], [1, 2, 0]]
    many = (torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 4).round().log_softmax(-1)
    assert torch.equal(first_of_best(many, 40), many.sort(descending=True, stable=True).indices[:, :40])


# --- the checks, run in the script -------------------------------------------------------------------------------


def check_product(name: str, fusion_name: str) -> None:
    """Several segments, of which the last is shorter, ragged tiles of features, and blocks of rows of every size."""
    from fenceline.layers import cuda_quantized
    from fenceline.layers.kernels.triton import skinny_gemm
    from fenceline.layers.kernels.triton.skinny_gemm import Fusion, SplitWorkspace, fixed_linear, num_segments

    skinny_gemm._FEW_TILES = 64
    (n, k), dtype, gated = (144, 1152), torch.float16, fusion_name == "gated"
    workspace = SplitWorkspace(torch.device("cpu"))
    assert num_segments(n, k) > 1
    matrix = torch.randn(n, k) / k**0.5 * torch.rand(n, 1)
    x, norm = torch.randn(ROWS[-1], k).to(dtype), torch.randn(k).to(dtype) if fusion_name in ("norm", "gated") else None
    bias = torch.randn(n).to(dtype)
    residual = torch.randn(ROWS[-1], n).to(dtype) if fusion_name == "residual" else None
    plain = matrix.to(dtype)
    multiply: Any = partial(fixed_linear, weight=in_front_of_nan(plain), workspace=workspace)
    if name != "dense":
        stored = stored_in(name, matrix)
        cuda_quantized.int4_takes = lambda x, stored: stored.kind == "int4"  # type: ignore[assignment]
        products = cuda_quantized.FixedQuantizedProducts((9, 0), workspace, fp8=True, int4=True)
        products._pdl = False
        multiply, plain = partial(products.few_rows, stored=stored), stored.dequantized(torch.float64)

    def product(rows: slice) -> torch.Tensor:
        given = None if residual is None else in_front_of_nan(residual[rows])
        fusion = Fusion(norm, 1e-6, in_front_of_nan(bias), gated, given)
        y: torch.Tensor = multiply(x=in_front_of_nan(x[rows]), fusion=fusion)
        assert not workspace.num_done.any() and (given is None or y is given)
        return y

    got = product(slice(None))
    skinny_gemm._FEW_TILES = 0  # from now on a program has all segments of a tile if there are several blocks of rows
    wide = x.double() if norm is None else F.rms_norm(x.double(), (k,), norm.double(), 1e-6)
    want = F.linear(wide, plain.double(), bias.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    if residual is not None:
        want = want + residual.double()
    assert (got.double() - want).norm() / want.norm() < (0.06 if name.startswith("fp8") else 2e-3)
    for rows, start in zip(ROWS, (3, 128, 40, 66, 0), strict=True):
        assert torch.equal(product(slice(start, start + rows)), got[start : start + rows]), rows


def stored_in(name: str, matrix: torch.Tensor) -> QuantizedFormat:
    stored = make_format(FORMATS[name], *matrix.shape, torch.float16)
    fill_slots(stored.slots("x", slice(None), tuple(matrix.shape), 0, 0), [("x.weight", matrix)])  # type: ignore[arg-type]
    return stored


def check_segments() -> None:
    """They fill a GPU with the product of one row, and are neither short nor many."""
    from fenceline.layers.kernels.triton.skinny_gemm import num_segments

    assert [num_segments(n, 4096) for n in (151_936, 12_288, 6144, 4096, 1024)] == [1, 1, 2, 4, 8]
    assert [num_segments(1024, k) for k in (512, 1024, 2048, 3072)] == [1, 2, 4, 4]


def check_attention(ways: tuple[tuple[int, int], ...] = ((1, 1), (64, 40)), **options: Any) -> None:
    from fixed_order_cases import check_attention as check

    from fenceline.layers.attention import triton_backend

    triton_backend._SEGMENT = 128
    check(ways, (257, 129), dtype=torch.float16, **options)


def check_attention_with_rules() -> None:
    from fenceline.layers.attention.base import LayerRules

    check_attention(((16, 5),), rules=LayerRules(150, 2.0, torch.randn(6)))


def check_attention_over_fp8() -> None:
    check_attention(((64, 3),), kv_dtype=torch.float8_e4m3fn)


def check_attention_of_many_heads() -> None:
    """More than 16 of a KV head: a decode step has a tile that is not full, verification of a chain has several."""
    check_attention(((16, 5),), heads=(20, 1))


def check_attention_over_latents() -> None:
    """One row is the key, and the value in front. Its last features are padded to a power of two."""
    from fenceline.layers.attention.base import LayerRules

    check_attention(((16, 5),), heads=(20, 1), head_dim=48, rules=LayerRules(rows=("latent", "latent"), value_dim=32))


def check_products_by_head() -> None:
    """A row has the same bits wherever it is among few rows or many, and is near the product."""
    from fenceline.layers.kernels.triton.by_head import by_head

    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=generator).half() for shape in ((150, 3, 20), (3, 24, 20)))
    whole = by_head(x, weight, x.new_empty(150, 3, 24), fixed=True)
    torch.testing.assert_close(whole, torch.einsum("thk,hnk->thn", x, weight), atol=2e-2, rtol=0)
    for first, end in ((0, 1), (70, 75), (60, 149)):
        part = by_head(x[first:end], weight, x.new_empty(end - first, 3, 24), fixed=True)
        assert torch.equal(part, whole[first:end])


def check_trees() -> None:
    from fixed_order_cases import check_trees as check

    from fenceline.layers.attention import triton_backend
    from fenceline.layers.attention.base import LayerRules

    triton_backend._SEGMENT = 128
    tree = [-1, 0, 0, 2, 1, 2, 4]
    check(16, 5, tree, 125, dtype=torch.float16)
    check(64, 1, tree, 61, dtype=torch.float16, rules=LayerRules(60, 2.0, torch.randn(6)))


def check_layers() -> None:
    """What a token's layers compute besides dense products and attention: what lies between a router and the sum of
    experts, and rotation."""
    from fenceline.config.families import ExpertsConfig
    from fenceline.layers import cuda_layers
    from fenceline.layers.context import LayerContext, Shard
    from fenceline.layers.kernels.base import HeadLayout, QKNorm
    from fenceline.layers.kernels.triton.skinny_gemm import SplitWorkspace
    from fenceline.layers.linear import ColumnPart, WideNorm

    torch.cuda.get_device_capability = lambda device=None: (8, 0)  # type: ignore[assignment]
    kernels = cuda_layers.CudaLayerKernels(torch.device("cpu"), SplitWorkspace(torch.device("cpu")))
    assert kernels.fixed_order
    num_tokens, k, size = 300, 160, 48
    experts = ExpertsConfig(num_experts=8, top_k=3, intermediate_size=size, renormalise=True)
    in_groups = replace(experts, num_groups=4, top_groups=2, sigmoid=True)
    x, router = torch.randn(80, k).half(), torch.randn(8, k)
    gate_up, down = ((torch.randn(8, *shape) / 8).half() for shape in ((2 * size, k), (k, size)))
    heads, norms, table = HeadLayout(6, 2, 16), QKNorm(torch.randn(16), torch.randn(16), 1e-6), torch.randn(300, 24)
    qkv = torch.randn(num_tokens, 160).half()

    def tokens(rows: slice) -> tuple[torch.Tensor, ...]:
        mine, rotated = in_front_of_nan(x[rows]), in_front_of_nan(qkv[rows])
        slots = torch.arange(num_tokens)[rows] + 1
        logits = kernels.router_logits(mine, router)
        routing, of_groups = (kernels.route(logits, None, slots[: len(mine)], 1, how) for how in (experts, in_groups))
        gated = kernels.grouped_product(mine, gate_up, routing, gated=True)
        summed = kernels.combine_experts(kernels.grouped_product(gated, down, routing), routing)
        caches = torch.zeros(2, num_tokens + 1, 2, 16).half()
        kernels.rotate_and_store(rotated, heads, norms, table, torch.arange(num_tokens)[rows], *caches, slots)
        chosen = routing.ids, routing.weights, of_groups.ids, of_groups.weights
        return *chosen, summed, rotated, caches[:, slots].transpose(0, 1)

    added = SimpleNamespace(all_reduce=lambda squares: squares * 2)  # the other rank brings the same
    context = LayerContext(Shard(0, 2, added), kernels, torch.float16, None)  # type: ignore[arg-type]
    wide = WideNorm("q_norm", ColumnPart("q_proj", 2 * k, k, 0), 1e-6, context)
    wide.weight.fill_(1.0)
    normed = wide.forward(x)
    torch.testing.assert_close(normed, F.rms_norm(x.float(), (k,), eps=1e-6).half(), atol=2e-3, rtol=0)
    assert torch.equal(wide.forward(x[9:12]), normed[9:12])
    whole = tokens(slice(None))
    for rows in (slice(5, 6), slice(20, 37)):
        assert all(torch.equal(part, all_of_it[rows]) for part, all_of_it in zip(tokens(rows), whole, strict=True))


def check_model() -> None:
    """A whole model in float16: the logits of a prompt's tokens, in chunks and steps and beside another request."""
    import tempfile
    from pathlib import Path

    from model_parity import CONTEXT, PagedModel, save_checkpoint

    from fenceline.layers import cuda_layers
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.context import LayerContext, Shard
    from fenceline.layers.forward_batch import ForwardMode

    device, dtype = torch.device("cpu"), torch.float16
    torch.cuda.get_device_capability = lambda device=None: (8, 0)  # type: ignore[assignment]
    multiply, workspace = cuda_layers.find_fixed_product(device)
    dense = partial(cuda_layers.FixedDenseWeight, dtype=dtype, multiply=multiply)
    context = LayerContext(Shard(), cuda_layers.CudaLayerKernels(device, workspace), dtype, dense)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint("qwen3", Path(folder))
        ours = PagedModel(Path(folder), 16, "cpu", context=context)
    heads = ours.config.num_heads
    ours.backend = TritonAttentionBackend(ours.pool, rules=ours.model.attention_rules, num_heads=heads, longest=CONTEXT)
    prompt, other = torch.randint(0, 100, (2, 21))
    [whole] = ours.step([(0, prompt, 0, 21)], ForwardMode.EXTEND)
    assert whole.isfinite().all()
    parts = [ours.step([(2, other, 0, 7), (1, prompt, 0, 12)], ForwardMode.EXTEND)[1]]
    parts += ours.step([(1, prompt, 12, 20)], ForwardMode.EXTEND)  # over the end of a page
    parts += ours.step([(1, prompt, 20, 21), (2, other, 7, 8)], ForwardMode.DECODE)[:1]
    assert torch.equal(torch.cat(parts), whole)
    few, cuda_layers.fixed_linear = cuda_layers.fixed_linear, lambda x, *given, **more: few(x, *given, **more) * len(x)
    with pytest.raises(ValueError, match="depends on the number of rows; leave it out"):
        cuda_layers.find_fixed_product(device)
    cuda_layers.fixed_linear = few


def check_log_sums() -> None:
    from fenceline.layers.kernels.triton.log_sums import log_sums

    logits = torch.randn(3, 5001) * 5
    logits[0, 4000], logits[1, :7] = torch.nan, -torch.inf
    for given in (logits, logits.half()):
        largest, sums = log_sums(in_front_of_nan(given))
        assert sums[0].isnan() and torch.equal(largest[1:], given[1:].float().amax(1))
        torch.testing.assert_close((largest + sums)[1:], given.float().logsumexp(1)[1:])


def check_machine_code(name: str) -> None:
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, num_warps, num_stages, types, constants = kernel_of(name)
    names, types = kernel.arg_names, types | dict.fromkeys(constants, "constexpr")
    signature = {each: types.get(each, "i32") for each in names}
    multiples = [each for each in names if "*" in signature[each] or each.endswith(("_stride", "k_size", "num_out"))]
    source = ASTSource(
        kernel, signature, {(names.index(each),): value for each, value in constants.items()},
        {(names.index(each),): [["tt.divisibility", 16]] for each in multiples if signature[each] != "constexpr"},
    )  # fmt: skip
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": True, "enable_fp_fusion": False}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert binary.asm["cubin"] and binary.metadata.shared <= 227 << 10, binary.metadata.shared
    ptx = binary.asm["ptx"]
    products = set(re.findall(r"\bw?gmma?\.\S+|\bmma\.\S+", ptx))
    kinds = {product.partition(".m64n")[0] for product in products if "fence" not in product and "group" not in product}
    assert kinds == {"wgmma.mma_async.sync.aligned"}, products
    assert not re.search(r"\bfma\.rn\.f32", ptx)
    assert check_shared_sums(ptx) == (name in ("one row", "decode", "verify", "tree", "wide heads", "latents"))
    waits, launches = (ptx.count(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
    assert waits == launches == ("PDL" in constants)
    if waits:  # nothing is written before the preceding kernel has ended
        assert "st.global" not in ptx[: ptx.index("griddepcontrol.wait")]


def kernel_of(name: str) -> tuple[Any, int, int, dict[str, str], dict[str, Any]]:
    """The kernel as a fixed order launches it for an 8B model: warps, stages, types of arguments, constants."""
    from fenceline.layers.kernels.triton import decode_attention, extend_attention, grouped_gemm, skinny_gemm

    if name == "experts":
        cut = grouped_gemm.grouped_config(64 * 128, 128, 2)
        types = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"order": "*i64", "ends": "*i32", "limit": "fp32"}
        constants: dict[str, Any] = dict.fromkeys(("bias", "scales", "zeros")) | {
            "NUM_EXPERTS": 128, "BLOCK_EXPERTS": 128, "SIZE": 768, "K": 2048, "PAIRS_A_ROW": 8, "GATED": True,
            "HAS_BIAS": False, "CLAMPS": False, "GROUPS": 0, "NUMBERS": 0, "BLOCK_M": cut.block_m,
            "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "PDL": True,
        }  # fmt: skip
        return grouped_gemm._grouped_kernel, cut.num_warps, cut.num_stages, types, constants
    if name in ("one row", "many rows", "many gated rows", "fp8"):
        rows, gated, fp8 = 1 if name == "one row" else 2048, "gated" in name, name == "fp8"
        config = skinny_gemm._fixed_config(rows, gated, 1 if fp8 else 2, True)
        operand = "*fp8e4nv" if fp8 else "*bf16"
        types = {"x_ptr": operand, "weight_ptr": operand, "out_ptr": "*bf16", "partial_ptr": "*fp32"}
        types |= {"num_done_ptr": "*i32", "x_scales_ptr": "*fp32", "scales_ptr": "*fp32"}
        constants = {
            "bias_ptr": None, "GROUP": 0, "SCALED": fp8, "HAS_BIAS": False, "GATED": gated, "ADD": not gated,
            "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "EVEN_K": True, "PDL": True, "SEGMENTS": 4,
            "ROWS": 16 if rows == 1 else 128, "PROGRAMS": 4 if rows == 1 else 1,
        } | ({} if fp8 else {"x_scales_ptr": None, "scales_ptr": None})  # fmt: skip
        return skinny_gemm._rows_kernel, config.num_warps, config.num_stages, types, constants
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("page_table_ptr", "num_done_ptr", "query_starts_ptr"), "*i32")
    types |= dict.fromkeys(("rows_ptr", "seq_lens_ptr"), "*i64") | dict.fromkeys(("partial_ptr", "stats_ptr"), "*fp32")
    types |= {"scale_log2": "fp32", "cap_log2": "fp32", "ancestors_ptr": "*i64"}
    shared = name.startswith("latent")
    wide = shared or name == "wide heads"
    size = 512 if shared else 256 if wide else 128
    constants = {"sinks_ptr": None, "NUM_KV_HEADS": 8, "HEAD_DIM": size, "DIM_PAD": size, "GROUP": 4, "PAGE_SIZE": 16}
    constants |= {"BATCH_PAD": 64, "BLOCK_N": 32 if wide else 64, "SEGMENT": 256, "WINDOW": 0, "CAPS": False}
    constants |= {"SINKS": False, "TAIL": 64 * shared, "TAIL_PAD": 64 if shared else 16, "SHARED": shared}
    if shared:
        constants |= {"NUM_KV_HEADS": 1, "GROUP": 32}
    if name.endswith("prefill"):
        long = name == "long prefill"
        types |= {"out_ptr": "*bf16" if long else "*fp32"}
        constants |= {"BLOCK_M": 128 if long else 64, "SPLIT": not long, "Q_STRIDE": 6144}
        return extend_attention._extend_kernel, 8 if long or wide else 4, 2 if wide else 3, types, constants
    num_queries = 4 if name == "verify" else 1
    constants |= {
        "ancestors_ptr": None, "NUM_WORKERS": 33, "NUM_QUERIES": num_queries, "NUM_NODES": num_queries, "TREE": False,
        "ROWS": 64, "MERGED_ROWS": constants["GROUP"] * num_queries, "PART": 4, "MAX_SEGMENTS": 160, "MERGE": 1,
        "PDL": True, "NUM_PREFETCHED": 2, "PATHS": 0, "PATH_NODES": 0, "MIN_BLOCKS": 1, "APART": False,
    }  # fmt: skip
    if name == "tree":
        del constants["ancestors_ptr"]
        constants |= {"PATHS": 8, "PATH_NODES": 8}
    return decode_attention._decode_kernel, 8 if wide else 4, 2 if wide else 3, types, constants


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print_outcomes({name: partial(check_machine_code, name) for name in MACHINE_CODE})
    else:
        set_up_interpreter()
        add_in_order()
        checks: dict[str, Any] = {name: partial(check_product, *name.split()) for name in PRODUCTS}
        print_outcomes(checks | {name: globals()[f"check_{name}"] for name in OTHERS})
