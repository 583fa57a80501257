"""Quantised weights: published checkpoints mean what their formats say, shards of them add up, and what a kernel for
them is given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_parity import PagedModel, reference_logits, save_checkpoint
from quantized_checkpoints import (
    FP8_FORMATS,
    GPTQ_ASYMMETRIC,
    INT4_FORMATS,
    INT8_FORMATS,
    Published,
    Tensors,
    write_published,
)
from safetensors.torch import load_file, save_file
from sala_reference import save_sala
from transformers import AutoModelForCausalLM

from fenceline.config.engine_config import resolve
from fenceline.config.model_config import ModelConfig
from fenceline.config.quantization import QuantConfig
from fenceline.config.server_args import ServerArgs
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.experts import ExpertsMLP
from fenceline.layers.forward_batch import ForwardMode
from fenceline.layers.kernels.base import KVScales
from fenceline.layers.kernels.four_bit import four_bit_numbers
from fenceline.layers.latent_attention import LatentAttention
from fenceline.layers.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from fenceline.layers.quantized import QuantizedWeight, round_to_fp8
from fenceline.layers.weight import fill_slots
from fenceline.models.decoder import CausalLM
from fenceline.models.loader import NewWeights, check_weights, load_model, replace_weights

CPU = torch.device("cpu")
# Matrices of several blocks of 128 (one of 64 rows) and groups of 32, 64 and 128.
SIZES: dict[str, object] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32}
FORMATS = FP8_FORMATS | INT8_FORMATS | INT4_FORMATS
# The largest error of a number, relative to itself, and relative to its scale.
WORST = {"fp8": (2**-4, 2**-10), "int4": (0.0, 0.501)}
PROMPT = torch.arange(2, 42)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_checkpoint("qwen3", folder, SIZES | {"num_attention_heads": 8, "num_key_value_heads": 2})
    return folder


def logits_of(model: PagedModel) -> torch.Tensor:
    return model.step([(0, PROMPT, 0, len(PROMPT))], ForwardMode.EXTEND)


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_checkpoint_means_what_its_format_says(name: str, plain: Path, tmp_path: Path) -> None:
    write_published(plain, tmp_path, FORMATS[name])
    ours = PagedModel(tmp_path, 16, "cpu")
    meant = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantised")
    assert ours.config.quantization is not None and not hasattr(meant.config, "quantization_config")
    (expected,) = reference_logits(meant, [PROMPT])
    torch.testing.assert_close(logits_of(ours)[0], expected, atol=1e-4, rtol=1e-4)
    assert ours.model.nbytes < 0.6 * meant.num_parameters() * 4


WITH_EXPERTS = {
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "shared_expert_intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# As in DeepSeek-V3 the rows of q_a_proj are whole blocks, and the last block of kv_a_proj_with_mqa is a part of one.
# Blocks of kv_b_proj lie across heads, and across a head's keys and values.
LATENT = {
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "v_head_dim": 32,
}
SALA: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "mixer_types": ["minicpm4", "lightning-attn"],
    "lightning_nh": 8,
    "lightning_nkv": 8,
    "lightning_head_dim": 32,
}
KIMI = {
    **LATENT,
    "q_lora_rank": None,
    "intermediate_size": 256,
    "linear_num_heads": 8,
    "linear_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
# Of each arrangement of numbers, scales and zeros one.
ARRANGEMENTS = ("fp8-tensor", "fp8-static", "fp8-blocks", "compressed-tensors-channel", "w8a8", "awq", "gptq")
OTHERS = [
    *(("qwen3-moe", name) for name in FORMATS),
    *((family, name) for family in ("deepseek-v2", "phi3") for name in ARRANGEMENTS),
    *((family, name) for family in ("glm4", "mixtral", "kimi-linear", "lfm2") for name in ("fp8-blocks", "awq")),
    *((family, "fp8-blocks") for family in ("deepseek-v3.2", "glm-5", "glm4-moe", "minimax-m2", "qwen2-moe")),
    *(("minicpm-sala", name) for name in ("fp8-blocks", "gptq")),
    *(("nemotron-h-moe", name) for name in ("fp8-blocks", "awq")),
]


@pytest.fixture(scope="module")
def plain_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A plain checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            if family == "minicpm-sala":
                save_sala(made[family], SIZES | SALA)
                return made[family]
            dense = {"num_attention_heads": 8, "num_key_value_heads": 4}
            has_latents = family in ("deepseek-v2", "deepseek-v3.2", "glm-5")
            sizes = LATENT if has_latents else dense if family in ("phi3", "glm4") else WITH_EXPERTS
            if family in ("qwen3-next", "qwen3.5-moe"):  # queries, keys and values of whole blocks
                sizes = {**sizes, **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)}
                sizes["layer_types"] = ["linear_attention", "full_attention"]
            if family == "nemotron-h-moe":  # as many rows for what in_proj makes
                sizes = {**sizes, "mamba_head_dim": 32, "ssm_state_size": 32, "num_hidden_layers": 4}
                sizes |= {"moe_shared_expert_intermediate_size": 384}
            if family == "kimi-linear":
                sizes = KIMI
            if family == "lfm2":
                sizes = {**dense, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}
            save_checkpoint(family, made[family], SIZES | sizes)
        return made[family]

    return get


@pytest.mark.parametrize(("family", "name"), OTHERS)
def test_fused_reordered_and_experts_matrices_are_read_right(
    family: str, name: str, plain_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Matrices that are taken apart or reordered when they are loaded, and those of experts."""
    write_published(plain_of(family), tmp_path, FORMATS[name])
    ours = PagedModel(tmp_path, 16, "cpu")
    meant = PagedModel(tmp_path / "dequantised", 16, "cpu")
    assert ours.config.quantization is not None and meant.config.quantization is None
    torch.testing.assert_close(logits_of(ours), logits_of(meant), atol=1e-4, rtol=1e-4)
    assert ours.model.nbytes < 0.6 * meant.model.nbytes


