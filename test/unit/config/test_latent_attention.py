"""Latent attention in the engine, sparse and not: tree, chunks, host and speculation see rows, whatever is in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_parity import PagedModel, reference_logits, save_checkpoint
from ranks import Ranks
from scheduler_driver import Driver, answers, make_model_driver
from scheduler_driver import request as ask

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.kv_layout import KVLayout, index_keys, latent
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import parse_args
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.forward_batch import AttendNew, ForwardMode
from fenceline.model_executor import extend_runner
from fenceline.models.families import make_model

NUM_TOKENS = 10
Saved = tuple[Path, transformers.PreTrainedModel]


# The layers that keep an indexer's keys too. Prompts are longer than what an indexer selects.
INDEXED: dict[str, tuple[bool, ...]] = {
    "deepseek-v2-lite": (False,) * 3,
    "deepseek-v3.2": (True,) * 3,
    "glm-5-shared": (True, False, True, False, False),
}


@pytest.fixture(scope="module", params=INDEXED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_checkpoint(request.param, directory)


def prompts() -> list[list[int]]:
    """Four begin with the same 40 tokens, four with others."""
    return [[(3 * j + (i if j >= 40 or i >= 4 else 0)) % 101 for j in range(50 + i)] for i in range(8)]


@pytest.fixture(scope="module")
def expected(saved: Saved) -> list[list[int]]:
    """What transformers answers to each prompt alone."""
    _, model = saved
    found = []
    with torch.no_grad():
        for prompt in prompts():
            ids = list(prompt)
            for _ in range(NUM_TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    return found


def asked(driver: Driver, which: Sequence[int], label: str) -> list[list[int]]:
    params = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return answers(driver, [ask(f"{label}{i}", prompts()[i], **params) for i in which])


def test_the_engine_answers_as_transformers_from_every_tier(
    saved: Saved, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Chunks, shared prefixes, graphs, and pages that were on the host: the device holds two of the prompts."""
    driver = make_model_driver(
        model_path=str(saved[0]), page_size=4, max_total_tokens=160, chunked_prefill_size=16,
        enable_hierarchical_cache=True, hicache_ratio=6.0, cuda_graph_bs=(1, 2, 4), piecewise_cuda_graph_tokens=(16,),
    )  # fmt: skip
    layout = driver.worker.kv_pool.layout  # type: ignore[attr-defined]
    indexed = INDEXED[request.node.callspec.params["saved"]]
    rows, keys = latent(32 + 16, "float32"), index_keys(28, "float32")
    assert layout == KVLayout(4, tuple(rows + keys if has_index else rows for has_index in indexed))
    loads: list[int] = []
    copier = driver.worker.hicache._copier  # type: ignore[attr-defined]
    to_device: Callable[..., None] = copier.to_device

    def counted(*args: Any) -> None:
        loads.append(len(args[1]))
        to_device(*args)

    monkeypatch.setattr(copier, "to_device", counted)
    for number in range(2):
        assert asked(driver, range(8), f"round {number}, ") == expected
    graphs = driver.worker.prefill_graphs, driver.worker.decode  # type: ignore[attr-defined]
    assert all(runner.stats.replays for runner in graphs)
    assert loads and driver.answers["round 1, 0"].last.cached_tokens >= 40  # type: ignore[union-attr]


