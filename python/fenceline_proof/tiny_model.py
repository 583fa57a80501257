"""Models so small that hundreds of engine runs take a minute: a Qwen3, one with experts, a Gemma 2 with windows,
a DeepSeek-V3 and a GLM-5 with dense layers; drafts, and a tokenizer.

The weights are random and written to a folder once. The tokenizer is byte-level: letters, pairs of letters, and bytes
of longer characters.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from fenceline.config.draft_config import SpeculativeAlgorithm, read_draft_config
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.weight import WeightSlots
from fenceline.models.draft_families import make_draft_model
from fenceline.models.families import make_model

VOCAB_SIZE = 64
EOS_TOKEN = 0
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB_SIZE, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "torch_dtype": "float32", "eos_token_id": EOS_TOKEN, "bos_token_id": 1,
}  # fmt: skip


# The same with experts in its second layer.
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0],
}  # fmt: skip
# Gemma 2's layers: the first has a window.
_WINDOWS = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
}  # fmt: skip
# DeepSeek-V3's layers: the second one has experts, and a shared one that joins these.
_LATENTS = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "first_k_dense_replace": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 8, "routed_scaling_factor": 2.5,
}  # fmt: skip
# GLM-5's layers: the second one attends to what the first has selected. So few heads of its indexer have equal scores.
_SPARSE = _LATENTS | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "index_n_heads": 2, "index_head_dim": 12,
    "index_topk": 6, "indexer_types": ["full", "shared"],
}  # fmt: skip
# Qwen3-Next's layers, with dense MLPs: the first two carry a state, the third attends with gates.
_STATES = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "mlp_only_layers": [0, 1, 2],
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
PLACEHOLDER, PICTURE_SIDE = 63, 4  # the token of an embedding, and the side of its square in pixels
# Qwen2.5-VL's layers, and a tower whose first layer has windows.
_PICTURES = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": PLACEHOLDER,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    "vision_config": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": PICTURE_SIDE // 2, "window_size": 2 * PICTURE_SIDE, "fullatt_block_indexes": [1],
    },
}  # fmt: skip
PLAIN = "plain"
_MODELS = {
    PLAIN: _CONFIG, "experts": _CONFIG | _EXPERTS, "windows": _CONFIG | _WINDOWS, "latents": _CONFIG | _LATENTS,
    "sparse": _CONFIG | _SPARSE, "pictures": _CONFIG | _PICTURES, "states": _CONFIG | _STATES,
    # The shortest windows under which there may be trees of drafts.
    "long_windows": _CONFIG | _WINDOWS | {"sliding_window": 64},
    # With one token more: a vocabulary that two ranks cannot halve.
    "odd": _CONFIG | {"vocab_size": VOCAB_SIZE + 1},
}  # fmt: skip
_NUM_KNOWN = 40  # tokens of EAGLE3's vocabulary

# What is told of a draft beside the target's own sizes, by its name.
_DRAFTS: dict[str, dict[str, object]] = {
    # It knows a part of the tokens.
    "EAGLE3": {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
        "draft_vocab_size": _NUM_KNOWN,
    },
    "NEXTN": {"num_nextn_predict_layers": 1},
    "NEXTN2": {"num_nextn_predict_layers": 2},  # a layer for each step
    "NEXTN3": {"num_nextn_predict_layers": 3},
    "NEAR": {},  # nearly the target: half of its proposals are accepted
    "ITSELF": {},
}  # fmt: skip
_DRAFTS["EAGLE3 of one head"] = _DRAFTS["EAGLE3"] | {"num_key_value_heads": 1}  # pages with rows of another size
_NOT_DRAWN = ("EAGLE3 of one head", "NEXTN3")  # those that a workload asks for
DRAFTS = tuple(name for name in _DRAFTS if name not in _NOT_DRAWN)
_NUM_LAYERS, _NUM_KV_HEADS, _HEAD_DIM = (
    int(str(_CONFIG[name])) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
)
_DRAFT_LAYERS = max(int(str(draft.get("num_nextn_predict_layers", _NUM_LAYERS))) for draft in _DRAFTS.values())
# Of the KV of a token, that of the largest draft included: keys and values of each layer, in float32.
MOST_TOKEN_BYTES = 2 * (_NUM_LAYERS + _DRAFT_LAYERS) * _NUM_KV_HEADS * _HEAD_DIM * 4
_NEAR = 0.1  # how much the weights of NEAR differ from the target's


@lru_cache
def tiny_model_path(name: str = PLAIN) -> str:
    """The folder of one of the models above, the same in every call of a process and deleted when it ends."""
    folder = _folder(name, _MODELS[name])
    model = resolve(ServerArgs(model_path=str(folder), device="cpu", load_format="dummy")).model
    slots = make_model(model, torch_context(Shard(), torch.float32)).weight_slots()
    save_file(_random(slots, 11), folder / "model.safetensors")
    return str(folder)


@lru_cache
def tiny_weights(number: int, model: str = PLAIN) -> str:
    """The folder of another checkpoint of the model; its weights are others for each ``number`` from 1 on."""
    folder = _folder(f"weights-{number}", _MODELS[model])
    tensors = load_file(Path(tiny_model_path(model)) / "model.safetensors")
    generator = torch.Generator().manual_seed(20 + number)
    for tensor in tensors.values():
        tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@lru_cache
def tiny_part(number: int) -> str:
    """A safetensors file with half of the tensors of :func:`tiny_weights`. Its folder is that of the checkpoint that
    the model has after the update."""
    tensors, others = (
        load_file(Path(folder) / "model.safetensors") for folder in (tiny_model_path(), tiny_weights(number))
    )
    part = {name: others[name] for name in sorted(others)[::2]}
    folder = _folder(f"part-{number}", _CONFIG)
    save_file(tensors | part, folder / "model.safetensors")
    save_file(part, folder / "part.safetensors")
    return str(folder / "part.safetensors")


@lru_cache
def tiny_draft(name: str, model: str = PLAIN) -> tuple[str, str | None]:
    """One of :data:`DRAFTS`: the algorithm that it is for, and its folder, as :func:`tiny_model_path`. ``model``: its
    target; of the sparse one there are NEAR, ITSELF and NEXTN alone, of others but the plain one and that with pictures
    the first two, and of that with states NEXTN; it has those of the plain one too, whose layers all attend."""
    if name == "NGRAM":  # no model
        return name, None
    if model == "states" and name != "NEXTN":
        return tiny_draft(name)
    if name == "ITSELF":
        return "STANDALONE", tiny_model_path(model)
    is_written = model in (PLAIN, "pictures") or name in ("NEAR", "NEXTN")
    assert is_written, f"a draft {name} of {model} has not been written"
    folder = _folder(f"draft-{name.lower().replace(' ', '-')}", _MODELS[model] | _DRAFTS[name])
    target = Path(tiny_model_path(model))
    weights = load_file(target / "model.safetensors")
    if name == "NEAR":
        (folder / "config.json").write_text((target / "config.json").read_text())  # of plain numbers
        generator = torch.Generator().manual_seed(12)
        weights = {n: t + _NEAR * torch.randn(t.shape, generator=generator) for n, t in weights.items()}
        save_file(weights, folder / "model.safetensors")
        return "STANDALONE", str(folder)
    is_eagle = name.startswith("EAGLE3")
    algorithm = SpeculativeAlgorithm("EAGLE3" if is_eagle else name.rstrip("23"))
    model_config = resolve(ServerArgs(model_path=str(target), device="cpu")).model
    context = torch_context(Shard(), torch.float32)
    config = read_draft_config(algorithm, str(folder), model_config)
    names = {"lm_head.weight", "d2t"} if is_eagle else set[str]()
    slots = make_draft_model(config, context, make_model(model_config, context), names).weight_slots()
    weights = _random(slots, 13)
    if is_eagle:
        known = torch.arange(_NUM_KNOWN)
        weights["d2t"] = known * VOCAB_SIZE // _NUM_KNOWN - known
    save_file(weights, folder / "model.safetensors")
    return algorithm.value, str(folder)


@lru_cache
def storage_secret() -> str:
    path = _temporary_folder("secret") / "key"
    path.write_text("5e" * 32)
    path.chmod(0o600)
    return str(path)


def _temporary_folder(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_temporary_root()))


@lru_cache
def _temporary_root() -> Path:
    """Of this process and of those that it forks later; deleted when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="fenceline-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _folder(name: str, config: dict[str, object]) -> Path:
    folder = _temporary_folder(name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _random(slots: WeightSlots, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, slot in slots.items():
        mean = 1.0 if len(slot.full_shape) == 1 else 0.0  # norms near one
        if name.endswith("A_log"):
            mean = -4.0  # so that states remember the tokens of a prompt
        weights[name] = torch.randn(slot.full_shape, generator=generator) * 0.3 + mean
    return weights


_LETTERS = "abcdefghijklmnopqrstuvwxyz .,!"
_PAIRS = (*("th he in er an re on at en nd ti es or te of ed is it al ar st to nt".split()), "e ", " a")  # noqa: SIM905
_BYTES = (b"\xc3", b"\xa9", b"\xe2", b"\x82\xac", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x99\x82")
# The bytes of each id. The first, the end-of-sequence token, is special and has no text.
PIECES = (b"", *(text.encode() for text in (*_LETTERS, *_PAIRS)), *_BYTES)
assert len(PIECES) == len(set(PIECES)) == VOCAB_SIZE and not PIECES[EOS_TOKEN], "one piece for each id"


@lru_cache
def tiny_tokenizer() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it, without merges: it only decodes."""
    # GPT-2's letters for bytes: printable Latin-1 stands for itself, the others follow U+0100 in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    vocab = {"".join(letters[byte] for byte in piece): id for id, piece in enumerate(PIECES) if piece}
    backend = RustTokenizer(models.BPE(vocab={"<end>": EOS_TOKEN, **vocab}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(backend, {"eos_token": "<end>"})
