"""What layers promise that no model of the proof needs, asked with random values when a run ends: vocabularies and
features divided among several ranks, frequencies of positions, matrices of four bits, hidden states for drafts.

What is right is computed here from the documentation, number by number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

from fenceline.config.model_config import RopeScaling
from fenceline.config.quantization import ON_LINE_METHOD, QuantConfig
from fenceline.layers import rotary, weight
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.forward_batch import AuxHiddenStates
from fenceline.layers.linear import ColumnPart, RowParallelLinear, VocabParallelEmbedding, WideNorm
from fenceline.layers.mxfp4 import mxfp4_slots, rounding_slot
from fenceline.layers.quantized import Fp8Format, Int4Format, QuantizingSlot, round_to_fp8
from fenceline.layers.weight import DenseWeight, WeightSlots, fill_slots

_GROUP = 32  # numbers of MXFP4 that share an exponent
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of its numbers, by their three lower bits
_EXPONENT_BIAS = 127
_LARGEST = 448.0  # number of E4M3


def compare_layers(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.getrandbits(32))
        for part in _PARTS:
            for wrong in part(random):
                return f"layers: {wrong}"
    return ""


class _Ranks:
    """Replaces the communicators of all ranks in one thread. The ranks' calls are made one after the other, twice: the
    first time each rank's sums and concatenations are of its own part alone; the second time they are of all parts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: list[list[torch.Tensor]] = []  # by operation, of each rank
        self._turn = self._place = 0

    def begin(self) -> None:
        self._turn, self._place = self._turn + 1, 0

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self._place == len(self.given):
            self.given.append([])
        parts = self.given[self._place]
        self._place += 1
        if self._turn <= self.size:
            parts.append(x.clone())
        return parts if len(parts) == self.size else [x] * self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._parts(x)).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._parts(x), -1)


def _contexts(size: int) -> tuple[_Ranks, list[Any]]:
    """A context for each of ``size`` ranks. What a weight has before it is loaded is no number."""
    ranks: Any = _Ranks(size)
    contexts = [
        torch_context(Shard(rank, size, ranks if size > 1 else None), torch.float32) for rank in range(size)
    ]

    def dense(out_features: int, in_features: int) -> DenseWeight:
        made = DenseWeight(out_features, in_features, torch.float32)
        made.data.fill_(math.nan)
        return made

    return ranks, [replace(context, dense=dense) for context in contexts]


def _of_all(ranks: _Ranks, calls: list[Any]) -> list[torch.Tensor]:
    """What each rank's call returns, with what the others have given."""
    results = []
    for call in (*calls, *calls):
        ranks.begin()
        results.append(call().clone())
    return results[len(calls) :]


def _near(found: torch.Tensor, right: torch.Tensor) -> bool:
    return found.shape == right.shape and torch.allclose(found, right, rtol=1e-4, atol=1e-5)


def _hidden(random: Random) -> Iterator[str]:
    """The hidden states before each chosen layer are kept at all of its places, and nothing else."""
    layers = tuple(random.randrange(4) for _ in range(random.randint(1, 4)))
    out = torch.full((2, 3 * len(layers)), -1.0)
    aux, right = AuxHiddenStates(layers, out), out.clone()
    for layer in random.sample(range(5), random.randint(1, 5)):
        aux.keep(layer, torch.full((2, 3), float(layer)))
        for place, wanted in enumerate(layers):
            if wanted == layer:
                right[:, 3 * place : 3 * place + 3] = layer
    if not torch.equal(out, right):
        yield f"hidden states before the layers {layers} are kept as {out[0].tolist()}, {right[0].tolist()} is right"


def _names(random: Random) -> Iterator[str]:
    """A report of many weights has the first ones and the number of the others."""
    most = weight._SHOWN_NAMES
    names = [
        f"w{number}"
        for number in range(random.choice((most - 1, most, most + 1, most + random.randint(1, 9))))
    ]
    right = ", ".join(names[number] for number in range(min(most, len(names))))
    right += f" and {len(names) - most} more" if names[most:] else ""
    if weight._shorten(names) != right:
        yield f"{len(names)} weights are named {weight._shorten(names)!r}, {right!r} is right"