@pytest.mark.parametrize(("deterministic", "mixed"), [(False, True), (True, True)])
def test_new_prompts_are_expanded_unless_rows_must_be_the_same(
    saved: Saved,
    expected: list[list[int]],
    deterministic: bool,
    mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Prompts of 30 tokens and more, in steps with others that continue, have a prefix or decode; with an indexer none
    is."""
    expanded, plan_new = [], AttentionBackend.plan_new

    def counted(self: AttentionBackend, lens: Any, starts: torch.Tensor) -> AttendNew:
        expanded.extend(lens.tolist())
        return plan_new(self, lens, starts)

    monkeypatch.setattr(AttentionBackend, "plan_new", counted)
    monkeypatch.setattr(extend_runner, "_FEWEST_EXPANDED", 30)
    driver = make_model_driver(
        model_path=str(saved[0]), page_size=4, chunked_prefill_size=68, cuda_graph_bs=(1, 2, 4),
        piecewise_cuda_graph_tokens=(16,), enable_deterministic_inference=deterministic, enable_mixed_chunk=mixed,
    )  # fmt: skip
    for number in range(2):
        assert asked(driver, range(8), f"round {number}, ") == expected
    indexed = INDEXED[request.node.callspec.params["saved"]]
    assert bool(expanded) == (not deterministic and not any(indexed))
    assert all(length >= 30 for length in expanded)
    assert bool(driver.scheduler.stats.num_mixed_steps) == mixed


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention", "full_attention"])
def test_layer_types_by_versions_of_transformers(kind: str, tmp_path: Path) -> None:
    save_checkpoint("deepseek-v3.2", tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries | {"layer_types": [kind] * entries["num_hidden_layers"]}))
    if kind == "full_attention":
        with pytest.raises(ConfigError, match="layer_types says full_attention of layer 0"):
            ModelConfig.from_dir(str(tmp_path))
    else:
        assert ModelConfig.from_dir(str(tmp_path)).indexer is not None


@pytest.mark.parametrize("name", ["deepseek-v2-query-rank", "glm-5-shared"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_divide_the_heads_and_repeat_the_rows(name: str, num_ranks: int, tmp_path: Path) -> None:
    """Chunks, a prefix hit and decoding give transformers' logits on all ranks, which keep the same rows."""
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    model = save_checkpoint(name, tmp_path, {**heads, "intermediate_size": 64})
    long, short = (torch.tensor(prompts()[i]) for i in (7, 1))
    texts = [long, torch.cat((long[:32], short))]
    expected = reference_logits(model, texts)
    ranks = Ranks(num_ranks)
    ours = [PagedModel(tmp_path, 16, "cpu", context=torch_context(shard, torch.float32)) for shard in ranks.shards]
    work = [[(0, 0, 20)], [(0, 20, 45)], [(1, 32, 60), (0, 45, 46)], [(0, 46, 47), (1, 60, 61)]]

    def run(rank: int) -> list[torch.Tensor]:
        ours[rank].share_prefix(0, 1, 2)
        steps = [
            ours[rank].step(
                [(i, texts[i], start, end) for i, start, end in step],
                ForwardMode.EXTEND if step is not work[-1] else ForwardMode.DECODE,
            )
            for step in work
        ]
        return [logits for step in steps for logits in step]

    spans = [span for step in work for span in step]
    for found in ranks.run(run):
        for logits, (i, start, end) in zip(found, spans, strict=True):
            torch.testing.assert_close(logits, expected[i][start:end], atol=1e-4, rtol=0)
    of_first = [rows.nan_to_num() for _, rows in ours[0].pool.tensors()]
    for other in ours[1:]:
        assert all(torch.equal(a, b.nan_to_num()) for a, (_, b) in zip(of_first, other.pool.tensors(), strict=True))


def test_a_draft_may_have_it_too(saved: Saved, expected: list[list[int]]) -> None:
    """A draft's rows follow the target's in the pool; the target is its own draft here."""
    folder = str(saved[0])
    driver = make_model_driver(
        model_path=folder, speculative_algorithm="STANDALONE", speculative_draft_model_path=folder,
        speculative_eagle_topk=2, speculative_num_steps=2,
    )  # fmt: skip
    assert asked(driver, range(8), "") == expected
    assert driver.worker.kv_pool.num_layers == 2 * saved[1].config.num_hidden_layers  # type: ignore[attr-defined]


# Published models: the numbers of their weights, bytes of these in memory, and bytes that a token keeps in bfloat16.
PUBLISHED = [
    ("DeepSeek-V2-Lite", 15_706_484_224, 2.0, 27 * 576 * 2),
    ("DeepSeek-V2", 235_741_434_880, 2.0, 60 * 576 * 2),
    ("DeepSeek-V3", 671_026_419_200, 1.036, 61 * 576 * 2),
    ("Kimi-K2", 1_026_408_232_448, 1.034, 61 * 576 * 2),
    ("GLM-4.7-Flash", 29_943_393_920, 2.0, 47 * 576 * 2),
    ("MiniCPM3-4B", 4_073_875_968, 2.0, 62 * 288 * 2),
]


@pytest.mark.parametrize(("name", "num_weights", "bytes_each", "token_bytes"), PUBLISHED)
def test_dummy_weights_of_published_models(
    name: str, num_weights: int, bytes_each: float, token_bytes: int, tmp_path: Path
) -> None:
    """Nothing is allocated. Layers behind the first one with experts are like it; the scales of FP8 are no weights."""
    support = Path(__file__).parents[2] / "support" / "published_configs.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(support.read_text())[name]["config"]))
    flags = ["--model-path", str(tmp_path), "--skip-tokenizer-init", "--load-format", "dummy", "--device", "cpu"]
    config = resolve(parse_args(flags)).model
    assert sum(row.nbytes for rows in config.kv_rows("bfloat16") for row in rows) == token_bytes
    stored = None if config.quantization is None else config.quantization.on_line()
    context = replace(torch_context(Shard(), torch.bfloat16), format=stored)
    last = 0 if config.experts is None else len(config.experts.dense_layers)
    with torch.device("meta"):
        model = make_model(replace(config, num_layers=last + 1, context_length=1), context)
    found, found_bytes = 0, 0
    for slot_name, slot in model.weight_slots().items():
        times = config.num_layers - last if slot_name.startswith(f"model.layers.{last}.") else 1
        found, found_bytes = found + times * slot.dest.numel(), found_bytes + times * slot.nbytes
    assert found == num_weights
    assert found_bytes / num_weights == pytest.approx(bytes_each, abs=5e-4)


@pytest.mark.parametrize("saved", ["deepseek-v2-lite"], indirect=True)
@pytest.mark.parametrize(
    ("flags", "gpu", "message"),
    [
        ("--attention-backend fa3", True, "fa3: does not compute the latent attention of DeepseekV2ForCausalLM; use"),
        ("--prefill-attention-backend flashinfer", True, "flashinfer: does not compute the latent attention of"),
        ('--json-model-override-args {"topk_method":"noaux_tc"}', False, "'noaux_tc' is not supported, greedy and"),
        ('--json-model-override-args {"num_key_value_heads":2}', False, "must be num_attention_heads, or left"),
    ],
)
def test_what_is_not_computed_is_refused_in_a_line(saved: Saved, flags: str, gpu: bool, message: str) -> None:
    args = parse_args(["--model-path", str(saved[0]), "--skip-tokenizer-init", *flags.split()])
    with pytest.raises(ConfigError) as caught:
        resolve(args, cuda_probe=lambda: gpu)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("saved", ["deepseek-v3.2"], indirect=True)
def test_selected_tokens_are_refused_where_they_depend_on_the_batch(saved: Saved) -> None:
    args = parse_args(["--model-path", str(saved[0]), "--skip-tokenizer-init", "--enable-deterministic-inference"])
    with pytest.raises(ConfigError, match="tokens that DeepseekV32ForCausalLM selects depend on the batch; leave"):
        resolve(args, cuda_probe=lambda: True)
    assert resolve(replace(args, device="cpu")).server_args.enable_deterministic_inference
