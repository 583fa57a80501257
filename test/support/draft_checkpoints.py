"""Random small drafts for the random targets of model_parity, saved in the published formats."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
import transformers
from model_parity import save_checkpoint
from safetensors.torch import load_file, save_file
from vision_cases import save_vision_checkpoint

VOCAB, TARGET_SIZE, TARGET_LAYERS = (101, 48, 3)  # vocabulary, hidden size and layers of the targets in model_parity

Tensors = dict[str, torch.Tensor]


@dataclass
class DraftCheckpoint:
    """A draft's ``config.json`` and tensors, which a test may change before ``save`` writes them."""

    config: dict[str, object]
    tensors: Tensors = field(default_factory=dict)

    def save(self, directory: Path) -> Path:
        """Write one safetensors file and ``config.json`` into ``directory``, which is returned."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self.config))
        return directory

    def size(self, key: str) -> int:
        """An integer of the config."""
        value = self.config[key]
        assert isinstance(value, int)
        return value


def save_target(name: str, directory: Path) -> transformers.PreTrainedModel:
    """A target of ``CHECKPOINTS``, or "mimo": a Qwen2 under MiMo's name."""
    model = save_checkpoint("qwen2" if name == "mimo" else name, directory)
    if name == "mimo":
        path = directory / "config.json"
        config = json.loads(path.read_text()) | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        path.write_text(json.dumps(config))
    return model


def random_eagle(rng: Random, family: str) -> DraftCheckpoint:
    """An EAGLE draft: LlamaForCausalLMEagle, Qwen2ForCausalLMEagle, ...; randomly with its own embedding and head."""
    config = _sizes(rng, TARGET_SIZE) | {
        "architectures": [rng.choice([f"{family}ForCausalLMEagle", f"{family}ForCausalLM"])],
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "attention_bias": family != "Qwen2" and rng.random() < 0.3,
    }
    made = DraftCheckpoint(config)
    biases = _biases(config, family)
    for index in range(made.size("num_hidden_layers")):
        made.tensors |= _layer(config, f"layers.{index}.", TARGET_SIZE, biases, qk_norm=family == "Qwen3")
        if index > 0:
            made.tensors[f"layers.{index}.input_layernorm.weight"] = _ones_about(TARGET_SIZE)
    made.tensors |= _linear("fc", 2 * TARGET_SIZE, TARGET_SIZE, bias=rng.random() < 0.5)
    if rng.random() < 0.5:
        made.tensors["embed_tokens.weight"] = torch.randn(VOCAB, TARGET_SIZE)
    if rng.random() < 0.3:
        made.tensors["lm_head.weight"] = torch.randn(VOCAB, TARGET_SIZE) * 0.1
    return made


def random_eagle3(
    rng: Random, vocab: int = VOCAB, size: int | None = None, others: Mapping[str, object] | None = None
) -> DraftCheckpoint:
    """An EAGLE-3 draft; randomly with another width than the target, if no ``size`` is given, a part of the vocabulary,
    or explicit layer ids. ``others``: entries of its config.json that are replaced."""
    size = size or rng.choice([TARGET_SIZE, 40])
    config = (
        _sizes(rng, size)
        | {"vocab_size": vocab, **(others or {})}
        | {
            "architectures": [rng.choice(["LlamaForCausalLMEagle3", "LlamaForCausalLM"])],
            "num_hidden_layers": 1,
            "attention_bias": rng.random() < 0.3,
        }
    )
    num_aux = 3
    if rng.random() < 0.6:
        num_aux = rng.choice([1, 2, 3, 4])
        ids = [rng.randrange(-1, TARGET_LAYERS) for _ in range(num_aux)]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    if size != TARGET_SIZE:
        config["target_hidden_size"] = TARGET_SIZE
    made = DraftCheckpoint(config)
    made.tensors |= _layer(config, "midlayer.", 2 * size, _biases(config, "Llama"), qk_norm=False)
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        made.tensors[f"{name}.weight"] = _ones_about(size)
    made.tensors |= _linear("fc", num_aux * TARGET_SIZE, size, bias=rng.random() < 0.3)
    if size != TARGET_SIZE or rng.random() < 0.3:
        made.tensors["embed_tokens.weight"] = torch.randn(vocab, size)
    head = rng.choice([37, vocab, None if size == TARGET_SIZE else vocab])
    if head is not None:
        config["draft_vocab_size"] = head
        made.tensors["lm_head.weight"] = torch.randn(head, size) * 0.1
        ids = sorted(rng.sample(range(vocab), head))
        made.tensors["d2t"] = torch.tensor(ids) - torch.arange(head)
        made.tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
    return made


