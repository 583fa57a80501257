"""A mixture of experts: the router against the formulas of the papers, and our Triton kernels, in Triton's interpreter
and compiled, against torch's operators.

Run as a script this file is the interpreted checks themselves: see ``triton_interpreter``.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from routed_tokens import compare, compare_routes, routed
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.families import ExpertsConfig
from fenceline.config.quantization import QuantConfig
from fenceline.config.server_args import ServerArgs
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.expert_matrices import ExpertMatrices
from fenceline.layers.experts import ExpertNames, ExpertsMLP, Router
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import LayerKernels, Routing
from fenceline.layers.weight import fill_slots
from fenceline.models.families import make_model
from fenceline_proof.tiny_model import tiny_model_path

CHECKS = (
    "products",
    "biases_and_limits",
    "fp8",
    "eight_bits_as_a_layer_stores_them",
    "few_experts_hit",
    "all_to_one",
    "all_padded",
    "combine",
    "logits",
    "routes",
    "groups_of_routes",
    "ties_of_routes",
    "own_experts",
)

results = outcomes_of(__file__)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


def make_router(correction: bool = False, **changes: object) -> Router:
    fields = {"num_experts": 8, "top_k": 3, "intermediate_size": 4, "renormalise": False, **changes}
    names = ExpertNames(correction="bias" if correction else None)
    router = Router(ExpertsConfig(**fields), 5, names, LayerKernels())  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    router.weight.normal_(generator=generator)
    if router.correction is not None:
        router.correction.normal_(generator=generator)
    return router


def route(router: Router, num_tokens: int = 40, num_padded: int = 0) -> tuple[torch.Tensor, Routing]:
    """The logits of random tokens, and where they go."""
    x = torch.randn(num_tokens, 5, generator=torch.Generator().manual_seed(5))
    slots = torch.arange(num_tokens).flip(0) + 16 - num_padded  # 16 and more are nobody's sink
    return x @ router.weight.T, router.forward(x, slots, 16)[1]


@pytest.mark.parametrize("renormalise", [False, True])
def test_softmax_over_all_experts(renormalise: bool) -> None:
    logits, routing = route(make_router(renormalise=renormalise, scaling=2.5))
    for token, row in enumerate(logits.double()):
        best = row.argsort(descending=True)[:3]
        scores = row.exp()[best] / row.exp().sum()
        expected = 2.5 * (scores / scores.sum() if renormalise else scores)
        assert routing.ids[token].tolist() == best.tolist()
        torch.testing.assert_close(routing.weights[token].double(), expected, atol=1e-6, rtol=0)


def test_the_correction_chooses_experts_and_does_not_weigh_them() -> None:
    router = make_router(correction=True, sigmoid=True, renormalise=True)
    logits, routing = route(router)
    assert router.correction is not None
    uncorrected = 0
    for token, scores in enumerate(logits.sigmoid()):
        best = (scores + router.correction).argsort(descending=True)[:3]
        uncorrected += best.tolist() != scores.argsort(descending=True)[:3].tolist()
        assert routing.ids[token].tolist() == best.tolist()
        torch.testing.assert_close(routing.weights[token], scores[best] / scores[best].sum())
    assert uncorrected, "the correction should matter"


def test_experts_of_the_best_groups_alone_are_open() -> None:
    logits, routing = route(make_router(sigmoid=True, num_groups=4, top_groups=2))
    elsewhere = 0
    for token, scores in enumerate(logits.sigmoid()):
        groups = scores.view(4, 2)
        best = groups.sum(1).argsort(descending=True)[:2].tolist()
        open_ = [2 * group + i for group in best for i in range(2)]
        expected = sorted(open_, key=lambda i: -float(scores[i]))[:3]
        elsewhere += set(expected) != set(scores.argsort(descending=True)[:3].tolist())
        assert routing.ids[token].tolist() == expected
    assert elsewhere, "groups should matter"


def test_the_best_expert_of_a_group_may_score_it() -> None:
    """DeepSeek-V2's group_limited_greedy: softmaxes, whose weights are not renormalised."""
    logits, routing = route(make_router(num_groups=4, top_groups=2, scored_by=1, scaling=16.0))
    by_sums = 0
    for token, scores in enumerate(logits.softmax(-1)):
        groups = scores.view(4, 2)
        best = groups.amax(1).argsort(descending=True)[:2].tolist()
        by_sums += set(best) != set(groups.sum(1).argsort(descending=True)[:2].tolist())
        expected = sorted((2 * group + i for group in best for i in range(2)), key=lambda i: -float(scores[i]))[:3]
        assert routing.ids[token].tolist() == expected
        torch.testing.assert_close(routing.weights[token], 16.0 * scores[expected])
    assert by_sums, "the rule should matter"


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "top_groups": 2}])
def test_of_equal_scores_the_first_wins(groups: dict[str, object]) -> None:
    router = make_router(sigmoid=True, **groups)
    router.weight.zero_()
    _, routing = route(router)
    assert routing.ids.tolist() == [[0, 1, 2]] * 40
    router.correction = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1])
    _, routing = route(router)
    assert routing.ids.tolist() == [[7, 0, 1]] * 40


