"""A random Qwen3 as models of embeddings are published, and the same with a head; what a server needs of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from scheduler_driver import Driver, request
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

F32 = npt.NDArray[np.float32]
VOCAB, HIDDEN = 120, 64
PROMPTS = [[5, 6, 7], [9], list(range(3, 90)), [*range(3, 60), 4, 4], [11] * 40]
END = "<|endoftext|>"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    return random_qwen3()


@pytest.fixture(scope="module")
def path(reference: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``reference`` as a model of embeddings."""
    path = tmp_path_factory.mktemp("embedder")
    save_embedder(reference, path)
    return path


def random_qwen3() -> transformers.PreTrainedModel:
    """The whole model, in float32."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, which would be ones
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def save_reranker(model: transformers.PreTrainedModel, directory: Path) -> None:
    """``model`` and its tokenizer."""
    model.save_pretrained(directory)
    _save_tokenizer(directory, appends=False)


def save_embedder(model: transformers.PreTrainedModel, directory: Path) -> None:
    """``model`` without its head and without "model." in names, a tokenizer that ends each text, and the files of
    sentence-transformers."""
    model.model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    publish(directory, {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True})
    _save_tokenizer(directory, appends=True)


def _save_tokenizer(directory: Path, appends: bool) -> None:
    make_tokenizer(appends).save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def publish(directory: Path, pooling: dict[str, object], modules: Sequence[dict[str, object]] = MODULES) -> None:
    """Write the files of sentence-transformers."""
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, **pooling}))


def make_tokenizer(appends: bool) -> RustTokenizer:
    """A token is a character of ASCII, or a word that judges answer. ``appends``: END ends each text."""
    characters = ["Ġ", "Ċ", *map(chr, range(33, 127))]
    backend = RustTokenizer(models.BPE(vocab={text: number for number, text in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in (END, "<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>", "yes", "no")])
    if appends:
        ends = [(END, backend.token_to_id(END))]
        backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=ends)
    return backend


def embedded(driver: Driver, rid: str) -> F32:
    """The state that a scheduler has sent for ``rid``, which has no more to say."""
    answer = driver.answers[rid]
    assert answer.last is not None and answer.last.decode is not None and answer.output_ids == []
    assert answer.finish is not None and answer.finish.type == "length"
    assert answer.last.decode.embedding is not None
    return np.frombuffer(answer.last.decode.embedding, np.float32)


def embed(driver: Driver, prompts: Sequence[list[int]] = PROMPTS, name: str = "e") -> list[F32]:
    """The states of ``prompts``, sent together; their ids begin with ``name``."""
    driver.send(*[request(f"{name}{i}", ids, embed=True, max_new_tokens=0) for i, ids in enumerate(prompts)])
    driver.run()
    return [embedded(driver, f"{name}{i}") for i in range(len(prompts))]


def state_of(model: transformers.PreTrainedModel, ids: Sequence[int]) -> F32:
    """transformers' state of the last token, after the last norm."""
    with torch.inference_mode():
        state: F32 = model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
    return state


def embedding_of(model: transformers.PreTrainedModel, ids: Sequence[int], dimensions: int = HIDDEN) -> F32:
    """The same, cut off and then of length 1."""
    state = state_of(model, ids)[:dimensions]
    embedding: F32 = state / np.linalg.norm(state)
    return embedding


def next_probabilities(model: transformers.PreTrainedModel, ids: Sequence[int]) -> F32:
    """transformers' probabilities of the next token."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    probabilities: F32 = logits.softmax(-1).numpy()
    return probabilities
