"""The selection of sparse attention: which tokens, in which order of equal scores, in every kind of step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_parity import PagedModel, save_checkpoint
from scheduler_driver import Driver, make_model_driver, request

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.kv_layout import KVLayout, index_keys, latent
from fenceline.config.server_args import parse_args
from fenceline.layers.attention.base import AttentionBackend, LayerRules
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.attention.fixed_order import FixedOrderAttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    IndexQueries,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels.index_rows import packed, rounded, spread, unpacked
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.guards import Best, first_of_best

RULES = {0: LayerRules(rows=("latent", "latent"), selects=True)}
BACKENDS = (ReferenceAttentionBackend, CpuAttentionBackend, FixedOrderAttentionBackend)
PAGE, TOP_K, WIDTH, HEADS = 4, 5, 6, 3
LENGTHS = (3, 5, 6, 41)  # fewer than are selected, as many, one more, many
TREE = (-1, 0, 0, 1, 2)  # the parent of each node
Read = list[int]  # the positions that a query sees, in order; those of a tree's nodes are of their slots


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -torch.inf]), min_size=1, max_size=20), st.integers(1, 20))
def test_of_equal_scores_the_first_are_taken(scores: list[float], num: int) -> None:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    found = first_of_best(torch.tensor([scores]), num)
    assert found[0].nonzero().flatten().tolist() == sorted(order[:num])


class Steps:
    """Requests of ``LENGTHS`` whose index keys, queries and weights are small whole numbers, so that many scores are
    equal and every sum is exact."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        rows = latent(WIDTH, "float32") + index_keys(4, "float32")
        pages_per_row = -(-max(LENGTHS) // PAGE)
        self.pool = KVPool(len(LENGTHS) * pages_per_row + 1, KVLayout(PAGE, (rows,)), torch.device("cpu"))
        self.pool.row(0, "latent").normal_(generator=self.generator)
        self.pool.row(0, "index").copy_(self._whole(self.pool.row(0, "index").shape))
        pages = torch.randperm(self.pool.num_pages - 1, generator=self.generator) + 1
        self.table = pages.view(len(LENGTHS), pages_per_row).int()

    def _whole(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=self.generator).float()

    def slots(self, row: int, positions: Read) -> list[int]:
        return [int(self.table[row, p // PAGE]) * PAGE + p % PAGE for p in positions]

    def check(self, plan: AttentionPlan, reads: list[tuple[int, Read]], best: Best = first_of_best) -> None:
        """``reads``: of each query its request and what it sees."""
        num = len(reads)
        q = torch.randn(num, HEADS, WIDTH, generator=self.generator)
        queries, weights = self._whole((num, 2, 4)), self._whole((num, 2))
        tokens = plan.select(0, IndexQueries(queries, weights, TOP_K, best))
        row = q[:, :1]  # not read: this step's rows are in the pool
        found = plan.forward_selected(0, q, row, row, 0.7, tokens)
        for i, (request_row, positions) in enumerate(reads):
            slots = torch.tensor(self.slots(request_row, positions))
            keys = self.pool.row(0, "index")[slots, 0]
            scores = ((queries[i] @ keys.T).relu() * weights[i, :, None]).sum(0).tolist()
            chosen = sorted(range(len(slots)), key=lambda j: (-scores[j], j))[:TOP_K]
            rows = self.pool.row(0, "latent")[slots[sorted(chosen)], 0]
            expected = torch.softmax(q[i] @ rows.T * 0.7, -1) @ rows
            torch.testing.assert_close(found[i], expected, atol=1e-5, rtol=1e-5)

    def inputs(self, mode: ForwardMode, new: list[int]) -> AttentionInputs:
        lens = np.array(LENGTHS)
        rows, tensor = torch.arange(len(LENGTHS)), torch.from_numpy(lens)
        return AttentionInputs(mode, self.table, rows, tensor, lens, np.array(new))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(BACKENDS))
def test_queries_attend_to_the_best_tokens(seed: int, kind: type[ReferenceAttentionBackend]) -> None:
    """Chunks behind prefixes, decode, and verified trees, whose nodes lie in the order of their numbers."""
    steps = Steps(seed)
    backend: AttentionBackend = kind(steps.pool, RULES)
    new = [3, 1, 6, 9]
    spans = [range(length - n, length) for length, n in zip(LENGTHS, new, strict=True)]
    reads = [(row, list(range(last + 1))) for row, span in enumerate(spans) for last in span]
    steps.check(backend.plan(steps.inputs(ForwardMode.EXTEND, new)), reads)
    ones = [1] * len(LENGTHS)
    reads = [(row, list(range(length))) for row, length in enumerate(LENGTHS)]
    steps.check(backend.plan(steps.inputs(ForwardMode.DECODE, ones)), reads)
    paths = [[node] for node in range(len(TREE))]
    for node, parent in enumerate(TREE):
        paths[node] = [*(paths[parent] if parent >= 0 else []), node]
    rows = [row for row, length in enumerate(LENGTHS) if length >= len(TREE)]
    starts = [LENGTHS[row] - len(TREE) for row in rows]
    ancestors = torch.tensor([[sum(1 << node for node in path) for path in paths]] * len(rows))
    lens = np.array([LENGTHS[row] for row in rows])
    tree = QueryTree(len(TREE), len(TREE), ancestors)
    inputs = VerifyInputs(steps.table, torch.tensor(rows), torch.from_numpy(lens), lens + 3, tree, HEADS)
    plan = backend.plan_verify(inputs)
    assert plan is not None
    plan.prepare()
    seen = [
        (row, [*range(start), *(start + node for node in path)])
        for row, start in zip(rows, starts, strict=True)
        for path in paths
    ]
    steps.check(plan, seen)


def test_the_check_would_see_another_order_of_equal_scores() -> None:
    steps = Steps(0)
    backend = ReferenceAttentionBackend(steps.pool, RULES)
    reads = [(row, list(range(length))) for row, length in enumerate(LENGTHS)]

    def last_of_best(scores: torch.Tensor, num: int) -> torch.Tensor:
        return first_of_best(scores.flip(-1), num).flip(-1)

    plan = backend.plan(steps.inputs(ForwardMode.DECODE, [1] * len(LENGTHS)))
    with pytest.raises(AssertionError, match="not close"):
        for _ in range(5):
            steps.check(plan, reads, last_of_best)


# --- layers and the engine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm-5-shared")
    save_checkpoint("glm-5-shared", directory)
    return directory


def test_a_selection_of_another_step_is_not_used(shared: Path) -> None:
    ours, prompt = PagedModel(shared, 16, "cpu"), torch.arange(3, 40)
    first = ours.batch([(0, prompt, 0, 20)], ForwardMode.EXTEND)
    ours.model.forward(first)
    second = ours.batch([(0, prompt, 20, 37)], ForwardMode.EXTEND)
    layer = ours.model.layers[1].self_attn  # which shares that of layer 0
    x = ours.model.embed(second)
    with pytest.raises(AssertionError, match="the layer that selects comes first"):
        layer.forward(x, second)
    second = replace(second, sparse=first.sparse)
    second.sparse.selection = replace(first.sparse.selection, layer_id=0)  # type: ignore[type-var]
    with pytest.raises(AssertionError, match="a selection of layer 0 in another step"):
        layer.forward(x, second)


@pytest.mark.parametrize(
    ("changes", "in_fp8"),
    [({}, False), ({"index_topk": 1000}, False), ({"index_head_dim": 32}, True)],
    ids=["selects", "never", "fp8"],
)
def test_deterministic_answers_have_the_same_bits(
    shared: Path, changes: dict[str, int], in_fp8: bool, tmp_path: Path
) -> None:
    """However a prompt is cut, what is cached of it, and what is computed beside it."""
    folder = shared
    if changes:
        save_checkpoint("glm-5-shared", folder := tmp_path, changes)
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    asked = {"return_logprob": True, "logprob_start_len": 0}

    def logprobs(driver: Driver, others: int) -> list[float | None]:
        prompt = [(7 * i) % 101 for i in range(50)]
        for number in range(others):
            prefix = prompt[: 8 * number] + [number + 3] * 9
            driver.send(request(f"other {number}", prefix, **sampling))
        driver.send(request("ours", prompt, **sampling, **asked))
        driver.run()
        return [*driver.first_logprobs["ours"].logprobs, *driver.output_logprobs["ours"]]

    def make(**flags: object) -> Driver:
        flags = {"model_path": str(folder), "page_size": 4, "enable_deterministic_inference": True, **flags}
        flags |= {"kv_cache_dtype": "fp8_e4m3"} if in_fp8 else {}
        return make_model_driver(**flags)  # type: ignore[arg-type]

    alone = logprobs(make(disable_cuda_graph=True), 0)
    assert logprobs(make(chunked_prefill_size=12, cuda_graph_bs=(1, 4)), 5) == alone
    if in_fp8:
        return  # no drafts yet
    drafts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    assert logprobs(make(**drafts, speculative_num_steps=2, speculative_eagle_topk=2), 2) == alone


def test_keys_in_fp8_select_nearly_the_same_tokens() -> None:
    """The Hadamard matrix changes no product, and of 512 tokens, of 4,096 random ones, 97 in 100 are the same. As in
    DeepSeek's models a few features are large."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, 128, generator=generator) for n in (16, 4096))
    q[:, :4], k[:, :4] = 8 * q[:, :4], 8 * k[:, :4]
    turned = spread(k)
    torch.testing.assert_close(spread(q) @ turned.T, q @ k.T, atol=1e-2, rtol=1e-5)
    matrix = spread(torch.eye(4))
    assert torch.equal(matrix * 2, torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1.0]]))
    rows = packed(*rounded(turned))
    assert rows.dtype == torch.uint8 and rows.shape == (4096, 132)
    torch.testing.assert_close(unpacked(rows), turned, atol=0.03 * float(turned.abs().max()), rtol=0.07)
    numbers, scales = rounded(spread(q))
    weights = torch.randn(16, generator=generator)
    exact = ((q @ k.T).relu() * weights[:, None]).sum(0)
    in_fp8 = ((numbers.float() @ unpacked(rows).T).relu() * (weights[:, None] * scales)).sum(0)
    both = first_of_best(exact, 512) & first_of_best(in_fp8, 512)
    assert 0.97 * 512 <= int(both.sum()) < 512


def test_a_gpu_is_refused_in_a_line(shared: Path) -> None:
    args = parse_args(["--model-path", str(shared), "--skip-tokenizer-init"])
    with pytest.raises(ConfigError) as caught:
        resolve(args, cuda_probe=lambda: True)
    assert "GlmMoeDsaForCausalLM has" in str(caught.value) and "use --device cpu" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "index_head_dim is 28; leave it out"),
        ('{"indexer_types":["shared","full","full","full","full"]}', "and full of the first; got shared, full, full"),
        ('{"indexer_types":["full"]}', "must say full or shared of each of the 5 layers"),
        ('{"indexer_types":null,"index_topk_pattern":"FSFXF"}', "got full, shared, full, X, full"),
        ('{"indexer_types":null,"index_topk_freq":2,"index_skip_topk_offset":0}', "got shared, full, shared"),
        ('{"index_head_dim":8}', "index_head_dim 8 is less than the 16 features that rotate"),
        ('{"q_lora_rank":null}', "q_lora_rank must be a number: the indexer reads the latents of queries"),
        ('{"indexer_rope_interleave":false}', "indexer_rope_interleave false is not supported"),
    ],
)
def test_configurations_that_cannot_work_are_refused(shared: Path, flags: str, message: str) -> None:
    further = ["--json-model-override-args", flags] if flags else ["--kv-cache-dtype", "fp8_e4m3"]
    args = parse_args(["--model-path", str(shared), "--skip-tokenizer-init", *further])
    with pytest.raises(ConfigError) as caught:
        resolve(args, cuda_probe=lambda: False)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "layers"),
    [
        ('{"indexer_types":null,"index_topk_pattern":"FSSFS"}', {0, 3}),
        ('{"indexer_types":null,"index_topk_freq":2,"index_skip_topk_offset":2}', {0, 1, 3}),
        ('{"indexer_types":null}', {0, 1, 2, 3, 4}),
    ],
)
def test_which_layers_have_an_indexer(shared: Path, entries: str, layers: set[int]) -> None:
    args = parse_args(["--model-path", str(shared), "--skip-tokenizer-init", "--json-model-override-args", entries])
    config = resolve(args, cuda_probe=lambda: False)
    assert config.model.indexer is not None and config.model.indexer.layers == layers
    rows = [[row.name for row in rows] for rows in config.kv_layout.layers]
    assert rows == [["latent", "index"] if layer in layers else ["latent"] for layer in range(5)]