def test_padded_tokens_go_to_no_expert() -> None:
    _, routing = route(make_router(), num_tokens=6, num_padded=2)
    assert (routing.ids[4:] == 8).all() and (routing.ids[:4] < 8).all()
    assert int(routing.ends[-1]) == 4 * 3
    assert set(routing.order[-6:].tolist()) == set(range(12, 18))


def test_every_slot_of_the_sink_page_is_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded request of a speculative step has several rows there, and none of them may cost an expert's product."""
    model = resolve(ServerArgs(model_path=tiny_model_path("experts"), device="cpu", load_format="dummy")).model
    layers = make_model(model, torch_context(Shard(), torch.float32)).layers
    mlp = next(layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsMLP))
    sent: list[tuple[torch.Tensor, Routing]] = []
    forward = mlp.router.forward
    monkeypatch.setattr(mlp.router, "forward", lambda *args: sent.append(forward(*args)) or sent[-1])
    pool = SimpleNamespace(page_size=4)
    batch = SimpleNamespace(out_slots=torch.tensor([9, 0, 1, 3, 4]), kv_pool=pool, normed={})
    mlp.forward(torch.ones(5, model.hidden_size), cast("ForwardBatch", batch))
    is_padded = (sent[0][1].ids == len(sent[0][1].ends)).all(1)
    assert is_padded.tolist() == [False, True, True, True, False]