def test_latents_that_are_stored_as_one_matrix(plain_of: Callable[[str], Path], tmp_path: Path) -> None:
    """In FP8 blocks, by which weights of a server are replaced: the plain numbers of kv_b_proj are too."""
    write_published(plain_of("deepseek-v2"), tmp_path, FORMATS["fp8-blocks"])
    ours = PagedModel(tmp_path, 16, "cpu")
    before, path = logits_of(ours)[0], tmp_path / "model.safetensors"
    weights = load_file(path)
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        for suffix in ("weight", "weight_scale_inv"):
            parts = [weights.pop(f"{layer}{name}.{suffix}") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
            weights[f"{layer}fused_qkv_a_proj_with_mqa.{suffix}"] = torch.cat(parts)
    assert [len(part) for part in parts] == [2, 2] and parts[0].dtype == torch.float32
    save_file(weights, path)
    assert torch.equal(logits_of(PagedModel(tmp_path, 16, "cpu"))[0], before)
    for name in [name for name in weights if name.endswith("kv_b_proj.weight_scale_inv")]:
        weights[name] = weights[name].flip(0)
    save_file(weights, path)
    new = NewWeights("1", directory=str(tmp_path))
    check_weights(ours.model, new)
    replace_weights(ours.model, new, lambda: None)
    after = logits_of(ours)[0]
    assert torch.equal(after, logits_of(PagedModel(tmp_path, 16, "cpu"))[0]) and not torch.allclose(after, before)


def test_ranks_may_cut_blocks_of_up_projections(plain_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The second rank's 208 rows begin within a block."""
    write_published(plain_of("deepseek-v2"), tmp_path, FORMATS["fp8-blocks"])
    config = ModelConfig.from_dir(str(tmp_path))

    def matrices(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        layer = load_model(config, "auto", CPU, torch_context(shard, torch.float32), 0, progress=False).layers[1]
        assert isinstance(layer.self_attn, LatentAttention)
        return layer.self_attn._up_matrices()

    halves = [matrices(Shard(rank, 2)) for rank in range(2)]
    for whole, *parts in zip(matrices(Shard()), *halves, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_on_line_formats_leave_up_projections_plain(plain_of: Callable[[str], Path]) -> None:
    """They are multiplied as plain numbers, so rounding them would only lose digits."""
    folder = plain_of("deepseek-v2")
    exact = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for kind, weights in (("fp8", "auto"), ("int4", "auto"), ("fp8", "dummy")):
        config = ModelConfig.from_dir(str(folder), quantization=kind)
        model = load_model(config, weights, CPU, torch_context(Shard(), torch.float32), 0, progress=False)
        attention = model.layers[0].self_attn
        assert isinstance(attention, LatentAttention) and attention.a_proj.weight.kind == kind
        if weights == "auto":
            assert torch.equal(attention.kv_b_proj.weight.data, exact["model.layers.0.self_attn.kv_b_proj.weight"])
    attention = _made(folder, FORMATS["fp8-blocks"].config).layers[0].self_attn  # with dummy weights
    assert isinstance(attention, LatentAttention) and attention.kv_b_proj.weight.kind == "dense"


# A family, a format, what its quantization_config says of plain modules, and which modules that are.
PARTLY_PLAIN: list[tuple[str, str, Mapping[str, object], str]] = [
    (
        "phi3",
        "fp8-tensor",
        {"ignored_layers": ["lm_head", "model.layers.1.self_attn.qkv_proj"]},
        r".*1\.self_attn\.qkv_proj",
    ),
    ("glm4", "fp8-static", {"ignored_layers": ["self_attn.q_proj", "k_proj", "v_proj"]}, r".*\.[qkv]_proj"),
    (
        "glm4",
        "fp8-blocks",
        {"modules_to_not_convert": ["lm_head", "model.layers.0", "model.layers.1.self_attn.o_proj"]},
        r".*layers\.0\..*|.*o_proj",
    ),
    ("glm4", "compressed-tensors-tensor", {"ignore": ["lm_head", "re:.*self_attn.*"]}, r".*self_attn.*"),
    (
        "phi3",
        "compressed-tensors-int4",
        {"ignore": [r"re:model\.layers\.1\..*", "re:.*down_proj$"]},
        r".*layers\.1\..*|.*down_proj",
    ),
    ("phi3", "awq", {"modules_to_not_convert": ["mlp.gate_up_proj"]}, r".*gate_up_proj"),
    ("glm4", "gptq", {"modules_to_not_convert": ["mlp"]}, r".*mlp.*"),
    ("phi3", "gptq", {"dynamic": {"-:.*down_proj": {}, r"-:model\.layers\.0\.": {}}}, r".*down_proj|.*layers\.0\..*"),
    (
        "phi3",
        "gptq-v2",
        {"modules_in_block_to_quantize": [["self_attn.qkv_proj"], ["mlp.down_proj"]]},
        r".*o_proj|.*gate_up_proj",
    ),
    ("qwen3-moe", "fp8-blocks", {"modules_to_not_convert": ["mlp.gate", "model.layers.*.self_attn"]}, r".*self_attn.*"),
    ("qwen3-moe", "awq", {"modules_to_not_convert": ["model.layers.1.mlp.experts"]}, r".*1\.mlp\.experts.*"),
    (
        "glm4-moe",
        "compressed-tensors-channel",
        {"ignore": ["re:.*shared_experts.*", *(f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down"))]},
        r".*shared_experts.*|.*layers\.0\.mlp\.\w+_proj",
    ),
    ("mixtral", "compressed-tensors-int4-zeros", {"ignore": ["re:.*w2$"]}, r".*w2"),
    (  # as Kimi-K2-Thinking is published
        "deepseek-v2",
        "compressed-tensors-int4",
        {"ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]},
        r".*self_attn.*|.*shared_experts.*|.*mlp\.\w+_proj",
    ),
    ("mixtral", "gptq", {"modules_to_not_convert": ["block_sparse_moe"]}, r".*block_sparse_moe.*"),
    (
        "nemotron-h-moe",
        "compressed-tensors-channel",
        {"ignore": ["backbone.layers.0.mixer.in_proj", r"re:backbone\.layers\.2.*"]},
        r"backbone\.layers\.0\.mixer\.in_proj|backbone\.layers\.2\..*",
    ),
    ("qwen3-next", "fp8-blocks", {"modules_to_not_convert": ["mlp.gate", "linear_attn.in_proj_ba"]}, ""),
    (
        "kimi-linear",
        "fp8-blocks",
        {"modules_to_not_convert": ["block_sparse_moe.shared_experts", "f_a_proj", "g_a_proj", "b_proj", "kv_b_proj"]},
        r".*shared_experts.*|.*\.(f_a|g_a|b|kv_b)_proj",
    ),
    (
        "kimi-linear",
        "compressed-tensors-int4",
        {"ignore": ["re:.*self_attn.*", r"re:.*block_sparse_moe\.shared_experts.*"]},
        r".*self_attn.*|.*shared_experts.*",
    ),
    ("lfm2", "fp8-static", {"ignored_layers": ["feed_forward.w2", "self_attn.out_proj"]}, r".*\.w2|.*attn\.out_proj"),
    ("lfm2", "compressed-tensors-int4", {"ignore": [r"re:.*conv\.in_proj"]}, r".*conv\.in_proj"),
    (
        "qwen3.5-moe",
        "fp8-blocks",
        {"modules_to_not_convert": ["mlp.gate", "linear_attn.in_proj_b", "linear_attn.in_proj_a"]},
        "",
    ),
]


@pytest.mark.parametrize(("family", "name", "listed", "left_out"), PARTLY_PLAIN)
def test_modules_that_a_checkpoint_leaves_plain(
    family: str, name: str, listed: Mapping[str, object], left_out: str, plain_of: Callable[[str], Path], tmp_path: Path
) -> None:
    published = replace(FORMATS[name], config={**FORMATS[name].config, **listed})
    write_published(plain_of(family), tmp_path, published, left_out)
    ours = PagedModel(tmp_path, 16, "cpu")
    meant = PagedModel(tmp_path / "dequantised", 16, "cpu")
    torch.testing.assert_close(logits_of(ours), logits_of(meant), atol=1e-4, rtol=1e-4)
    wholly = _made(plain_of(family), FORMATS[name].config).nbytes
    assert wholly < ours.model.nbytes < meant.model.nbytes
    random = _made(plain_of(family), published.config)
    assert _quantised_modules(random) == _quantised_modules(ours.model)


# Two config_groups, and which modules have the first format.
MIXED = [
    ("phi3", "compressed-tensors-channel", ["re:.*self_attn.*"], "compressed-tensors-int4", ["Linear"]),
    ("glm4", "w8a8", ["Linear"], "compressed-tensors-int4-channel", [r"re:.*mlp\..*"]),
    ("qwen3-moe", "w8a8", ["re:.*self_attn.*"], "compressed-tensors-int4", [r"re:.*mlp\.experts.*"]),
    ("mixtral", "compressed-tensors-channel", ["Linear"], "w8a16", ["re:.*w2$"]),
]


@pytest.mark.parametrize(("family", "one", "ones", "two", "twos"), MIXED)
def test_a_checkpoint_with_two_formats(
    family: str, one: str, ones: list[str], two: str, twos: list[str], plain_of: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    groups = {}
    for name, targets in ((one, ones), (two, twos)):
        config = FORMATS[name].config
        group = {**config["config_groups"]["group_0"], "targets": targets, "format": config.get("format")}
        groups[name] = group
    named = two if ones == ["Linear"] else one
    pattern = next(targets[0] for targets in (ones, twos) if targets != ["Linear"]).removeprefix("re:")

    def quantise(module: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return FORMATS[named if re.match(pattern, module) else one if named == two else two].quantise(matrix)

    config = {**FORMATS[one].config, "config_groups": groups, "format": "mixed-precision"}
    write_published(plain_of(family), tmp_path, Published(config, FORMATS[one].quantise), quantise=quantise)
    ours = PagedModel(tmp_path, 16, "cpu")
    meant = PagedModel(tmp_path / "dequantised", 16, "cpu")
    torch.testing.assert_close(logits_of(ours), logits_of(meant), atol=1e-4, rtol=1e-4)
    assert ours.model.nbytes < 0.6 * meant.model.nbytes
    kinds = {slot.dest.dtype for slot in ours.model.weight_slots().values()}
    assert len(kinds & {torch.int8, torch.uint8, torch.float8_e4m3fn}) == 2


def test_parts_of_one_product_with_two_formats_are_refused(plain_of: Callable[[str], Path]) -> None:
    groups = {
        name: {**FORMATS[name].config["config_groups"]["group_0"], "targets": targets}
        for name, targets in (("w8a8", ["re:.*q_proj"]), ("compressed-tensors-channel", ["Linear"]))
    }
    config = {**FORMATS["w8a8"].config, "config_groups": groups}
    with pytest.raises(ValueError, match="model.layers.0.self_attn q_proj and k_proj have different formats, which"):
        _made(plain_of("phi3"), config)


def test_tensors_that_cannot_matter_are_left_out(plain: Path, tmp_path: Path) -> None:
    """AutoGPTQ's zero biases, a head beside a tied embedding, scales of keys that are not in FP8, old tables."""
    write_published(plain, tmp_path, FORMATS["gptq"])
    for folder in (tmp_path / "dequantised", tmp_path):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        path = folder / "model.safetensors"
        weights = load_file(path)
        del weights["lm_head.weight"]
        save_file(weights, path)
    layer = "model.layers.0."
    extra = {f"{layer}self_attn.{x}_proj.bias": torch.zeros(256) for x in "qo"}
    extra |= {f"{layer}mlp.up_proj.bias": torch.zeros(512)}
    extra |= {f"lm_head.{suffix}": torch.ones(2) for suffix in ("qweight", "qzeros", "scales", "g_idx")}
    extra |= {
        f"{layer}self_attn.{name}": torch.tensor(1.5)
        for name in ("k_proj.k_scale", "v_proj.v_scale", "q_scale", "prob_scale", "k_scale")
    }
    extra |= {f"{layer}self_attn.rotary_emb.{name}": torch.ones(4) for name in ("inv_freq", "cos_cached")}
    save_file(weights | extra, path)
    ours, meant = PagedModel(tmp_path, 16, "cpu"), PagedModel(tmp_path / "dequantised", 16, "cpu")
    torch.testing.assert_close(logits_of(ours), logits_of(meant), atol=1e-4, rtol=1e-4)
    check_weights(ours.model, NewWeights("1", directory=str(tmp_path)))
    name = f"{layer}mlp.up_proj.bias"
    save_file(weights | extra | {name: torch.eye(1, 512)[0]}, path)
    for read in (
        lambda: PagedModel(tmp_path, 16, "cpu"),
        lambda: check_weights(ours.model, NewWeights("1", directory=str(tmp_path))),
    ):
        with pytest.raises(ValueError, match=f"does not have: {name};"):
            read()


def test_scales_of_keys_that_are_not_announced_are_told_of(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a KV cache in FP8 they would matter."""
    write_published(plain, tmp_path, FORMATS["fp8-tensor"])
    weights = load_file(tmp_path / "model.safetensors")
    scales = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    save_file(weights | scales, tmp_path / "model.safetensors")
    for kv_dtype, told in ((None, False), (torch.float8_e4m3fn, True)):
        caplog.clear()
        context = replace(torch_context(Shard(), torch.float32), kv_dtype=kv_dtype)
        load_model(ModelConfig.from_dir(str(tmp_path)), "auto", CPU, context, 0, progress=False)
        assert ("k_proj.k_scale" in caplog.text and "without a scale" in caplog.text) is told
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    scales = {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5) for i in range(2) for x in "kv"}
    save_file(weights | scales, tmp_path / "model.safetensors")
    context = replace(torch_context(Shard(), torch.float32), kv_dtype=torch.float8_e4m3fn)
    model = load_model(ModelConfig.from_dir(str(tmp_path)), "auto", CPU, context, 0, progress=False)
    assert model.layers[1].self_attn._kv_scales == KVScales(0.5, 0.5)


def _quantised_modules(model: CausalLM) -> set[str]:
    few_bits = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    return {name.rsplit(".", 1)[0] for name, slot in model.weight_slots().items() if slot.dest.dtype in few_bits}


def _made(plain: Path, quantization: Mapping[str, object]) -> CausalLM:
    config = ModelConfig.from_dir(str(plain), {"quantization_config": dict(quantization)})
    return load_model(config, "dummy", CPU, torch_context(Shard(), torch.float32), 0, progress=False)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("re:.*layers.1.*v_proj", "of model.layers.1.self_attn it leaves v_proj plain and q_proj not"),
        ("model.layers.0.mlp.experts.4", "of model.layers.0.mlp it leaves experts.4.gate_proj plain and experts.0"),
        ("gate_proj", "of model.layers.0.mlp it leaves experts.0.gate_proj plain and experts.0.up_proj not"),
    ],
)
def test_parts_of_one_product_that_differ_are_refused(listed: str, said: str, plain_of: Callable[[str], Path]) -> None:
    config = {**FORMATS["compressed-tensors-channel"].config, "ignore": [listed]}
    with pytest.raises(ValueError) as caught:
        _made(plain_of("qwen3-moe"), config)
    text = str(caught.value)
    assert said in text and "use a checkpoint in which they agree" in text and "\n" not in text


@pytest.mark.parametrize("family", ["phi3", "glm4", "qwen3-moe"])
def test_on_line_fp8_of_such_matrices(family: str, plain_of: Callable[[str], Path]) -> None:
    """Rows are rounded one by one, so that it makes no difference where they lie."""
    exact = PagedModel(plain_of(family), 16, "cpu").model.layers[1]
    config = ModelConfig.from_dir(str(plain_of(family)), quantization="fp8")
    ours = load_model(config, "auto", CPU, torch_context(Shard(), torch.float32), 0, progress=False).layers[1]
    pairs = [(ours.self_attn.qkv_proj.weight.stored, exact.self_attn.qkv_proj.weight.data)]
    if isinstance(ours.mlp, ExpertsMLP) and isinstance(exact.mlp, ExpertsMLP):
        pairs.append((ours.mlp.gate_up._stored, exact.mlp.gate_up.data.flatten(0, 1)))
    else:
        pairs.append((ours.mlp.gate_up_proj.weight.stored, exact.mlp.gate_up_proj.weight.data))
    for stored, matrix in pairs:
        numbers, scales = round_to_fp8(matrix, matrix.shape[1])
        assert torch.equal(stored.data.float(), numbers.float()) and torch.equal(stored.scales, scales)


@pytest.mark.parametrize("name", ["fp8-blocks", *INT4_FORMATS])
def test_shards_of_quantised_experts_add_up(name: str, plain_of: Callable[[str], Path], tmp_path: Path) -> None:
    write_published(plain_of("qwen3-moe"), tmp_path, FORMATS[name])
    config = ModelConfig.from_dir(str(tmp_path))

    def experts_of(shard: Shard) -> ExpertsMLP:
        model = load_model(config, "auto", CPU, torch_context(shard, torch.float32), 0, progress=False)
        assert isinstance(model.layers[0].mlp, ExpertsMLP)
        return model.layers[0].mlp

    whole, halves = experts_of(Shard()), [experts_of(Shard(rank, 2)) for rank in range(2)]
    parts = ("data", "scales") if name == "fp8-blocks" else ("data", "scales", "zeros")
    for part in parts:
        gate_up, down = getattr(whole.gate_up, part).view(6, 2, 256, -1), getattr(whole.down, part)
        for rank, half in enumerate(halves):
            own = slice(rank * 128, (rank + 1) * 128)
            assert torch.equal(getattr(half.gate_up, part).float(), gate_up[:, :, own].flatten(1, 2).float())
            columns = down.chunk(2, 2)[rank]
            assert torch.equal(getattr(half.down, part).float(), columns.float())
    for rank in range(2):  # and by experts
        some, own = experts_of(Shard(rank, 2, ep_size=2)), slice(3 * rank, 3 * rank + 3)
        for part in parts:
            for matrices in ("gate_up", "down"):
                found, expected = (getattr(getattr(mlp, matrices), part).float() for mlp in (some, whole))
                assert torch.equal(found, expected[own])


def test_experts_in_int4_that_ranks_would_cut_are_refused(plain_of: Callable[[str], Path], tmp_path: Path) -> None:
    """256 features in groups of 128 on 4 ranks; --ep-size, or smaller groups, help."""
    for name, group in (("awq", 128), ("gptq", 64)):
        write_published(plain_of("qwen3-moe"), folder := tmp_path / name, FORMATS[name])
        flags = {"model_path": str(folder), "device": "cpu", "tp_size": 4}
        if group == 128:
            with pytest.raises(ValueError, match="experts in groups of 128., which it .* use 1, 2, or --ep-size"):
                resolve(ServerArgs(**flags))
            with pytest.raises(ValueError, match="64 input features for each rank are no groups of 128"):
                config = ModelConfig.from_dir(str(folder))
                load_model(config, "auto", CPU, torch_context(Shard(0, 4), torch.float32), 0, False)
            flags["ep_size"] = 2
        assert resolve(ServerArgs(**flags)).server_args.tp_size == 4


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe"])
def test_on_line_int4_of_experts(family: str, plain_of: Callable[[str], Path]) -> None:
    exact = PagedModel(plain_of(family), 16, "cpu").model.layers[1].mlp
    config = ModelConfig.from_dir(str(plain_of(family)), quantization="int4")
    context = torch_context(Shard(), torch.float32)
    ours = load_model(config, "auto", CPU, context, 0, progress=False).layers[1].mlp
    assert isinstance(ours, ExpertsMLP) and isinstance(exact, ExpertsMLP)
    for name in ("gate_up", "down"):
        matrices = getattr(ours, name)
        numbers = four_bit_numbers(matrices.data, matrices.scales, matrices.zeros, torch.float32)
        plain_numbers = getattr(exact, name).data[: len(numbers)]  # behind them may lie a shared expert's
        worst = 0.501 * matrices.scales.repeat_interleave(128, 2)
        assert ((numbers - plain_numbers).abs() <= worst).all()
        assert (numbers - plain_numbers).abs().max() > 0
    assert ours.router.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", WORST)
def test_on_line_weights_are_as_near_as_their_format_allows(kind: str, plain: Path) -> None:
    config = ModelConfig.from_dir(str(plain), quantization=kind)
    ours = load_model(config, "auto", CPU, torch_context(Shard(), torch.float32), 0, progress=False)
    exact = PagedModel(plain, 16, "cpu").model
    for layer, reference in zip(ours.layers, exact.layers, strict=True):
        for part in ("gate_up_proj", "down_proj"):
            weight, dense = getattr(layer.mlp, part).weight, getattr(reference.mlp, part).weight
            error = (weight.stored.dequantized(torch.float32) - dense.data).abs()
            relative, steps = WORST[kind]
            scales = weight.stored.scales.repeat_interleave(weight.stored.group, 1)
            assert (error <= relative * dense.data.abs() + steps * scales).all()
            assert error.max() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_shards_of_a_quantised_model_add_up(name: str, plain: Path, tmp_path: Path) -> None:
    write_published(plain, tmp_path, FORMATS[name])
    config = ModelConfig.from_dir(str(tmp_path))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))

    def run(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        layer = load_model(config, "auto", CPU, torch_context(shard, torch.float32), 0, False).layers[0]
        gated = layer.mlp.gate_up_proj.forward(x).chunk(2, -1)
        down = layer.self_attn.o_proj.weight.product(x[:, shard.rank * 256 // shard.size :][:, : 256 // shard.size])
        return torch.cat(gated, 0), down

    whole, halves = run(Shard()), [run(Shard(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.cat([half[0] for half in halves], 1), whole[0])
    torch.testing.assert_close(halves[0][1] + halves[1][1], whole[1], atol=1e-4, rtol=1e-4)


def test_groups_that_ranks_would_cut_are_refused() -> None:
    config = QuantConfig(method="fp8", kind="fp8", scales="block")
    context = replace(torch_context(Shard(1, 2), torch.float32), format=config)
    with pytest.raises(ValueError, match="cut its groups of 128; choose a smaller --tp-size"):
        RowParallelLinear("down_proj", 384, 16, False, context).weight_slots("x.")


def test_columns_in_the_order_of_activations_are_refused(plain: Path, tmp_path: Path) -> None:
    write_published(plain, tmp_path, FORMATS["gptq"])
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.g_idx"] = weights["model.layers.1.mlp.up_proj.g_idx"].flip(0)
    save_file(weights, path)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.g_idx: .*desc_act"):
        PagedModel(tmp_path, 16, "cpu")


@pytest.mark.parametrize("family", ["glm4", "qwen3-moe"])
def test_zero_points_of_0_in_gptqs_first_version(family: str, plain_of: Callable[[str], Path], tmp_path: Path) -> None:
    write_published(plain_of(family), tmp_path, GPTQ_ASYMMETRIC)
    ours, meant = PagedModel(tmp_path, 16, "cpu"), PagedModel(tmp_path / "dequantised", 16, "cpu")
    torch.testing.assert_close(logits_of(ours), logits_of(meant), atol=1e-4, rtol=1e-4)


def test_int4_needs_whole_groups() -> None:
    context = torch_context(Shard(0, 2), torch.float32)
    for method in ("awq", "on-line"):
        config = QuantConfig(method=method, kind="int4", group_size=64)
        with pytest.raises(ValueError, match="48 input features for each rank are no groups of 64"):
            RowParallelLinear("down_proj", 96, 16, False, replace(context, format=config))
    config = QuantConfig(method="on-line", kind="int4")
    layer = RowParallelLinear("down_proj", 192, 16, False, replace(context, format=config))
    assert isinstance(layer.weight, QuantizedWeight) and layer.weight.stored.group == 32  # the largest that fits


def test_fused_parts_share_the_largest_of_their_input_scales() -> None:
    config = QuantConfig(method="fp8", kind="fp8", scales="tensor", static_input=True)
    context = replace(torch_context(Shard(), torch.float32), format=config)
    parts = [ColumnPart(name, size, size, 0) for name, size in (("a", 4), ("b", 6))]
    layer = ColumnParallelLinear(8, parts, False, context)
    for largest in (0.5, 0.25):  # loading again forgets the first checkpoint's
        weights = {}
        for part, scale in zip(parts, (0.125, largest), strict=True):
            weights[f"{part.name}.weight"] = torch.zeros(part.full, 8, dtype=torch.float8_e4m3fn)
            weights[f"{part.name}.weight_scale"] = torch.tensor(1.0)
            weights[f"{part.name}.input_scale"] = torch.tensor([scale])
        fill_slots(layer.weight_slots(""), weights.items())
        assert isinstance(layer.weight, QuantizedWeight)
        assert layer.weight.stored.input_scale == largest


@pytest.mark.parametrize("kind", WORST)
def test_dummy_weights_of_a_quantised_model_are_rounded_ones(kind: str, plain: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(str(plain))
    context = torch_context(Shard(), torch.float32)
    dense = load_model(config, "dummy", CPU, context, 5, False).layers[1].mlp.down_proj.weight.data
    published = FORMATS["fp8-static" if kind == "fp8" else "awq"]
    write_published(plain, tmp_path, published)
    quantised = load_model(ModelConfig.from_dir(str(tmp_path)), "dummy", CPU, context, 5, False)
    stored = quantised.layers[1].mlp.down_proj.weight.stored
    torch.testing.assert_close(
        stored.dequantized(torch.float32), dense, atol=2e-3 if kind == "fp8" else 3e-3, rtol=2**-4
    )


@pytest.mark.parametrize("tensor", ["weight", "weight_scale"])
def test_tensors_of_another_format_are_refused(tensor: str, plain: Path, tmp_path: Path) -> None:
    write_published(plain, tmp_path, FORMATS["fp8-tensor"])
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = f"model.layers.0.mlp.up_proj.{tensor}"
    weights[name] = torch.ones(2) if tensor == "weight_scale" else weights[name].bfloat16()
    save_file(weights, path)
    with pytest.raises(ValueError, match=f"{name} .* different models"):
        PagedModel(tmp_path, 16, "cpu")


def test_scales_of_e8m0_are_refused(plain: Path, tmp_path: Path) -> None:
    """ue8m0 in config.json says only that they are powers of two; published files store them as float32."""
    published = FORMATS["fp8-blocks"]
    config = {**published.config, "scale_fmt": "ue8m0"}
    write_published(plain, tmp_path, Published(config, published.quantise))
    ours, meant = PagedModel(tmp_path, 16, "cpu"), PagedModel(tmp_path / "dequantised", 16, "cpu")
    torch.testing.assert_close(logits_of(ours), logits_of(meant), atol=1e-4, rtol=1e-4)
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight_scale_inv"
    weights = load_file(path)
    save_file(weights | {name: weights[name].to(torch.float8_e8m0fnu)}, path)
    with pytest.raises(ValueError, match="up_proj.weight_scale_inv is torch.float8_e8m0fnu; use the model's unquant"):
        PagedModel(tmp_path, 16, "cpu")


def test_rounding_to_fp8_takes_the_nearest_number() -> None:
    numbers = torch.tensor([[448.0, 1.0, 1.0625, 1.06, -1.07, 0.0]])
    rounded, scales = round_to_fp8(numbers, 6)
    assert scales.tolist() == [[1.0]]
    assert rounded.float().tolist() == [[448.0, 1.0, 1.0, 1.0, -1.125, 0.0]]
    zeros, scales = round_to_fp8(torch.zeros(2, 5), 4)
    assert zeros.shape == (2, 5) and not zeros.float().any() and scales.shape == (2, 2)
