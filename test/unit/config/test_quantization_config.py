"""What a checkpoint's quantization_config and --quantization mean, and which are refused with which remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FP8_FORMATS, INT4_FORMATS

from fenceline.config import ConfigError
from fenceline.config.checks import check
from fenceline.config.kv_layout import KVLayout
from fenceline.config.quantization import QuantConfig, read_quantization
from fenceline.config.server_args import ServerArgs
from fenceline.layers.attention.backends import AttentionSetting, make_attention_backends
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.device import CpuDevice

REMEDY = "; use the model's unquantised weights, with --quantization "
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


def compressed(weights: object, **others: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, **others}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def mixed(first: list[str], second: list[str]) -> dict[str, object]:
    """FP8 for the modules ``first``, int4 for ``second``."""
    groups = {"a": {"targets": first, "weights": FP8}, "b": {"targets": second, "weights": INT4}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def read(entry: object, folder: Path, asked: str | None = None) -> QuantConfig | None:
    return read_quantization({} if entry is None else {"quantization_config": entry}, folder, asked)


@pytest.mark.parametrize(
    ("name", "scales", "static"),
    [
        ("fp8-tensor", "tensor", False),
        ("fp8-static", "tensor", True),
        ("fp8-blocks", "block", False),
        ("compressed-tensors-tensor", "tensor", True),
        ("compressed-tensors-channel", "channel", False),
        ("compressed-tensors-blocks", "block", False),
    ],
)
def test_published_fp8_is_read(name: str, scales: str, static: bool, tmp_path: Path) -> None:
    config = FP8_FORMATS[name].config
    plain = tuple(config.get("ignore") or config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
    method = str(config["quant_method"])
    expected = QuantConfig(method=method, kind="fp8", scales=scales, static_input=static, plain=plain)
    assert read(config, tmp_path) == read(config, tmp_path, expected.method) == expected
    assert read_quantization({"compression_config": config}, tmp_path) == expected


@pytest.mark.parametrize(
    ("name", "group", "has_zeros", "offset"),
    [
        ("awq", 128, True, 0),
        ("awq-rows", -1, True, 0),
        ("awq-symmetric", 64, False, 0),
        ("gptq-rows-act-order", -1, False, 1),
        ("compressed-tensors-int4-channel", -1, False, 0),
        ("gptq", 64, False, 1),
        ("gptq-v2", 32, False, 0),
        ("compressed-tensors-int4", 128, False, 0),
        ("compressed-tensors-int4-zeros", 32, True, 0),
    ],
)
def test_published_int4_is_read(name: str, group: int, has_zeros: bool, offset: int, tmp_path: Path) -> None:
    config = INT4_FORMATS[name].config
    method = str(config["quant_method"])
    expected = QuantConfig(
        method=method,
        kind="int4",
        group_size=group,
        has_zeros=has_zeros,
        zero_offset=offset,
        plain=tuple(config.get("ignore", ())),
    )
    assert read(config, tmp_path) == read(config, tmp_path, method) == expected


def test_plain_weights_stay_plain_unless_asked(tmp_path: Path) -> None:
    assert read(None, tmp_path) is None
    assert read(None, tmp_path, "fp8") == QuantConfig(method="on-line", kind="fp8", scales="channel")
    assert read(None, tmp_path, "int4") == QuantConfig(method="on-line", kind="int4", group_size=128)


@pytest.mark.parametrize(
    ("entry", "method"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
        ({"bits": 4}, "a method that config.json does not name"),
        ("yes", "a method that config.json does not name"),
    ],
)
def test_an_unknown_format_is_refused_by_its_name(entry: object, method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(entry, tmp_path)
    text = str(caught.value)
    assert text.startswith(f"the checkpoint is quantised ({method}), which is not supported (fp8, ")
    assert REMEDY in text and "\n" not in text


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}', "modelopt FP8"),
        ('{"producer": {"name": "modelopt"}}', "modelopt"),
    ],
)
def test_a_checkpoint_that_modelopt_has_quantised_is_refused(text: str, method: str, tmp_path: Path) -> None:
    """It says so in a file of its own."""
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"quantised \({method}\), which is not supported"):
        read(None, tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "scale_fmt": "ue4m3"}, "scales of the format ue4m3"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "neither dynamic nor static"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"blocks of \[64, 128\]"),
        (compressed(FP8) | {"ignore": ["lm_head", "re:("]}, r"except 're:\(', which is no regular expression"),
        (compressed(FP8) | {"config_groups": {}}, "without config_groups"),
        (compressed({**FP8, "strategy": "group"}), "scale for each group"),
        (compressed({**FP8, "strategy": "block", "block_structure": [1, 128]}), r"blocks of \[1, 128\]"),
        (compressed({**INT4, "group_size": 16}), "groups of 16"),
        (compressed({**INT4, "strategy": "tensor"}), "scale of int4 for each tensor"),
        (compressed({**INT4, "actorder": "group"}), "not adjacent"),
        (compressed(INT4, input_activations={"num_bits": 8}), "rounded input"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "8 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "groups of 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "packed as gemv"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:x": {}}}, "several ways"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, "head, which must be plain"),
        (compressed({"num_bits": 2, "type": "int", "strategy": "channel"}), r"2 bits \(int\)"),
        (compressed({**INT8, "strategy": "group", "group_size": 64}), r"int8 for each group \(64\)"),
        (compressed({**INT8, "symmetric": False}), "zero points"),
        (compressed(INT8, format="marlin-24"), "int8 as marlin-24"),
        (compressed(INT8, input_activations={"num_bits": 8, "type": "float"}), "another format for inputs"),
        (compressed(FP8, targets=[]), "no list of modules"),
        (mixed(["Linear"], ["Linear"]), "several config_groups for all linear layers"),
        (mixed(["re:("], ["Linear"]), "no regular expression"),
    ],
)
def test_variants_that_cannot_be_served_are_refused(entry: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(entry, tmp_path)
    assert REMEDY in str(caught.value) and "\n" not in str(caught.value)


def test_the_flag_must_fit_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is quantised already \(fp8\); leave it out"):
        read({"quant_method": "fp8"}, tmp_path, "compressed-tensors")
    with pytest.raises(ConfigError, match="the checkpoint is not quantised; leave it out, or use fp8 or int4"):
        read(None, tmp_path, "compressed-tensors")


@pytest.mark.parametrize(
    ("listed", "plain", "quantised"),
    [
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"),
        ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_projection"),
        ("gate", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("self_attn", "model.layers.7.self_attn.o_proj", "model.layers.7.mlp.down_proj"),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("re:mlp", "mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("model.layers.*.self_attn", "model.layers.12.self_attn.q_proj", "model.layers.12.self_attention"),
        ("model.layers.2.self_attn.qkv_proj", "model.layers.2.self_attn.k_proj", "model.layers.2.self_attn.o_proj"),
        ("re:.*gate_up_proj", "model.layers.2.mlp.gate_proj", "model.layers.2.mlp.down_proj"),
        ("re:.*v_proj", "model.layers.2.self_attn.v_proj", "model.layers.2.self_attn.q_proj"),
        ("language_model.model.layers.0", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        ("re:model.language_model.layers.0.*", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"),
    ],
)
def test_which_modules_a_listed_one_names(listed: str, plain: str, quantised: str, tmp_path: Path) -> None:
    for entry in (
        compressed(FP8) | {"ignore": ["lm_head", listed]},
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", listed]},
    ):
        config = read(entry, tmp_path)
        assert config is not None and config.of("lm_head") is None
        assert config.of(plain) is None and config.of(quantised) == config
    everything = read(compressed(FP8), tmp_path)
    assert everything is not None and everything.of(plain) == everything


def test_each_module_has_the_format_of_its_group(tmp_path: Path) -> None:
    """Names have precedence over all linear layers, whatever the order of the groups is."""
    for entry, inverse in (
        (mixed(["re:.*self_attn.*"], ["Linear"]), False),
        (mixed(["Linear"], ["re:.*mlp.*"]), False),
        (mixed(["re:.*mlp.down_proj"], ["model.layers.0.self_attn"]), True),
    ):
        config = read(entry, tmp_path)
        assert config is not None and config.of("lm_head") is None
        attention, down = (config.of(f"model.layers.0.{name}_proj") for name in ("self_attn.q", "mlp.down"))
        assert attention is not None and down is not None
        assert (attention.kind, down.kind) == (("int4", "fp8") if inverse else ("fp8", "int4"))
        assert (config.of("model.layers.0.mlp.up_proj") is None) is inverse


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"quantization": "bitsandbytes"}, "not available, use fp8 or int4"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "not available, use fp8_e4m3"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "speculative_algorithm": "EAGLE3"},
            "does not go with --speculative-algorithm yet",
        ),
        ({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashinfer"}, "use triton, or leave it out"),
        ({"kv_cache_dtype": "fp8_e4m3", "decode_attention_backend": "fa3"}, "use triton, or leave it out"),
    ],
)
def test_flags_that_cannot_work_are_refused_at_start(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(ServerArgs.from_kwargs({"model_path": "demo", **flags}))


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_backends_that_do_not_read_fp8_are_not_made(name: str) -> None:
    """Nor measured: ``auto`` takes this for a backend that cannot run here."""
    layout = KVLayout.uniform(16, 2, 2, 16, "float8_e4m3fn")
    pool = KVPool(4, layout, torch.device("cpu"), torch.float32)
    setting = AttentionSetting(pool, CpuDevice(), 4, 64)
    with pytest.raises(ValueError, match=f"--attention-backend {name} does not read --kv-cache-dtype fp8_e4m3"):
        make_attention_backends(name, name, setting)
    assert make_attention_backends("torch", "torch", setting).decode_name == "torch"
