"""DraftConfig: the configuration of a draft model, read from its directory and checked against its target model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from fenceline.config import ConfigError
from fenceline.config.families import OWN_MTP
from fenceline.config.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from fenceline.config.model_files import read_model_json, tokenizer_vocab


class SpeculativeAlgorithm(Enum):
    """The values of --speculative-algorithm, as in SGLang."""

    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    NEXTN = "NEXTN"
    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"  # without a draft model


# Endings of architecture names such as LlamaForCausalLMEagle3; the longer one is tried first.
_SUFFIXES = {"Eagle3": SpeculativeAlgorithm.EAGLE3, "Eagle": SpeculativeAlgorithm.EAGLE}
_EAGLE3_FAMILIES = ("LlamaForCausalLM",)  # for targets of any family


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A draft model that fits its target. ``model`` describes the draft's own layers. Its context length and dtype are
    the target's: positions are the target's, whatever length the draft was trained at. For NEXTN it is the target's
    with as many layers as predict further tokens. ``draft_vocab_size`` is the size of the draft's head; None: that of
    the vocabulary. ``token_map``: the file of the tokens that the head has; None: the checkpoint says it.
    ``aux_layers``: for EAGLE-3, the layers of the target whose inputs the draft reads (see ``AuxHiddenStates``).
    ``sees_images``: where tokens are an image's, the draft reads the target's embeddings; a narrower or wider draft
    cannot, and reads those of their ids."""

    algorithm: SpeculativeAlgorithm
    model: ModelConfig
    draft_vocab_size: int | None = None
    token_map: str | None = None
    aux_layers: tuple[int, ...] = ()
    sees_images: bool = False

    @property
    def lookahead(self) -> int:
        """From how many following tokens the draft's KV of a token is computed. If each step has a layer of its own,
        each layer looks one token further ahead than the preceding one."""
        if self.algorithm is SpeculativeAlgorithm.STANDALONE:
            return 0
        return self.model.num_layers if self.algorithm is SpeculativeAlgorithm.NEXTN else 1

    @property
    def num_rows_behind(self) -> int:
        """For how many of the last committed tokens the draft may not have computed its KV yet. A draft that reads no
        hidden states computes the KV of the tokens from which it proposes. If all its proposals are accepted, it has
        not computed that of the last one."""
        return int(self.algorithm is SpeculativeAlgorithm.STANDALONE)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a decode step computes for each request. The draft proposes ``depth`` tokens one after the other. The target
    verifies ``num_nodes`` rows, including that of the last token. The step writes to ``num_slots`` KV slots, from that
    of the last token on. With depth 0 it is a step without drafts. The step yields at most ``num_tokens`` tokens, and
    writes ``num_spare`` slots after those of its tokens."""

    depth: int = 0
    num_nodes: int = 1
    num_slots: int = 1
    # Computed once, because every step reads them several times.
    num_tokens: int = field(init=False, repr=False, compare=False)
    num_spare: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", self.depth + 1)
        object.__setattr__(self, "num_spare", self.num_slots - self.num_tokens)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How decode steps speculate. ``draft`` proposes tokens in ``num_steps`` steps, ``topk`` tokens for each place.
    ``num_draft_tokens`` of them, including the last token, are verified (None: all). ``simulated_accept_length``: with
    dummy weights, how many tokens a step yields on average, whatever the draft proposes. ``draft_attention_backend`` is
    that of the draft's layers (None: the target's). ``is_adaptive``: steps may propose fewer tokens, see
    :attr:`depths`. ``match_window``: there is no draft model; proposed is what followed the last tokens of a request
    where they occurred before, at least as many of them as the first number says and at most the second."""

    draft: DraftConfig | None
    num_steps: int
    simulated_accept_length: float | None = None
    draft_attention_backend: str | None = None
    topk: int = 1
    num_draft_tokens: int | None = None
    is_adaptive: bool = False
    match_window: tuple[int, int] | None = None

    @property
    def depths(self) -> tuple[int, ...]:
        """How many tokens the draft may propose one after the other in a step, ascending; the last is ``num_steps``."""
        return tuple(sorted({0, 1, self.num_steps})) if self.is_adaptive else (self.num_steps,)

    @property
    def shapes(self) -> dict[int, StepShape]:
        """The shapes of steps by their depth, in ascending order."""
        return {depth: self._shape(depth) for depth in self.depths}

    @property
    def largest(self) -> StepShape:
        """The shape of the deepest steps."""
        return self._shape(self.num_steps)

    def _shape(self, depth: int) -> StepShape:
        num_nodes, rows, topk = depth + 1, 0, self.topk
        if topk > 1 and depth > 0:
            num_nodes = 1 + topk + (depth - 1) * topk * topk
            # The draft's layers compute the rows of all levels of the tree except the last. For a draft that reads no
            # hidden states they come after the root's row.
            rows = topk * (depth - 1) + (self.draft.num_rows_behind if self.draft else 0)
        if self.num_draft_tokens is not None:
            num_nodes = min(num_nodes, self.num_draft_tokens)
        return StepShape(depth, num_nodes, max(depth + 1, num_nodes, rows))