def test_few_tokens_go_through_a_shared_expert_as_through_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's result is that which it has among many, whose shared expert is a product of its own."""
    path, changes = tiny_model_path("latents"), '{"first_k_dense_replace": 0, "n_routed_experts": 4}'
    args = ServerArgs(model_path=path, device="cpu", load_format="dummy", json_model_override_args=changes)
    model = resolve(args).model
    layers = make_model(model, torch_context(Shard(), torch.float32)).layers
    mlp = next(layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsMLP))
    assert mlp.joins and mlp.shared is not None
    generator = torch.Generator().manual_seed(3)
    for slot in mlp.all_slots().values():
        slot.dest.normal_(std=0.3, generator=generator)
    batch = SimpleNamespace(out_slots=torch.arange(40) % 9 + 3, kv_pool=SimpleNamespace(page_size=4), normed={})
    x = torch.randn(40, model.hidden_size, generator=generator)
    many = mlp.forward(x.clone(), cast("ForwardBatch", batch))
    batch.out_slots = batch.out_slots[:32]
    monkeypatch.setattr(mlp.shared, "add_to", None)
    few = mlp.forward(x[:32].clone(), cast("ForwardBatch", batch))
    live = batch.out_slots >= 4
    torch.testing.assert_close(few[live], many[:32][live])
    assert not torch.equal(few, x[:32])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 9}, "num_experts_per_tok 9"),
        ({"num_groups": 3}, "n_group 3"),
        ({"num_groups": 4, "top_groups": 1}, "fewer than num_experts_per_tok 3"),
    ],
)
def test_impossible_routers_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_router(**changes)


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability: int) -> None:
    """For the shapes of Qwen3-30B-A3B: tensor cores, 16-byte loads, and little enough shared memory."""
    pytest.importorskip("triton", reason="Triton is not installed")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fenceline.layers.kernels.triton import grouped_gemm

    kernel = grouped_gemm._grouped_kernel
    types = {
        "x": "*bf16",
        "weight": "*bf16",
        "order": "*i64",
        "ends": "*i32",
        "out": "*bf16",
        "bias": "*bf16",
        "scales": "*fp32",
        "zeros": "*u8",
    }
    plain, fp8, int8, packed = "*bf16", "*fp8e4nv", "*i8", "*u8"
    cases = [(n, clamps, 0, 0, plain) for n, clamps in ((8, False), (4096, False), (65536, False), (4096, True))]
    if capability >= 89:  # earlier ones have no instructions for FP8
        cases += [(8, False, 16, 0, fp8), (65536, False, 16, 0, fp8), (4096, False, 1, 0, fp8)]
    cases += [(8, False, 16, 0, int8), (65536, False, 1, 0, int8)]
    cases += [(8, False, 16, 1, packed), (65536, False, 64, 1, packed), (4096, True, 64, 2, packed)]
    if capability != 90:
        cases = list({case[-1]: case for case in sorted(cases, key=lambda case: case[0])}.values())  # largest of a kind
    for num_pairs, clamps, groups, numbers, weight in cases:
        types["weight"] = weight
        types["scales"] = "*u8" if numbers == 2 else "*fp32"
        config = grouped_gemm.grouped_config(num_pairs, 128, 2)
        kind = (128, 768, 2048, 8, True, clamps, clamps, groups, numbers, capability >= 90)
        variant = grouped_gemm._product_variant(kind, config)
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {name: "fp32" if name == "limit" else types.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in variant.constants.items()},
            {(i,): [["tt.divisibility", 16]] for i in range(len(types))},
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert binary.metadata.shared <= (163 << 10 if capability == 80 else 227 << 10)
        assert "mma" in binary.asm["ptx"]
        assert ("cp.async" if groups else "cp.async.cg.shared.global") in binary.asm["ptx"]


# --- the checks, run in the script -------------------------------------------------------------------


def check_products() -> None:
    compare(routed(21, 3, [0, 1, 2, 3, 4, 5, 6], 7, num_padded=2), 24, 40)
    compare(routed(5, 2, [0, 1, 2, 3], 4), 17, 33)
    compare(routed(9, 2, [0, 1, 2, 3], 4, num_padded=1), 32, 64, torch.float16)


def check_biases_and_limits() -> None:
    compare(routed(21, 3, [0, 1, 2, 3, 4, 6], 7, num_padded=2), 24, 40, limit=0.9)
    compare(routed(5, 2, [0, 1, 2, 3], 4), 17, 33, limit=0.9)


