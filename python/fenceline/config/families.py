"""The model families that are served, by the architecture that config.json names, and what each reads of it in its own
way. What they compute is in ``models/``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fenceline.config import ConfigError
from fenceline.config.config_reader import ConfigReader

_MISTRAL_WINDOW = 4096  # transformers' default where config.json has no sliding_window


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts of a model: ``num_experts`` MLPs of ``intermediate_size``, of which each token goes
    through ``top_k``.

    ``sigmoid``: a token's score for an expert is the sigmoid of its logit, otherwise the softmax of all. Experts
    compete in ``num_groups`` groups of equal size, of which the best ``top_groups`` are open to a token.
    ``renormalise``: the scores of a token's experts are divided by their sum; afterwards they are multiplied by
    ``scaling``. ``shared_size`` is the intermediate size of the expert that all tokens go through (0: there is none).
    ``dense_layers`` have an ordinary MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"config.json: num_experts_per_tok {self.top_k} is more than the {self.num_experts} experts"
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"config.json: {self.num_experts} experts in n_group {self.num_groups} groups, topk_group"
                f" {self.top_groups} of them: the groups must be of equal size and enough"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ConfigError(
                f"config.json: topk_group {self.top_groups} groups hold fewer than num_experts_per_tok {self.top_k}"
                " experts"
            )


def _no_window(reader: ConfigReader, num_layers: int) -> int | None:
    return None


def _mistral_window(reader: ConfigReader, num_layers: int) -> int | None:
    if "sliding_window" in reader.values and reader.values["sliding_window"] is None:
        return None
    return reader.size("sliding_window", _MISTRAL_WINDOW)


def _mixtral_window(reader: ConfigReader, num_layers: int) -> int | None:
    return None if reader.values.get("sliding_window") is None else reader.size("sliding_window")


def _qwen_window(reader: ConfigReader, num_layers: int) -> int | None:
    """Only with the switch on, and in some layers."""
    if not reader.switch("use_sliding_window"):
        return None
    layer_types = reader.values.get("layer_types")
    if isinstance(layer_types, list):
        slides = "sliding_attention" in layer_types
    else:
        first_sliding = reader.values.get("max_window_layers", 28)
        slides = isinstance(first_sliding, int) and first_sliding < num_layers
    return reader.size("sliding_window", 4096) if slides else None


def _qwen_moe_window(reader: ConfigReader, num_layers: int) -> int | None:
    return reader.size("sliding_window", 4096) if reader.switch("use_sliding_window") else None


def _qwen_experts(reader: ConfigReader, num_layers: int) -> ExpertsConfig:
    every = reader.size("decoder_sparse_step", 1)
    named = reader.numbers("mlp_only_layers")
    return ExpertsConfig(
        # transformers 5 writes the second name for some families whose publishers wrote the first.
        num_experts=reader.size("num_experts" if "num_experts" in reader.values else "num_local_experts"),
        top_k=reader.size("num_experts_per_tok"),
        intermediate_size=reader.size("moe_intermediate_size"),
        renormalise=reader.switch("norm_topk_prob"),
        dense_layers=frozenset(named) | {i for i in range(num_layers) if (i + 1) % every},
        shared_size=reader.count("shared_expert_intermediate_size"),
    )


def _mixtral_experts(reader: ConfigReader, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=reader.size("num_local_experts"),
        top_k=reader.size("num_experts_per_tok"),
        intermediate_size=reader.size("intermediate_size"),
        renormalise=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's config.json is read where families differ, by the rules of its transformers config.

    ``head_dim`` is the default (None: the heads share hidden_size). ``window`` gives the sliding window that some layer
    uses, ``experts`` its mixture of experts; both get the number of layers.
    """

    head_dim: int | None = None
    window: Callable[[ConfigReader, int], int | None] = _no_window
    experts: Callable[[ConfigReader, int], ExpertsConfig] | None = None


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "MiMoForCausalLM": Family(window=_qwen_window),
        "MistralForCausalLM": Family(window=_mistral_window),
        "MixtralForCausalLM": Family(window=_mixtral_window, experts=_mixtral_experts),
        "Qwen2ForCausalLM": Family(window=_qwen_window),
        "Qwen2MoeForCausalLM": Family(window=_qwen_moe_window, experts=_qwen_experts),
        "Qwen3ForCausalLM": Family(head_dim=128, window=_qwen_window),
        "Qwen3MoeForCausalLM": Family(window=_qwen_moe_window, experts=_qwen_experts),
    }
)
