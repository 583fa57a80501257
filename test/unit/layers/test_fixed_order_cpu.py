"""--enable-deterministic-inference on a CPU: bits that depend on a row, or on a query's sequence, alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import Case
from fuzz_reports import REPORTS, Make
from hypothesis import given
from hypothesis import strategies as st
from scheduler_driver import make_model_driver, request

import fenceline
from fenceline.layers.attention.base import PLAIN, LayerRules
from fenceline.layers.attention.fixed_order import FixedOrderAttentionBackend
from fenceline.layers.context import Shard, fixed_order_context
from fenceline.layers.forward_batch import ForwardMode
from fenceline.layers.kernels import fixed_order
from fenceline.layers.kernels.base import ACTIVATIONS, LayerKernels
from fenceline.layers.kernels.fixed_order import FixedOrderKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = [PLAIN, LayerRules(window=40), LayerRules(soft_cap=0.8, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))]
TREE = [-1, 0, 0, 1, 2, 1, 5, 4]
PATH = [0, 1, 5, 6]  # of the nodes, from the root to a leaf


def attended(case: Case, mode: ForwardMode, request: int) -> torch.Tensor:
    return case.run(mode, FixedOrderAttentionBackend(case.pool, case.rules_there()))[request]


def put(case: Case, request: int, of: tuple[torch.Tensor, torch.Tensor, torch.Tensor], places: list[int]) -> None:
    """Let ``request`` have the queries, keys and values ``of``; token i lies in place ``places[i]``, which are those of
    the case's tokens. Queries are those of the last places."""
    queries, keys, values = of
    slots = case.slots[request][places]
    case.pool.row(1, "k")[slots], case.pool.row(1, "v")[slots] = keys, values
    case.keys[request][places], case.values[request][places] = keys, values
    case.queries[request] = queries


@given(st.integers(9, 150), st.sampled_from(RULES), st.sampled_from(DTYPES), st.sampled_from([1, 16, 64]))
def test_a_query_s_bits_depend_on_its_sequence_alone(
    length: int, rules: LayerRules, dtype: torch.dtype, page_size: int
) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(length, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2))

    def case(lens: list[int], new: list[int]) -> Case:
        return Case(lens, new, page_size, (4, 2), seed=len(lens), dtype=dtype, head_dim=16, rules=rules)

    everything = list(range(length))
    whole = case([length], [length])
    put(whole, 0, (q, k, v), everything)
    bits = attended(whole, ForwardMode.EXTEND, 0)

    chunk = case([300, length, 7], [3, 5, 7])
    put(chunk, 1, (q[-5:], k, v), everything)
    assert torch.equal(attended(chunk, ForwardMode.EXTEND, 1), bits[-5:])

    decode = case([9, 400, length], [1, 1, 1])
    put(decode, 2, (q[-1:], k, v), everything)
    assert torch.equal(attended(decode, ForwardMode.DECODE, 2), bits[-1:])

    chain = case([70, length], [4, 4])
    put(chain, 1, (q[-4:], k, v), everything)
    backend = FixedOrderAttentionBackend(chain.pool, chain.rules_there())
    assert torch.equal(chain.verify(backend, 4, None, bound=9)[4:], bits[-4:])

    # In a tree the last four tokens are nodes of a path, with other nodes between them.
    first = length - len(PATH)
    tree = case([first + len(TREE), 80], [len(TREE)] * 2)
    queries = tree.queries[0]
    queries[PATH] = q[-len(PATH) :]
    put(tree, 0, (queries, k, v), [*range(first), *(first + node for node in PATH)])
    backend = FixedOrderAttentionBackend(tree.pool, tree.rules_there())
    assert torch.equal(tree.verify(backend, len(TREE), [TREE] * 2, bound=3)[PATH], bits[-len(PATH) :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_product_depends_on_the_row_alone(dtype: torch.dtype) -> None:
    kernels = FixedOrderKernels()
    generator = torch.Generator().manual_seed(1)
    for n, k in ((96, 256), (1, 200), (333, 832)):
        x = torch.randn(37, k, generator=generator).to(dtype)
        weight, bias = torch.randn(n, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
        together = kernels.linear(x, weight, bias)
        torch.testing.assert_close(together, torch.nn.functional.linear(x, weight, bias), atol=0.3, rtol=0.02)
        for rows in (slice(0, 1), slice(3, 12), slice(5, 37)):
            assert torch.equal(kernels.linear(x[rows], weight, bias), together[rows])
    heads = torch.randn(11, 3, 32, generator=generator).to(dtype)
    weight = torch.randn(3, 24, 32, generator=generator).to(dtype)
    together = kernels.by_head(heads, weight, torch.empty(11, 3, 24, dtype=dtype))
    expected = LayerKernels().by_head(heads, weight, torch.empty_like(together))
    torch.testing.assert_close(together, expected, atol=0.3, rtol=0.02)
    assert torch.equal(kernels.by_head(heads[4:5], weight, torch.empty_like(together[:1])), together[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_the_same_at_a_tensor_s_end(dtype: torch.dtype) -> None:
    """Of 33 elements torch computes one by other code than the rest."""
    kernels, plain = FixedOrderKernels(), LayerKernels()
    x = (3 * torch.randn(50, 66, generator=torch.Generator().manual_seed(2))).to(dtype)
    for name in ACTIVATIONS:
        together = kernels.activate(x, name)
        torch.testing.assert_close(together, plain.activate(x, name), atol=1e-5, rtol=0.02)
        for row in range(len(x)):
            assert torch.equal(kernels.activate(x[row : row + 1], name)[0], together[row])
    torch.testing.assert_close(kernels.sigmoid(x), x.sigmoid())


def test_a_cpu_whose_products_depend_on_the_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(x: torch.Tensor, weight: torch.Tensor, bias: object = None) -> torch.Tensor:
        return (x @ weight.T) + torch.arange(len(x)).unsqueeze(1)

    monkeypatch.setattr(fixed_order.F, "linear", by_place)
    monkeypatch.setattr(fixed_order, "_tried", set())
    with pytest.raises(ValueError, match=r"a \[4, 6\] matrix with .* threads .* set OMP_NUM_THREADS=1"):
        fixed_order_context(Shard(), torch.float32).dense(4, 6)


@pytest.mark.parametrize(("model", "flags"), [("demo", {"quantization": "int4"}), ("demo-moe", {})])
def test_products_are_tried_at_the_start(model: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that cannot keep the promise does not begin to serve."""
    monkeypatch.setattr(fixed_order, "_tried", set())
    path = fenceline.demo_model_path(model)
    driver = make_model_driver(enable_deterministic_inference=True, model_path=path, disable_cuda_graph=True, **flags)
    at_start = set(fixed_order._tried)
    driver.send(request("a", [5, 6, 7, 8], temperature=0.0, max_new_tokens=2, ignore_eos=True))
    driver.run()
    assert at_start and fixed_order._tried == at_start


@pytest.mark.long
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
def test_public_reports(report: Callable[[Make], None]) -> None:
    report(partial(make_model_driver, dtype="bfloat16", enable_deterministic_inference=True))
