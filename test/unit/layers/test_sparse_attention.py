"""The selection of sparse attention: which tokens, in which order of equal scores, in every kind of step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_parity import PagedModel, save_checkpoint
from scheduler_driver import Driver, make_model_driver, request
from selection_cases import Sizes, Steps

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import parse_args
from fenceline.layers.attention.base import AttentionBackend, plan_extend
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.attention.fixed_order import FixedOrderAttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import ForwardMode
from fenceline.layers.kernels.index_rows import packed, rounded, spread, unpacked
from fenceline.memory_order.guards import first_of_best

BACKENDS = (ReferenceAttentionBackend, CpuAttentionBackend, FixedOrderAttentionBackend)
LENGTHS = (3, 5, 6, 41)  # fewer than are selected, as many, one more, many
TREE = [-1, 0, 0, 1, 2]  # the parent of each node


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -torch.inf]), min_size=1, max_size=20), st.integers(1, 20))
def test_of_equal_scores_the_first_are_taken(scores: list[float], num: int) -> None:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    found = first_of_best(torch.tensor([scores]), num)
    assert found[0].nonzero().flatten().tolist() == sorted(order[:num])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(BACKENDS))
def test_queries_attend_to_the_best_tokens(seed: int, kind: type[ReferenceAttentionBackend]) -> None:
    """Chunks behind prefixes, decode, and verified trees, whose nodes lie in the order of their numbers."""
    steps = Steps(seed, LENGTHS, Sizes())
    backend: AttentionBackend = kind(steps.pool, steps.rules)
    new = [3, 1, 6, 9]
    plan, reads = steps.extended(backend, new)
    steps.check(plan, reads)
    steps.check(plan_extend(backend, steps.inputs(ForwardMode.EXTEND, new), 2), reads)  # as that of a draft
    steps.check(*steps.decoded(backend))
    steps.check(*steps.verified(backend, TREE, len(TREE)))


def test_the_check_would_see_another_order_of_equal_scores() -> None:
    steps = Steps(0, LENGTHS, Sizes())
    backend = ReferenceAttentionBackend(steps.pool, steps.rules)

    def last_of_best(scores: torch.Tensor, num: int) -> torch.Tensor:
        return first_of_best(scores.flip(-1), num).flip(-1)

    plan, reads = steps.decoded(backend)
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


def test_a_gpu_is_refused_what_it_cannot_do_in_a_line(shared: Path) -> None:
    args = ["--model-path", str(shared), "--skip-tokenizer-init"]
    assert resolve(parse_args(args), cuda_probe=lambda: True).device == "cuda"
    for flags, message in (
        (["--attention-backend", "fa3"], "does not compute the latent attention of GlmMoeDsaForCausalLM; use triton"),
        (["--enable-deterministic-inference"], "depend on the batch; leave it out, or use --device cpu"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(parse_args(args + flags), cuda_probe=lambda: True)
        assert message in str(caught.value) and "\n" not in str(caught.value)


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