def save_appended_mtp(
    name: str, directory: Path, others: Mapping[str, object] | None = None
) -> tuple[transformers.PreTrainedModel, torch.nn.Module, DraftCheckpoint]:
    """A target of ``CHECKPOINTS`` with a multi-token prediction layer behind its last one, as DeepSeek-V3 is published:
    transformers' model in float64, its decoder layer that is part of the prediction layer, and the checkpoint.
    ``others``: see ``save_checkpoint``."""
    indexed = {"indexer_types": ["full", "shared", "shared", "full"]} if name == "glm-5-shared" else {}
    model = save_checkpoint(name, directory, {"num_hidden_layers": TARGET_LAYERS + 1, **indexed, **(others or {})})
    block, model.model.layers = model.model.layers[-1], model.model.layers[:-1]
    model.config.num_hidden_layers = TARGET_LAYERS
    made = _read_one_file(directory, {"num_hidden_layers": TARGET_LAYERS, "num_nextn_predict_layers": 1})
    for kind in ("layer_types", "mlp_layer_types", "indexer_types"):
        if isinstance(kinds := made.config.get(kind), list):
            made.config[kind] = kinds[:TARGET_LAYERS]
    prefix = f"model.layers.{TARGET_LAYERS}."
    made.tensors |= {f"{prefix}{norm}.weight": _ones_about(TARGET_SIZE) for norm in ("enorm", "hnorm")}
    made.tensors |= _linear(f"{prefix}eh_proj", 2 * TARGET_SIZE, TARGET_SIZE, bias=False)
    made.tensors[f"{prefix}shared_head.norm.weight"] = _ones_about(TARGET_SIZE)
    made.tensors[f"{prefix}embed_tokens.weight"] = made.tensors["model.embed_tokens.weight"].clone()
    made.tensors[f"{prefix}shared_head.head.weight"] = made.tensors["lm_head.weight"].clone()
    made.save(directory)
    return model.double(), block.double(), made


def _read_one_file(directory: Path, others: dict[str, object]) -> DraftCheckpoint:
    """The checkpoint in ``directory``, which goes; ``others``: entries of its config.json that are replaced."""
    made = DraftCheckpoint(json.loads((directory / "config.json").read_text()) | others)
    for path in directory.glob("*.safetensors"):
        made.tensors |= {name: tensor.clone() for name, tensor in load_file(path).items()}
        path.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    return made


def add_mtp(directory: Path, num_layers: int) -> DraftCheckpoint:
    """Adds multi-token prediction layers to the checkpoint of a target, and returns all of it."""
    made = _read_one_file(directory, {"num_nextn_predict_layers": num_layers})
    config = made.config
    if isinstance(text := config.get("text_config"), dict):
        config = text | {"num_nextn_predict_layers": num_layers}
    kind = str(config["model_type"])
    family = "Qwen3" if kind.startswith("qwen3") else "Qwen2" if kind.startswith(("mimo", "qwen2")) else "Llama"
    for index in range(num_layers):
        prefix = f"model.mtp_layers.{index}."
        made.tensors |= _layer(config, prefix, TARGET_SIZE, _biases(config, family), qk_norm=family == "Qwen3")
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
        made.tensors |= {f"{prefix}{name}.weight": _ones_about(TARGET_SIZE) for name in norms}
        made.tensors |= _linear(f"{prefix}input_proj", 2 * TARGET_SIZE, TARGET_SIZE, bias=False)
    made.save(directory)
    return DraftCheckpoint(config, made.tensors)


