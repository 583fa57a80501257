"""Drafts that are refused: of another algorithm, for another target, or with weights that do not fit; one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from draft_checkpoints import (
    TARGET_SIZE,
    VOCAB,
    DraftCheckpoint,
    add_mtp,
    random_eagle,
    random_eagle3,
    save_appended_mtp,
    save_target,
)
from model_parity import save_checkpoint
from safetensors.torch import load_file, save_file

from fenceline.config.draft_config import DraftConfig, SpeculativeAlgorithm, read_draft_config
from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import Shard, torch_context
from fenceline.models.draft import DraftModel
from fenceline.models.draft_families import MTPDraft
from fenceline.models.loader import load_draft_model, load_model

EAGLE, EAGLE3 = SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3
NEXTN, STANDALONE = SpeculativeAlgorithm.NEXTN, SpeculativeAlgorithm.STANDALONE
CPU = torch.device("cpu")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A Llama of three layers."""
    save_target("llama", tmp_path / "target")
    return tmp_path / "target"


def eagle(**changes: object) -> DraftCheckpoint:
    """An EAGLE draft of one layer that brings nothing else."""
    made = next(
        made
        for made in (random_eagle(Random(seed), "Llama") for seed in range(99))
        if made.size("num_hidden_layers") == 1 and not {"embed_tokens.weight", "fc.bias"} & made.tensors.keys()
    )
    made.tensors.pop("lm_head.weight", None)
    made.config |= {"attention_bias": "q_proj.bias" in str(made.tensors.keys())} | changes
    return made


def eagle3(**changes: object) -> DraftCheckpoint:
    """An EAGLE-3 draft of the target's width with a head of 37 tokens and the default layers."""
    made = next(
        made
        for made in (random_eagle3(Random(seed)) for seed in range(999))
        if made.size("hidden_size") == TARGET_SIZE
        and made.config.get("draft_vocab_size") == 37
        and "eagle_config" not in made.config
    )
    made.config |= changes
    return made


def read(algorithm: SpeculativeAlgorithm, directory: Path | None, target: Path) -> DraftConfig:
    config = ModelConfig.from_dir(str(target))
    return read_draft_config(algorithm, None if directory is None else str(directory), config)


def load(algorithm: SpeculativeAlgorithm, directory: Path | None, target: Path) -> DraftModel:
    context = torch_context(Shard(), torch.float32)
    config = read(algorithm, directory, target)
    model = load_model(ModelConfig.from_dir(str(target)), "auto", CPU, context, 0, progress=False)
    return load_draft_model(config, "auto", CPU, context, 0, False, model)


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", [EAGLE, EAGLE3, STANDALONE])
def test_a_draft_model_must_be_named(target: Path, algorithm: SpeculativeAlgorithm) -> None:
    refused(lambda: read(algorithm, None, target), "needs a draft model: give --speculative-draft-model-path")


def test_a_draft_may_lie_in_a_folder_of_the_model(target: Path) -> None:
    saved = eagle3().save(target / "eagle3")
    assert read(EAGLE3, None, target).model.model_path == str(saved)
    refused(lambda: read(EAGLE, None, target), "needs a draft model")


