"""ConfigReader: typed reads of a config.json."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, ValuesView
from types import MappingProxyType

from fenceline.config import ConfigError

logger = logging.getLogger(__name__)
# The most that a size may be. No model comes near it, so a larger number is a mistake, and it is found before memory is
# asked for. Positions beyond it are no whole numbers in float32.
MOST = 1 << 24
# Entries that cannot change a logit, by the reason.
_NO_EFFECT = frozenset(
    {
        # They name the model, and what made the file.
        "architectures", "auto_map", "model_type", "name_or_path", "_name_or_path", "transformers_version",
        "unsloth_fixed", "unsloth_version", "torch_dtype", "dtype", "base_model_name_or_path",
        # They are for training: initialisation, dropout, losses.
        "initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "residual_dropout",
        "hidden_dropout", "hidden_dropout_prob", "dropout", "router_aux_loss_coef", "router_jitter_noise",
        "output_router_logits", "pretraining_tp", "use_mtp", "moe_aux_loss_lambda", "moe_capacity",
        "moe_use_aux_free", "input_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size", "shift_labels",
        "mup_denominator", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
        "conv_use_xavier_init",
        # They say what a call of transformers returns, and how it computes the same numbers.
        "use_cache", "output_hidden_states", "output_attentions", "return_dict", "return_dict_in_generate",
        "chunk_size_feed_forward", "tie_last_hidden_states", "_attn_implementation", "attn_implementation",
        "_experts_implementation", "experts_implementation", "cache_implementation", "use_flash_attention",
        "torchscript", "fuse_rms_norm", "is_decoder",
        # They are for classifiers and encoders, of which nothing is computed here, and for towers (config/vision.py).
        "id2label", "label2id", "problem_type", "num_labels", "vision_config", "mm_tokens_per_image",
        "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id", "boi_token_id", "eoi_token_id",
        "vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id",
        # They are ids of tokens and defaults of sampling; generation_config.json and the request say them.
        "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id", "bos_token_id", "eos_token_id",
        "temperature", "top_p", "top_k", "repetition_penalty", "do_sample", "max_length", "max_new_tokens",
        # They repeat others in the words of the checkpoint's authors.
        "experts_per_token", "initial_context_length", "mlp_intermediate_size", "num_mtp_modules",
        "mtp_transformer_layers", "use_routing_bias", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
        "block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads",
        # They are read with a tower; texts have the same position on all axes.
        "rope_parameters.mrope_section", "rope_parameters.mrope_interleaved",
        # It counts only with use_sliding_window.
        "max_window_layers",
        # The draft of a speculative algorithm has them (config/draft_config.py).
        "target_hidden_size", "target_model_type", "draft_vocab_size", "eagle_config",
    }
)  # fmt: skip
_ROPE = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention")
# Entries with which a model computes something else, and the values that say that it does not. null never says so.
_COMPUTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "use_bidirectional_attention": (False,),
        "is_causal": (True,),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (),
        "per_layer_config": ({},),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "clip_qkv": (),
        "logit_scale": (1,),
        "pruned_heads": ({},),
        "use_rmsnorm": (True,),
        "use_sliding_window": (False,),
        # Factors of cos and sin by the length, of the Phi-3 models with experts or images.
        **dict.fromkeys((f"{rope}.{length}_mscale" for rope in _ROPE[:2] for length in ("short", "long")), ()),
    }
)


class Entries(Mapping[str, object]):
    """The entries of a config.json and the rope parameters inside them, which remember whether they have been read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {
            key: Entries(value) if isinstance(value, Mapping) and key in _ROPE else value
            for key, value in values.items()
        }
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def values(self) -> ValuesView[object]:
        """All values; they do not count as read."""
        return self._values.values()

    def unread(self) -> dict[str, object]:
        """The entries that nobody has read; those of rope parameters with a dotted name."""
        found = {key: value for key, value in self._values.items() if key not in self.read}
        for key, value in self._values.items():
            if isinstance(value, Entries) and key in self.read:
                found |= {f"{key}.{inside}": unread for inside, unread in value.unread().items()}
        return found


def check_unread(entries: Entries, computed: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ``ConfigError`` if an entry that nobody has read says that the model computes something else than we do.
    ``computed`` has the family's entries of this kind and the values that we compute. A log line names entries that are
    not known here."""
    expected = {**_COMPUTED, **computed}
    unread = {key: value for key, value in entries.unread().items() if value is not None}
    for key in unread.keys() & expected.keys():
        if unread[key] not in expected[key]:
            wanted = " or ".join(json.dumps(value) for value in (*expected[key], None))
            raise ConfigError(
                f"config.json: {key} {json.dumps(unread[key])} is not supported for this architecture, only {wanted} is"
            )
    unknown = sorted(unread.keys() - expected.keys() - _NO_EFFECT)
    if unknown:
        logger.warning("config.json: these entries are not known and have no effect: %s", ", ".join(unknown))


class ConfigReader:
    """Typed reads from config.json. A value of the wrong type or size raises ``ConfigError``, which names the key."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    def overridden(self, *keys: str) -> None:
        """Count ``keys`` as read: they have no effect, because of the values of others."""
        for key in keys:
            self.values.get(key)

    def size(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """An integer from 1 to ``most``."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"config.json: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
        if value > most:
            raise ConfigError(f"config.json: {key} must be at most {most}, got {value!r}")
        return value

    def count(self, key: str, most: int = MOST, default: int = 0) -> int:
        """An integer from 0 to ``most``; ``default`` if the key is missing."""
        return 0 if self.values.get(key) == 0 else self.size(key, default, most)

    def whole(self, key: str, default: int) -> int:
        """An integer of at least -1."""
        value = self.values.get(key)
        return default if value is None else -1 if value == -1 else self.count(key)

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"config.json: {key} must be a finite number, got {value!r}")
        return float(value)

    def switch(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"config.json: {key} must be a list of strings, got {value!r}")
        return tuple(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of integers, empty if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
            raise ConfigError(f"config.json: {key} must be a list of whole numbers, got {value!r}")
        return tuple(value)
