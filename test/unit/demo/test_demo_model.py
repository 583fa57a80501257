"""The shipped demo model as transformers sees it, and the training script's checkpoints and export."""

from __future__ import annotations

import itertools
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
from fenceline_demo.corpus import Ids, Mask, build_batch
from fenceline_demo.evaluation import CATEGORIES, EvalItem, held_out_items
from fenceline_demo.tokenizer import CHAT_TEMPLATE, FastEncoder
from train_demo_model import Progress, Trainer, load_checkpoint, lr_scale, parse_args, plan_decay

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


@pytest.mark.parametrize("category", CATEGORIES)
def test_held_out_items_are_answered_with_a_clear_margin(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, category: str
) -> None:
    # Teacher forcing: greedy decoding gives the answer exactly when each of its tokens comes out on top.
    right, margins = 0, []
    items = held_out_items(seed=21, num_items=4 if category in ("recall", "ledger") else 8, categories=(category,))
    for item in items:
        prompt = tokenizer(item.prompt()).input_ids
        answer = tokenizer(f" {item.item.answer}\n").input_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2)
        right += top.indices[:, 0].tolist() == answer
        margins.append(float((top.values[:, 0] - top.values[:, 1]).min()))
    assert right == len(items)
    assert sorted(margins)[len(margins) // 2] > 3.0


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


def _trainer(directory: Path, *flags: str) -> Trainer:
    common = ["--output-dir", str(directory), "--device", "cpu", "--max-steps", "4", "--decay-steps", "2"]
    args = parse_args([*common, "--warmup-steps", "2", "--tokens-per-step", "64", *flags])
    tokenizer = Tokenizer.from_file(str(Path(demo_model_path(), "tokenizer.json")))
    return Trainer(args, tokenizer, [])


def _batches(first: int) -> Iterator[tuple[Ids, Mask]]:
    encoder = FastEncoder(Tokenizer.from_file(str(Path(demo_model_path(), "tokenizer.json"))))
    for step in itertools.count(first):
        yield build_batch(0, step, 1, 64, encoder)


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "whole")
    assert whole.run(Progress(), _batches(0)).step == 4
    broken = _trainer(tmp_path / "broken", "--eval-every", "2")
    with pytest.raises(StopIteration):  # the data ends after step 2: a crash just behind a checkpoint
        broken.run(Progress(), itertools.islice(_batches(0), 2))
    resumed = _trainer(tmp_path / "resumed", "--seed", "9")
    progress = load_checkpoint(
        tmp_path / "broken" / "checkpoint", resumed.model, resumed.optimizer, resumed.device, new_schedule=False
    )
    assert progress.step == 2
    assert resumed.run(progress, _batches(2)).step == 4
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_learning_rate_warms_up_holds_and_decays() -> None:
    scales = [lr_scale(Progress(step=s, decay_start=60, end_step=100), warmup=10) for s in (0, 9, 50, 80, 100)]
    assert scales == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_time_budget_fixes_the_decay_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_args(["--output-dir", "unused", "--max-seconds", "100", "--decay-fraction", "0.4"])
    monkeypatch.setattr("train_demo_model.time.monotonic", lambda: 30.0)
    assert plan_decay(Progress(step=300), args, 0.0, 0).decay_start is None
    monkeypatch.setattr("train_demo_model.time.monotonic", lambda: 60.0)
    planned = plan_decay(Progress(step=600), args, 0.0, 0)
    assert (planned.decay_start, planned.end_step) == (600, 1000)
