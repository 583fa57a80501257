"""Attention to selected blocks (MiniCPM-SALA): which blocks, and that a query's choice depends on its position and the
keys before it alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_parity import PagedModel, reference_logits
from ranks import Ranks
from sala_reference import ENTRIES, SPARSE, save_sala, selected_blocks

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.families import BlocksConfig
from fenceline.config.kv_layout import KVLayout, group_means, keys_and_values
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import parse_args
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.attention.fixed_order import FixedOrderAttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.context import torch_context
from fenceline.layers.forward_batch import AttentionInputs, BlockQueries, ForwardMode
from fenceline.layers.kernels.base import LayerKernels
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.guards import first_of_best

BACKENDS = (ReferenceAttentionBackend, CpuAttentionBackend, FixedOrderAttentionBackend)
KV_HEADS, GROUP, DIM, PAGE = 2, 3, 8, 16


class _Cache:
    """Requests of random keys in a pool of which all else is NaN. Keys are stored in steps of random lengths."""

    def __init__(self, seed: int, lengths: list[int], blocks: BlocksConfig) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        rows = keys_and_values(KV_HEADS, DIM, "float32") + group_means(KV_HEADS, DIM, blocks.stride, "float32")
        pages = [-(-length // PAGE) for length in lengths]
        self.pool = KVPool(sum(pages) + 1, KVLayout(PAGE, (rows,)), torch.device("cpu"))
        for row in self.pool.rows[0].values():
            row[PAGE:] = torch.nan
        free = (torch.randperm(sum(pages), generator=self.generator) + 1).tolist()
        self.table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        self.keys = [torch.randn(length, KV_HEADS, DIM, generator=self.generator) for length in lengths]
        for i, (keys, count) in enumerate(zip(self.keys, pages, strict=True)):
            self.table[i, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
            first = 0
            while first < len(keys):
                end = min(first + int(torch.randint(1, 40, (), generator=self.generator)), len(keys))
                at = torch.arange(first, end)
                slots = self.table[i, at // PAGE].long() * PAGE + at % PAGE
                for name in ("k", "v"):
                    self.pool.row(0, name)[slots] = keys[first:end]
                means = self.pool.row(0, "index")
                LayerKernels().store_means(self.pool.row(0, "k"), means, at, slots, blocks.stride)
                first = end


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from(BACKENDS),
    st.sampled_from([(8, 4, 16), (4, 4, 16), (12, 4, 8), (4, 2, 8), (8, 8, 16)]),
    st.lists(st.integers(1, 200), min_size=1, max_size=3),
    st.sampled_from([(1, 0, 2), (0, 2, 5), (2, 1, 4)]),
    st.booleans(),
)
def test_queries_select_the_blocks_of_the_definition(
    seed: int,
    kind: type[ReferenceAttentionBackend],
    sizes: tuple[int, int, int],
    lengths: list[int],
    counts: tuple[int, int, int],
    decode: bool,
) -> None:
    (width, stride, size), (first, local, top_k) = sizes, counts
    blocks = BlocksConfig(size=size, top_k=top_k, first=first, local=local, width=width, stride=stride)
    sparse = {"kernel_size": width, "kernel_stride": stride, "block_size": size, "topk": top_k - local}
    sparse |= {"init_blocks": first, "window_size": local * size}
    cache = _Cache(seed, lengths, blocks)
    lens = torch.tensor(lengths)
    new = [1 if decode else min(length, 30) for length in lengths]
    inputs = AttentionInputs(
        ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        cache.table, torch.arange(len(lens)), lens, lens.numpy(), torch.tensor(new).numpy(),
        torch.tensor([0, *new]).cumsum(0).int(),
    )  # fmt: skip
    plan = kind(cache.pool, {0: LayerRules(selects=True)}).plan(inputs)
    queries = 2 * torch.randn(sum(new), KV_HEADS * GROUP, DIM, generator=cache.generator)
    chosen = plan.select_blocks(0, BlockQueries(queries, DIM**-0.5, blocks, first_of_best))
    row = queries[:, :KV_HEADS]  # not read: this step's rows are in the pool
    found = plan.forward_selected(0, queries, row, row, 0.7, chosen)
    query = 0
    for keys, count in zip(cache.keys, new, strict=True):
        for last in range(len(keys) - count, len(keys)):
            for head in range(KV_HEADS):
                own = queries[query, head * GROUP : (head + 1) * GROUP]
                numbers = selected_blocks(own, keys[: last + 1, head], sparse)
                seen = torch.arange(last + 1)
                mine = keys[seen[torch.isin(seen // size, torch.tensor(numbers))], head]
                expected = torch.softmax(own @ mine.T * 0.7, -1) @ mine
                torch.testing.assert_close(found[query, head * GROUP : (head + 1) * GROUP], expected)
            query += 1


# --- the model


@pytest.fixture(scope="module")
def sala(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sala")
    save_sala(directory)
    return directory


def _logits(directory: Path, prompt: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    model, ends = PagedModel(directory, 16, "cpu"), [*cuts, len(prompt)]
    work = zip([0, *cuts], ends, strict=True)
    return torch.cat([model.step([(0, prompt, first, end)], ForwardMode.EXTEND)[0] for first, end in work])


def test_results_do_not_depend_on_the_prompts_length_as_the_published_switch_does(sala: Path, tmp_path: Path) -> None:
    prompt = torch.randint(0, 101, (170,), generator=torch.Generator().manual_seed(3))
    switching = save_sala(tmp_path, {"sparse_config": SPARSE | {"dense_len": 160}})
    shorter, longer = reference_logits(switching, [prompt[:159], prompt])
    assert (shorter - longer[:159]).abs().max() > 1.0
    ours = _logits(tmp_path, prompt, [])
    torch.testing.assert_close(ours, longer, atol=1e-3, rtol=0)
    torch.testing.assert_close(_logits(tmp_path, prompt[:159], [50, 129]), ours[:159], atol=1e-4, rtol=0)
    # Up to the four blocks that a query attends to, that is all tokens.
    torch.testing.assert_close(ours[:64], shorter[:64], atol=1e-3, rtol=0)


def test_ranks_select_with_their_own_key_heads(sala: Path) -> None:
    prompt = torch.arange(1, 100)
    expected = _logits(sala, prompt, [70])
    ranks = Ranks(2)
    models = [PagedModel(sala, 16, "cpu", context=torch_context(shard, torch.float32)) for shard in ranks.shards]

    def run(rank: int) -> torch.Tensor:
        work = ((0, 70), (70, 99))
        return torch.cat([models[rank].step([(0, prompt, *span)], ForwardMode.EXTEND)[0] for span in work])

    for logits in ranks.run(run):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--page-size 1", "--page-size 1: MiniCPMSALAForCausalLM keeps means of the keys of 4 tokens"),
        ("--page-size 16 --kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3: not supported for the selected"),
        ('--page-size 16 --tp-size 6 --json-model-override-args {"intermediate_size":72}', "not divide; use 1, 2"),
    ],
)
def test_flags_that_cannot_work_are_refused(sala: Path, flags: str, message: str) -> None:
    args = parse_args(["--model-path", str(sala), "--skip-tokenizer-init", "--device", "cpu", *flags.split()])
    with pytest.raises(ConfigError) as caught:
        resolve(args)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"sparse_config": SPARSE | {"kernel_size": 6}}, "block_size 16 and kernel_size 6 must be multiples of"),
        ({"sparse_config": SPARSE | {"topk": 1}}, "1 blocks of init_blocks and 2 of window_size are more than the 2"),
        ({"sparse_config": SPARSE | {"use_nope": True}}, "use_nope true in sparse_config is not supported"),
        ({"sparse_config": SPARSE | {"kernel_stride": 3, "kernel_size": 6, "block_size": 12}}, "must be a multiple of"),
        ({"mixer_types": ["minicpm4"] * 3}, "mixer_types must say minicpm4 or lightning-attn of each of the 4 layers"),
        ({"lightning_nkv": 2}, "lightning_nkv must be lightning_nh 6"),
        ({"attn_use_rope": True}, "attn_use_rope true is not supported"),
    ],
)
def test_configurations_that_cannot_work_are_refused(entries: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ENTRIES | entries))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dir(str(tmp_path))
    assert message in str(caught.value) and "\n" not in str(caught.value)