def _vocabulary(random: Random) -> Iterator[str]:
    """Each rank has as many rows of the vocabulary, the last ones with zeros behind them. Together they give the
    embedding of each token, and its logit; those of padding are -inf. A copy of some rows gives their logits."""
    size, vocab_size, hidden = random.randint(1, 3), random.randint(3, 9), 4
    scale, factor, cap = (random.choice((1.0, 2.0)), random.choice((1.0, 0.5)), random.choice((0.0, 3.0)))
    whole, x = torch.randn(vocab_size, hidden), torch.randn(2, hidden)
    ids = torch.tensor([random.randrange(vocab_size) for _ in range(5)])
    ranks, contexts = _contexts(size)
    heads = [VocabParallelEmbedding(vocab_size, hidden, one, scale, factor, cap) for one in contexts]
    rows, live = math.ceil(vocab_size / size), []
    for rank, head in enumerate(heads):
        mine = [row for row in range(rank * rows, (rank + 1) * rows) if row < vocab_size]
        live.append(len(mine))
        data = head.weight.data
        if len(data) != rows or head.num_live_rows != len(mine) or bool(data[len(mine) :].any()):
            yield f"rank {rank} of {size} has {head.num_live_rows} of {len(data)} rows of {vocab_size}; {mine} are its"
            return
        data[: len(mine)] = whole[mine]
    logits = x @ whole.T * factor
    logits = cap * torch.tanh(logits / cap) if cap else logits
    for found in _of_all(ranks, [partial(head.forward, ids) for head in heads]):
        if not _near(found, whole[ids] * scale):
            yield f"the embeddings of {ids.tolist()} are wrong, of {vocab_size} rows on {size} ranks"
    ranks.given.clear()
    own = [head.own_logits(x, None).clone() for head in heads]
    for rank, part in enumerate(own):
        first = min(rank * rows, vocab_size)
        right = torch.cat(
            (logits[:, first : first + live[rank]], torch.full((2, rows - live[rank]), -math.inf)), 1
        )
        if not _near(part, right):
            yield f"the logits of rank {rank} of {size} are {part.tolist()}, {right.tolist()} is right"
    ranks._turn = 0
    calls = [partial(head.whole_logits, part) for head, part in zip(heads, own, strict=True)]
    for found in _of_all(ranks, calls):
        if not _near(found, logits):
            yield f"the logits of {size} ranks together are {found.tolist()}, {logits.tolist()} is right"
    if size == 1:
        some = heads[0].with_rows(ids, contexts[0]).own_logits(x, None)
        if not _near(some, logits[:, ids]):
            yield f"the logits of a head with the rows {ids.tolist()} are {some.tolist()}"