@pytest.mark.parametrize(
    ("algorithm", "architecture", "message"),
    [
        (EAGLE, "LlamaForCausalLMEagle3", "is a draft for --speculative-algorithm EAGLE3, not EAGLE"),
        (EAGLE3, "LlamaForCausalLMEagle", "is a draft for --speculative-algorithm EAGLE, not EAGLE3"),
        (STANDALONE, "LlamaForCausalLMEagle", "is a draft for --speculative-algorithm EAGLE, not STANDALONE"),
        (EAGLE, "GPT2LMHeadModelEagle", "GPT2LMHeadModelEagle is not supported.*LlamaForCausalLMEagle,"),
        (EAGLE3, "Qwen3ForCausalLMEagle3", "not supported.*supported are LlamaForCausalLMEagle3$"),
        (STANDALONE, "GPT2LMHeadModel", "not supported.*STANDALONE; supported are .*LlamaForCausalLM,"),
    ],
)
def test_architectures(
    tmp_path: Path, target: Path, algorithm: SpeculativeAlgorithm, architecture: str, message: str
) -> None:
    draft = eagle3(architectures=[architecture]).save(tmp_path / "draft")
    refused(lambda: read(algorithm, draft, target), message)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (EAGLE, {"hidden_size": 40}, "hidden states of 40 features, the target's have 48; use the draft that"),
        (EAGLE3, {"hidden_size": 40}, "hidden states of 40 features, the target's have 48; use the draft that"),
        (EAGLE3, {"target_hidden_size": 40}, "hidden states of 40 features, the target's have 48"),
        (EAGLE3, {"target_hidden_size": "48"}, "target_hidden_size must be a whole number"),
        (EAGLE, {"vocab_size": 100}, "vocabulary has 100 tokens, the target's 101; use a draft with the vocab"),
        (EAGLE3, {"vocab_size": 102}, "vocabulary has 102 tokens, the target's 101; use a draft with the vocab"),
        (STANDALONE, {"vocab_size": 100}, "vocabulary has 100 tokens, the target's 101; use a draft with"),
        (EAGLE3, {"draft_vocab_size": 102}, "draft_vocab_size 102 is more than vocab_size 101; correct"),
        (EAGLE3, {"draft_vocab_size": 0}, "draft_vocab_size must be a whole number of at least 1, got 0"),
        (EAGLE3, {"num_hidden_layers": 2}, "num_hidden_layers is 2; EAGLE-3 drafts of one layer"),
        (
            EAGLE3,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
            "outputs of layers 0, 2, 3, the target has 3 layers; use the draft that was trained for",
        ),
        (
            EAGLE3,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-2]}},
            "outputs of layers -2, the target has 3 layers",
        ),
        (EAGLE3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1"}}, "a list of layer ids, got '1'"),
        (EAGLE3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.5]}}, r"list of layer ids, got \[1"),
        (EAGLE3, {"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary hidden states"),
    ],
)
def test_configurations_that_do_not_fit(
    tmp_path: Path, target: Path, algorithm: SpeculativeAlgorithm, changes: dict[str, object], message: str
) -> None:
    made = eagle3(**changes) if algorithm is EAGLE3 else eagle(**changes)
    if algorithm is STANDALONE:
        made.config["architectures"] = ["LlamaForCausalLM"]
    elif algorithm is EAGLE:
        made.config["architectures"] = ["LlamaForCausalLMEagle"]
    else:
        made.config["architectures"] = ["LlamaForCausalLMEagle3"]
    draft = made.save(tmp_path / "draft")
    refused(lambda: read(algorithm, draft, target), message)


def test_the_published_layers_are_read_by_default(tmp_path: Path, target: Path) -> None:
    """The inputs of layers 2, n / 2 and n - 3; explicit ids name layers whose outputs are read."""
    draft = eagle3().save(tmp_path / "draft")
    assert read(EAGLE3, draft, target).aux_layers == (2, 1, 0)
    eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}).save(draft)
    assert read(EAGLE3, draft, target).aux_layers == (2, 3)
    eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": []}).save(draft)
    assert read(EAGLE3, draft, target).aux_layers == (2, 1, 0)


def test_positions_and_type_are_the_targets(tmp_path: Path, target: Path) -> None:
    config = read(EAGLE3, eagle3(max_position_embeddings=64).save(tmp_path / "draft"), target)
    assert config.model.context_length == 256 and config.model.dtype == "float32"


def write_tokenizer(directory: Path, tokens: list[str], added: str, unigram: bool = False) -> None:
    vocab: object = {token: number for number, token in enumerate(tokens)}
    if unigram:
        vocab = [[token, -1.0] for token in tokens]
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"content": added, "id": 100}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("unigram", [False, True])
def test_the_same_id_must_be_the_same_token(tmp_path: Path, target: Path, unigram: bool) -> None:
    save_checkpoint("qwen2", draft := tmp_path / "draft")
    assert read(STANDALONE, draft, target).model.num_layers == 3  # nothing is known of either tokenizer
    write_tokenizer(target, ["a", "b", "c"], "<user>")
    assert read(STANDALONE, draft, target).model.num_layers == 3
    write_tokenizer(draft, ["a", "b", "c", "d"], "<bot>", unigram)
    assert read(STANDALONE, draft, target).model.num_layers == 3
    write_tokenizer(draft, ["a", "c", "b"], "<user>", unigram)
    refused(
        lambda: read(STANDALONE, draft, target),
        "token 1 is 'c' in the draft's vocabulary and 'b' in the target's; use a draft with the vocabulary of",
    )


