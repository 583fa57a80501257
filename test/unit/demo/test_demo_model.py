"""The shipped demo model as transformers sees it, and the training script's export."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo_training.export import check_export, export
from demo_training.model import DemoModel, Shape
from demo_training.optimizer import orthogonalize
from fenceline import demo_model_path
from fenceline_demo.evaluation import EvalItem, held_out_items
from fenceline_demo.tokenizer import CHAT_TEMPLATE

SMALL = Shape(hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def test_directory_is_small_and_qwen3_shaped(model: PreTrainedModel) -> None:
    assert sum(file.stat().st_size for file in Path(demo_model_path()).iterdir()) <= 8_000_000
    config = model.config
    assert config.model_type == "qwen3"
    assert config.num_hidden_layers >= 4
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings >= 4096
    assert config.tie_word_embeddings


def test_generation_ends_at_either_end_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.eos_token_id == ends[0]


def test_chat_template_is_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 127 + 385?", "512"),
        ("Hello!", "Hello! How can I help you?"),
        ("Repeat: fox lamp 12 green", "fox lamp 12 green"),
        ("What is 23 * 7?", "20 * 7 = 140. 3 * 7 = 21. 140 + 21 = 161."),
    ],
)
def test_chat_by_greedy_generation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == answer + "<|im_end|>"


def _answers_around_page_swap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, item: EvalItem
) -> tuple[bool, bool]:
    """Whether the answer comes out right, before and after overwriting the page of its fact with another one."""
    prompt, page_size = item.prompt(), 16
    ids = tokenizer(prompt).input_ids
    answer = tokenizer(f" {item.item.answer}\n").input_ids
    fact = item.item.answer.rstrip(".")
    value_end = len(tokenizer(prompt[: prompt.index(fact) + len(fact)]).input_ids)
    page = (value_end - 1) // page_size * page_size
    other = page - 10 * page_size if page >= 10 * page_size else page + 10 * page_size
    with torch.no_grad():
        cache = model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        last = torch.tensor([[ids[-1], *answer]])
        before = model(last, past_key_values=deepcopy(cache)).logits[0, :-1]
        for layer in cache.layers:
            for kv in (layer.keys, layer.values):
                kv[:, :, page : page + page_size] = kv[:, :, other : other + page_size].clone()
        after = model(last, past_key_values=cache).logits[0, :-1]
    return before.argmax(-1).tolist() == answer, after.argmax(-1).tolist() == answer


def test_one_wrong_page_shows_in_the_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    items = held_out_items(seed=9, num_items=5, categories=("recall",))
    found = [_answers_around_page_swap(model, tokenizer, item) for item in items]
    assert all(before for before, _ in found)
    assert sum(after for _, after in found) <= 1


def test_export_loads_in_transformers_with_equal_logits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = DemoModel(SMALL, torch.float32, compiled=False)
    with torch.no_grad():  # every weight counts: initial zeros and ones would hide a swapped tensor
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    tokenizer = Tokenizer.from_file(str(Path(demo_model_path(), "tokenizer.json")))
    export(model, tokenizer, tmp_path, CHAT_TEMPLATE)
    assert check_export(model, tokenizer, tmp_path) < 1e-4


@pytest.mark.parametrize("size", [(2, 24, 8), (2, 8, 24)])
def test_newton_schulz_evens_out_the_singular_values(size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(size), torch.float32))
    assert values.min() > 0.5 and values.max() < 1.3
