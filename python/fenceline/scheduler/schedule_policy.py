"""The order of waiting requests, how long shared prefill steps are, and how much running requests will ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import isqrt
from random import Random

from fenceline.config.model_config import ModelConfig
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.scheduler.req import Prefix, Req

# As in SGLang: looking up the prefixes of a longer queue costs more than it wins, fcfs takes over.
_LPM_MAX_QUEUE = 128
# A request that shares at least this many more tokens with one ahead of it than with the tree goes after all
# those that do not: by then the other's prompt may be cached.
_IN_BATCH_MIN_SHARED = 32

# What a prefill step costs besides its tokens: as work, and as tokens, by which large products do better. Four times
# what was measured (1 ms of an H200 for the 0.6B, 2 ms for the 8B): the mean wait is 0.3 % longer than at best, but
# the whole burst, and decode after it, 1 % sooner.
_STEP_FLOP, _STEP_TOKENS = 15 * 10**11, 250
_MIN_SHARED_TOKENS = 512
# Of a longer queue the rest is taken to be like its beginning.
_MAX_COUNTED = 256

# Long requests leave a 16th of memory to short ones, which are those of which four fit into it, and a 32nd of the rows.
# Where four fit only if they are shorter than this, nothing is left to anybody.
_SHORT_MEMORY, _SHORT_ROWS, _NUM_SHORT = 16, 32, 4
_LEAST_SHORT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StepSharing:
    """How many tokens the prompts that share a prefill step have. With so many no further prompt joins it.

    First tokens come with the end of their step. Of ``w`` waiting tokens in steps of ``s`` a prompt waits for half of
    the ``w / s`` steps and for half a step of its own. With a step as long as ``s + cost_tokens`` tokens that is least
    for ``s = sqrt(w * cost_tokens)``: a burst begins with long steps, which use the GPU best, and ends with short ones.
    """

    cost_tokens: int
    min_tokens: int = _MIN_SHARED_TOKENS

    @classmethod
    def of(cls, model: ModelConfig) -> StepSharing:
        """For ``model``: the 8B's steps cost as much as 357 tokens, the 0.6B's as 1,952; a tiny model's cost more than
        any prompts, so that all that fit go together."""
        queries = model.num_heads * model.head_dim
        qkv = queries + 2 * model.num_kv_heads * model.head_dim
        layer = model.hidden_size * (qkv + queries + 3 * model.active_mlp_size)
        return cls(_STEP_TOKENS + _STEP_FLOP // (2 * layer * model.num_layers))

    def tokens(self, num_waiting: int) -> int:
        """For the next step while so many tokens are to be computed."""
        return max(isqrt(num_waiting * self.cost_tokens), self.min_tokens)


def max_prefills_in_row(device: str) -> int:
    """Full prefill steps that may follow one another while other requests wait to decode.

    One on a CPU, where each takes a time that a reader notices. On a GPU 16, which take 2.6 s of an H200 for the 8B
    and 0.7 s for the 0.6B: bursts of prompts mostly end before that. With four for the 8B each burst is interrupted by
    decode steps of few requests: time to the first token is 22 % better, time per output token 11 % worse.
    """
    return 16 if device == "cuda" else 1


@dataclass(slots=True)
class ShortShare:
    """What long requests leave to short ones, so that a short one need not wait until a long one ends: ``tokens`` of
    memory and ``rows``; and what of it short ones have: ``held_tokens`` in the pages of those that run,
    ``final_tokens`` that these have at their ends, ``held_rows``.

    A request is short by what it may need at most, its prompt and its ``max_new_tokens``.
    """

    tokens: int
    rows: int
    held_tokens: int = 0
    final_tokens: int = 0
    held_rows: int = 0

    @classmethod
    def of(cls, num_tokens: int, num_rows: int) -> ShortShare:
        """For a KV cache of so many tokens, and so many rows."""
        tokens = num_tokens // _SHORT_MEMORY
        if tokens < _NUM_SHORT * _LEAST_SHORT_TOKENS:
            return cls(0, 0)
        return cls(tokens, num_rows // _SHORT_ROWS)

    def is_short(self, final_len: int) -> bool:
        """Whether a request that may come to ``final_len`` tokens is."""
        return _NUM_SHORT * final_len <= self.tokens

    def take(self, num_held: int, final_len: int) -> None:
        """A short one runs from now on; with negative numbers, it does not any more."""
        self.held_tokens += num_held
        self.final_tokens += final_len
        self.held_rows += 1 if final_len > 0 else -1

    def has_room(self, req: Req) -> bool:
        """Whether ``req`` is short and all of it fits into what short ones have not asked for yet."""
        return req.is_short and self.final_tokens + req.final_len <= self.tokens

    @property
    def kept_tokens(self) -> int:
        """That long ones may not take now."""
        return max(self.tokens - self.held_tokens, 0)

    @property
    def kept_rows(self) -> int:
        """That long ones may not take now."""
        return max(self.rows - self.held_rows, 0)


def num_waiting_tokens(waiting: Iterable[Req], num_waiting: int) -> int:
    """Of all prompts of ``num_waiting`` requests, cached prefixes included."""
    counted = list(islice(waiting, _MAX_COUNTED))
    total = sum(req.num_tokens for req in counted)
    return total * num_waiting // max(len(counted), 1)


def loses_least(req: Req) -> tuple[int, int]:
    """Key by which running requests of one rank are retracted, the smallest first: as in SGLang those with the fewest
    outputs lose least, among them the longest prompt."""
    return len(req.output_ids), -len(req.prompt_ids)


def order_waiting(
    waiting: list[Req], policy: str, match: Callable[[Req], Prefix], random: Random
) -> list[Req]:
    """The waiting requests, which are given in turn, in the order of a policy other than fcfs. Retracted ones go first:
    they have run already, and newcomers must not pass them for ever."""
    retracted = [req for req in waiting if req.num_retractions]
    fresh = [req for req in waiting if not req.num_retractions]
    if policy == "random":
        random.shuffle(fresh)
    elif len(fresh) > _LPM_MAX_QUEUE:
        pass
    elif policy == "dfs-weight":
        fresh = _by_weight(fresh, match)
    else:
        matched = {req.rid: match(req) for req in fresh}
        first, later = _split_shared(fresh, matched)
        fresh = sorted(first, key=lambda req: -matched[req.rid].num_tokens) + later
    return retracted + fresh


def _by_weight(waiting: list[Req], match: Callable[[Req], Prefix]) -> list[Req]:
    """In the order of a walk through the tree that goes first where most of the requests are, and to what is below a
    node before those that end at it: who shares a prefix runs together, while it is there."""
    own: defaultdict[TreeNode, list[Req]] = defaultdict(list)
    # All are matched first, because a match may split nodes.
    for node, req in [(match(req).match.host_node, req) for req in waiting]:
        own[node].append(req)
    children: defaultdict[TreeNode, list[TreeNode]] = defaultdict(list)  # in order of arrival
    tops: list[TreeNode] = []  # the root, if anybody waits
    # Each node once, and below its parent: this runs in every step, and the ways up are long and mostly shared.
    weights: dict[TreeNode, int] = {}
    for end in own:
        way: list[TreeNode] = []
        above: TreeNode | None = end
        while above is not None and above not in weights:
            (tops if above.parent is None else children[above.parent]).append(above)
            way.append(above)
            above = above.parent
        weights |= {node: len(own.get(node, ())) for node in reversed(way)}
    for node in reversed(weights):
        if node.parent is not None:
            weights[node.parent] += weights[node]
    order: list[Req] = []
    stack = [(node, False) for node in tops]
    while stack:
        node, walked = stack.pop()
        if walked:
            order += own.get(node, ())
            continue
        heaviest_first = sorted(children[node], key=weights.__getitem__, reverse=True)
        stack += [(node, True), *((child, False) for child in reversed(heaviest_first))]
    return order


def _split_shared(waiting: list[Req], matched: dict[str, Prefix]) -> tuple[list[Req], list[Req]]:
    """Requests to try now, and those that would find a longer prefix once one of the former has run."""
    first: list[Req] = []
    later: list[Req] = []
    # By namespace, of which no other shares the pages, and by where the cached prefix ends in the tree, which says what
    # its tokens are: to compare those, of each request at each step, would take longer than a step.
    heads: set[tuple[str, int, int, bytes]] = set()
    for req in waiting:
        prefix = matched[req.rid]
        known = prefix.num_tokens
        tokens = req.prompt_ids[known : known + _IN_BATCH_MIN_SHARED]
        head = (req.source.extra_key, id(prefix.match.host_node), known, tokens.tobytes())
        if len(tokens) == _IN_BATCH_MIN_SHARED and head in heads:
            later.append(req)
        else:
            heads.add(head)
            first.append(req)
    return first, later
