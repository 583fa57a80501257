"""ModelConfig: what config.json, generation_config.json and the tokenizer's files become."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fenceline.config import ConfigError
from fenceline.config.model_config import SUPPORTED_ARCHITECTURES, ModelConfig, RopeScaling
from fenceline.images.video import FrameTimes

Json = dict[str, object]
LLAMA: Json = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def write(directory: Path, config: Json, **others: Json) -> str:
    """Write config.json and ``others`` (file name without .json → content); returns the directory."""
    for name, content in {"config": config, **others}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return str(directory)


def test_reads_sizes_and_defaults(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write(tmp_path, LLAMA))
    assert (config.architecture, config.num_layers, config.num_heads) == ("LlamaForCausalLM", 4, 8)
    assert (config.num_kv_heads, config.head_dim, config.context_length) == (2, 8, 4096)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 500000.0, None)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.dtype, config.windows, config.eos_token_ids) == ("bfloat16", (), ())
    assert config.hf_config["torch_dtype"] == "bfloat16"


def test_travels_between_processes(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write(tmp_path, LLAMA))
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.hf_config == config.hf_config


def test_imports_no_torch() -> None:
    code = "import sys, fenceline.config.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    assert ModelConfig.from_dir(write(tmp_path, {**LLAMA, "head_dim": 32})).head_dim == 32
    qwen3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
    assert ModelConfig.from_dir(write(tmp_path, qwen3)).head_dim == 128  # as transformers has it


LLAMA3_ROPE: Json = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": LLAMA3_ROPE, "rope_theta": 7e5},
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 7e5}, "rope_theta": None},
        {"rope_scaling": {**LLAMA3_ROPE, "rope_type": None, "type": "llama3"}, "rope_theta": 7e5},
    ],
    ids=["old", "transformers 5", "oldest"],
)
def test_both_notations_of_rope_scaling(tmp_path: Path, rope: Json) -> None:
    config = ModelConfig.from_dir(write(tmp_path, {**LLAMA, **rope}))
    assert config.rope_theta == 7e5
    assert config.rope_scaling is not None
    assert config.rope_scaling.rope_type == "llama3"
    assert config.rope_scaling.original_max_position_embeddings == 1024
    assert config.context_length == 4096  # llama3's max_position_embeddings is the scaled length


def test_a_name_from_before_the_family_was_in_transformers(tmp_path: Path) -> None:
    """As ERNIE 4.5 0.3B was published."""
    config = ModelConfig.from_dir(write(tmp_path, {**LLAMA, "architectures": ["Ernie4_5_ForCausalLM"]}))
    assert (config.architecture, config.rope_interleaved) == ("Ernie4_5ForCausalLM", True)


@pytest.mark.parametrize(
    ("rope", "context_length"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 2.0}, 8192),
        ({"type": "linear", "factor": 2.5}, 10240),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 4096),
        ({"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 4096),
        ({"type": "default"}, 4096),
    ],
)
def test_scaling_extends_the_context(tmp_path: Path, rope: Json, context_length: int) -> None:
    assert ModelConfig.from_dir(write(tmp_path, {**LLAMA, "rope_scaling": rope})).context_length == context_length


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "'dynamic with alpha' is not supported"),
        ({"rope_type": "mrope"}, "'mrope' is not supported"),
        ({"rope_type": "longrope", "factor": 2.0}, "needs short_factor, a list"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}, "needs long_factor, a list"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor has 1 numbers"),
        ({"rope_type": "yarn"}, "needs a factor"),
        ({"rope_type": "linear", "factor": 0.5}, "from 1 to"),
        ({"rope_type": "linear", "factor": 1e308}, "from 1 to"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1e308}, "from 1 to"),
        ({"rope_type": "linear", "factor": "2"}, "finite number"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_theta": 1e4}}, "layer type"),
        ({**LLAMA3_ROPE, "high_freq_factor": 1.0}, "low_freq_factor < high_freq_factor"),
        ([], None),
        ([1], "must be an object"),
    ],
)
def test_rope_that_cannot_work_is_refused(tmp_path: Path, rope: object, message: str | None) -> None:
    path = write(tmp_path, {**LLAMA, "rope_scaling": rope})
    if message is None:
        assert ModelConfig.from_dir(path).rope_scaling is None
    else:
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_dir(path)


def test_overrides_replace_entries_in_either_notation(tmp_path: Path) -> None:
    path = write(tmp_path, {**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 7e5}})
    assert ModelConfig.from_dir(path, {"num_hidden_layers": 1}).num_layers == 1
    theta = ModelConfig.from_dir(path, {"rope_theta": 123.0})
    assert (theta.rope_theta, theta.rope_scaling is not None) == (123.0, True)
    linear = ModelConfig.from_dir(path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert linear.rope_scaling is not None
    assert (linear.rope_theta, linear.rope_scaling.rope_type) == (7e5, "linear")
    plain = ModelConfig.from_dir(path, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}})
    assert (plain.rope_theta, plain.rope_scaling) == (9.0, None)


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {**LLAMA, "eos_token_id": 2, "bos_token_id": 1},
        generation_config={"eos_token_id": [2, 7, 5000]},
        tokenizer_config={
            "eos_token": {"content": "<|eot|>"},
            "added_tokens_decoder": {"9": {"content": "<|eot|>"}, "8": {"content": "<|x|>"}},
        },
    )
    config = ModelConfig.from_dir(path)
    assert config.eos_token_ids == (2, 7, 9)  # 5000 is outside the vocabulary
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 11, "content": "</s>"}], "model": {"vocab": {"</s>": 4}}},
        {"model": {"vocab": {"a": 0, "</s>": 11}}},
        {"model": {"vocab": [[f"p{i}", 0.0] for i in range(11)] + [["</s>", 0.0]]}},
    ],
    ids=["added", "bpe", "unigram"],
)
def test_eos_from_tokenizer_json(tmp_path: Path, tokenizer: Json) -> None:
    path = write(tmp_path, LLAMA, tokenizer=tokenizer, special_tokens_map={"eos_token": "</s>"})
    assert ModelConfig.from_dir(path).eos_token_ids == (11,)


def test_eos_from_a_tokenizer_elsewhere(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    model.mkdir()
    tokenizer.mkdir()
    write(tokenizer, {}, tokenizer_config={"eos_token": "E"}, tokenizer={"model": {"vocab": {"E": 3}}})
    path = write(model, LLAMA)
    assert ModelConfig.from_dir(path, tokenizer_path=str(tokenizer)).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [("auto", "bfloat16"), ("half", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float", "float32")],
)
def test_dtype(tmp_path: Path, asked: str, dtype: str) -> None:
    assert ModelConfig.from_dir(write(tmp_path, LLAMA), dtype=asked).dtype == dtype


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_dtype_of_the_checkpoint(tmp_path: Path, entries: Json, dtype: str) -> None:
    assert ModelConfig.from_dir(write(tmp_path, {**LLAMA, **entries})).dtype == dtype


def test_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    generation: Json = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": None, "do_sample": True}
    config = ModelConfig.from_dir(write(tmp_path, LLAMA, generation_config=generation))
    assert config.sampling_defaults.as_dict() == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    config = ModelConfig.from_dir(write(tmp_path, LLAMA, generation_config={"top_k": 0}))
    assert config.sampling_defaults.as_dict() == {"top_k": -1}
    generation = {"do_sample": False, "temperature": 0.6}
    config = ModelConfig.from_dir(write(tmp_path, LLAMA, generation_config=generation))
    assert config.sampling_defaults.as_dict() == {"temperature": 0.0}


MISTRAL: Json = {**LLAMA, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
QWEN: Json = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}


QWEN_3_5: Json = {"architectures": ["Qwen3_5ForCausalLM"]}
NEMOTRON_H: Json = {"architectures": ["NemotronHForCausalLM"], "rope_theta": 10000.0}
GEMMA: Json = {"architectures": ["Gemma2ForCausalLM"]}
GEMMA3: Json = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "num_hidden_layers": 8}
EXAONE: Json = {**LLAMA, "architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**MISTRAL, "sliding_window": 1024}, (1024,) * 4),
        (MISTRAL, (4096,) * 4),  # transformers' default for a missing entry
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 512)),
        (
            {**QWEN, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 512, None, 512),
        ),
        ({**LLAMA, "architectures": ["Gemma2ForCausalLM"]}, (4096, None, 4096, None)),
        (GEMMA3, (512,) * 5 + (None, 512, 512)),
        ({**GEMMA3, "sliding_window_pattern": 2}, (512, None) * 4),
        # as the 32B and the 1.2B are published
        ({**EXAONE, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, (4096, 4096, 4096, None)),
        ({**LLAMA, "architectures": ["Olmo3ForCausalLM"]}, (4096, 4096, 4096, None)),
        ({**EXAONE, "sliding_window_pattern": None, "sliding_window": None}, ()),
        ({**MISTRAL, "sliding_window": None}, ()),
        ({**QWEN, "use_sliding_window": False}, ()),
        ({**LLAMA, "sliding_window": 16}, ()),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 4}, (None,) * 4),
        (
            {**QWEN, "use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 4},
            (None,) * 4,
        ),
    ],
)
def test_windows_of_layers(tmp_path: Path, config: Json, windows: tuple[int | None, ...]) -> None:
    assert ModelConfig.from_dir(write(tmp_path, config)).windows == windows


def test_layers_with_a_window_rotate_in_their_own_way(tmp_path: Path) -> None:
    """As published, and as transformers 5 writes it. The length that such a model states is that after scaling."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old: Json = {**GEMMA3, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}
    new: Json = {
        **GEMMA3,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }
    for config in (old, new):
        read = ModelConfig.from_dir(write(tmp_path, config))
        assert (read.rope_theta, read.rope_scaling) == (5e5, RopeScaling("linear", 8.0, 4096))
        assert read.local_rope == (2e4, None)
        assert read.context_length == GEMMA3["max_position_embeddings"]
    with pytest.raises(ValueError, match="differ by layer type"):
        ModelConfig.from_dir(write(tmp_path, {**new, "architectures": ["LlamaForCausalLM"]}))
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    olmo = {**LLAMA, "architectures": ["Olmo3ForCausalLM"], "rope_theta": 1e6, "rope_scaling": yarn}
    read = ModelConfig.from_dir(write(tmp_path, olmo))
    assert read.rope_scaling is not None and (read.rope_theta, read.local_rope) == (1e6, (1e6, None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.*" + SUPPORTED_ARCHITECTURES[0]),
        ({"architectures": ["Qwen3VLMoeForCausalLM"]}, r"the nearest is Qwen3MoeForCausalLM\)"),
        ({"architectures": None}, "supported are"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 10000"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be at most 10000"),
        *[
            ({key: 2**31}, f"{key} must be at most 16777216")
            for key in ("vocab_size", "hidden_size", "head_dim", "max_position_embeddings", "rotary_dim")
        ],
        (
            {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_intermediate_size": 8, "moe_num_shared_experts": -1},
            "moe_num_shared_experts must be",
        ),
        ({**GEMMA, "sliding_window": 2**31}, "sliding_window must be at most 16777216"),
        ({"rope_scaling": {"type": "linear", "factor": 1e6}}, "choose a length with --context-length"),
        (
            {"architectures": ["Phi3ForCausalLM"], "head_dim": 20, "partial_rotary_factor": 0.25},
            "rotates 5 of 20 features",
        ),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "set head_dim"),
        ({"head_dim": 7}, "even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"hidden_act": "quick_gelu"}, "supported are silu"),
        ({"hidden_act": ["silu"]}, "supported are silu"),
        ({"layer_types": ["full_attention"], **GEMMA}, "tells of 1 layers"),
        ({"layer_types": ["chunked_attention"] * 4, **GEMMA}, "chunked_attention are not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "which other entries contradict"),
        ({"layer_types": ["linear_attention"] * 4}, "this architecture does not have"),
        ({"layer_types": ["linear_attention"] * 4, **QWEN_3_5}, "at least one must be full_attention"),
        ({"num_hidden_layers": 3, **QWEN_3_5}, "none of 3 layers attends"),
        ({"layer_types": ["conv"] * 4, "architectures": ["Lfm2ForCausalLM"]}, "none of 4 layers attends"),
        ({"layer_types": ["sliding_attention"] * 4, **QWEN_3_5}, "linear_attention or full_attention of each of the 4"),
        ({"layer_types": ["full_attention"], **QWEN_3_5}, "linear_attention or full_attention of each of the 4"),
        ({"hybrid_override_pattern": "M-", **NEMOTRON_H}, "must say M, .*, - or E of each of the 4 layers"),
        ({"hybrid_override_pattern": "M-X*", **NEMOTRON_H}, "must say M, .*, - or E of each of the 4 layers"),
        ({"hybrid_override_pattern": "M--*", **NEMOTRON_H}, "- or E not behind M or"),
        ({"hybrid_override_pattern": "-M-*", **NEMOTRON_H}, "- or E not behind M or"),
        ({"hybrid_override_pattern": "M-M-", **NEMOTRON_H}, "none of 4 layers attends"),
        ({"hybrid_override_pattern": "M-M*", "n_groups": 3, **NEMOTRON_H}, "128 must be a multiple of n_groups 3"),
        ({"hybrid_override_pattern": "M-M*", "time_step_limit": [0.1], **NEMOTRON_H}, "two numbers from 0 on"),
        ({"hybrid_override_pattern": "M-M*", "mlp_hidden_act": "silu", **NEMOTRON_H}, 'only "relu2" or null is'),
        (
            {"hybrid_override_pattern": "MEM*", "n_shared_experts": 2, **NEMOTRON_H},
            "n_shared_experts 2 is not supported",
        ),
        ({"hybrid_override_pattern": "MEM*", "mlp_bias": True, **NEMOTRON_H}, "mlp_bias true is not supported"),
        ({"use_bidirectional_attention": True, **GEMMA}, "use_bidirectional_attention true is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window true is not supported"),
        ({"is_causal": False}, "only true or null is"),
        ({"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "long_mscale": 1.3}},
            "rope_scaling.long_mscale 1.3 is not supported",
        ),
        ({"attn_logit_softcapping": -1.0, **GEMMA}, "must not be negative"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "unquantised"),
        ({"torch_dtype": "int8"}, "--dtype"),
        ({"rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_configs_that_cannot_work_are_refused_in_one_line(tmp_path: Path, changes: Json, message: str) -> None:
    path = write(tmp_path, {**LLAMA, **changes})
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_dir(path)
    assert "\n" not in str(caught.value)


def test_unknown_entries_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of future families may matter, so they are not dropped in silence. But no model is refused for them."""
    rope = {"type": "linear", "factor": 2.0, "future": 1}
    ModelConfig.from_dir(
        write(tmp_path, {**LLAMA, "attention_dropout": 0.1, "future_gate": True, "other": None, "rope_scaling": rope})
    )
    (record,) = caplog.records
    assert record.getMessage().endswith("have no effect: future_gate, rope_scaling.future")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (b"[1]", "object is expected"),
        (b"\xff\xfe{", "not valid JSON"),
        (None, "is an empty directory; download"),
    ],
)
def test_broken_config_json(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_dir(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "hf_quant_config.json", "tokenizer.json"]
)
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    """Opening a pipe would wait for ever."""
    write(tmp_path, LLAMA, special_tokens_map={"eos_token": "end"})
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: is no regular file"):
        ModelConfig.from_dir(str(tmp_path))


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model directory"):
        ModelConfig.from_dir(str(tmp_path / "nowhere"))


def test_context_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    assert ModelConfig.from_dir(path, context_length=100).context_length == 100
    with pytest.raises(ValueError, match="use --context-length 4096"):
        ModelConfig.from_dir(path, context_length=4097)
    with pytest.raises(ValueError, match="at least 1"):
        ModelConfig.from_dir(path, context_length=0)


def test_a_length_may_be_chosen_where_the_models_is_absurd(tmp_path: Path) -> None:
    path = write(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 1e6}})
    assert ModelConfig.from_dir(path, context_length=1 << 24).context_length == 1 << 24
    with pytest.raises(ValueError, match="at most 16777216 are possible"):
        ModelConfig.from_dir(path, context_length=1 << 25)


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use auto, half"):
        ModelConfig.from_dir(write(tmp_path, LLAMA), dtype="int4")


def test_the_part_of_a_head_that_rotates_in_either_notation(tmp_path: Path) -> None:
    glm: Json = {**LLAMA, "architectures": ["Glm4ForCausalLM"], "head_dim": 16}
    for entries, factor in (({}, 0.5), ({"partial_rotary_factor": 0.25}, 0.25), ({"rotary_dim": 12}, 0.75)):
        config = ModelConfig.from_dir(write(tmp_path, {**glm, **entries}))
        assert (config.partial_rotary_factor, config.rope_interleaved) == (factor, True)
    config = ModelConfig.from_dir(write(tmp_path, {**glm, "head_dim": 44, "rotary_dim": 30}))
    assert int(config.partial_rotary_factor * 44) == 30  # 30 / 44 * 44 is below 30


@pytest.mark.parametrize("asked", [None, "int4"])
def test_experts_may_be_int4_unless_their_family_has_a_format(tmp_path: Path, asked: str | None) -> None:
    moe: dict[str, object] = {
        **QWEN, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_local_experts": 4,
    }  # fmt: skip
    if asked is None:
        moe["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    stored = ModelConfig.from_dir(write(tmp_path, moe), quantization=asked).quantization
    assert stored is not None and stored.kind == "int4"
    write(tmp_path, {**moe, "architectures": ["GptOssForCausalLM"]})
    with pytest.raises(
        ValueError, match="GptOssForCausalLM: weights of this family in int4 are not supported .none are."
    ):
        ModelConfig.from_dir(str(tmp_path), quantization=asked)


PUBLISHED: dict[str, Json] = json.loads((Path(__file__).parents[2] / "support" / "published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``test/support/published_configs.json`` has the entries and values of published files, with their source."""
    published = PUBLISHED[name]
    config = ModelConfig.from_dir(write(tmp_path, published["config"]))
    read: Json = {
        "context_length": config.context_length,
        "windows": sum(window is not None for window in config.windows),
        "experts": config.experts and [config.experts.num_experts, config.experts.top_k],
        "quantization": config.quantization and [config.quantization.kind, config.quantization.scales],
        "rotates": config.partial_rotary_factor,
        "unrotated": len(config.unrotated_layers),
        "tied": config.tie_word_embeddings,
        "mtp_layers": config.num_mtp_layers,
    }
    usual: Json = dict.fromkeys(read) | {"windows": 0, "rotates": 1.0, "unrotated": 0, "tied": False, "mtp_layers": 0}
    assert read == usual | published["expected"]
    assert caplog.text == ""  # no entry is unknown


@pytest.mark.parametrize(
    "entries",
    [
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        {"linear_attn_config": {"use_full_rank_gate": True}},
        {"mla_use_output_gate": True},
        {"routed_expert_hidden_size": 3584},
        {"attn_res_block_size": 12},
        {"hidden_act": "situ"},
    ],
)
def test_what_later_models_of_kimi_linear_have_is_refused(entries: Json, tmp_path: Path) -> None:
    config: Json = PUBLISHED["Kimi-Linear-48B-A3B"]["config"]
    inside = entries.get("linear_attn_config", {})
    changed = config | entries | {"linear_attn_config": config["linear_attn_config"] | inside}
    (name,) = inside or entries
    with pytest.raises(ValueError, match=f"{name} .* is not supported"):
        ModelConfig.from_dir(write(tmp_path, changed))


def test_towers_of_published_configs_are_read(tmp_path: Path) -> None:
    found = {}
    for name, published in PUBLISHED.items():
        if "vision_config" in published["config"]:
            (tmp_path / name).mkdir()
            vision = ModelConfig.from_dir(write(tmp_path / name, published["config"])).vision
            if name.startswith("Qwen3.5"):  # of which only texts are read
                assert vision is None
                continue
            assert vision is not None
            found[name] = (
                vision.depth,
                vision.images.factor,
                vision.placeholder,
                len(vision.full_layers),
                vision.deepstack,
            )
    assert found == {
        "Gemma-3-12b": (27, 56, 262144, 27, ()),
        "Qwen2.5-VL-7B": (32, 28, 151655, 4, ()),
        "Qwen3-VL-30B-A3B": (27, 32, 151655, 27, (8, 16, 24)),
        "Qwen3-VL-8B": (27, 32, 151655, 27, (8, 16, 24)),
    }


def test_how_videos_are_prepared(tmp_path: Path) -> None:
    """Qwen3-VL has a file that says so, Qwen2.5-VL prepares frames as images."""
    files: dict[str, Json] = {
        "Qwen2.5-VL-7B": {"preprocessor_config.json": {"min_pixels": 3136, "max_pixels": 12845056}},
        "Qwen3-VL-8B": {
            "preprocessor_config.json": {"size": {"longest_edge": 16777216, "shortest_edge": 65536}},
            "video_preprocessor_config.json": {"size": {"longest_edge": 25165824, "shortest_edge": 4096}},
        },
    }
    found = {}
    for name, settings in files.items():
        (tmp_path / name).mkdir()
        for file, entries in settings.items():
            (tmp_path / name / file).write_text(json.dumps(entries))
        vision = ModelConfig.from_dir(write(tmp_path / name, PUBLISHED[name]["config"])).vision
        assert vision is not None and vision.video is not None
        assert vision.placeholders == (151655, 151656)
        video, made = vision.video, vision.video.settings
        limits = made.min_pixels, made.max_pixels, made.shares_pixels, made.group_size
        found[name] = limits, video.tokens_per_second, video.as_tokenized(3, FrameTimes(1.0))
    group = "<|vision_start|><|video_pad|><|vision_end|>"
    assert found == {
        "Qwen2.5-VL-7B": ((3136, 12845056, False, 2), 2.0, "<|video_pad|>" * 2),
        "Qwen3-VL-8B": ((4096, 25165824, True, 2), 0.0, f"<0.5 seconds>{group}<2.0 seconds>{group}"),
    }
    for entries, message in (
        ({"do_resize": False}, "do_resize false"),
        ({"temporal_patch_size": 4}, "4 is not config"),
    ):
        (tmp_path / "Qwen3-VL-8B" / "video_preprocessor_config.json").write_text(json.dumps(entries))
        with pytest.raises(ConfigError, match=message):
            ModelConfig.from_dir(str(tmp_path / "Qwen3-VL-8B"))


@pytest.mark.parametrize(
    "entries,message",
    [
        ({"vision_config": None}, "vision_config must be an object"),
        ({"vision_config": {"window_size": 100}}, "window_size 100 must be a multiple of 28"),
        ({"vision_config": {"hidden_act": "gelu"}}, "'gelu' of the tower is not supported, silu is"),
        ({"vision_config": {"hidden_size": 1000}}, "multiple of four times its 16 heads"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}, "three numbers whose sum is 64"),
    ],
)
def test_towers_that_are_not_computed_are_refused(tmp_path: Path, entries: Json, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(write(tmp_path, PUBLISHED["Qwen2.5-VL-7B"]["config"] | entries))


@pytest.mark.parametrize(
    "entries,message",
    [
        ({"do_resize": False}, "do_resize false is not supported"),
        ({"patch_size": 16}, "patch_size 16 is not config.json's, which is 14"),
        ({"image_std": [1, 0, 1]}, "image_std must be above 0"),
        ({"image_mean": [1, 2]}, "image_mean must be three numbers"),
    ],
)
def test_other_preparations_of_images_are_refused(tmp_path: Path, entries: Json, message: str) -> None:
    write(tmp_path, PUBLISHED["Qwen2.5-VL-7B"]["config"])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(str(tmp_path))


def test_a_config_of_each_family_is_published() -> None:
    families = {name for published in PUBLISHED.values() for name in published["config"]["architectures"]}
    assert families == set(SUPPORTED_ARCHITECTURES)
