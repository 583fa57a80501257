"""Models so small that hundreds of engine runs take a minute: a Qwen3, some with experts, some in FP8, a Gemma 2 with
windows, an OLMo 2, a SmolLM3 in INT4 of which one layer sees no positions, a gpt-oss with sinks and experts in MXFP4,
an ERNIE 4.5 and a GLM-4, whose rotary pairs are neighbours; drafts, and a tokenizer.

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
from fenceline.models.draft_registry import make_draft_model
from fenceline.models.registry import make_model

VOCAB_SIZE = 64
EOS_TOKEN = 0
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": EOS_TOKEN,
    "bos_token_id": 1,
}


# The same with experts in its second layer.
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
# Qwen2's, with one more expert for all tokens.
_SHARED = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": False,
}
# gpt-oss's layers: sinks, a window in the first, and experts of which one tensor has all matrices.
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,
    "attention_bias": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
# Gemma 2's layers: the first has a window.
_WINDOWS = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
# OLMo 2's layers: norms behind each branch, and of queries and keys over all heads at once.
_WIDE = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
_UNROTATED = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0]}
# Rotary pairs of adjacent features, of all of a head or of the first half of them.
_ADJACENT = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "use_bias": True}
_PARTIAL = {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5
}  # fmt: skip
# One head of keys for all queries, biases, and rotary frequencies that are scaled for longer contexts in two ways.
_FEW_HEADS = {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0}
_BLOCK = 128  # of FP8, rows and columns
_GROUP = 32  # of INT4 and MXFP4, columns
_FP8 = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
_INT4 = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": False}
_MXFP4 = {"quant_method": "mxfp4"}
_FP8_ROWS = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
            "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
        }
    },
}
# Of each layer. In the second one keys have none.
_KV_SCALES = {"k": (0.25, 1.0), "v": (0.4, 0.8)}
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
PLAIN = "plain"
_MODELS = {
    PLAIN: _CONFIG,
    "experts": _CONFIG | _EXPERTS,
    "windows": _CONFIG | _WINDOWS,
    # The shortest windows under which there may be trees of drafts.
    "long_windows": _CONFIG | _WINDOWS | {"sliding_window": 64},
    "wide": _CONFIG | _WIDE,
    "adjacent": _CONFIG | _ADJACENT,
    "partial": _CONFIG | _PARTIAL,
    "llama3": _CONFIG | _FEW_HEADS | {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 64}},
    "yarn": _CONFIG | _FEW_HEADS | {"rope_scaling": _YARN | {"original_max_position_embeddings": 64}},
    "fp8": _CONFIG | {"intermediate_size": 160, "quantization_config": _FP8},  # a block and a part of one
    # With a scale for the keys and one for the values of each layer, if they are kept in FP8.
    "kv_scales": _CONFIG | {"quantization_config": _FP8 | {"kv_cache_scheme": _KV_SCHEME}},
    "int4": _CONFIG | _UNROTATED | {"intermediate_size": 64, "quantization_config": _INT4},
    "shared": _CONFIG | _EXPERTS | _SHARED,
    "fp8_experts": _CONFIG | _EXPERTS | {"quantization_config": _FP8},
    "int4_experts": _CONFIG | _EXPERTS | {
        "intermediate_size": 64, "moe_intermediate_size": 64, "quantization_config": _INT4
    },
    "gpt_oss": _CONFIG | _GPT_OSS,
    "mxfp4": _CONFIG | _GPT_OSS | {"quantization_config": _MXFP4},
    "fp8_rows": _CONFIG | {"quantization_config": _FP8_ROWS},
    # The engine rounds plain numbers, which stay what they are because each is one of the format.
    "rounded_fp8": _CONFIG,
}  # fmt: skip
# With one token more: a vocabulary that two ranks cannot halve.
_MODELS |= {
    f"odd_{name}": _MODELS[name] | {"vocab_size": VOCAB_SIZE + 1}
    for name in (PLAIN, "wide", "llama3", "gpt_oss")
}
MODELS = tuple(_MODELS)
# What --quantization says, where it is not what the checkpoint says.
ROUNDED = {"rounded_fp8": "fp8"}
_SOURCES = {"rounded_fp8": "fp8_rows"}  # whose plain numbers they have
_MEANT = "dequantised"  # the folder in a quantised model's
_NUM_KNOWN = 40  # tokens of EAGLE3's vocabulary

# What is told of a draft beside the target's own sizes, by its name.
_DRAFTS: dict[str, dict[str, object]] = {
    # It knows a part of the tokens.
    "EAGLE3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": _NUM_KNOWN,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
    },
    # Its pages have rows of another size than the target's.
    "EAGLE3 of one head": {},
    "NEXTN": {"num_nextn_predict_layers": 1},
    "NEXTN2": {"num_nextn_predict_layers": 2},  # a layer for each step
    "NEXTN3": {"num_nextn_predict_layers": 3},
    # Nearly the target, and the target itself: half of the first one's proposals are accepted, and all of the second
    # one's.
    "NEAR": {},
    "ITSELF": {},
}
_DRAFTS["EAGLE3 of one head"] = _DRAFTS["EAGLE3"] | {"num_key_value_heads": 1}
_NOT_DRAWN = ("EAGLE3 of one head", "NEXTN3")  # those that a workload asks for
DRAFTS = tuple(name for name in _DRAFTS if name not in _NOT_DRAWN)
_NUM_LAYERS, _NUM_KV_HEADS, _HEAD_DIM = (
    int(str(_CONFIG[name])) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
)
_DRAFT_LAYERS = max(
    int(str(draft.get("num_nextn_predict_layers", _NUM_LAYERS))) for draft in _DRAFTS.values()
)
# Of the KV of a token, that of the largest draft included: keys and values of each layer, in float32.
MOST_TOKEN_BYTES = 2 * (_NUM_LAYERS + _DRAFT_LAYERS) * _NUM_KV_HEADS * _HEAD_DIM * 4
_NEAR = 0.1  # how much the weights of NEAR differ from the target's


@lru_cache
def tiny_model_path(name: str = PLAIN) -> str:
    """The folder of one of :data:`MODELS`, the same in every call of a process and deleted when it ends."""
    if name in _SOURCES:
        return plain_path(tiny_model_path(_SOURCES[name]))
    if "quantization_config" in _MODELS[name]:
        return str(_quantised(name))
    folder = _folder(name, _MODELS[name])
    model = resolve(ServerArgs(model_path=str(folder), device="cpu", load_format="dummy")).model
    slots = make_model(model, torch_context(Shard(), torch.float32)).weight_slots()
    save_file(_random(slots, 11), folder / "model.safetensors")
    return str(folder)


def plain_path(folder: str) -> str:
    """The folder of the plain numbers that the model in ``folder`` stands for: itself if it is not quantised."""
    meant = Path(folder) / _MEANT
    return str(meant) if meant.exists() else folder


def _quantised(name: str) -> Path:
    """The folder of a quantised model; the numbers that it stands for are in a folder in it."""
    config = dict(_MODELS[name])
    del config["quantization_config"]
    folder = _folder(name, config)  # plain at first
    model = resolve(ServerArgs(model_path=str(folder), device="cpu", load_format="dummy")).model
    tensors = _random(make_model(model, torch_context(Shard(), torch.float32)).weight_slots(), 11)
    stored: dict[str, torch.Tensor] = {}
    settings = _MODELS[name]["quantization_config"]
    assert isinstance(settings, dict)
    store, ending, joint = {
        "fp8": (_in_fp8, "_proj.weight", "."),
        "compressed-tensors": (_in_fp8_by_rows, "_proj.weight", "."),
        "gptq": (_in_int4, "_proj.weight", "."),
        "mxfp4": (_in_mxfp4, "_proj", "_"),
    }[settings["quant_method"]]
    for key, tensor in list(tensors.items()):
        if not key.endswith(ending):
            stored[key] = tensor
            continue
        parts, tensors[key] = store(tensor)
        module = key.removesuffix(".weight") + joint
        stored |= {f"{module}{suffix}": part.contiguous() for suffix, part in parts.items()}
    if "kv_cache_scheme" in settings:
        names = [key.replace("q_proj.weight", "{}_scale") for key in tensors if key.endswith("q_proj.weight")]
        scales = {
            name.format(kind): torch.tensor(sizes[index])
            for index, name in enumerate(names)
            for kind, sizes in _KV_SCALES.items()
        }
        stored, tensors = stored | scales, tensors | scales
    (folder / _MEANT).mkdir()
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / _MEANT / "model.safetensors"
    )
    (folder / _MEANT / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_MODELS[name]))
    return folder


def _in_fp8(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """matrix [N, K] → a checkpoint's tensors, with a scale for each block, and the numbers that they stand for."""
    num_rows, num_columns = (-(-size // _BLOCK) for size in matrix.shape)
    scales = torch.empty(num_rows, num_columns)
    numbers, meant = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn), torch.empty_like(matrix)
    for row in range(num_rows):
        for column in range(num_columns):
            rows, columns = (
                slice(row * _BLOCK, (row + 1) * _BLOCK),
                slice(column * _BLOCK, (column + 1) * _BLOCK),
            )
            block = matrix[rows, columns]
            scale = scales[row, column] = block.abs().max() / 448
            numbers[rows, columns] = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            meant[rows, columns] = numbers[rows, columns].float() * scale
    return {"weight": numbers, "weight_scale_inv": scales}, meant


def _in_fp8_by_rows(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """matrix [N, K] → the tensors of compressed-tensors, with a scale for each row, and the numbers that they stand
    for."""
    scales = matrix.abs().amax(1, keepdim=True) / 448
    numbers = (matrix / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _in_int4(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """matrix [N, K] → gptq's tensors, with a scale and a zero point for each group of columns, and the numbers that
    they stand for. Zero points are stored as one less, which its first version does."""
    grouped = matrix.view(len(matrix), -1, _GROUP)
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(1, 15)
    numbers = ((grouped / scales).round() + zeros).clamp(0, 15)
    parts = {
        "qweight": _words(numbers.view_as(matrix)).t(),
        "qzeros": _words(zeros.squeeze(2).t() - 1),
        "scales": scales.squeeze(2).t().half(),
        "g_idx": (torch.arange(matrix.shape[1]) // _GROUP).int(),
    }
    return parts, ((numbers - zeros) * scales).view_as(matrix)


def _in_mxfp4(stack: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Matrices [experts, K, N] → gpt-oss's tensors of bytes, in which each 32 numbers along K share an exponent, and
    the numbers that they stand for, as ``stack``."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grouped = stack.transpose(1, 2).unflatten(2, (-1, _GROUP))  # [experts, N, groups, 32]
    exponents = grouped.abs().amax(3).log2().floor() - 2  # the largest number becomes 4 or 6
    scaled = grouped / 2 ** exponents.unsqueeze(3)
    codes = (scaled.abs().unsqueeze(4) - sizes).abs().argmin(4)
    meant = (sizes[codes] * scaled.sign() * 2 ** exponents.unsqueeze(3)).flatten(2).transpose(1, 2)
    codes += 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return {"blocks": blocks.to(torch.uint8), "scales": (exponents + 127).to(torch.uint8)}, meant


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Each eight numbers of four bits along a row as an int32, the first in its lowest bits."""
    words = (numbers.long().unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@lru_cache
def tiny_weights(number: int) -> str:
    """The folder of another checkpoint of the model; its weights are others for each ``number`` from 1 on."""
    folder = _folder(f"weights-{number}", _CONFIG)
    tensors = load_file(Path(tiny_model_path()) / "model.safetensors")
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
def tiny_misfit(kind: str) -> str:
    """The folder of a checkpoint that cannot take the model's place: it ``lacks`` a tensor, has one of another shape
    (``shape``), or is another model (``model``)."""
    folder = _folder(f"misfit-{kind}", _CONFIG | ({"num_hidden_layers": 3} if kind == "model" else {}))
    tensors = load_file(Path(tiny_model_path()) / "model.safetensors")
    name = sorted(tensors)[-1]
    if kind == "lacks":
        del tensors[name]
    if kind == "shape":
        tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@lru_cache
def tiny_draft(name: str, model: str = PLAIN) -> tuple[str, str]:
    """One of :data:`DRAFTS`: the algorithm that it is for, and its folder, as :func:`tiny_model_path`. ``model``: its
    target; of another than the plain one there are whole models alone, NEAR and ITSELF."""
    if name == "ITSELF":
        return "STANDALONE", tiny_model_path(model)
    assert model == PLAIN or name == "NEAR", f"a draft {name} of {model} has not been written"
    folder = _folder(f"draft-{name.lower().replace(' ', '-')}", _MODELS[model] | _DRAFTS[name])
    target = Path(plain_path(tiny_model_path(model)))
    weights = load_file(target / "model.safetensors")
    if name == "NEAR":
        (folder / "config.json").write_text((target / "config.json").read_text())  # of plain numbers
        generator = torch.Generator().manual_seed(12)
        weights = {n: t + _NEAR * torch.randn(t.shape, generator=generator) for n, t in weights.items()}
        save_file(weights, folder / "model.safetensors")
        return "STANDALONE", str(folder)
    is_eagle = name.startswith("EAGLE3")
    algorithm = SpeculativeAlgorithm("EAGLE3" if is_eagle else name.rstrip("23"))
    model_config = resolve(ServerArgs(model_path=tiny_model_path(), device="cpu")).model
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
    """A file with a secret, for --hicache-storage-key."""
    path = _temporary_folder("secret") / "key"
    path.write_text("5e" * 32)
    path.chmod(0o600)
    return str(path)


def _temporary_folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"fenceline-tiny-{name}-"))
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
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }
    vocab = {"".join(letters[byte] for byte in piece): id for id, piece in enumerate(PIECES) if piece}
    backend = RustTokenizer(models.BPE(vocab={"<end>": EOS_TOKEN, **vocab}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(backend, {"eos_token": "<end>"})
