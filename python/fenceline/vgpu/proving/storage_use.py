"""What the engine asks of storage, and what it does with the answers: which pages it looks for and writes, under which
keys, which it fetches, and which of those that come the tree takes.

The keys are computed here from docs/storage.md, and what the tree has is looked up without its own search.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.mem_cache.hicache import OffloadedTail
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.controller import Ack, Fetched, Found
from fenceline.mem_cache.storage.worker import Prefetch
from fenceline.mem_cache.tree.radix_cache import HostHold, MatchResult, TreeNode
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.events import around

I32 = npt.NDArray[np.int32]


class StorageUse:
    """``wrong``: what was asked or done wrongly. ``num_to_keep``: pages copied to the host as part of the
    tree, which storage is to write."""

    def __init__(self, scheduler: Scheduler, threshold: int) -> None:
        """``threshold``: shorter prefixes, in tokens, are not looked for."""
        memory = scheduler.memory
        tiers = memory.tiers
        assert tiers is not None and tiers.storage is not None, "there is storage"
        self.wrong: list[str] = []
        self.num_to_keep = 0
        self._tree = tree = tiers.tree
        self._threshold = threshold
        self._scheduler = scheduler
        self._rid = ""  # of the request whose prompt has been looked for last
        self._prompt: list[int] = []  # the part of a prompt that may be cached, with what follows it
        around(scheduler, "accept", after=self._accepted)
        around(memory, "prefetch", before=self._arrives)
        around(tiers.storage, "prefetch", after=self._asked)
        around(tree, "hold_host", after=self._held)
        around(tree, "insert_host", before=self._offers, after=self._inserted)
        around(tiers._transfers, "store", before=self._stores)
        around(tiers, "offload", after=self._offloaded)
        self._ops: set[int] = set()  # handles of prefetches
        self._asked_before: set[int] = set()  # of these, those that were asked for with other weights
        self._calls: list[tuple[str, object]] = []  # while the answers are processed
        around(tiers.storage, "forget", before=lambda: self._asked_before.update(self._ops))
        around(tiers.storage, "complete", before=self._begin_answers, after=self._answered)
        around(
            tree, "alloc_host", after=lambda leased, num: self._calls.append(("lease", leased is not None))
        )
        around(
            tiers.storage._controller, "fetch", before=lambda op, pages, after: self._note("fetch", op, pages)
        )
        around(tiers.storage._controller, "cancel", before=lambda op: self._note("cancel", op))
        self._wanted: list[Ack] = []  # answers for which somebody waits
        self._offered: list[list[int]] = []  # host pages that were offered to the tree since the last answers
        self._num_in_tree = 0  # leading pages of what is offered that the tree has

    def _stores(self, ticket: object, device_pages: I32, *args: object) -> None:
        self.num_to_keep += len(device_pages)

    def _offloaded(self, tail: OffloadedTail | None, *args: object) -> None:
        self.num_to_keep -= tail is not None  # a page of a request, not of the tree

    def _arrives(self, req: Req) -> None:
        """The tokens from the first one on whose logprob is asked for are computed in any case, and the last one is."""
        prompt, source = req.prompt_ids.tolist(), req.source
        self._rid = req.rid
        num = len(prompt) - 1
        if source.return_logprob and source.logprob_start_len >= 0:
            num = min(num, source.logprob_start_len)
        self._prompt = prompt[: num + max(self._tree.lookahead, 1)]

    def _accepted(self, _: None, message: TokenizedGenerateReq) -> None:
        is_queued = message.rid in self._scheduler.reqs
        self._check(
            not is_queued or self._rid == message.rid, f"the prompt of {message.rid} is not looked for"
        )

    def _asked(
        self, op: Prefetch | None, token_ids: Sequence[int], match: MatchResult, extra_key: str = ""
    ) -> None:
        """All whole pages behind what is known are looked for."""
        if op is not None:
            self._ops.add(op.handle)
        token_ids = self._prompt
        size, lookahead = self._tree.page_size, self._tree.lookahead
        num_known = (match.num_tokens + match.num_host_tokens) // size
        num_pages = (len(token_ids) - max(lookahead, 1)) // size
        if (num_pages - num_known) * size < max(self._threshold, 1):
            self._check(op is None, f"asks for {num_pages - num_known} pages, too few")
            return
        keys = self._keys(extra_key, token_ids)[num_known:num_pages]
        if op is None:
            self._check(False, f"does not ask for {len(keys)} pages")
        else:
            self._check(
                list(op.keys) == keys, f"asks for {len(op.keys)} pages, not for the {len(keys)} of a prompt"
            )

    def _held(self, hold: HostHold, node: TreeNode) -> None:
        """Pages of the tree are about to be written."""
        tokens = np.concatenate(
            [part.tokens[: part.num_pages * self._tree.page_size] for part in node.path()]
        )
        tokens = np.append(tokens, node.tokens[node.num_pages * self._tree.page_size :])
        keys = self._keys(self._tree.namespace(node.path()[0]), tokens.tolist())[-node.num_pages :]
        self._check(hold.keys == keys, f"writes {node.num_pages} pages under keys that are not theirs")

    def _keys(self, namespace: str, tokens: Sequence[int]) -> list[PageKey]:
        """Those of the whole pages of ``tokens`` behind which the lookahead is known."""
        assert self._tree._root_key is not None, "there is storage"
        key, size, lookahead = self._tree._root_key(namespace), self._tree.page_size, self._tree.lookahead
        keys = []
        for first in range(0, len(tokens) - size - lookahead + 1, size):
            page = b"".join(
                int(token).to_bytes(4, "little") for token in tokens[first : first + size + lookahead]
            )
            key = hashlib.sha256(key + page).digest()
            keys.append(key)
        return keys

    # --- answers

    def _note(self, what: str, op: Prefetch, pages: I32 | None = None) -> None:
        self._calls.append((what, op.handle if pages is None else (op.handle, len(pages))))

    def _begin_answers(self, acks: Sequence[Ack]) -> None:
        self._calls = []
        self._wanted = [ack for ack in acks if not (isinstance(ack, Found) and ack.op.cancelled)]

    def _answered(self, result: None, acks: Sequence[Ack]) -> None:
        """All pages that storage has found are fetched, if they are not too few, somebody still waits for them, and the
        host has room. All that come are offered to the tree, unless the weights have been replaced since."""
        size, calls, offered = self._tree.page_size, list(self._calls), self._offered
        self._offered = []
        for ack in acks:
            if isinstance(ack, Found):
                op, num = ack.op, ack.num_pages
                is_wanted = ack in self._wanted and num > 0 and num * size >= self._threshold
                leases = is_wanted and calls[:1] in ([("lease", True)], [("lease", False)])
                has_room = leases and calls.pop(0) == ("lease", True)
                done = calls.pop(0) if calls else None
                right = ("fetch", (op.handle, num)) if has_room else ("cancel", op.handle)
                self._check(
                    done == right and leases == is_wanted,
                    f"storage has found {num} pages of {op!r}: {done}, {right} is right",
                )
            if isinstance(ack, Fetched) and ack.op.handle not in self._asked_before:
                pages = ack.op.host_pages[ack.first : ack.first + ack.num_pages].tolist()
                got = offered.pop(0) if offered else []
                self._check(got == pages, f"host pages {pages} have come, and {got} are offered to the tree")
        self._check(not offered, f"{offered} are offered to the tree, and have not come for it")

    def _offers(self, tokens: I32, host_pages: I32, after: object = None, extra_key: str = "") -> None:
        """Pages that storage has brought are about to be offered to the tree."""
        self._offered.append(host_pages.tolist())
        self._num_in_tree = self._num_pages_of(tokens, extra_key)

    def _inserted(
        self, spare: I32, tokens: I32, host_pages: I32, after: object = None, extra_key: str = ""
    ) -> None:
        """The tree takes those that it lacks if it has all in front of them, and gives back the others."""
        num_pages = (len(tokens) - self._tree.lookahead) // self._tree.page_size
        first = num_pages - len(host_pages)
        fits = self._num_in_tree >= first
        num_spare = self._num_in_tree - first if fits else len(host_pages)
        right = np.array_equal(spare, host_pages[:num_spare])
        has_all = not fits or self._num_pages_of(tokens, extra_key) == num_pages
        self._check(
            right and has_all,
            f"gives back {len(spare)} of {len(host_pages)} pages from storage, {num_spare} are right",
        )

    def _num_pages_of(self, tokens: I32, namespace: str) -> int:
        """How many leading pages of ``tokens`` the tree has on any tier."""
        tree, num_pages = self._tree, 0
        size, lookahead = tree.page_size, tree.lookahead
        children = [node for node in tree.root.children.values() if tree.namespace(node) == namespace]
        while True:
            rest = tokens[num_pages * size :]
            for node in children:
                num = 0
                while num < node.num_pages and np.array_equal(
                    node.tokens[num * size : (num + 1) * size + lookahead],
                    rest[num * size : (num + 1) * size + lookahead],
                ):
                    num += 1
                if num:
                    num_pages += num
                    break
            else:
                return num_pages
            if num < node.num_pages:
                return num_pages
            children = list(node.children.values())

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"storage's use: {text}")
