"""The model class for each architecture that config.json may name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.models.decoder import CausalLM
from fenceline.models.deepseek_v2 import DeepseekV2ForCausalLM
from fenceline.models.ernie4_5 import Ernie4_5_MoeForCausalLM, Ernie4_5ForCausalLM
from fenceline.models.exaone4 import Exaone4ForCausalLM
from fenceline.models.gemma2 import Gemma2ForCausalLM
from fenceline.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from fenceline.models.glm4 import Glm4ForCausalLM
from fenceline.models.glm4_moe import Glm4MoeForCausalLM
from fenceline.models.gpt_oss import GptOssForCausalLM
from fenceline.models.llama import LlamaForCausalLM
from fenceline.models.minimax_m2 import MiniMaxM2ForCausalLM
from fenceline.models.mistral import MistralForCausalLM
from fenceline.models.mixtral import MixtralForCausalLM
from fenceline.models.olmo2 import Olmo2ForCausalLM
from fenceline.models.phi3 import Phi3ForCausalLM
from fenceline.models.qwen2 import Qwen2ForCausalLM
from fenceline.models.qwen2_moe import Qwen2MoeForCausalLM
from fenceline.models.qwen3 import Qwen3ForCausalLM
from fenceline.models.qwen3_moe import Qwen3MoeForCausalLM
from fenceline.models.seed_oss import SeedOssForCausalLM
from fenceline.models.smollm3 import SmolLM3ForCausalLM

# The keys are those of fenceline.config.families.FAMILIES; a test compares the two.
MODELS: Mapping[str, type[CausalLM]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
        "Ernie4_5ForCausalLM": Ernie4_5ForCausalLM,
        "Ernie4_5_MoeForCausalLM": Ernie4_5_MoeForCausalLM,
        "Exaone4ForCausalLM": Exaone4ForCausalLM,
        "Gemma2ForCausalLM": Gemma2ForCausalLM,
        "Gemma3ForCausalLM": Gemma3ForCausalLM,
        "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
        "Glm4ForCausalLM": Glm4ForCausalLM,
        "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
        "GptOssForCausalLM": GptOssForCausalLM,
        "GraniteForCausalLM": LlamaForCausalLM,
        "LlamaForCausalLM": LlamaForCausalLM,
        "MiMoForCausalLM": Qwen2ForCausalLM,
        "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "MixtralForCausalLM": MixtralForCausalLM,
        "Olmo2ForCausalLM": Olmo2ForCausalLM,
        "Phi3ForCausalLM": Phi3ForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
        "SeedOssForCausalLM": SeedOssForCausalLM,
        "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    }
)


def make_model(config: ModelConfig, context: LayerContext, first_layer: int = 0) -> CausalLM:
    """The model of ``config.architecture``, with uninitialised parameters on the default device. ``first_layer``: see
    ``CausalLM``.

    Raises ``ValueError``, which names the supported architectures, for any other one.
    """
    if config.architecture not in MODELS:
        raise ValueError(f"architecture {config.architecture} is not supported; supported are {', '.join(MODELS)}")
    return MODELS[config.architecture](config, context, first_layer)