def check_fp8() -> None:
    """A scale for each row, and for each 128 of it."""
    for groups in (lambda k: 1, lambda k: -(-k // 128)):
        compare(routed(9, 2, [0, 1, 2, 3], 4, num_padded=1), 24, 200, groups=groups)
    compare(routed(5, 1, [0, 2], 3), 130, 32, torch.float16, groups=lambda k: -(-k // 128))


def check_eight_bits_as_a_layer_stores_them() -> None:
    from fenceline.layers.kernels.triton import grouped_gemm

    for kind, scales in itertools.product(("fp8", "int8"), ("tensor", "channel", "block", "group")):
        if scales == {"fp8": "group", "int8": "block"}[kind]:
            continue
        config = QuantConfig(method="on-line", kind=kind, scales=scales)
        stored = ExpertMatrices(3, 24, 256, torch_context(Shard(), torch.float32), config)
        for expert in range(3):
            slots = stored.slots("up", expert, slice(0, 24), (24, 256), 0, 0)
            fill_slots(slots, [("up.weight", torch.randn(24, 256) * (1 + torch.arange(256) // 128))])
        x, routing = torch.randn(5, 256), routed(5, 2, [0, 1, 2], 3)
        expected = LayerKernels().grouped_product(x, stored.data, routing, scales=stored.scales)
        for cut in (grouped_gemm.GroupedConfig(16, 16, 32, 4, 1), None):
            ours = grouped_gemm.grouped_product(x, stored.data, routing, config=cut, scales=stored.scales)
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)


def check_few_experts_hit() -> None:
    compare(routed(1, 2, [3, 9], 10), 16, 32)
    compare(routed(6, 2, [0, 9], 10, num_padded=1), 16, 32)


def check_all_to_one() -> None:
    compare(routed(70, 1, [2], 4), 16, 32)


def check_all_padded() -> None:
    compare(routed(3, 2, [0, 1], 2, num_padded=3), 16, 32)


def check_own_experts() -> None:
    """Of a rank's own experts the pairs come first, as if they had been sorted alone."""
    from fenceline.layers.kernels.triton import routing as kernels

    for tokens, padded in ((1, 0), (9, 2), (300, 7)):
        routing = routed(tokens, 3, [0, 1, 2, 5, 7, 11], 12, num_padded=padded)
        for own in (range(3), range(3, 6), range(6, 12), range(8, 9)):
            ours, wanted = kernels.of_experts(routing, own), routing.of_experts(own)
            for name in ("ids", "weights", "order", "ends"):
                assert torch.equal(getattr(ours, name), getattr(wanted, name)), (tokens, own, name)
            ids = torch.where((routing.ids >= own.start) & (routing.ids < own.stop), routing.ids - own.start, len(own))
            alone = Routing.group(ids, routing.weights, len(own))
            assert torch.equal(ours.ids, alone.ids) and torch.equal(ours.ends, alone.ends)
            assert torch.equal(ours.order[: ours.ends[-1]], alone.order[: ours.ends[-1]])


def check_combine() -> None:
    from fenceline.layers.kernels.triton import grouped_gemm

    routing = routed(6, 2, [0, 1, 2], 3, num_padded=2)
    y, residual = torch.randn(12, 1500), torch.randn(6, 1500)
    y[8:] = float("nan")
    expected = LayerKernels().combine_experts(y, routing, residual.clone())
    ours = grouped_gemm.combine_experts(y, routing, residual.clone())
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours[4:], residual[4:])


def check_logits() -> None:
    from fenceline.layers.kernels.triton import routing

    for num_tokens, num_experts, k in ((1, 6, 40), (16, 9, 1500), (19, 81, 2600), (65, 4, 8)):
        x, weight = torch.randn(num_tokens, k).half(), torch.randn(num_experts, k)
        torch.testing.assert_close(routing.router_logits(x, weight), x.float() @ weight.T, atol=1e-4, rtol=1e-5)
        norm = torch.randn(k).half()
        normed, logits = routing.normed_logits(x, norm, 1e-6, weight)
        torch.testing.assert_close(normed, LayerKernels().rms_norm(x, norm, 1e-6))
        torch.testing.assert_close(logits, normed.float() @ weight.T, atol=1e-4, rtol=1e-5)


def check_routes() -> None:
    for num_tokens in (1, 6, 40):
        compare_routes(num_tokens, 12)
    compare_routes(1050, 5, [(False, True, False)])  # more programs than are counted at a time


def check_groups_of_routes() -> None:
    deepseek_v2, deepseek_v3 = (False, False, False), (True, True, True)
    for num_tokens, scores, groups in (
        (40, deepseek_v3, (4, 2, 2)),
        (3, deepseek_v3, (3, 2, 2)),
        (3, deepseek_v3, (12, 4, 2)),  # a group's second best expert does not exist
        (3, deepseek_v2, (4, 3, 1)),
        (1, deepseek_v2, (2, 1, 1)),
    ):
        compare_routes(num_tokens, 12, [scores], groups)
    compare_routes(2, 40, [deepseek_v2, deepseek_v3], (4, 2, 2))  # groups of ten


def check_ties_of_routes() -> None:
    uncorrected = [(False, False, False), (True, True, False)]
    for groups in ((1, 1, 2), (4, 2, 2), (3, 2, 1)):
        compare_routes(9, 12, uncorrected, groups, ties=True)


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: globals()[f"check_{name}"] for name in CHECKS})