def save_own_mtp(
    name: str, directory: Path, others: Mapping[str, object] | None = None
) -> tuple[transformers.PreTrainedModel, DraftCheckpoint]:
    """A hybrid target of ``CHECKPOINTS`` with the layer that predicts further tokens in a module of its own, as
    Qwen3-Next is published: transformers' model, which does not read it, and the checkpoint, whose tensors are named as
    those of one expert each (on disk Qwen3.5's are stacked)."""
    model = save_checkpoint(name, directory, others)
    made = _read_one_file(directory, {} if name == "qwen3-next" else {"mtp_num_hidden_layers": 1})
    config = made.config
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    size, head_dim, bias = sizes["hidden_size"], sizes["head_dim"], bool(config.get("attention_bias"))
    heads, kv_size = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    layer, mtp = "mtp.layers.0.", {}
    for norm in ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        mtp[f"{norm}.weight"] = 0.3 * torch.randn(size)
    for norm, width in (("input_layernorm", size), ("post_attention_layernorm", size), ("self_attn.q_norm", head_dim)):
        mtp[f"{layer}{norm}.weight"] = 0.3 * torch.randn(width)
    mtp[f"{layer}self_attn.k_norm.weight"] = 0.3 * torch.randn(head_dim)
    mtp |= _linear("mtp.fc", 2 * size, size, bias=False)
    for part, width in (("q_proj", 2 * heads), ("k_proj", kv_size), ("v_proj", kv_size)):
        mtp |= _linear(f"{layer}self_attn.{part}", size, width, bias)
    mtp |= _linear(f"{layer}self_attn.o_proj", heads, size, bias)
    mlps = {f"{layer}mlp.": sizes["intermediate_size"]} if "intermediate_size" in sizes else {}
    num_experts = 0 if sizes.get("decoder_sparse_step", 1) > 1 else sizes.get("num_experts", 0)
    if num_experts:
        mlps = {f"{layer}mlp.experts.{index}.": sizes["moe_intermediate_size"] for index in range(num_experts)}
        mlps[f"{layer}mlp.shared_expert."] = sizes["shared_expert_intermediate_size"]
        mtp |= _linear(f"{layer}mlp.gate", size, num_experts, bias=False)
        mtp |= _linear(f"{layer}mlp.shared_expert_gate", size, 1, bias=False)
    for prefix, inner in mlps.items():
        mtp |= _linear(f"{prefix}gate_proj", size, inner, bias=False)
        mtp |= _linear(f"{prefix}up_proj", size, inner, bias=False)
        mtp |= _linear(f"{prefix}down_proj", inner, size, bias=False)
    stored, experts = dict(mtp), f"{layer}mlp.experts."
    if num_experts and name != "qwen3-next":
        stored = {key: tensor for key, tensor in mtp.items() if not key.startswith(experts)}
        of_each = [
            {part: mtp[f"{experts}{i}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for i in range(num_experts)
        ]
        stored[f"{experts}gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in of_each])
        stored[f"{experts}down_proj"] = torch.stack([each["down"] for each in of_each])
    DraftCheckpoint(config, made.tensors | stored).save(directory)
    return model.double(), DraftCheckpoint(config, made.tensors | mtp)


def _sizes(rng: Random, size: int) -> dict[str, object]:
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (6, 2), (3, 1)])
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": size,
        "intermediate_size": rng.choice([30, 64]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([10, 16]),
        "max_position_embeddings": 64,  # shorter than the target's context
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "rope_theta": rng.choice([10000.0, 500.0]),
        "hidden_act": "silu",
        "tie_word_embeddings": rng.random() < 0.5,
        "torch_dtype": "float16",
    }


@dataclass(frozen=True)
class _Biases:
    qkv: bool
    o: bool
    mlp: bool


def _biases(config: dict[str, object], family: str) -> _Biases:
    attention = bool(config.get("attention_bias"))
    if family == "Qwen2":
        return _Biases(qkv=True, o=False, mlp=False)
    return _Biases(qkv=attention, o=attention, mlp=family == "Llama" and bool(config.get("mlp_bias")))


def _layer(config: dict[str, object], prefix: str, in_size: int, biases: _Biases, qk_norm: bool) -> Tensors:
    """The tensors of a layer without the norm of its input."""
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    size, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    head_dim = sizes.get("head_dim") or size // heads
    kv_size = sizes["num_key_value_heads"] * head_dim
    tensors = {f"{prefix}post_attention_layernorm.weight": _ones_about(size)}
    tensors |= _linear(f"{prefix}self_attn.q_proj", in_size, heads * head_dim, biases.qkv)
    tensors |= _linear(f"{prefix}self_attn.k_proj", in_size, kv_size, biases.qkv)
    tensors |= _linear(f"{prefix}self_attn.v_proj", in_size, kv_size, biases.qkv)
    tensors |= _linear(f"{prefix}self_attn.o_proj", heads * head_dim, size, biases.o)
    tensors |= _linear(f"{prefix}mlp.gate_proj", size, inner, biases.mlp)
    tensors |= _linear(f"{prefix}mlp.up_proj", size, inner, biases.mlp)
    tensors |= _linear(f"{prefix}mlp.down_proj", inner, size, biases.mlp)
    if qk_norm:
        tensors[f"{prefix}self_attn.q_norm.weight"] = _ones_about(head_dim)
        tensors[f"{prefix}self_attn.k_norm.weight"] = _ones_about(head_dim)
    return tensors


def _linear(name: str, in_size: int, out_size: int, bias: bool) -> Tensors:
    tensors = {f"{name}.weight": torch.randn(out_size, in_size) * 0.8 / in_size**0.5}
    return tensors | ({f"{name}.bias": torch.randn(out_size) * 0.3} if bias else {})


def _ones_about(size: int) -> torch.Tensor:
    return 1 + 0.3 * torch.randn(size)


@dataclass
class VisionDraft:
    """A target of ``vision_cases`` with a draft of it: transformers' model, the target's folder, the draft's flags and
    its checkpoint."""

    target: transformers.PreTrainedModel
    directory: Path
    flags: dict[str, object]
    draft: DraftCheckpoint


def save_vision_draft(name: str, algorithm: str, num_layers: int, folder: Path) -> VisionDraft:
    """An EAGLE3 draft of that architecture, or a NEXTN one of so many layers."""
    target = save_vision_checkpoint(name, folder / "target")
    flags: dict[str, object] = {"speculative_algorithm": algorithm, "speculative_num_steps": num_layers}
    if algorithm == "NEXTN":
        return VisionDraft(target, folder / "target", flags, add_mtp(folder / "target", num_layers))
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]} if "Qwen" in name else None
    others = {"head_dim": 16, "rope_scaling": rope, "max_position_embeddings": 512}
    draft = random_eagle3(Random(zlib.crc32(name.encode())), 120, TARGET_SIZE, others)
    flags |= {"speculative_draft_model_path": str(draft.save(folder / "draft")), "speculative_num_steps": 2}
    return VisionDraft(target, folder / "target", flags, draft)
