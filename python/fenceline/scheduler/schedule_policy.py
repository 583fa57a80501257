"""The order of waiting requests, how long shared prefill steps are, and how much running requests will ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import isqrt, sqrt
from random import Random

from fenceline.config.model_config import ModelConfig
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.model_executor.step import MixedCosts
from fenceline.scheduler.req import Prefix, Req

# As in SGLang, a longer queue is served first come, first served: looking up all its prefixes would cost too much.
_LPM_MAX_QUEUE = 128
# A request that shares at least this many more tokens with one ahead of it than with the tree goes after all
# those that do not: by then the other's prompt may be cached.
_IN_BATCH_MIN_SHARED = 32

# What a prefill step costs besides its tokens: as work, and as tokens, by which large products do better. Four times
# what was measured (1 ms of an H200 for the 0.6B, 2 ms for the 8B): the mean wait is 0.3 % longer than at best, but
# the whole burst, and decode after it, 1 % sooner.
_STEP_FLOP, _STEP_TOKENS = 15 * 10**11, 250
_MIN_SHARED_TOKENS = 512
# The tokens of a longer queue are estimated from this many requests at its beginning.
_MAX_COUNTED = 256


@dataclass(frozen=True, slots=True)
class StepSharing:
    """From how many tokens on no further prompt joins a prefill step. A prompt's first token comes at the end of its
    step. If ``w`` tokens wait and are computed in steps of ``s`` tokens, a prompt waits on average for half of the ``w
    / s`` steps and for half of its own step. A step takes as long as ``s + cost_tokens`` tokens, so the wait is
    shortest for ``s = sqrt(w * cost_tokens)``. A burst therefore begins with long steps, which use the GPU best, and
    ends with short ones.

    Steps of up to ``graph_tokens`` are CUDA graphs. Launching a longer one takes the CPU as long as the GPU needs for
    ``launch_tokens``, so prompts share it only if it has more than these."""

    cost_tokens: int
    min_tokens: int = field(default_factory=lambda: _MIN_SHARED_TOKENS)
    graph_tokens: int = 0
    launch_tokens: int = 0

    @classmethod
    def of(cls, model: ModelConfig, graph_tokens: int = 0, launch_tokens: int = 0) -> StepSharing:
        """For ``model``. The fixed cost of a step corresponds to 357 tokens for the 8B and 1,952 for the 0.6B. For a
        tiny model it exceeds any prompts, so that all prompts that fit share a step."""
        cost_tokens = _STEP_TOKENS + _STEP_FLOP // (2 * model.layer_weights * model.num_layers)
        return cls(cost_tokens, graph_tokens=graph_tokens, launch_tokens=launch_tokens)

    def tokens(self, num_waiting: int) -> int:
        """The limit for the next step if ``num_waiting`` tokens are to be computed."""
        return max(isqrt(num_waiting * self.cost_tokens), self.min_tokens)

    def stays_in_graphs(self, num_step: int, num_new: int, limit: int) -> bool:
        """Whether a step of ``num_step`` tokens ends before a prompt of ``num_new``, with which it would have to be
        launched kernel by kernel. ``limit``: of :meth:`tokens`."""
        return num_step <= self.graph_tokens < num_step + num_new and limit <= self.launch_tokens


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """A limit on the work of a prefill step on a CPU, where attention to a long prefix takes longer than all else and
    noticeably delays other requests. Work is counted in tokens: a token without a prefix counts one. With a prefix of
    ``even_tokens`` its attention takes as many multiplications as its matrix products, and it counts two.

    The limit is 1.25 times the work of a full step without prefixes, also for a request that is alone: the next one
    waits for the step that runs when it arrives. But a prompt always gets a quarter of the step's tokens, and at least
    as many as the draft looks ahead, so that it is completed however long it is.
    """

    even_tokens: int

    @classmethod
    def of(cls, model: ModelConfig, device: str) -> PrefixWork | None:
        """For ``model`` (the demo model has 1,632 ``even_tokens``); None on a GPU, where only tokens are limited."""
        if device != "cpu":
            return None
        return cls(max(model.layer_weights // model.score_work, 1))

    def of_step(self, step_tokens: int) -> float:
        """The work that a step of at most ``step_tokens`` may have."""
        return self.of_tokens(step_tokens, 0) * 1.25

    def of_tokens(self, num_tokens: int, prefix_len: int) -> float:
        """The work of ``num_tokens`` tokens after a prefix of ``prefix_len``."""
        return num_tokens * (1 + (prefix_len + num_tokens / 2) / self.even_tokens)

    def max_tokens(self, work: float, prefix_len: int) -> int:
        """The greatest number of tokens after a prefix of ``prefix_len`` whose work is at most ``work`` (>= 0)."""
        slope = 1 + prefix_len / self.even_tokens
        return int(self.even_tokens * (sqrt(slope**2 + 2 * work / self.even_tokens) - slope))


@dataclass(slots=True)
class StepTime:
    """What is left of the time of a step in which others decode: ``limit`` seconds, less what attention to prefixes
    takes of them. It has ``num_tokens`` tokens so far, and those who decode have ``context`` tokens. However long that
    takes, it has ``least`` tokens of prompts."""

    costs: MixedCosts
    limit: float
    num_tokens: int
    context: int
    least: int

    def max_tokens(self, prefix_len: int, most: int) -> int:
        """The greatest number of further tokens, up to ``most``, after a prefix of ``prefix_len``."""
        fitting = self.costs.tokens_within(self.limit, self.num_tokens, prefix_len, self.context, most)
        return max(fitting, min(self.least, most))

    def take(self, num_tokens: int, prefix_len: int) -> None:
        """The step gets ``num_tokens`` after a prefix of ``prefix_len``; if negative, it gives them back."""
        self.limit -= self.costs.per_pair * num_tokens * prefix_len
        self.num_tokens += num_tokens
        self.least -= num_tokens


def max_of_body(device: str) -> int | None:
    """How many requests of one HTTP body may run at once, None for any number: each makes every decode step longer, and
    all others wait for it. On a CPU a step of 64 requests with a long prompt took 63 to 77 ms, and a new stream waits
    for two steps or three."""
    return 32 if device == "cpu" else None


def max_prefills_in_row(device: str, verifies_drafts: bool) -> int:
    """Full prefill steps that may follow one another while other requests wait to decode. One on a CPU, where each step
    takes noticeably long. 16 on a GPU, which take 2.6 s on an H200 for the 8B and 0.7 s for the 0.6B; most bursts of
    prompts end before that. With a limit of four, decode steps of few requests interrupt each burst: for the 8B the
    time to the first token is 22 % better, the time per output token 11 % worse. One where steps verify drafts: with
    several tokens for each request these are bound by arithmetic, so that waiting for more requests saves nothing."""
    return 16 if device == "cuda" and not verifies_drafts else 1


def num_waiting_tokens(waiting: Iterable[Req], num_waiting: int) -> int:
    """The tokens of all ``num_waiting`` waiting requests, cached prefixes included; an estimate for a long queue."""
    counted = list(islice(waiting, _MAX_COUNTED))
    total = sum(req.num_tokens for req in counted)
    return total * num_waiting // max(len(counted), 1)


def order_waiting(waiting: list[Req], policy: str, match: Callable[[Req], Prefix], random: Random) -> list[Req]:
    """The ``waiting`` requests, which are given in the order of their turns, in the order of a ``policy`` other than
    fcfs. Retracted requests go first, because they have run already and new ones must not pass them for ever."""
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
    """The requests in the order of a depth-first walk through the tree, which visits the children with the most
    requests first, and a node's children before the requests that end at the node. So requests that share a prefix run
    together, while the prefix is cached."""
    own: defaultdict[TreeNode, list[Req]] = defaultdict(list)
    # All are matched first, because a match may split nodes.
    for node, req in [(match(req).match.host_node, req) for req in waiting]:
        own[node].append(req)
    children: defaultdict[TreeNode, list[TreeNode]] = defaultdict(list)  # in order of arrival
    tops: list[TreeNode] = []  # the root, if there are waiting requests
    # Each node once, after its parent. The walk up stops at nodes that are known, because this runs in every step, and
    # paths to the root are long and mostly shared.
    weights: dict[TreeNode, int] = {}
    for end in own:
        path: list[TreeNode] = []
        above: TreeNode | None = end
        while above is not None and above not in weights:
            (tops if above.parent is None else children[above.parent]).append(above)
            path.append(above)
            above = above.parent
        weights |= {node: len(own.get(node, ())) for node in reversed(path)}
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
