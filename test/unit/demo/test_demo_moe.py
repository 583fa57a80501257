"""The shipped mixture of experts: its answers by our engine, and wrong ones where tokens go to wrong experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler_driver import Driver, answers, make_model_driver, request
from speculative_driver import STANDALONE, make_driver
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fenceline import demo_model_path
from fenceline.layers.experts import ExpertsMLP
from fenceline.layers.kernels.base import LayerKernels, Routing
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch
from fenceline_demo.evaluation import EvalItem, held_out_items

SKILLS = ("add", "sub", "mul", "copy", "long_copy")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path("demo-moe"))


def share_right(driver: Driver, tokenizer: PreTrainedTokenizerBase, items: Sequence[EvalItem]) -> float:
    """Of the items, which are asked at once."""
    stop = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("\n"))
    reqs = [
        request(
            item.item_id, tokenizer(item.prompt())["input_ids"],
            temperature=0.0, max_new_tokens=len(item.item.answer) + 8, stop_token_ids=tuple(stop),
        )
        for item in items
    ]  # fmt: skip
    texts = [tokenizer.decode(ids).strip() for ids in answers(driver, reqs)]
    return sum(text == item.item.answer for text, item in zip(texts, items, strict=True)) / len(items)


def test_it_is_small_and_has_eight_experts_of_which_two_are_used() -> None:
    folder = Path(demo_model_path("demo-moe"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    config = make_model_driver(model_path=str(folder)).config.model
    assert config.experts is not None and config.architecture == "Qwen3MoeForCausalLM"
    assert (config.experts.num_experts, config.experts.top_k) == (8, 2)


def test_held_out_items_are_answered_and_wrong_experts_show(tokenizer: PreTrainedTokenizerBase) -> None:
    items = held_out_items(seed=21, num_items=24, categories=SKILLS)
    driver = make_model_driver(model_path="demo-moe")
    assert share_right(driver, tokenizer, items) >= 0.9
    driver = make_model_driver(model_path="demo-moe")
    mixtures = [layer.mlp for layer in driver.worker.model.layers]  # type: ignore[attr-defined]
    assert mixtures and all(isinstance(mlp, ExpertsMLP) for mlp in mixtures)
    for weight in (weight for mlp in mixtures for weight in (mlp.gate_up.data, mlp.down.data)):
        weight.copy_(weight.roll(1, 0))  # each expert in its neighbour's place
    wrong = share_right(driver, tokenizer, items)
    assert wrong < 0.3, wrong


@pytest.mark.parametrize("topk", [0, 1, 2], ids=["no draft", "chain", "tree"])
def test_padding_of_graphs_reaches_no_expert(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in prefill nor in decode steps, nor in the rows that a draft proposes and that are verified."""
    seen: list[tuple[int, int, torch.Tensor]] = []  # live requests or tokens of a step, all of them, and a routing
    launched: list[tuple[int, tuple[int, ...]]] = []
    route = LayerKernels.route

    def watched(self: LayerKernels, *args: Any) -> Routing:
        routing = route(self, *args)
        num, sizes = launched[-1]
        seen.append((num, next(size for size in sizes if num <= size), routing.ids))
        return routing

    def launch(batch: StepBatch) -> ForwardResult | HeldStep:
        if batch.is_decode:
            launched.append((len(batch.rows), (2, 5)))
        else:
            launched.append((batch.num_prompt_tokens, (16, 64)))
        return original(batch)

    models = {"target": Path(demo_model_path("demo-moe"))}
    sizes: dict[str, object] = {"cuda_graph_bs": (2, 5), "piecewise_cuda_graph_tokens": [16, 64]}
    draft = (STANDALONE, "target") if topk else ()
    driver = make_driver(models, *draft, topk=topk, chunked_prefill_size=64, **sizes)  # type: ignore[arg-type]
    original = driver.worker.launch
    monkeypatch.setattr(LayerKernels, "route", watched)
    monkeypatch.setattr(driver.worker, "launch", launch)
    reqs = [request(f"r{i}", [9 + i] * (7 + i), max_new_tokens=6 + 9 * i, ignore_eos=True) for i in range(4)]
    answers(driver, reqs)
    padded = set[tuple[int, int]]()
    for num, size, ids in seen:
        if len(ids) % size == 0:  # else a draft's rows of a prompt, which no graph computes
            rows = ids.view(size, -1)
            assert (rows[num:] == 8).all() and (rows[:num] < 8).any(1).all()
            padded.add((num, size))
    assert {(4, 5), (3, 5), (2, 2), (1, 2)} <= padded and any(size == 64 for _, size in padded)