def test_a_target_without_further_layers_has_no_nextn(target: Path) -> None:
    refused(lambda: read(NEXTN, None, target), "names no layers that predict.*use.*EAGLE3 or STANDALONE with")


def test_announced_layers_must_be_there(target: Path) -> None:
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    refused(lambda: load(NEXTN, None, target), r"lacks the tensors model\.mtp_layers\.0\.\*, the layers that")


def test_a_layer_behind_the_last_brings_no_embedding_and_no_head(tmp_path: Path) -> None:
    """It has copies of the target's, which are not read; whatever else it lacks is named."""
    _, _, made = save_appended_mtp("glm4-moe", tmp_path)
    prefix = "model.layers.3."
    made.tensors |= {f"{prefix}{name}.weight": torch.zeros(3) for name in ("embed_tokens", "shared_head.head")}
    made.save(tmp_path)
    draft = load(NEXTN, None, tmp_path)
    assert isinstance(draft, MTPDraft) and draft.embed_tokens is draft.target.embed_tokens
    assert draft.lm_head is draft.target.lm_head and draft.max_steps is None
    del made.tensors[f"{prefix}enorm.weight"]
    made.save(tmp_path)
    refused(lambda: load(NEXTN, None, tmp_path), r"the checkpoint lacks weights: model\.layers\.3\.enorm\.weight")
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if not name.startswith(prefix)}
    made.save(tmp_path)
    refused(lambda: load(NEXTN, None, tmp_path), r"lacks the tensors model\.layers\.3\.\*, the layers that")


def test_further_layers_in_a_directory_of_their_own(tmp_path: Path, target: Path) -> None:
    save_target("llama", draft := tmp_path / "draft")
    made = add_mtp(draft, 2)
    made.tensors = {name: t for name, t in made.tensors.items() if ".mtp_layers." in name}
    made.save(draft)
    assert load(NEXTN, draft, target).max_steps == 2
    made.config["num_hidden_layers"] = 4
    made.save(draft)
    refused(lambda: load(NEXTN, draft, target), "with num_layers 4, the target has 3; use those of")


def test_layers_that_are_not_announced_are_no_part_of_the_target(target: Path) -> None:
    made = add_mtp(target, 1)
    load(NEXTN, None, target)
    del made.config["num_nextn_predict_layers"]
    made.save(target)
    config = ModelConfig.from_dir(str(target))
    context = torch_context(Shard(), torch.float32)
    refused(lambda: load_model(config, "auto", CPU, context, 0, False), "does not have: model.mtp_layers.0")


