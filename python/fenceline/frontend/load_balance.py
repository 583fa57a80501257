"""Chooses the replica for a request (--load-balance-method): each in turn, the one with the shortest queue, or the one
to which the longest part of the prompt has been sent before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from fenceline.config.server_args import LoadBalanceMethod

# Prompts are compared in blocks of so many tokens. Every block costs a hash when a request is sent.
_BLOCK_TOKENS = 64
_MOST_BLOCKS = 1 << 17  # that are remembered: 8 million tokens
# How many requests more than the least loaded one a replica may have and still get one for its prefix: so many, or a
# share of what the least loaded one has.
_MOST_AHEAD, _SHARE_AHEAD = 4, 0.25


class LoadBalancer:
    """The requests in flight on each replica, and the choice of the next one's."""

    def __init__(self, method: LoadBalanceMethod, num_replicas: int) -> None:
        self._method = method
        self._num_reqs = [0] * num_replicas
        self._num_tokens = [0] * num_replicas  # of their prompts
        self._next = 0
        self._prefixes = PrefixIndex(num_replicas)

    @property
    def num_reqs(self) -> Sequence[int]:
        return self._num_reqs

    def choose(self, token_ids: Sequence[int], extra_key: str = "") -> int:
        """The replica for a prompt in the namespace ``extra_key``."""
        replica = self._choose(token_ids, extra_key)
        self._next = (replica + 1) % len(self._num_reqs)
        return replica

    def begun(self, replica: int, num_tokens: int) -> None:
        """``replica`` has got a request with a prompt of ``num_tokens``."""
        self._num_reqs[replica] += 1
        self._num_tokens[replica] += num_tokens

    def ended(self, replica: int, num_tokens: int) -> None:
        """A request of ``replica`` has ended."""
        self._num_reqs[replica] -= 1
        self._num_tokens[replica] -= num_tokens

    def flushed(self) -> None:
        """The replicas' caches are empty."""
        self._prefixes.clear()

    def _choose(self, token_ids: Sequence[int], extra_key: str) -> int:
        everyone = range(len(self._num_reqs))
        if self._method == "round_robin":
            return self._next
        if self._method == "shortest_queue":
            return min(everyone, key=self._load)
        least = min(self._num_reqs)
        most = least + max(_MOST_AHEAD, int(least * _SHARE_AHEAD))
        known = self._prefixes.match(token_ids, extra_key)
        free = [replica for replica in everyone if self._num_reqs[replica] <= most]
        replica = min(free, key=lambda replica: (-known[replica], *self._load(replica)))
        self._prefixes.add(replica)
        return replica

    def _load(self, replica: int) -> tuple[int, int, int]:
        """Among replicas with the same load, the one whose turn it is."""
        turn = (replica - self._next) % len(self._num_reqs)
        return self._num_reqs[replica], self._num_tokens[replica], turn


class PrefixIndex:
    """Which prefixes have been sent to which replica lately. The replica may have evicted some of them since, and its
    cache also has what it generated."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # replicas as bits, the longest unused first
        self._latest: list[bytes] = []

    def match(self, token_ids: Sequence[int], extra_key: str) -> list[int]:
        """How many leading blocks of the prompt each replica was sent."""
        self._latest = keys = _keys(token_ids, extra_key)
        known = [0] * self._num_replicas
        replicas = (1 << self._num_replicas) - 1
        for number, key in enumerate(keys, 1):
            replicas &= self._blocks.get(key, 0)
            if not replicas:
                break
            for replica in range(self._num_replicas):
                if replicas >> replica & 1:
                    known[replica] = number
        return known

    def add(self, replica: int) -> None:
        """The prompt that was matched last is sent to ``replica``."""
        for key in reversed(self._latest):  # the beginning of a prompt is forgotten last
            self._blocks[key] = self._blocks.pop(key, 0) | 1 << replica
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def _keys(token_ids: Sequence[int], extra_key: str) -> list[bytes]:
    """A key for each whole block, which names all tokens up to its end."""
    chain = hashlib.blake2b(extra_key.encode(errors="surrogatepass"), digest_size=16)
    data = np.array(token_ids, dtype=np.int32).tobytes()
    keys = []
    for start in range(0, len(token_ids) // _BLOCK_TOKENS * _BLOCK_TOKENS * 4, _BLOCK_TOKENS * 4):
        chain.update(data[start : start + _BLOCK_TOKENS * 4])
        keys.append(chain.digest())
    return keys
