"""How each family of models builds a layer. What a config.json leaves out is in ``fenceline.config.families``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from fenceline.config.config_reader import ConfigReader
from fenceline.config.families import FAMILIES
from fenceline.config.model_config import ModelConfig
from fenceline.layers.block_attention import BlockSparseAttention
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import (
    Branch,
    BranchNorms,
    DecoderLayer,
    GatedAttention,
    GatedMLP,
    LayerSite,
    OutputGatedAttention,
    PlainMLP,
    SelfAttention,
    TokenMixer,
)
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.gated_delta_net import GatedDeltaNet
from fenceline.layers.kimi_delta_attention import KimiDeltaAttention
from fenceline.layers.latent_attention import LatentAttention
from fenceline.layers.lightning_attention import LightningAttention
from fenceline.layers.mamba2 import Mamba2
from fenceline.layers.short_convolution import ShortConvolution
from fenceline.layers.sparse_attention import SparseLatentAttention
from fenceline.models.decoder import CausalLM, LayerMaker, Weights
from fenceline.models.vision import TOWERS

_ERNIE_CORRECTION = "moe_statics.e_score_correction_bias"


def _mixer(site: LayerSite, names: ExpertNames = ExpertNames(), bias: bool = False) -> Branch:
    """Experts, or an MLP in the layers that config.json names; ``bias`` is the MLP's."""
    dense = site.config.experts is None or site.index in site.config.experts.dense_layers
    return GatedMLP(site, bias) if dense else ExpertsMLP(site, names)


def _llama(site: LayerSite) -> DecoderLayer:
    """Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783): grouped-query attention, rotary positions, SwiGLU, RMSNorm.
    ``attention_bias`` is for all four projections of attention, ``mlp_bias`` for all three of the MLP. Granite 3 is the
    same model with multipliers, which the layers read from the config."""
    bias = site.config.attention_bias
    return DecoderLayer(SelfAttention(site, qkv_bias=bias, o_bias=bias), GatedMLP(site, site.config.mlp_bias))


def _plain(site: LayerSite) -> DecoderLayer:
    """Llama without biases. Mistral 7B and its dense successors (arXiv:2310.06825), the first of which has a window in
    all layers; Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905), stored with fused matrices, of which some rotate
    only a part of each head."""
    return DecoderLayer(SelfAttention(site), GatedMLP(site))


def _qwen2(site: LayerSite) -> DecoderLayer:
    """Qwen2, Qwen2.5 (arXiv:2407.10671), the text model of Qwen2.5-VL (arXiv:2502.13923), and MiMo (arXiv:2505.07608):
    Llama with biases on queries, keys and values. They are part of the architecture: config.json has no field for
    them."""
    return DecoderLayer(SelfAttention(site, qkv_bias=True), GatedMLP(site))


