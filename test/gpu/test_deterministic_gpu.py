"""--enable-deterministic-inference on a GPU: the bits of a token's numbers do not depend on what is computed beside it.

The conformance programs come first. They ask whether the tensor core and the compiler give a row the same bits in
every shape of a kernel, which no document promises: products, experts, attention and sums over the vocabulary. Then the
engine answers the same requests alone and in company, in chunks, from caches, speculated, in graphs and without. Most
of the first run's time is Triton's compiler's, so run it in several processes: ``pytest -m gpu -n 8``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from demo_requests import prompts, sampled_requests
from fixed_order_cases import check_attention, check_trees
from fuzz_reports import REPORTS, Answer, Make, collect
from scheduler_driver import Driver, make_model_driver, request

import fenceline
from fenceline.config.families import ExpertsConfig
from fenceline.config.quantization import QuantConfig
from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.cuda_layers import CudaLayerKernels, FixedProduct, find_fixed_product
from fenceline.layers.cuda_quantized import find_fixed_products
from fenceline.layers.kernels.base import HeadLayout, QKNorm
from fenceline.layers.kernels.triton.by_head import by_head
from fenceline.layers.kernels.triton.skinny_gemm import Fusion, SplitWorkspace
from fenceline.layers.quantized import make_format
from fenceline.layers.weight import fill_slots
from fenceline.sampling.logprobs import token_logprobs

pytestmark = pytest.mark.gpu

# Every padding of few rows, its edges, and many rows in one block and several.
ROWS = (1, 2, 5, 16, 17, 33, 64, 65, 128, 129, 130, 257, 1000, 2048)
# Weight rows and K of 0.6B and 8B models, a vocabulary, and what is no multiple of any tile. Few have float16 too,
# because each compiles some twenty kernels.
SHAPES = [
    *((n, k, torch.bfloat16) for n, k in ((6144, 4096), (24_576, 4096), (4096, 12_288), (1024, 2048), (151_936, 1024))),
    *((n, k, dtype) for n, k in ((4096, 4096), (360, 1096)) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.fixture(scope="module", autouse=True)
def product() -> Iterator[tuple[FixedProduct, SplitWorkspace]]:
    """The dense product and its workspace; meanwhile Triton compiles as the flag makes it."""
    import triton

    before = triton.knobs.language.default_fp_fusion
    yield find_fixed_product(torch.device("cuda"))
    triton.knobs.language.default_fp_fusion = before


def same_bits(multiply: Any, x: torch.Tensor, width: int, gated: bool, workspace: SplitWorkspace) -> None:
    """``multiply`` takes x and a fusion. Each row has the bits that it has among all of them, wherever it is."""
    n = width // 2 if gated else width
    bias, residual = torch.randn(width, device="cuda").to(x.dtype), torch.randn(len(x), n, device="cuda").to(x.dtype)

    def run(rows: slice) -> torch.Tensor:
        given = None if gated else residual[rows].clone()
        y: torch.Tensor = multiply(x=x[rows].clone(), fusion=Fusion(bias=bias, gated=gated, residual=given))
        return y

    whole = run(slice(None))
    assert whole.isfinite().all()
    for rows in ROWS:
        for start in {0, (len(x) - rows) // 2, len(x) - rows}:
            for _ in range(2):
                assert torch.equal(run(slice(start, start + rows)), whole[start : start + rows]), (rows, start)
    assert not workspace.num_done.any()


@pytest.mark.parametrize(("n", "k", "dtype"), SHAPES, ids=str)
def test_dense_products(product: tuple[FixedProduct, SplitWorkspace], n: int, k: int, dtype: torch.dtype) -> None:
    multiply, workspace = product
    torch.manual_seed(0)
    x, weight = torch.randn(2048, k, device="cuda").to(dtype), (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
    y = multiply(x[:130], weight)
    assert (y.float() - x[:130].float() @ weight.float().t()).norm() < 0.01 * y.float().norm()
    for gated in (False, True):
        same_bits(partial(multiply, weight=weight), x, n, gated, workspace)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *((QuantConfig(method="on-line", kind="fp8"), dtype) for dtype in (torch.bfloat16, torch.float16)),
        (QuantConfig(method="on-line", kind="fp8", scales="block"), torch.bfloat16),
        *((QuantConfig(method="on-line", kind="int4", group_size=size), torch.bfloat16) for size in (32, 128)),
        (QuantConfig(method="on-line", kind="int4", group_size=128), torch.float16),
        (QuantConfig(method="on-line", kind="int8"), torch.bfloat16),
    ],
    ids=["fp8", "fp8, fp16", "fp8 blocks", "int4/32", "int4/128", "int4/128, fp16", "int8"],
)
def test_quantised_products(
    product: tuple[FixedProduct, SplitWorkspace], config: QuantConfig, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    products = find_fixed_products(torch.device("cuda"), config.kind, product[1])
    for n, k in ((6144, 4096), (1024, 2048)):
        with torch.device("cuda"):
            stored, matrix = make_format(config, n, k, dtype), torch.randn(n, k) / k**0.5
            x = torch.randn(2048, k).to(dtype)
        fill_slots(stored.slots("w", slice(None), (n, k), 0, 0), [("w.weight", matrix)])
        for gated in (False, True):
            same_bits(partial(products.few_rows, stored=stored), x, n, gated, product[1])


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, torch.float16), (128, torch.bfloat16)], ids=str)
def test_experts_and_rotation(
    product: tuple[FixedProduct, SplitWorkspace], num_experts: int, dtype: torch.dtype
) -> None:
    """From the router to the sum of experts, with padded tokens; and what follows the projection of queries and
    keys."""
    torch.manual_seed(0)
    kernels = CudaLayerKernels(torch.device("cuda"), product[1])
    experts = ExpertsConfig(num_experts=num_experts, top_k=8, intermediate_size=768, renormalise=True)
    in_groups = replace(experts, top_k=2, num_groups=4, top_groups=2, sigmoid=True)
    heads = HeadLayout(32, 8, 128)
    with torch.device("cuda"):
        x, router = torch.randn(2048, 1024).to(dtype), torch.randn(num_experts, 1024) / 32
        gate_up = (torch.randn(num_experts, 1536, 1024) / 32).to(dtype)
        down = (torch.randn(num_experts, 1024, 768) / 28).to(dtype)
        norms = QKNorm(torch.randn(128).to(dtype), torch.randn(128).to(dtype), 1e-6)
        table, qkv = torch.randn(2048, 192), torch.randn(2048, 48 * 128).to(dtype)
        positions = torch.arange(2048)

    def run(rows: slice, padding: int = 0) -> list[torch.Tensor]:
        num = len(x[rows])
        slots = torch.cat((positions[rows] + 1, positions[:padding] * 0))
        mine = torch.cat((x[rows], x[:padding]))
        logits = kernels.router_logits(mine, router)
        routing, of_groups = (kernels.route(logits, None, slots, 1, how) for how in (experts, in_groups))
        gated = kernels.grouped_product(mine, gate_up, routing, gated=True)
        summed = kernels.combine_experts(kernels.grouped_product(gated, down, routing), routing)
        rotated = qkv[rows].clone()
        caches = torch.zeros(2, 2049, 8, 128, dtype=dtype, device="cuda")
        kernels.rotate_and_store(rotated, heads, norms, table, positions[rows], *caches, slots[:num])
        stored = caches[:, slots[:num]].transpose(0, 1)
        return [
            kernels.rms_norm(mine, norms.q_weight.repeat(8), 1e-6)[:num],
            *(part[:num] for part in (routing.weights, of_groups.ids, of_groups.weights, summed)),
            rotated,
            stored,
        ]

    whole = run(slice(None))
    for rows in ROWS:
        for start, padding in ((0, 3), (2048 - rows, 0)):
            for part, all_of_it in zip(run(slice(start, start + rows), padding), whole, strict=True):
                assert torch.equal(part, all_of_it[start : start + rows]), (rows, start)


SINKS = torch.randn(32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "kv_dtype", "rules"),
    [
        ((32, 8), 128, torch.bfloat16, None, LayerRules()),
        ((32, 8), 128, torch.float16, None, LayerRules()),
        ((32, 8), 128, torch.bfloat16, torch.float8_e4m3fn, LayerRules()),
        ((32, 8), 128, torch.bfloat16, None, LayerRules(window=300)),
        ((32, 8), 64, torch.bfloat16, None, LayerRules(700, 2.0, SINKS)),
        ((32, 2), 96, torch.bfloat16, None, LayerRules()),
        ((40, 2), 128, torch.bfloat16, None, LayerRules()),
        ((32, 16), 256, torch.bfloat16, None, LayerRules(window=300, soft_cap=2.0)),
    ],
    ids=["bf16", "fp16", "fp8", "window", "window, cap, sinks", "96", "20 heads", "256"],
)
def test_attention(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, rules: LayerRules
) -> None:
    """Decode, verification and chunks against a prefill of the whole prompt, for page sizes and divisions of the work;
    ends on both sides of a block, of a segment and of a page."""
    check_attention(
        ((1, 7), (64, 132)), (64, 65, 255, 256, 257, 2100), heads, (1, 60), seed=1, device="cuda",
        head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, rules=rules,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_heads", [20, 128])
def test_attention_over_latents(num_heads: int, kv_dtype: torch.dtype | None) -> None:
    """The row of DeepSeek and GLM: 512 features and 64 that are rotated."""
    check_attention(
        ((16, 7), (64, 132)), (64, 257, 2100), (num_heads, 1), (1, 60), seed=1, device="cuda", head_dim=576,
        dtype=torch.bfloat16, kv_dtype=kv_dtype, rules=LayerRules(rows=("latent", "latent"), value_dim=512),
    )  # fmt: skip


@pytest.mark.parametrize(("n", "k"), [(512, 192), (256, 512)])
def test_products_by_head(n: int, k: int) -> None:
    x, weight = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((3000, 20, k), (20, n, k)))
    whole = by_head(x, weight, x.new_empty(3000, 20, n), fixed=True)
    torch.testing.assert_close(whole, torch.einsum("thk,hnk->thn", x, weight), atol=0.5, rtol=2e-2)
    for first, end in ((0, 1), (5, 6), (70, 100), (60, 2999)):
        part = by_head(x[first:end], weight, x.new_empty(end - first, 20, n), pdl=True, fixed=True)
        assert torch.equal(part, whole[first:end]), (first, end)


@pytest.mark.parametrize("rules", [LayerRules(), LayerRules(window=100)], ids=["plain", "window"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_attention_of_trees(page_size: int, rules: LayerRules) -> None:
    tree = [-1, 0, 0, 2, 1, 2, 4, 3]
    for prefix in (61, 253, 1000):
        check_trees(page_size, 132, tree, prefix, device="cuda", dtype=torch.bfloat16, head_dim=64, rules=rules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [151_936, 32_001, 50_257, 997])
def test_logprobs(vocab_size: int, dtype: torch.dtype) -> None:
    """Rows begin at any address if the vocabulary is odd. Many logits are equal."""
    torch.manual_seed(0)
    logits = (torch.randn(40, vocab_size, device="cuda") * 4).to(dtype)
    ids = torch.randint(0, vocab_size, (40,), device="cuda")
    whole = token_logprobs(logits, ids, 20, fixed_order=True)
    torch.testing.assert_close(whole.chosen, logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0])
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(39, 40)):
        part = token_logprobs(logits[rows], ids[rows], 20, fixed_order=True)
        assert torch.equal(part.chosen, whole.chosen[rows]) and torch.equal(part.top_ids, whole.top_ids[rows])
        assert torch.equal(part.top_logprobs, whole.top_logprobs[rows])


# --- the engine --------------------------------------------------------------------------------------------------


def requests() -> list[TokenizedGenerateReq]:
    """Greedy and sampled ones of all lengths, with the logprobs of prompts and outputs."""
    long = [token for ids in prompts() * 2 for token in ids]
    with_logprobs: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    asked = [
        request(f"g{i}", ids, temperature=0.0, max_new_tokens=40, ignore_eos=True, **with_logprobs)
        for i, ids in enumerate([*prompts(), long, long[:140]])
    ]
    return [*asked, *sampled_requests()]


Answers = dict[str, Answer]


def make(**flags: Any) -> Driver:
    given = {"dtype": "bfloat16", "enable_deterministic_inference": True} | flags
    return make_model_driver(device="cuda", **given)


MODELS: dict[str, dict[str, object]] = {
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "fp8 KV": {"kv_cache_dtype": "fp8_e4m3"},
    "experts": {"model_path": fenceline.demo_model_path("demo-moe")},
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Answers]:
    """By model: every request by itself, step after step, nothing cached, without graphs."""
    return {}


def reference(alone: dict[str, Answers], model: str) -> Answers:
    if model not in alone:
        driver = make(
            disable_overlap_schedule=True, disable_radix_cache=True, disable_cuda_graph=True,
            disable_piecewise_cuda_graph=True, **MODELS[model],
        )  # fmt: skip
        alone[model] = {rid: answer for req in requests() for rid, answer in collect(driver, [req]).items()}
    return alone[model]


WAYS: dict[str, dict[str, object]] = {
    "as usual": {},
    "pages of a token": {"page_size": 1},
    "pages of 64": {"page_size": 64},
    "chunks": {"chunked_prefill_size": 16},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 32},
    "no graphs": {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True},
    "no cache": {"disable_radix_cache": True},
    "retracted": {
        "page_size": 1, "max_total_tokens": 480, "schedule_conservativeness": 0.01, "chunked_prefill_size": 64,
    },
    "eagle3": {
        "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
        "speculative_draft_model_path": f"{fenceline.demo_model_path()}/eagle3",
    },
    "eagle3 trees": {
        "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 4,
        "speculative_draft_model_path": f"{fenceline.demo_model_path()}/eagle3",
    },
    "looked up": {"speculative_algorithm": "NGRAM"},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_answers_have_the_same_bits_in_company(alone: dict[str, Answers], model: str, way: str) -> None:
    """Twice, so that the second time prefixes are cached, and in another order."""
    if (way.startswith("eagle3") and model == "experts") or (
        "speculative_algorithm" in WAYS[way] and model == "fp8 KV"
    ):
        pytest.skip("there is no such draft, or FP8 keys are refused with one")
    expected = reference(alone, model)
    driver = make(**(MODELS[model] | WAYS[way]))
    for asked in (requests(), requests()[::-1]):
        found = collect(driver, asked)
        wrong = [rid for rid, answer in found.items() if answer != expected[rid]]
        assert not wrong, (wrong, found[wrong[0]], expected[wrong[0]])
    if way == "mixed":
        assert driver.scheduler.stats.num_mixed_steps > 10
    if way == "retracted":
        assert driver.scheduler.stats.num_retractions > 0


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
def test_public_reports(report: Callable[[Make], None]) -> None:
    report(make)
