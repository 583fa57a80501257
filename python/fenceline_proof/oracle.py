"""The oracle: a request's answer, computed alone and from scratch.

It is one forward over plain arrays for one request, without cache, batch, graphs or scheduler, and the sampling formula
as it is documented. Nothing is imported from the package (scripts/tidy.py checks it): if the engine and the oracle
agree, two independent implementations agree. Weights are read from the model's folder by their names in the checkpoint
(Qwen3's, those of its mixtures of experts, Gemma 2's, GLM-5's and Qwen3-Next's with dense layers, Qwen2.5-VL's).

The arithmetic is float64, so that the only difference from the engine's float32 is the engine's rounding. Angles of
rotary positions are float32 by definition.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]

# Scores (logits over temperature, with noise) that differ by less than this may change their order in float32.
TOLERANCE = 1e-5
# By how much of their mean size float32 may have keys and values differ from float64. It is some 1e-7 in most cases.
_NEAR_TIE = 2e-6
_TOP_P_SLACK = 1e-6  # the same for sums of probabilities
_CHUNK = 256  # prompt tokens computed at once, which bounds the size of attention's scores
_GREEDY_BELOW = 1e-6
# How the tower's images are normalised, by channel.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_M64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, splitmix64's step


@dataclass(frozen=True, slots=True)
class Query:
    """Everything that an answer depends on. ``stop_ids`` include end-of-sequence ids if these end the answer."""

    prompt: tuple[int, ...]
    seed: int
    stop_ids: frozenset[int] = frozenset()
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: int = 0  # of GRAMMARS, 0 for none
    eos_ids: frozenset[int] = frozenset()  # that end an answer with a grammar
    pieces: tuple[bytes, ...] = ()  # of each id, for its grammar
    # (index, folder): from that output on, another checkpoint's weights; folder "" is the oracle's own.
    weights: tuple[tuple[int, str], ...] = ()
    images: tuple[tuple[int, bytes, int, int], ...] = ()  # (place in the prompt, RGB pixels, height, width)

    @property
    def greedy(self) -> bool:
        """Whether the token with the largest score is always taken."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One token of an answer: the ``token``, the ids that rounding could have made of it, the log-probabilities [V] of
    the unfiltered draw, and its scores [V], of which the largest that is not filtered is drawn."""

    token: int
    close: frozenset[int]
    logprobs: F64
    scores: F64


# The families that it knows. Gemma's layers have norms behind attention and MLP too, windows and soft caps.
_FAMILIES = ("qwen3", "qwen3_moe", "gemma2", "deepseek_v3", "glm_moe_dsa", "qwen2_5_vl", "qwen3_next")


class Model:
    """The weights of a model in a folder with Hugging Face's layout."""

    def __init__(self, folder: str | Path, rounds_kv: bool = False) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        assert config["model_type"] in _FAMILIES, f"the oracle knows {_FAMILIES}"
        self.is_gemma = config["model_type"] == "gemma2"
        # Of what attention adds, of what the MLP reads, and of what it adds.
        self.norms = ("", "post_attention_layernorm", "")
        if self.is_gemma:
            self.norms = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        self.is_hybrid = config["model_type"] == "qwen3_next"
        self.windows: list[int | None] = [None] * config["num_hidden_layers"]
        self.score_scale = 1 / math.sqrt(config["head_dim"])
        self.score_cap = self.logit_cap = 0.0
        if "layer_types" in config:
            slides = [kind == "sliding_attention" for kind in config["layer_types"]]
            self.windows = [config["sliding_window"] if sliding else None for sliding in slides]
        if self.is_gemma:
            self.score_scale = 1 / math.sqrt(config["query_pre_attn_scalar"])
            self.score_cap = config["attn_logit_softcapping"]
            self.logit_cap = config["final_logit_softcapping"]
        self.index_top_k: int = config.get("index_topk", 0)
        self.latent_size: int = config.get("kv_lora_rank", 0)
        if self.latent_size:
            self.score_scale = 1 / math.sqrt(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        self.top_k: int = config.get("num_experts_per_tok", 0)
        self.experts_scale: float = config.get("routed_scaling_factor", 1.0)
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        self.rounds_kv = rounds_kv
        tensors = load_file(Path(folder) / "model.safetensors")
        self.weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.rotary_dim = int(self.head_dim * config.get("partial_rotary_factor", 1))
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        self._frequencies = np.float32(1.0) / np.float32(config["rope_theta"]) ** exponents
        self.tower = config.get("vision_config", {})
        # Of layers that carry a state: heads, those that share out keys, and features of a key.
        self.num_states, self.num_state_keys, self.state_key_dim = (
            config.get(f"linear_{name}", 0) for name in ("num_value_heads", "num_key_heads", "key_head_dim")
        )
        sections = config.get("rope_scaling", {}).get("mrope_section", [])
        self.axes = np.repeat(np.arange(len(sections)), sections)  # of each pair: time, row or column
        self.embedding = self.weights["model.embed_tokens.weight"]
        tied = config.get("tie_word_embeddings", False)
        self.head = self.embedding if tied else self.weights["lm_head.weight"]
        if self.is_gemma:
            self.embedding = self.embedding * np.float64(np.float32(math.sqrt(config["hidden_size"])))

    def norm(self, x: F64, name: str) -> F64:
        """RMSNorm over the last axis, in Gemma and Qwen3-Next with one more than the weights, but for the norms of
        states. x as it is if there is no such norm."""
        if f"{name}.weight" not in self.weights:
            return x
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        offset = self.is_gemma or (self.is_hybrid and "linear_attn" not in name)
        weighted: F64 = x / scale * (self.weights[f"{name}.weight"] + offset)
        return weighted

    def linear(self, x: F64, name: str) -> F64:
        """x times the transposed weight, as checkpoints store it, and the bias if there is one."""
        product: F64 = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return product if bias is None else product + bias

    def gated(self, x: F64, name: str) -> F64:
        """The MLP ``name``: SwiGLU, in Gemma with gelu in its approximation by tanh."""
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        if self.is_gemma:
            share = (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
        else:
            share = 1 / (1 + np.exp(-gate))
        return self.linear(gate * share * up, f"{name}.down_proj")

    def mix(self, x: F64, name: str) -> F64:
        """The MLP ``name`` of x [T, hidden], or its experts: each token's ``top_k`` best, weighted by a softmax over
        these. DeepSeek-V3's by their sigmoids, beside an expert that all tokens share."""
        if f"{name}.gate.weight" not in self.weights:
            return self.gated(x, name)
        has_shared = f"{name}.shared_experts.up_proj.weight" in self.weights
        result = self.gated(x, f"{name}.shared_experts") if has_shared else np.zeros_like(x)
        for token, scores in enumerate(self.linear(x, f"{name}.gate")):
            likely = 1 / (1 + np.exp(-scores)) if has_shared else np.exp(scores - scores.max())
            correction = self.weights[f"{name}.gate.e_score_correction_bias"] if has_shared else 0.0
            best = np.argsort(-(likely + correction))[: self.top_k]
            shares = self.experts_scale * likely[best] / likely[best].sum()
            for expert, share in zip(best, shares, strict=True):
                result[token] += share * self.gated(x[token], f"{name}.experts.{int(expert)}")
        return result

    def rotate(self, x: F64, first: int, places: npt.NDArray[np.int64] | None = None) -> F64:
        """Rotary positions ``first``, ``first + 1``, ... of x [T, heads, head_dim]: pairs (i, i + n / 2) of the first n
        features that rotate. Or of each token the ``places`` [T, 3] in time, row and column, of which each pair takes
        one."""
        positions = np.arange(first, first + len(x), dtype=np.float32)[:, None]
        if places is not None:
            positions = places[:, self.axes].astype(np.float32)
        turned = self._turned(x[..., : self.rotary_dim], (positions * self._frequencies).astype(np.float64))
        return np.concatenate([turned, x[..., self.rotary_dim :]], axis=-1)

    def _turned(self, x: F64, angles: F64) -> F64:
        angles = angles[:, None, :]
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def rotate_pairs(self, x: F64, first: int, start: int) -> F64:
        """``rotate`` of pairs of neighbours, those of the ``head_dim`` features from ``start`` on."""
        before, rotated, after = np.split(x, [start, start + self.head_dim], axis=-1)
        halves = np.concatenate([rotated[..., ::2], rotated[..., 1::2]], axis=-1)
        return np.concatenate([before, self.rotate(halves, first), after], axis=-1)

    def embed_image(self, pixels: bytes, height: int, width: int) -> F64:
        """The tower's embeddings [N, hidden] of an image, row by row."""
        side, merge, heads = self.tower["patch_size"], 2, self.tower["num_heads"]
        rows, columns = height // side, width // side
        values: F64 = (np.frombuffer(pixels, np.uint8).reshape(rows, side, columns, side, 3) / 255 - _MEAN) / _STD
        squares = values.transpose(0, 2, 4, 1, 3).reshape(rows * columns, 3, 1, side * side)
        patches = squares.repeat(2, axis=2).reshape(rows * columns, -1)  # two frames
        kernel = self.weights["visual.patch_embed.proj.weight"]
        x = patches @ kernel.reshape(len(kernel), -1).T
        at = np.indices((rows, columns)).reshape(2, -1)
        size = x.shape[1] // heads
        steps = np.float32(1) / np.float32(10_000) ** (np.arange(0, size // 2, 2, dtype=np.float32) / (size // 2))
        angles = np.concatenate([(axis[:, None] * steps).astype(np.float64) for axis in at], axis=1)
        window = self.tower["window_size"] // side
        windows = at[0] // window * columns + at[1] // window
        apart = windows[:, None] != windows
        for layer in range(self.tower["depth"]):
            name = f"visual.blocks.{layer}"
            qkv = self.linear(self.norm(x, f"{name}.norm1"), f"{name}.attn.qkv").reshape(len(x), 3, heads, size)
            q, k, v = self._turned(qkv[:, 0], angles), self._turned(qkv[:, 1], angles), qkv[:, 2]
            scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
            if layer not in self.tower["fullatt_block_indexes"]:
                scores[:, apart] = -np.inf
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1)
            x = x + self.linear(attended, f"{name}.attn.proj")
            x = x + self.gated(self.norm(x, f"{name}.norm2"), f"{name}.mlp")
        x = self.norm(x, "visual.merger.ln_q").reshape(rows // merge, merge, columns // merge, merge, -1)
        x = self.linear(x.transpose(0, 2, 1, 3, 4).reshape(rows * columns // merge**2, -1), "visual.merger.mlp.0")
        return self.linear(x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2, "visual.merger.mlp.2")

    def places(self, query: Query) -> npt.NDArray[np.int64]:
        """Where the prompt's tokens and the next one are, in time, row and column, [T + 1, 3]."""
        found: list[tuple[int, int, int]] = []
        images, following = {place: shape for place, _, *shape in query.images}, 0
        while len(found) <= len(query.prompt):
            height, width = images.get(len(found), (0, 0))
            rows, columns = (side // self.tower["patch_size"] // 2 for side in (height, width))
            found += [
                (following, following + row, following + column) for row in range(rows) for column in range(columns)
            ]
            if not height:
                found.append((following,) * 3)
            following += max(rows, columns, 1)
        return np.array(found)

    def logits(self, hidden: F64) -> F64:
        """[T, hidden] after the last layer → [T, V]."""
        scores: F64 = self.norm(hidden, "model.norm") @ self.head.T
        return np.tanh(scores / self.logit_cap) * self.logit_cap if self.logit_cap else scores


class Answer:
    """One request's answer, computed as far as it is needed. Tokens in ``forced`` are given and not computed.

    ``num_near_ties``: keys and values so far that lie so near to the middle between two numbers of FP8 that another
    order of additions may round them to the other one."""

    def __init__(self, models: Callable[[str], Model], query: Query, forced: tuple[tuple[int, int], ...] = ()) -> None:
        self.query = query
        self.num_near_ties = 0
        self._models = models
        self._forced = dict(forced)
        self._tokens: list[int] = []  # outputs
        self._steps: list[Step] = []
        self._hidden: list[F64] = []  # of the prompt, with the weights of the first output
        self._scores = models(dict(query.weights).get(0, "")).logits
        self._begin(dict(query.weights).get(0, ""))

    def _begin(self, folder: str) -> None:
        """Compute all tokens so far with the weights in ``folder``."""
        model = self._model = self._models(folder)
        self._index_keys: list[F64] = [np.zeros((0, 0))] * model.num_layers
        self._keys: list[list[F64]] = [[] for _ in range(model.num_layers)]
        self._values: list[list[F64]] = [[] for _ in range(model.num_layers)]
        self._num_computed = 0
        self._inputs: dict[int, F64] = {}  # the last inputs of each convolution
        self._states: dict[int, F64] = {}  # [heads, features of a key, features of a value], by layer
        self._embedded = [(one[0], model.embed_image(*one[1:])) for one in self.query.images]
        self._places = model.places(self.query) if len(model.axes) else None
        tokens = (*self.query.prompt, *self._tokens)
        hidden = [self._forward(tokens[start : start + _CHUNK]) for start in range(0, len(tokens), _CHUNK)]
        self._hidden = self._hidden or hidden
        self._last = model.logits(hidden[-1][-1:])[0]

    def step(self, index: int) -> Step:
        """The ``index``-th output. The caller knows that the answer has not ended before."""
        while len(self._steps) <= index:
            folder = dict(self.query.weights).get(len(self._tokens))
            if self._tokens and folder is not None:
                self._begin(folder)
            elif self._tokens:
                self._last = self._model.logits(self._forward(self._tokens[-1:]))[0]
            step = choose(self._last, self.query, self._tokens)
            self._steps.append(step)
            self._tokens.append(self._forced.get(len(self._tokens), step.token))
        return self._steps[index]

    def prompt_logprobs(self, first: int) -> F64:
        """[n, V]: of what may follow the prompt's tokens ``first`` .. the last but one, unadjusted."""
        hidden = np.concatenate(self._hidden)[first:-1]
        return _log_softmax(self._scores(hidden))

    def embedding(self) -> F64:
        """[hidden]: the state of the prompt's last token behind the last norm."""
        return self._model.norm(self._hidden[-1][-1], "model.norm")

    def _forward(self, tokens: tuple[int, ...] | list[int]) -> F64:
        """Hidden states [T, hidden] of the next ``tokens`` of the sequence."""
        model, first, num = self._model, self._num_computed, len(tokens)
        x = model.embedding[list(tokens)]
        for place, embedded in self._embedded:
            if first <= place < first + num:  # prompts with images are computed at once
                x[place : place + len(embedded)] = embedded
        for layer in range(model.num_layers):
            name = f"model.layers.{layer}"
            h = model.norm(x, f"{name}.input_layernorm")
            if f"{name}.linear_attn.A_log" in model.weights:
                attended = self._recur(layer, h, f"{name}.linear_attn")
            else:
                attended = self._attend(layer, h, f"{name}.self_attn", first)
                attended = model.linear(attended.reshape(num, -1), f"{name}.self_attn.o_proj")
            after_attention, before_mlp, after_mlp = (f"{name}.{norm}" for norm in model.norms)
            x = x + model.norm(attended, after_attention)
            mixed = model.mix(model.norm(x, before_mlp), f"{name}.mlp")
            x = x + model.norm(mixed, after_mlp)
        self._num_computed += num
        return x

    def _recur(self, layer: int, h: F64, name: str) -> F64:
        """A gated delta net, token by token."""
        model, num = self._model, len(h)
        heads, key_heads, size = model.num_states, model.num_state_keys, model.state_key_dim
        share = heads // key_heads
        parts = model.linear(h, f"{name}.in_proj_qkvz").reshape(num, key_heads, -1)
        values = (parts.shape[2] - 2 * size) // 2
        q, k, v, z = np.split(parts, [size, 2 * size, 2 * size + values], axis=2)
        b, a = np.split(model.linear(h, f"{name}.in_proj_ba").reshape(num, key_heads, 2 * share), 2, axis=2)
        kernel = model.weights[f"{name}.conv1d.weight"][:, 0]
        channels, taps = kernel.shape
        before = self._inputs.get(layer, np.zeros((taps - 1, channels)))
        inputs = np.concatenate([before, np.hstack([x.reshape(num, -1) for x in (q, k, v)])])
        self._inputs[layer] = inputs[-(taps - 1) :]
        mixed = sum(inputs[tap : tap + num] * kernel[:, tap] for tap in range(taps))
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [key_heads * size, 2 * key_heads * size], axis=1)
        q, k = (
            (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)).repeat(share, axis=1)
            for x in (q.reshape(num, key_heads, size), k.reshape(num, key_heads, size))
        )
        v = v.reshape(num, heads, -1)
        times = np.log1p(np.exp(a.reshape(num, heads) + model.weights[f"{name}.dt_bias"]))
        kept = np.exp(-np.exp(model.weights[f"{name}.A_log"]) * times)
        written = 1 / (1 + np.exp(-b.reshape(num, heads)))
        state = self._states.get(layer, np.zeros((heads, size, v.shape[2])))
        results = []
        for token in range(num):
            state = state * kept[token][:, None, None]
            change = written[token][:, None] * (v[token] - np.einsum("hk,hkv->hv", k[token], state))
            state = state + k[token][:, :, None] * change[:, None]
            results.append(np.einsum("hk,hkv->hv", q[token], state) / math.sqrt(size))
        self._states[layer] = state
        gate = z.reshape(num, heads, -1)
        normed = model.norm(np.stack(results), f"{name}.norm") * gate / (1 + np.exp(-gate))
        return model.linear(normed.reshape(num, -1), f"{name}.out_proj")

    def _attend(self, layer: int, h: F64, name: str, first: int) -> F64:
        """Causal attention of the tokens from position ``first`` on over all so far; [T, heads, head_dim]."""
        model, num = self._model, len(h)

        def heads(kind: str, count: int) -> F64:
            flat = model.linear(h, f"{name}.{kind}_proj").reshape(num, count, -1)
            return model.norm(flat[..., : model.head_dim], f"{name}.{kind}_norm")

        if model.latent_size:
            q, k, v = self._from_latents(layer, h, name, first)
        else:
            q, k = heads("q", model.num_heads), heads("k", model.num_kv_heads)
            places = None if self._places is None else self._placed(self._places, first, num)
            q, k = model.rotate(q, first, places), model.rotate(k, first, places)
            v = heads("v", model.num_kv_heads)
        self._keys[layer].append(self._kept(k))
        self._values[layer].append(self._kept(v))
        keys, values = np.concatenate(self._keys[layer]), np.concatenate(self._values[layer])
        self._keys[layer], self._values[layer] = [keys], [values]
        # [kv heads, tokens of all query heads that share one, head_dim] and [kv heads, all tokens, head_dim]
        grouped = q.reshape(num, model.num_kv_heads, -1, q.shape[-1]).transpose(1, 2, 0, 3)
        queries = grouped.reshape(model.num_kv_heads, -1, q.shape[-1])
        scores = queries @ keys.transpose(1, 2, 0) * model.score_scale
        if model.score_cap:
            scores = np.tanh(scores / model.score_cap) * model.score_cap
        window = model.windows[layer] or len(keys)
        if num > 1 or window < len(keys):
            ago = np.arange(first, first + num)[:, None] - np.arange(len(keys))
            by_query = scores.reshape(-1, num, len(keys))
            by_query += np.where((ago < 0) | (ago >= window), -np.inf, 0.0)
        if model.index_top_k:
            scores.reshape(-1, num, len(keys))[:, ~self._selected] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out: F64 = (weights @ values.transpose(1, 0, 2)).reshape(*grouped.shape[:3], -1).transpose(2, 0, 1, 3)
        out = out.reshape(num, model.num_heads, -1)
        if not model.is_hybrid:
            return out
        gates = model.linear(h, f"{name}.q_proj").reshape(num, model.num_heads, -1)[..., model.head_dim :]
        return out / (1 + np.exp(-gates))

    @staticmethod
    def _placed(places: npt.NDArray[np.int64], first: int, num: int) -> npt.NDArray[np.int64]:
        """The places of tokens ``first`` to ``first + num - 1``, behind the known ones one after the other."""
        behind = np.maximum(np.arange(first, first + num) - (len(places) - 1), 0)
        return places[np.minimum(np.arange(first, first + num), len(places) - 1)] + behind[:, None]

    def _from_latents(self, layer: int, h: F64, name: str, first: int) -> tuple[F64, F64, F64]:
        """Queries, keys and values of latent attention. If the layer has an indexer, it selects the tokens."""
        model, num = self._model, len(h)
        start = model.latent_size
        latent = model.norm(model.linear(h, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
        q = model.linear(latent, f"{name}.q_b_proj").reshape(num, model.num_heads, -1)
        q = model.rotate_pairs(q, first, q.shape[-1] - model.head_dim)
        row = model.rotate_pairs(model.linear(h, f"{name}.kv_a_proj_with_mqa")[:, None], first, start)
        plain = model.norm(row[:, 0, :start], f"{name}.kv_a_layernorm")
        both = model.linear(plain, f"{name}.kv_b_proj").reshape(num, model.num_heads, -1)
        nope_dim = q.shape[-1] - model.head_dim
        rotated = row[..., start:].repeat(model.num_heads, axis=1)
        if f"{name}.indexer.wk.weight" in model.weights:
            self._select(layer, h, latent, f"{name}.indexer", first)
        return q, np.concatenate([both[..., :nope_dim], rotated], axis=-1), both[..., nope_dim:]

    def _select(self, layer: int, h: F64, latent: F64, name: str, first: int) -> None:
        """Which of all tokens each of h [T, hidden] attends to: the best, of equal ones the first."""
        model, num = self._model, len(h)
        key = model.linear(h, f"{name}.wk")
        key = (key - key.mean(-1, keepdims=True)) / np.sqrt(key.var(-1, keepdims=True) + 1e-6)
        key = key * model.weights[f"{name}.k_norm.weight"] + model.weights[f"{name}.k_norm.bias"]
        key = model.rotate_pairs(key[:, None], first, 0)[:, 0]
        keys = self._index_keys[layer] = np.concatenate([self._index_keys[layer].reshape(-1, key.shape[1]), key])
        q = model.rotate_pairs(model.linear(latent, f"{name}.wq_b").reshape(num, -1, key.shape[1]), first, 0)
        share = model.linear(h, f"{name}.weights_proj") * (q.shape[1] * q.shape[2]) ** -0.5
        scores = np.einsum("ths,th->ts", np.maximum(q @ keys.T, 0), share)
        scores[np.arange(first, first + num)[:, None] < np.arange(len(keys))] = -np.inf
        order = np.argsort(-scores, axis=-1, kind="stable")[:, : model.index_top_k]
        self._selected = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(self._selected, order, True, -1)
        if len(keys) > model.index_top_k:
            last = np.take_along_axis(scores, order[:, -1:], -1)
            gaps = abs(scores - np.where(np.isinf(last), 0, last))
            self.num_near_ties += int(((gaps > 0) & (gaps < TOLERANCE) & ~np.isinf(last)).sum())

    def _kept(self, x: F64) -> F64:
        """Keys or values x [T, heads, head_dim] as they are kept: in FP8 numbers of three bits after the first,
        exponents from -6 and size to 448, with ties to even."""
        if not self._model.rounds_kv:
            return x
        exponents = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6.0)
        steps = 2.0 ** (exponents - 3)
        off = np.abs(x / steps - np.floor(x / steps) - 0.5) * steps
        self.num_near_ties += int((off <= _NEAR_TIE * np.sqrt((x * x).mean())).sum())
        return np.clip(np.round(x / steps) * steps, -448.0, 448.0)


class Oracle:
    """Answers by request, computed once: runs of a campaign need the same ones again and again."""

    def __init__(self, folder: str | Path, max_answers: int = 512, rounds_kv: bool = False) -> None:
        """``rounds_kv``: keys and values are kept in FP8."""
        self.rounds_kv = rounds_kv
        self._models = lru_cache(lambda other: Model(other or folder, rounds_kv))
        self._answer = lru_cache(max_answers)(partial(Answer, self._models))

    def answer(self, query: Query, forced: tuple[tuple[int, int], ...] = ()) -> Answer:
        """``forced``: (index, token) of outputs for which the engine's rounding gave another token."""
        return self._answer(query, forced)


# --- from logits to a token ----------------------------------------------------------------------------


def choose(logits: F64, query: Query, outputs: list[int]) -> Step:
    """The token after ``outputs`` if the model's logits are ``logits`` [V]."""
    model_logits, logits = logits, _adjusted(logits, query, outputs)
    if query.grammar:
        logits = np.where(_allowed(query, outputs), logits, -np.inf)
    if query.greedy:
        scaled, scores = logits - logits.max(), logits
        nominal = surely = perhaps = np.ones(len(logits), dtype=bool)
    else:
        scaled = (logits - logits.max()) / query.temperature
        scores = scaled + gumbel(query.seed, len(query.prompt) + len(outputs), len(logits))
        nominal, surely, perhaps = kept(scaled, query, model_logits)
    token = int(np.where(nominal, scores, -np.inf).argmax())
    best = np.where(surely, scores, -np.inf).max()
    close = np.flatnonzero(perhaps & (scores >= best - TOLERANCE))
    return Step(token, frozenset(close.tolist()), _log_softmax(scaled), scores)


def _adjusted(logits: F64, query: Query, outputs: list[int]) -> F64:
    """Bias, then repetition penalty on all tokens so far, then frequency and presence on outputs, then the mask."""
    logits = logits.copy()
    for token, bias in query.logit_bias:
        logits[token] += bias
    for token in {*query.prompt, *outputs}:
        score = logits[token]
        logits[token] = score * query.repetition_penalty if score < 0 else score / query.repetition_penalty
    for token in set(outputs):
        logits[token] -= query.frequency_penalty * outputs.count(token) + query.presence_penalty
    if len(outputs) < query.min_new_tokens and not query.grammar:
        logits[list(query.stop_ids)] = -np.inf
    return logits


# By number: an expression, and endings of which one makes a whole text of each beginning of one.
GRAMMARS: dict[int, tuple[bytes, tuple[bytes, ...]]] = {
    1: (rb"(th|he|a)+\.", (b"", b".", b"h.", b"e.", b"a.")),
    2: (rb"[a-e ]{2,6}!?", (b"", b"a", b"aa")),
    3: (rb"(\xc3\xa9)?(no|on){1,3}", (b"", b"n", b"o", b"no", b"\xa9no")),
    4: (rb"[a-c]{1,3}#", (b"", b"#", b"a#")),
}


def is_stuck(query: Query, outputs: Sequence[int]) -> bool:
    """Whether the query's grammar allows no token after ``outputs``."""
    return bool(query.grammar) and not _allowed(query, outputs).any()


def _allowed(query: Query, outputs: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[V]: which tokens may come after ``outputs`` in the query's grammar."""
    expression, endings = GRAMMARS[query.grammar]
    text = b"".join(query.pieces[token] for token in outputs)

    def begins(text: bytes) -> bool:
        return any(re.fullmatch(expression, text + ending) for ending in endings)

    assert begins(text), "every output was allowed"
    allowed = np.array([bool(piece) and begins(text + piece) for piece in query.pieces])
    # An answer that may go on does not end before it has as many tokens as it must.
    if re.fullmatch(expression, text) and not (allowed.any() and len(outputs) < query.min_new_tokens):
        allowed[list(query.eos_ids)] = True
    return allowed


def kept(scaled: F64, query: Query, model_logits: F64 | None = None) -> tuple[npt.NDArray[np.bool_], ...]:
    """[V] each: which tokens top_k, top_p and min_p keep, which they keep with any rounding, and which they may keep.
    Each filter uses the whole distribution, and tokens that tie with the last one kept are kept. Those that tie only
    after ``model_logits`` have been adjusted may do so in float64 alone."""
    lowest, _ = _lowest_kept(scaled, query, 0.0)
    kept = scaled >= lowest
    low, _ = _lowest_kept(scaled, query, _TOP_P_SLACK)
    high, least_kept = _lowest_kept(scaled, query, -_TOP_P_SLACK)
    dropped = scaled[~kept]
    on_the_edge = query.min_p > 0 and bool((abs(scaled - math.log(query.min_p)) <= TOLERANCE).any())
    if model_logits is not None and kept.sum() > least_kept:
        on_the_edge |= len(set(model_logits[scaled == lowest].tolist())) > 1
    if low == high and not on_the_edge and (not len(dropped) or dropped.max() < lowest - TOLERANCE):
        return kept, kept, kept
    return kept, scaled > high + TOLERANCE, scaled >= low - TOLERANCE


def _lowest_kept(scaled: F64, query: Query, slack: float) -> tuple[float, int]:
    """The lowest score that is kept, and how many tokens top_k and top_p keep if none ties with the last of them."""
    ordered = np.sort(scaled)[::-1]
    num_kept = len(ordered)
    if query.top_k > 0:
        num_kept = min(query.top_k, num_kept)
    if query.top_p < 1:
        mass = np.exp(ordered) / np.exp(ordered).sum()
        before = mass.cumsum() - mass  # the smallest set whose mass reaches top_p
        num_kept = min(max(int((before < query.top_p + slack).sum()), 1), num_kept)
    lowest = float(ordered[num_kept - 1])
    if query.min_p > 0:
        lowest = max(lowest, math.log(query.min_p))  # the largest probability has score 0
    return lowest, num_kept


def _log_softmax(scores: F64) -> F64:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: F64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def gumbel(seed: int, position: int, num_ids: int) -> F64:
    """Standard Gumbel noise of the token ids below ``num_ids`` at ``position``: a pure function.

    Two 32-bit keys are the halves of splitmix64's finaliser (Steele, Lea, Flood 2014) of the mixed seed, so many golden
    steps on; the bits of an id are ``lowbias32`` (hash-prospector) of ``id * 0x9E3779B1 + key_a``, with ``key_b``
    mixed in between its two rounds. 31 of them are a uniform number v, and the noise is -log(-log(1 - v)).
    """
    keys = _keys(seed, position)
    key_a, key_b = np.uint32(keys >> 32), np.uint32(keys & 0xFFFFFFFF)
    x: U32 = np.arange(num_ids, dtype=np.uint32) * np.uint32(0x9E3779B1) + key_a
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) ^ key_b
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    v = ((x & np.uint32(0x7FFFFFFF)) + 0.5) * 2.0**-31
    return -np.log(-np.log1p(-np.minimum(v, 1.0 - 2.0**-24)))


def uniform(seed: int, position: int) -> float:
    """A number from 0 to 1 (excluded) of ``seed`` at ``position``: the lower 31 bits of the upper key."""
    return (_keys(seed, position) >> 32 & 0x7FFFFFFF) / 2**31


def _keys(seed: int, position: int) -> int:
    return _finalised(_finalised(seed + _GOLDEN) + position * _GOLDEN)


def _finalised(z: int) -> int:
    z &= _M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
    return z ^ (z >> 31)