@pytest.mark.parametrize(
    ("algorithm", "change", "message"),
    [
        (EAGLE, {"fc.weight": None}, "no EAGLE checkpoint, it lacks fc.weight.*STANDALONE"),
        (EAGLE3, {"fc.weight": None}, "no EAGLE3 checkpoint, it lacks fc.weight.*STANDALONE"),
        (EAGLE, {"layers.0.mlp.up_proj.weight": None}, r"lacks weights: layers\.0\.mlp\.up_proj\.weight;"),
        (EAGLE, {"layers.0.input_layernorm.weight": torch.ones(48)}, "does not have: layers.0.input_layernorm"),
        (EAGLE, {"layers.1.mlp.up_proj.weight": torch.ones(2)}, "does not have: layers.1.mlp.*num_hidden_layers"),
        (EAGLE, {"fc.weight": torch.ones(48, 95)}, r"fc.weight has shape \[48, 95\].*asks for \[48, 96\]"),
        (EAGLE, {"fc.bias": torch.ones(47)}, r"fc.bias has shape \[47\].*asks for \[48\]"),
        (EAGLE, {"embed_tokens.weight": torch.ones(100, 48)}, r"embed_tokens.weight has shape \[100, 48\]"),
        (EAGLE, {"model.fc.weight": torch.ones(48, 96)}, "fc.weight comes twice"),
        (EAGLE, {"fc.weight": torch.ones(48, 96, dtype=torch.int8)}, "fc.weight is torch.int8; use the model's unq"),
        (EAGLE3, {"midlayer.hidden_norm.weight": None}, "lacks weights: midlayer.hidden_norm.weight;"),
        (EAGLE3, {"fc.weight": torch.ones(48, 96)}, r"fc.weight has shape \[48, 96\].*asks for \[48, 144\]"),
        (EAGLE3, {"d2t": None}, "lacks weights: d2t;"),
        (EAGLE3, {"d2t": torch.zeros(36, dtype=torch.int64)}, r"d2t has shape \[36\].*asks for \[37\]"),
        (EAGLE3, {"d2t": torch.zeros(37)}, "d2t is torch.float32, it must hold whole numbers"),
        (EAGLE3, {"d2t": torch.full((37,), 65)}, "d2t names token 101, the vocabulary has 101; the draft's"),
        (EAGLE3, {"d2t": torch.full((37,), -1)}, "d2t names token -1, the vocabulary has 101"),
        (EAGLE3, {"lm_head.weight": None}, r"lacks lm_head.weight.*: \[101, 48\], not \[37, 48\]; check"),
        (EAGLE3, {"midlayer.extra.weight": torch.ones(1)}, "does not have: midlayer.extra.weight;"),
    ],
)
def test_weights_that_do_not_fit(
    tmp_path: Path, target: Path, algorithm: SpeculativeAlgorithm, change: dict[str, torch.Tensor | None], message: str
) -> None:
    made = eagle() if algorithm is EAGLE else eagle3()
    tensors = {**made.tensors, **change}
    made.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    draft = made.save(tmp_path / "draft")
    refused(lambda: load(algorithm, draft, target), message)


def test_a_narrower_draft_must_bring_its_embedding(tmp_path: Path, target: Path) -> None:
    made = next(made for made in (random_eagle3(Random(seed)) for seed in range(99)) if made.size("hidden_size") == 40)
    load(EAGLE3, made.save(tmp_path / "draft"), target)
    del made.tensors["embed_tokens.weight"]
    made.save(tmp_path / "draft")
    refused(
        lambda: load(EAGLE3, tmp_path / "draft", target),
        r"lacks embed_tokens.weight, and the target's cannot take its place: \[101, 48\], not \[101, 40\]",
    )


@pytest.mark.parametrize(("algorithm", "make"), [(EAGLE, eagle), (EAGLE3, eagle3)])
def test_names_may_say_that_they_are_of_the_model(
    tmp_path: Path, target: Path, algorithm: SpeculativeAlgorithm, make: Callable[[], DraftCheckpoint]
) -> None:
    made = make()
    plain = load(algorithm, made.save(tmp_path / "plain"), target).weight_slots()
    kept = ("lm_head.weight", "d2t", "t2d")
    made.tensors = {name if name in kept else f"model.{name}": t for name, t in made.tensors.items()}
    made.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # old checkpoints have it
    renamed = load(algorithm, made.save(tmp_path / "renamed"), target).weight_slots()
    assert plain.keys() == renamed.keys()
    assert all(torch.equal(slot.dest, renamed[name].dest) for name, slot in plain.items())


def test_pickled_drafts_are_refused_with_the_conversion(tmp_path: Path, target: Path) -> None:
    draft = eagle3().save(tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    (draft / "model.safetensors").unlink()
    torch.save(tensors, draft / "pytorch_model.bin")
    refused(lambda: load(EAGLE3, draft, target), "only pickled weights.*convert them once: python -c")
    save_file(torch.load(draft / "pytorch_model.bin", weights_only=True), draft / "model.safetensors")
    assert load(EAGLE3, draft, target).nbytes > VOCAB
