"""The tokens of requests, kept outside the engine's memory, and token prefixes as numbers: tags follow from these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput
from fenceline.ipc.io_struct import TokenizedGenerateReq

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

NOTHING = 0  # the prefix of memory that has not been written
GUESS = "as the draft has computed it from its own hidden states"


class Prefixes:
    """Token prefixes as numbers: one for each sequence of tokens in each namespace, from 1."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}
        # Of each prefix: its length, and the request that it was first made for.
        self._ends: list[tuple[int, str]] = [(0, "")]
        self._marked: dict[int, tuple[int, str]] = {}

    def root(self, namespace: str, weights: str = "") -> int:
        """The prefix without a token, as ``weights`` compute it, "" the first ones."""
        return self._number((0, f"{weights}\0{namespace}"), 0, f"namespace {namespace!r}")

    def then(self, prefix: int, token: int, owner: str) -> int:
        """``prefix`` and one more token, of a request called ``owner`` in reports."""
        return self._number((prefix, token), self._ends[prefix][0] + 1, owner)

    def marked(self, prefix: int, mark: str) -> int:
        """A number of its own for a slot of ``prefix`` that holds something else than its values; ``mark``: what."""
        number = self._number((prefix, mark), *self._ends[prefix])
        self._marked[number] = prefix, mark
        return number

    def mark(self, number: int) -> tuple[int, str]:
        """The prefix and the mark of a :meth:`marked` one; of any other itself and ""."""
        return self._marked.get(number, (number, ""))

    def length(self, prefix: int) -> int:
        return self._ends[prefix][0]

    def describe(self, prefix: int) -> str:
        """``token 4 of r1`` for the last token of the prefix."""
        length, owner = self._ends[prefix]
        mark = self.mark(prefix)[1]
        return f"token {length - 1} of {owner}{', ' if mark else ''}{mark}"

    def _number(self, key: tuple[int, int | str], length: int, owner: str) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._ends)
            self._ends.append((length, owner))
        return number


class Account:
    """The tokens of one request: the prefixes that end at its tokens 0, 1, ..., as far as they are known."""

    def __init__(
        self, source: TokenizedGenerateReq, token_ids: Iterable[int], prefixes: Prefixes, weights: str = "",
        images: Sequence[ImageInput] = (),
    ) -> None:  # fmt: skip
        self.source = source  # kept, so that no other object has the same id()
        self.images = images
        self.name = source.rid + (f" (namespace {source.extra_key!r})" if source.extra_key else "")
        self.name += f" with {weights}" if weights else ""
        self._prefixes = prefixes
        self._root = prefixes.root(source.extra_key, weights)
        self.ends: list[int] = []
        for token in token_ids:
            self.ends.append(prefixes.then(self.ends[-1] if self.ends else self._root, token, self.name))

    def sampled(self, position: int, token: int) -> None:
        """A step has sampled its token at ``position``. Tokens from there on are removed: the request was retracted."""
        del self.ends[position:]
        self.ends.append(self._prefixes.then(self.ends[-1], token, self.name))


@dataclass(frozen=True, slots=True)
class Seq:
    """A request's part of a step: tokens ``first`` .. ``length - 1`` are computed, the one after them is sampled. If it
    ``decodes``, only the device knows the token.

    ``pages``: those of its tokens in order, as the request has them when the step is submitted. In a speculative step
    ``length`` is the most that it can be."""

    account: Account
    row: int
    first: int
    length: int
    samples: bool
    pages: I32
    decodes: bool = False

    def first_read(self, window: int | None) -> int:
        return 0 if window is None else max(self.first - window + 1, 0)

    def slots(self, page_size: int) -> I64:
        """Numbers (page * page_size + offset) of the slots of all its tokens."""
        return (self.pages[:, None] * np.int64(page_size) + np.arange(page_size)).reshape(-1)[: self.length]
