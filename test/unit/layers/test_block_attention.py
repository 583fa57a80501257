"""Attention to selected blocks (MiniCPM-SALA): which blocks, and that a query's choice depends on its position and the
keys before it alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from block_cases import BlockSteps
from hypothesis import given, settings
from hypothesis import strategies as st
from model_parity import PagedModel, reference_logits
from ranks import Ranks
from sala_reference import ENTRIES, SPARSE, save_sala

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.families import BlocksConfig
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import parse_args
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.attention.fixed_order import FixedOrderAttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.context import torch_context
from fenceline.layers.forward_batch import ForwardMode

BACKENDS = (ReferenceAttentionBackend, CpuAttentionBackend, FixedOrderAttentionBackend)


@settings(deadline=None, max_examples=20)
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
    steps = BlockSteps(seed, lengths, blocks)
    steps.check(kind(steps.pool, steps.rules), None if decode else [min(length, 30) for length in lengths])


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
        ("--page-size 16 --speculative-algorithm NEXTN", "--speculative-algorithm: not supported for the "),
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