def read_draft_config(
    algorithm: SpeculativeAlgorithm, directory: str | None, target: ModelConfig, token_map: str | None = None
) -> DraftConfig:
    """Read the draft's ``config.json``, and for EAGLE the file ``token_map`` if one is given. ``directory`` None means
    the target's directory: a folder in it with the algorithm's name in lower case, as in the demo model, or for NEXTN
    the target's checkpoint itself. Raises ``ConfigError``, one line with the remedy, for a directory without a draft of
    this algorithm, and for a draft of another target, whose sizes, vocabulary or layers do not fit."""
    if directory is None:
        beside = Path(target.model_path) / algorithm.value.lower()
        directory = str(beside) if beside.is_dir() else None
    if algorithm is SpeculativeAlgorithm.NEXTN:
        return _read_nextn(directory, target)
    if directory is None:
        raise ConfigError(
            f"--speculative-algorithm {algorithm.value} needs a draft model: give --speculative-draft-model-path"
        )
    hf = read_model_json(Path(directory))
    family = _family(hf, algorithm)
    model = ModelConfig.from_dir(directory, {"architectures": [family]}, dtype=target.dtype)
    model = dataclasses.replace(model, context_length=target.context_length, vision=None)  # it has no tower
    _check_vocabulary(model, target, directory)
    if model.recurrent_layers:
        raise ConfigError(
            f"{directory}: layers of {model.architecture} carry a state, which a draft cannot take back; use a draft"
            " whose layers all attend"
        )
    sees_images = target.vision is not None and model.hidden_size == target.hidden_size
    if algorithm is SpeculativeAlgorithm.STANDALONE:
        return DraftConfig(algorithm=algorithm, model=model, sees_images=sees_images)
    eagle3 = algorithm is SpeculativeAlgorithm.EAGLE3
    expected = _size(hf, "target_hidden_size", model.hidden_size) if eagle3 else model.hidden_size
    if expected != target.hidden_size:
        raise ConfigError(
            f"{directory}: the draft reads hidden states of {expected} features, the target's have"
            f" {target.hidden_size}; use the draft that was trained for {target.model_path}"
        )
    if not eagle3:
        num_known = None if token_map is None else len(read_token_map(token_map, model.vocab_size))
        return DraftConfig(
            algorithm=algorithm, model=model, draft_vocab_size=num_known, token_map=token_map, sees_images=sees_images
        )
    if model.num_layers != 1:
        raise ConfigError(
            f"{directory}: num_hidden_layers is {model.num_layers}; EAGLE-3 drafts of one layer are supported"
        )
    draft_vocab_size = _size(hf, "draft_vocab_size", model.vocab_size)
    if draft_vocab_size > model.vocab_size:
        raise ConfigError(
            f"{directory}: draft_vocab_size {draft_vocab_size} is more than vocab_size {model.vocab_size}; correct"
            " config.json or download the draft again"
        )
    return DraftConfig(
        algorithm=algorithm,
        model=model,
        draft_vocab_size=draft_vocab_size,
        aux_layers=_aux_layers(hf, target, directory),
        sees_images=sees_images,
    )


def read_token_map(file: str, vocab_size: int) -> list[int]:
    """The ids in a file of --speculative-token-map, ascending. Raises ``ConfigError``, one line, if it has none, or
    others than those of the vocabulary."""
    import torch  # which takes a second

    flag = f"--speculative-token-map {file}"
    try:
        ids = torch.as_tensor(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # of many types: a damaged file, other objects in it
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{flag}: not a list or tensor of token ids that torch.save has written ({reason})") from None
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool or not len(ids):
        raise ConfigError(f"{flag}: has {list(ids.shape)} {ids.dtype} in place of a list of token ids")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"{flag}: names token {low if low < 0 else high}, the vocabulary has {vocab_size}; use the file that was"
            " made for this model"
        )
    known: list[int] = torch.unique(ids).tolist()
    return known