def _features(random: Random) -> Iterator[str]:
    """A product of features that are divided among ranks is added once, with its bias; a norm over all heads divides by
    the number of all features."""
    size, each, tokens = random.randint(1, 3), 4, 2
    x, residual, matrix, bias = (
        torch.randn(*one) for one in ((tokens, size * each), (tokens, 3), (3, size * each), (3,))
    )
    ranks, contexts = _contexts(size)
    layers = [RowParallelLinear("o_proj", size * each, 3, True, context) for context in contexts]
    for rank, layer in enumerate(layers):
        weights: Any = layer.weight
        weights.data.copy_(matrix[:, rank * each : (rank + 1) * each])
        assert layer.bias is not None, "it was asked for"
        layer.bias.copy_(bias)
    parts = [x[:, rank * each : (rank + 1) * each].contiguous() for rank in range(size)]

    def add(layer: RowParallelLinear, part: torch.Tensor) -> torch.Tensor:
        return layer.add_to(residual.clone(), part)

    adds = [partial(add, layer, part) for layer, part in zip(layers, parts, strict=True)]
    for found in _of_all(ranks, adds):
        if not _near(found, residual + x @ matrix.T + bias):
            yield f"a product of {size * each} features on {size} ranks is added as {found.tolist()}"
    ranks, contexts = _contexts(size)
    norms = [
        WideNorm("q_norm", ColumnPart("q_proj", size * each, each, rank), 1e-6, context)
        for rank, context in enumerate(contexts)
    ]
    factors = torch.randn(size * each)
    for rank, norm in enumerate(norms):
        norm.weight.copy_(factors[rank * each : (rank + 1) * each])
    calls = [partial(norm.forward, part) for norm, part in zip(norms, parts, strict=True)]
    found = torch.cat(_of_all(ranks, calls), 1)
    right = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * factors
    if not _near(found, right):
        yield f"a norm over {size * each} features on {size} ranks gives {found.tolist()}, {right.tolist()} is right"


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K / 2] → numbers: of each 32 the first half is in the lower bits of 16 bytes, the other above."""
    blocks = data.unflatten(-1, (-1, 16))
    return torch.cat((blocks % 16, blocks // 16), -1).flatten(-2)


def _mxfp4(random: Random) -> Iterator[str]:
    """Of published blocks, and of plain matrices, each rank keeps its part of the numbers and of their exponents."""
    num, rows, groups = random.randint(1, 2), random.randint(1, 3), random.randint(2, 4)
    first = random.randrange(groups)
    kept = random.randint(1, groups - first)
    numbers = torch.randint(0, 16, (num, rows, groups * _GROUP), dtype=torch.uint8)
    numbers.unflatten(2, (groups, _GROUP))[..., 0] = 7  # the largest one, so that all exponents are equal
    exponents = torch.randint(0, 255, (num, rows, groups), dtype=torch.uint8)
    blocks = (numbers[..., ::2] + 16 * numbers[..., 1::2]).unflatten(2, (groups, _GROUP // 2))
    mine = numbers[..., first * _GROUP : (first + kept) * _GROUP]

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(num, rows, kept * 16, dtype=torch.uint8), torch.zeros(
            num, rows, kept, dtype=torch.uint8
        )

    shape, starts = (num, rows, groups * _GROUP), (first * 16, first)
    data, scales = made()
    slots = mxfp4_slots("w", data, scales, shape, lambda matrices: matrices, starts)
    fill_slots(slots, [("w_blocks", blocks), ("w_scales", exponents)], lambda name: False)
    if not torch.equal(_unpacked(data), mine) or not torch.equal(
        scales, exponents[..., first : first + kept]
    ):
        yield f"the groups {first} to {first + kept - 1} of {groups} in MXFP4 are loaded as {_unpacked(data).tolist()}"
    sizes = torch.tensor(_SIZES)[(numbers % 8).long()]
    plain = torch.where(numbers >= 8, -sizes, sizes).transpose(1, 2).contiguous()
    data, scales = made()
    slot = rounding_slot(data, scales, shape, lambda matrices: matrices, starts, torch.float32)
    fill_slots({"w": slot}, [("w", plain)], lambda name: False)
    got = _unpacked(data)
    wrong = (got != mine) & ~((got % 8 == 0) & (mine % 8 == 0))  # zero has no sign
    if bool(wrong.any()) or not bool((scales == _EXPONENT_BIAS).all()):
        yield f"matrices are rounded to {got.tolist()} with the exponents {scales.tolist()}, not to {mine.tolist()}"


def _rounded(random: Random) -> Iterator[str]:
    """Numbers in FP8 are as many as before, and the largest of each group is E4M3's largest."""
    rows, columns, group = random.randint(1, 3), random.randint(1, 20), random.randint(2, 8)
    matrix = torch.randn(rows, columns) * 10
    numbers, scales = round_to_fp8(matrix, group)
    if tuple(numbers.shape) != (rows, columns) or tuple(scales.shape) != (rows, math.ceil(columns / group)):
        yield f"{rows} x {columns} numbers in groups of {group} become {numbers.shape} with scales {scales.shape}"
        return
    for row in range(rows):
        for column in range(columns):
            scale = scales[row, column // group].item()
            around = matrix[row, column - column % group : column - column % group + group].abs().max().item()
            value, right = numbers[row, column].float().item() * scale, matrix[row, column].item()
            if (
                abs(scale * _LARGEST / around - 1) > 1e-3
                or abs(value - right) > abs(right) / 16 + scale / 512
            ):
                yield f"{right} of a group up to {around} becomes {value} with the scale {scale}"


def _input_scales(random: Random) -> Iterator[str]:
    """Parts of one layer in FP8 have the largest of their input scales."""
    sizes = [random.randint(1, 3) for _ in range(random.randint(1, 3))]
    config = QuantConfig(method="fp8", kind="fp8", scales="tensor", static_input=True)
    stored, begin, given = Fp8Format(sum(sizes), 8, config, torch.float32), 0, []
    slots: WeightSlots = {}
    assert stored.input_scale is not None, "it was asked for"
    stored.input_scale.fill_(-1)
    for part, size in enumerate(sizes):
        slots |= stored.slots(f"w{part}", slice(begin, begin + size), (size, 8), 0, 0)
        begin += size
        given.append(random.random())
    tensors = []
    for part, (size, scale) in enumerate(zip(sizes, given, strict=True)):
        tensors += [(f"w{part}.weight", torch.zeros(size, 8).to(stored.data.dtype))]
        tensors += [(f"w{part}.weight_scale", torch.ones(())), (f"w{part}.input_scale", torch.tensor(scale))]
    fill_slots(slots, tensors, lambda name: False)
    if abs(stored.input_scale.item() - max(given)) > 1e-6:
        yield f"the input scales {given} become {stored.input_scale.item()}"


def _starts(random: Random) -> Iterator[str]:
    """Of a matrix whose columns are divided, a rank takes two numbers of four bits from each byte, and the scale of a
    group from its column, also where a group has the columns of several ranks."""
    size, rank, rows = random.randint(2, 4), random.randrange(4), random.randint(1, 3)
    rank %= size
    config = QuantConfig(method="fp8", kind="fp8", scales="block")
    for columns in (64, 128, 256):
        stored = Fp8Format(rows, columns, config, torch.float32)
        slot = stored.slots("w", slice(None), (rows, columns * size), 1, columns * rank)["w.weight_scale_inv"]
        if slot.start != math.floor(columns * rank / 128):
            yield f"rank {rank} with {columns} columns takes scales in FP8 from column {slot.start}"
    int4 = QuantConfig(method=ON_LINE_METHOD, kind="int4", group_size=128)
    four_bits = Int4Format(rows, 128, int4, torch.float32)
    found = four_bits.slots("w", slice(None), (rows, 128 * size), 1, 128 * rank)["w.weight"]
    assert isinstance(found, QuantizingSlot), "a plain matrix is rounded"
    starts = [start for _, start in found.parts]
    if starts != [64 * rank, rank, rank]:
        yield f"rank {rank} with 128 columns takes numbers, scales and zeros of four bits from {starts}"


def _frequencies(random: Random) -> Iterator[str]:
    """YaRN divides frequencies by the factor if they turn less than ``beta_slow`` times in the original length, keeps
    those that turn more than ``beta_fast`` times, and goes from one to the other in a straight line between."""
    head_dim, theta = random.choice((8, 16, 64)), random.choice((100.0, 10_000.0))
    scaling = RopeScaling(
        "yarn",
        random.choice((2.0, 8.0)),
        random.choice((64, 512, 4096)),
        beta_fast=random.choice((8.0, 32.0)),
        beta_slow=random.choice((1.0, 2.0)),
        truncate=random.random() < 0.5,
    )
    length = scaling.original_max_position_embeddings
    # A pair of dimensions i turns length * theta ** (-2 i / d) / 2 pi times.
    turns = (scaling.beta_fast, scaling.beta_slow)
    low, high = (head_dim / 2 * math.log(length / math.tau / num, theta) for num in turns)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 * (low == high)
    found = rotary._yarn(head_dim, theta, scaling).tolist()
    for pair in range(head_dim // 2):
        plain = theta ** (-2 * pair / head_dim)
        slowed = min(max((pair - low) / (high - low), 0), 1)
        right = plain * (1 - slowed) + plain / scaling.factor * slowed
        if abs(found[pair] / right - 1) > 1e-3:
            yield f"of {scaling} pair {pair} of {head_dim} has the frequency {found[pair]}, {right} is right"


_PARTS = (_hidden, _names, _vocabulary, _features, _mxfp4, _rounded, _input_scales, _starts, _frequencies)