def _qwen2_moe(site: LayerSite) -> DecoderLayer:
    """Qwen1.5-MoE and Qwen2-57B-A14B (arXiv:2407.10671): Qwen2 with experts and a shared expert, whose result is
    multiplied by a sigmoid, which is computed for each token."""
    attention = SelfAttention(site, qkv_bias=site.config.hf_config.get("qkv_bias") is not False)
    return DecoderLayer(attention, _mixer(site, ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")))


def _qwen3(site: LayerSite, names: ExpertNames = ExpertNames()) -> DecoderLayer:
    """Qwen3 (arXiv:2505.09388): Llama with each query and key head RMS-normalised before the rotation; dense, or with
    experts (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder); and the text model of Qwen3-VL (arXiv:2511.21631).
    ``attention_bias`` is for all four projections of attention, the MLP has none."""
    bias = site.config.attention_bias
    return DecoderLayer(SelfAttention(site, qkv_bias=bias, o_bias=bias, qk_norm=True), _mixer(site, names))


def _qwen3_next(site: LayerSite, interleaved: bool = True) -> DecoderLayer:
    """Qwen3-Next (2025): gated delta nets, and attention with normalised heads and output gates in every fourth layer,
    of which a quarter of the features rotates; experts, and a shared expert as in Qwen2-57B-A14B."""
    bias = site.config.attention_bias
    attention: TokenMixer
    if site.index in site.config.recurrent_layers:
        attention = GatedDeltaNet(site, interleaved)
    else:
        attention = GatedAttention(site, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return DecoderLayer(attention, _mixer(site, ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")))


def _qwen3_5(site: LayerSite) -> DecoderLayer:
    """Qwen3.5 (2026), of which only texts are read: Qwen3-Next with projections apart, with experts or without."""
    return _qwen3_next(site, interleaved=False)


def _qwen3_5_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the text model under names as in Qwen3-Next, and those of each expert apart."""
    for name, tensor in _qwen_vision_weights(weights):
        if name.startswith("visual."):
            continue
        prefix, _, stacked = name.rpartition(".experts.")
        if stacked == "gate_up_proj":
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                yield f"{prefix}.experts.{expert}.gate_proj.weight", gate
                yield f"{prefix}.experts.{expert}.up_proj.weight", up
        elif stacked == "down_proj":
            for expert, down in enumerate(tensor):
                yield f"{prefix}.experts.{expert}.down_proj.weight", down
        else:
            yield name, tensor


def _renamed(architecture: str) -> Callable[[Weights], Weights]:
    """A function that gives tensors the names that we use for those of their checkpoint, ``_without_mtp``."""

    def renamed(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _without_mtp(weights):
            for stored, ours in FAMILIES[architecture].stored_names.items():
                name = name.replace(stored, ours)
            yield name, tensor

    return renamed


def _without_mtp(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Without layers that predict further tokens and whose family has none here."""
    return ((name, tensor) for name, tensor in weights if not name.startswith("mtp."))


def _mixtral(site: LayerSite) -> DecoderLayer:
    """Mixtral 8x7B and 8x22B (arXiv:2401.04088): Mistral with experts in place of every MLP. The scores of a token's
    experts are divided by their sum."""
    names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
    return DecoderLayer(SelfAttention(site), ExpertsMLP(site, names))


def _minimax_m2(site: LayerSite) -> DecoderLayer:
    """MiniMax-M2 and M2.5 (2025): experts in every layer, chosen by sigmoids with a correction; norms across all heads.
    Only a part of each head rotates."""
    names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias")
    return DecoderLayer(SelfAttention(site, wide_qk_norm=True), ExpertsMLP(site, names))


def _gpt_oss(site: LayerSite) -> DecoderLayer:
    """gpt-oss (OpenAI, 2025, arXiv:2508.10925): experts with biases and a clamped SwiGLU, published in MXFP4 and kept
    in this format; attention sinks, and windows in every second layer."""
    bias = site.config.attention_bias
    attention = SelfAttention(site, qkv_bias=bias, o_bias=bias, sinks=True)
    return DecoderLayer(attention, ExpertsMLP(site, ExpertNames(router="router", stacked="turns")))


def _deepseek(site: LayerSite) -> DecoderLayer:
    """DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 and R1 (arXiv:2412.19437), Kimi-K2 (arXiv:2507.20534) and
    GLM-4.7-Flash (2026): latent attention, experts, and shared experts. The first layers have a dense MLP. Experts are
    chosen by softmaxes, or by sigmoids with a correction, in the large models from groups. In DeepSeek-V3.2
    (arXiv:2512.02556) and GLM-5 (2026) an indexer selects the tokens to attend to; in GLM-5 some layers share the
    selection of an earlier one."""
    config = site.config
    assert config.experts is not None, "the family reads its experts from config.json"
    names = ExpertNames(
        shared="shared_experts" if config.experts.shared_size else None,
        correction="gate.e_score_correction_bias" if config.experts.sigmoid else None,
    )
    attention = LatentAttention if config.indexer is None else SparseLatentAttention
    return DecoderLayer(attention(site, config.attention_bias), _mixer(site, names, config.mlp_bias))


def _kimi_linear(site: LayerSite) -> DecoderLayer:
    """Kimi-Linear (arXiv:2510.26692): Kimi delta attention, latent attention without positions in the other layers, and
    experts as in DeepSeek-V3. The first layers have a dense MLP."""
    correction = "gate.e_score_correction_bias"
    names = ExpertNames(gate="w1", up="w3", down="w2", shared="shared_experts", correction=correction)
    attention: TokenMixer
    if site.index in site.config.recurrent_layers:
        attention = KimiDeltaAttention(site)
    else:
        attention = LatentAttention(replace(site, rotary=site.rotary.without_rotation), site.config.attention_bias)
    return DecoderLayer(attention, _mixer(site, names))


def _lfm2(site: LayerSite) -> DecoderLayer:
    """LFM2 (Liquid AI, 2025, arXiv:2511.23404): gated short convolutions, and attention with normalised heads in some
    layers."""
    attention: TokenMixer
    if site.index in site.config.recurrent_layers:
        attention = ShortConvolution(site, ConfigReader(site.config.hf_config).switch("conv_bias"))
    else:
        attention = SelfAttention(site, qk_norm=True)
    return DecoderLayer(attention, GatedMLP(site))


class _NemotronHAttention(SelfAttention):
    name = "mixer"


def _nemotron_h(site: LayerSite) -> DecoderLayer | Branch:
    """Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 (arXiv:2508.14444) and Nemotron 3 (arXiv:2512.20848): a layer is
    either Mamba2, attention without positions, or an MLP or experts, which have no gate. Experts of Nemotron 3 Super
    read a projection of the hidden state."""
    config, norms = site.config, BranchNorms("norm")
    if site.index in config.recurrent_layers:
        reader = ConfigReader(config.hf_config)
        return DecoderLayer(Mamba2(site, reader.switch("use_bias"), reader.switch("use_conv_bias", True), norms))
    if site.index not in config.mlp_layers:
        return DecoderLayer(_NemotronHAttention(replace(site, rotary=site.rotary.without_rotation), norms=norms))
    if config.experts is None or site.index in config.experts.dense_layers:
        return PlainMLP(site, "mixer", config.mlp_bias, norms)
    correction = "gate.e_score_correction_bias"
    return ExpertsMLP(site, ExpertNames("mixer", gate=None, shared="shared_experts", correction=correction), norms)


def _minicpm3(site: LayerSite) -> DecoderLayer:
    """MiniCPM3 (OpenBMB, 2024, arXiv:2404.06395): latent attention, an MLP, and multipliers of embeddings, branches and
    logits."""
    return DecoderLayer(LatentAttention(site, site.config.attention_bias), GatedMLP(site, site.config.mlp_bias))


def _minicpm_sala(site: LayerSite) -> DecoderLayer:
    """MiniCPM-SALA (OpenBMB, 2026): lightning attention in three of four layers, and attention to selected blocks,
    without positions and with output gates, in the others (InfLLM-V2, arXiv:2509.24663); multipliers as in MiniCPM3.
    ``attention_bias`` is for all projections of both."""
    bias = site.config.attention_bias
    attention: TokenMixer
    if site.index in site.config.recurrent_layers:
        attention = LightningAttention(site, bias)
    else:
        kind = OutputGatedAttention if site.config.blocks is None else BlockSparseAttention
        attention = kind(replace(site, rotary=site.rotary.without_rotation), bias, bias)
    return DecoderLayer(attention, GatedMLP(site, site.config.mlp_bias))


def _ernie4_5(site: LayerSite) -> DecoderLayer:
    """ERNIE 4.5 (Baidu, 2025, https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), dense and with
    experts: Llama in which adjacent features of a head rotate as pairs. ``use_bias`` in config.json is for all
    projections; experts have no biases and are chosen by softmaxes with a correction."""
    bias, experts = ConfigReader(site.config.hf_config).switch("use_bias"), site.config.experts
    shared = "shared_experts" if experts is not None and experts.shared_size else None
    mixer = _mixer(site, ExpertNames(shared=shared, correction=_ERNIE_CORRECTION), bias)
    return DecoderLayer(SelfAttention(site, qkv_bias=bias, o_bias=bias), mixer)


def _ernie_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Without the multi-token prediction layer, and the corrections [1, experts] reshaped to [experts]."""
    for name, tensor in weights:
        if not name.startswith("model.mtp_"):
            yield name, tensor.flatten() if name.endswith(_ERNIE_CORRECTION) else tensor


def _gemma(site: LayerSite) -> DecoderLayer:
    """Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786): norms before and after each branch, GELU, and embeddings
    multiplied by the square root of their size. In Gemma 2 every second layer attends within a window, and scores and
    logits are capped. Gemma 3 has normalised heads in place of these caps, and most of its layers have a window and
    their own rotary angles."""
    bias, is_third = site.config.attention_bias, site.config.architecture.startswith("Gemma3")
    if is_third and site.config.window(site.index) is not None:
        site = replace(site, rotary=site.rotary.local)
    norms = BranchNorms("input_layernorm", "post_attention_layernorm")
    attention = SelfAttention(site, qkv_bias=bias, o_bias=bias, qk_norm=is_third, norms=norms)
    norms = BranchNorms("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return DecoderLayer(attention, GatedMLP(site, norms=norms))


def _gemma_vision_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a Gemma 3 that reads images: the text model's renamed as in a checkpoint of it alone, those of the
    tower as transformers 5 calls them. It has had several names for all of them."""
    for name, tensor in weights:
        if name.removeprefix("model.").startswith(TOWERS):
            yield name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1), tensor
            continue
        name = name.replace("model.language_model.", "model.", 1)
        yield name.removeprefix("language_model."), tensor


def _qwen_vision_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a Qwen model that reads images, renamed as Qwen2.5-VL was published: the text model's begin as in
    a checkpoint of the text model alone, the tower's with ``visual.``."""
    for name, tensor in weights:
        yield name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1), tensor


def _glm4(site: LayerSite) -> DecoderLayer:
    """GLM-4-0414 (arXiv:2406.12793): sandwich norms, and biases on queries, keys and values; half of each head's
    features rotate, in pairs of adjacent ones."""
    norms = BranchNorms("input_layernorm", "post_self_attn_layernorm")
    attention = SelfAttention(site, qkv_bias=site.config.attention_bias, norms=norms)
    return DecoderLayer(attention, GatedMLP(site, norms=BranchNorms("post_attention_layernorm", "post_mlp_layernorm")))


def _glm4_moe(site: LayerSite) -> DecoderLayer:
    """GLM-4.5 and GLM-4.6 (arXiv:2508.06471): experts chosen by sigmoids with a correction, and a shared expert. The
    first layers have a dense MLP. Heads are normalised if config.json says so."""
    config = site.config
    qk_norm = config.hf_config.get("use_qk_norm") is True
    names = ExpertNames(shared="shared_experts", correction="gate.e_score_correction_bias")
    return DecoderLayer(SelfAttention(site, qkv_bias=config.attention_bias, qk_norm=qk_norm), _mixer(site, names))


def _exaone4(site: LayerSite) -> DecoderLayer:
    """EXAONE 4.0 (arXiv:2507.11407): norms after the branches, and normalised heads. In a model that has windows,
    layers without one have no position embedding."""
    if site.config.windows and site.config.window(site.index) is None:
        site = replace(site, rotary=site.rotary.without_rotation)
    attention = SelfAttention(site, qk_norm=True, norms=BranchNorms(after="post_attention_layernorm"))
    return DecoderLayer(attention, GatedMLP(site, norms=BranchNorms(after="post_feedforward_layernorm")))


def _olmo2(site: LayerSite) -> DecoderLayer:
    """OLMo 2 (arXiv:2501.00656) and 3 (arXiv:2512.13961): norms after each branch and none before it; queries and keys
    too, over all heads. In OLMo 3 most layers have a window, and only the others' angles are scaled."""
    if site.config.window(site.index) is not None:
        site = replace(site, rotary=site.rotary.local)
    bias, norms = site.config.attention_bias, BranchNorms(after="post_attention_layernorm")
    attention = SelfAttention(site, qkv_bias=bias, o_bias=bias, wide_qk_norm=True, norms=norms)
    return DecoderLayer(attention, GatedMLP(site, norms=BranchNorms(after="post_feedforward_layernorm")))


def _seed_oss(site: LayerSite) -> DecoderLayer:
    """Seed-OSS-36B (ByteDance, 2025): Llama with biases that config.json switches on, separately for o_proj. In the
    published model queries, keys and values have biases, and o_proj has none."""
    o_bias = ConfigReader(site.config.hf_config).switch("attention_out_bias")
    attention = SelfAttention(site, qkv_bias=site.config.attention_bias, o_bias=o_bias)
    return DecoderLayer(attention, GatedMLP(site, site.config.mlp_bias))


def _smollm3(site: LayerSite) -> DecoderLayer:
    """SmolLM3 (Hugging Face, 2025): Llama with some layers that have no position embedding (NoPE, arXiv:2305.19466)."""
    if site.index in site.config.unrotated_layers:
        site = replace(site, rotary=site.rotary.without_rotation)
    return _llama(site)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The arguments with these names of ``CausalLM``."""

    make_layer: LayerMaker
    own_weights: Callable[[Weights], Weights] | None = None


# The keys are those of fenceline.config.families.FAMILIES; a test compares the two.
MODELS: Mapping[str, Architecture] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": Architecture(_deepseek),
        "DeepseekV3ForCausalLM": Architecture(_deepseek),
        "DeepseekV32ForCausalLM": Architecture(_deepseek),
        "Ernie4_5ForCausalLM": Architecture(_ernie4_5),
        "Ernie4_5_MoeForCausalLM": Architecture(_ernie4_5, _ernie_weights),
        "Exaone4ForCausalLM": Architecture(_exaone4),
        "Gemma2ForCausalLM": Architecture(_gemma),
        "Gemma3ForCausalLM": Architecture(_gemma),
        "Gemma3ForConditionalGeneration": Architecture(_gemma, _gemma_vision_weights),
        "Glm4ForCausalLM": Architecture(_glm4),
        "Glm4MoeForCausalLM": Architecture(_glm4_moe),
        "Glm4MoeLiteForCausalLM": Architecture(_deepseek),
        "GlmMoeDsaForCausalLM": Architecture(_deepseek),
        "GptOssForCausalLM": Architecture(_gpt_oss),
        "GraniteForCausalLM": Architecture(_llama),
        "KimiLinearForCausalLM": Architecture(_kimi_linear, _renamed("KimiLinearForCausalLM")),
        "Lfm2ForCausalLM": Architecture(_lfm2, _renamed("Lfm2ForCausalLM")),
        "LlamaForCausalLM": Architecture(_llama),
        "MiMoForCausalLM": Architecture(_qwen2),
        "MiniMaxM2ForCausalLM": Architecture(_minimax_m2),
        "MiniCPM3ForCausalLM": Architecture(_minicpm3),
        "MiniCPMSALAForCausalLM": Architecture(_minicpm_sala),
        "MistralForCausalLM": Architecture(_plain),
        "MixtralForCausalLM": Architecture(_mixtral),
        "NemotronHForCausalLM": Architecture(_nemotron_h, _renamed("NemotronHForCausalLM")),
        "Olmo2ForCausalLM": Architecture(_olmo2),
        "Olmo3ForCausalLM": Architecture(_olmo2),
        "Phi3ForCausalLM": Architecture(_plain),
        "Qwen2ForCausalLM": Architecture(_qwen2),
        "Qwen2_5_VLForConditionalGeneration": Architecture(_qwen2, _qwen_vision_weights),
        "Qwen2MoeForCausalLM": Architecture(_qwen2_moe),
        "Qwen3ForCausalLM": Architecture(_qwen3),
        "Qwen3MoeForCausalLM": Architecture(_qwen3),
        "Qwen3NextForCausalLM": Architecture(_qwen3_next),
        "Qwen3_5ForCausalLM": Architecture(_qwen3_5, _qwen3_5_weights),
        "Qwen3_5ForConditionalGeneration": Architecture(_qwen3_5, _qwen3_5_weights),
        "Qwen3_5MoeForCausalLM": Architecture(_qwen3_5, _qwen3_5_weights),
        "Qwen3_5MoeForConditionalGeneration": Architecture(_qwen3_5, _qwen3_5_weights),
        "Qwen3VLForConditionalGeneration": Architecture(_qwen3, _qwen_vision_weights),
        "Qwen3VLMoeForConditionalGeneration": Architecture(
            partial(_qwen3, names=ExpertNames(stacked="halves")), _qwen_vision_weights
        ),
        "SeedOssForCausalLM": Architecture(_seed_oss),
        "SmolLM3ForCausalLM": Architecture(_smollm3),
    }
)


def make_model(config: ModelConfig, context: LayerContext, first_layer: int = 0) -> CausalLM:
    """The model of ``config.architecture``, with uninitialised parameters on the default device. ``first_layer``: see
    ``CausalLM``. Raises ``ValueError``, which names the supported architectures, for any other one."""
    if config.architecture not in MODELS:
        raise ValueError(f"architecture {config.architecture} is not supported; supported are {', '.join(MODELS)}")
    architecture = MODELS[config.architecture]
    return CausalLM(config, context, architecture.make_layer, architecture.own_weights, first_layer)