def _read_nextn(directory: str | None, target: ModelConfig) -> DraftConfig:
    model = target
    if directory is not None:
        model = ModelConfig.from_dir(directory, dtype=target.dtype)
        for name in ("architecture", "hidden_size", "vocab_size", "num_layers"):
            draft, wanted = getattr(model, name), getattr(target, name)
            if draft != wanted:
                raise ConfigError(
                    f"{directory}: its layers were made for a model with {name} {draft}, the target has {wanted}; use"
                    f" those of {target.model_path}"
                )
    if model.num_mtp_layers == 0:
        raise ConfigError(
            f"{model.model_path}: config.json names no layers that predict further tokens (num_nextn_predict_layers);"
            " use --speculative-algorithm EAGLE3 or STANDALONE with --speculative-draft-model-path"
        )
    if model.mtp_prefix == OWN_MTP and model.num_mtp_layers > 1:
        raise ConfigError(
            f"{model.model_path}: config.json names {model.num_mtp_layers} layers that predict further tokens, one is"
            f" supported for {model.architecture}; use --speculative-algorithm EAGLE3 or STANDALONE"
        )
    first = model.num_layers if model.appended_mtp else 0
    model = dataclasses.replace(
        model,
        num_layers=model.num_mtp_layers,
        first_layer=first,
        context_length=target.context_length,
        recurrent_layers=frozenset(),
    )
    if model.indexer is not None:  # each of these layers has its own
        indexed = model.indexer.layers | set(model.layer_indices)
        model = dataclasses.replace(model, indexer=dataclasses.replace(model.indexer, layers=indexed))
    sees_images = target.vision is not None
    return DraftConfig(algorithm=SpeculativeAlgorithm.NEXTN, model=model, sees_images=sees_images)


def _family(hf: Mapping[str, object], algorithm: SpeculativeAlgorithm) -> str:
    """The family of the draft's layers. Checkpoints of EAGLE's authors name only the family (LlamaForCausalLM);
    conversions add the algorithm (LlamaForCausalLMEagle)."""
    names = hf.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none"
    family, of = name, None
    for suffix, named in _SUFFIXES.items():
        if name.endswith(suffix):
            family, of = name.removesuffix(suffix), named
            break
    if of is not None and of is not algorithm:
        raise ConfigError(
            f"config.json: {name} is a draft for --speculative-algorithm {of.value}, not {algorithm.value}"
        )
    supported = _EAGLE3_FAMILIES if algorithm is SpeculativeAlgorithm.EAGLE3 else SUPPORTED_ARCHITECTURES
    if family not in supported:
        ending = next((suffix for suffix, named in _SUFFIXES.items() if named is algorithm), "")
        raise ConfigError(
            f"config.json: architecture {name} is not supported as a draft for --speculative-algorithm"
            f" {algorithm.value}; supported are {', '.join(family + ending for family in supported)}"
        )
    return family


def _aux_layers(hf: Mapping[str, object], target: ModelConfig, directory: str) -> tuple[int, ...]:
    """The target's layers whose inputs the draft reads. Ids in config.json name layers whose *outputs* are read, as in
    SGLang, SpecForge and ModelOpt; the published default names layers whose inputs are read."""
    if target.mlp_layers:
        raise ConfigError(
            f"--speculative-algorithm EAGLE3: not supported for {target.architecture}, of whose layers some are an MLP"
            " alone, because not all layers' inputs can be read; use STANDALONE"
        )
    num_layers = target.num_layers
    eagle = hf.get("eagle_config")
    eagle = eagle if isinstance(eagle, Mapping) else {}
    if eagle.get("use_aux_hidden_state") is False:
        raise ConfigError(
            f"{directory}: a draft without auxiliary hidden states (eagle_config.use_aux_hidden_state) is not"
            " supported; use one that reads them"
        )
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(
            f"{directory}: eagle_config.eagle_aux_hidden_state_layer_ids must be a list of layer ids, got {ids!r}"
        )
    layers = tuple(i + 1 for i in ids) or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= layer <= num_layers for layer in layers):
        raise ConfigError(
            f"{directory}: the draft reads the outputs of layers {', '.join(str(layer - 1) for layer in layers)}, the"
            f" target has {num_layers} layers; use the draft that was trained for {target.model_path}, or correct"
            " eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return layers


def _check_vocabulary(draft: ModelConfig, target: ModelConfig, directory: str) -> None:
    """Check that ids mean the same tokens in both vocabularies, because a draft proposes ids. Tokens that were added by
    name (chat markers, reserved tokens) may differ: models of one family rename them, and proposals are verified."""
    remedy = f"use a draft with the vocabulary of {target.model_path}"
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{directory}: the draft's vocabulary has {draft.vocab_size} tokens, the target's {target.vocab_size};"
            f" {remedy}"
        )
    ours, theirs = tokenizer_vocab(Path(target.model_path)), tokenizer_vocab(Path(directory))
    if ours is None or theirs is None or ours == theirs:
        return
    tokens = {number: token for token, number in theirs.items()}
    clash = [(i, token) for token, i in ours.items() if tokens.get(i, token) != token]
    if clash:
        number, token = min(clash)
        raise ConfigError(
            f"{directory}: token {number} is {tokens[number]!r} in the draft's vocabulary and {token!r} in the"
            f" target's; {remedy}"
        )


def _size(hf: Mapping[str, object], key: str, default: int) -> int:
    value = hf.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
    return value
