"""The shadow tags of speculative steps: which slots the draft's and the target's rows go to, and what they stand for.

A step makes several forwards over the same slots, and the device alone knows where they begin. What they must be
follows from the request's tokens so far (``tags.Account``) and from the tokens that the step has proposed and drawn at
that moment: a row stands for the tokens in front of it on its own path. A row of a rejected token so stands for a
prefix that no request has, and whoever reads it as a token of a request is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.model_executor.step import DecodeBatch, ScheduleBatch
from fenceline.vgpu.gpu import VirtualGpu
from fenceline.vgpu.layout import Layout
from fenceline.vgpu.memory import Tag
from fenceline.vgpu.streams import Operation
from fenceline.vgpu.tags import HOLE, I64, SINK_PAGE, Seq, SlotMemory, Step, Tags, memory_of

_GUESS = "as the draft has computed it from its own hidden states"


class SpeculativeStep(Step):
    """The purpose of a speculative step's operations.

    Of each request the target stores the rows of its last token and of n proposed ones, at positions L - 1 to
    L - 1 + n, L being the number of its tokens as the step begins. Before that the draft proposes. One that reads
    hidden states stores a row each time, from L - 1 on, computed from its own hidden states; afterwards it stores all
    n + 1 rows again, from the target's. One that reads none begins with two rows, at L - 2 and L - 1, the first of
    which goes to the sink unless the row is missing; it has no row of the last of n accepted tokens. ``depth`` is n,
    and may be 0.
    """

    def __init__(self, tags: Tags, seqs: Sequence[Seq], runner: SpeculativeRunner, depth: int) -> None:
        super().__init__(tags, seqs, decodes=True)
        self._kind = "speculative step"
        self._num_rows = depth + 1
        self._reads_hidden = runner.reads_hidden
        arena = runner.arena
        self._proposed, self._drawn, self._counts = (
            memory_of(arena[name]) for name in ("input_ids", "drawn", "counts")
        )
        self._known: list[I64] | None = None  # of each request, the prefixes that end at its tokens
        self._num_stores: Counter[int] = Counter()  # by part
        self._stored: dict[int, list[dict[int, int]]] = {}  # by part and request: tags by position

    # --- what is known

    def _row(self, memory: tuple[Tag, Layout], index: int) -> list[int]:
        """The values of a request's rows; requests lie one after the other."""
        row: list[int] = _values(memory).reshape(-1)[index * self._num_rows :][: self._num_rows].tolist()
        return row

    def _ends_of(self, index: int) -> I64:
        """The prefixes that end at the request's tokens as the step begins."""
        if self._known is None:
            self._known = [np.array(seq.account.ends, np.int64) for seq in self._seqs]
        return self._known[index]

    def _base(self, index: int) -> int:
        """The position of its last token."""
        return len(self._ends_of(index)) - 1

    def _forward(self, part: int) -> tuple[int, int]:
        """Of the forward that has stored ``part`` last: its first position, from the base, and its rows a request."""
        number, num_proposed = self._num_stores[part] - 1, self._num_rows - 1
        if part < self._tags.num_target_parts:
            rows = [(0, self._num_rows)]
        elif self._reads_hidden:
            rows = [(k, 1) for k in range(num_proposed - 1)] + [(0, self._num_rows)]
        else:
            rows = [(-1, 2)] + [(k, 1) for k in range(1, num_proposed)]
        assert number < len(rows), f"{self._tags.part_names[part]} is stored {number + 1} times in a step"
        return rows[number]

    def _path(self, index: int, num_tokens: int) -> list[int]:
        """The prefixes that end at its last token and at the first ``num_tokens - 1`` proposed ones."""
        seq, ends = self._seqs[index], self._ends_of(index)
        prefixes, path = self._tags.prefixes, [int(ends[-2])]
        for token in self._row(self._proposed, index)[:num_tokens]:
            path.append(prefixes.then(path[-1], token, seq.account.name))
        return path[1:]

    def _rows_of(self, index: int, part: int) -> list[int]:
        """What the rows of the request in the forward that stores ``part`` stand for."""
        (first, num_rows), prefixes = self._forward(part), self._tags.prefixes
        if part < self._tags.num_target_parts:
            return self._path(index, num_rows)
        if not self._reads_hidden:
            path = [int(self._ends_of(index)[-2]), *self._path(index, first + num_rows)]
            return path[first + 1 : first + 1 + num_rows]
        if self._num_stores[part] < self._num_rows - 1:
            return [prefixes.marked(self._path(index, first + 2)[-1], _GUESS)]
        name, drawn = self._seqs[index].account.name, self._row(self._drawn, index)
        path = self._path(index, num_rows)
        return [prefixes.then(end, token, name) for end, token in zip(path, drawn, strict=True)]

    # --- writing

    def _write(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        if not len(slots):
            return
        tags, size, part = self._tags, memory.page_size, int(memory.part[slots[0]])
        if part in self._stored:
            self._check_read_by_all(op, part)
        self._num_stores[part] += 1
        self._unread[part] = list(self._seqs)
        first, num_rows = self._forward(part)
        stored = self._stored.setdefault(part, [{} for _ in self._seqs])
        num_live = len(self._seqs) * num_rows
        self._check_padding(op, memory, slots, num_live)
        for row, slot in enumerate(slots[:num_live].tolist()):
            index, seq = row // num_rows, self._seqs[row // num_rows]
            if row % num_rows == 0:
                rows, meant = self._rows_of(index, part), seq.slots(size)
            position = self._base(index) + first + row % num_rows
            number = int(memory.page[slot]) * size + int(memory.offset[slot])
            if position == self._base(index) - 1 and not self._is_missing(memory, int(meant[position])):
                if memory.page[slot] != SINK_PAGE:
                    text = (
                        f"{self._kind} computes token {position} of {seq.account.name} again, which is there"
                    )
                    tags.found(memory, slot, text, op)
                continue
            right = int(meant[position]) if position < len(meant) else -1  # beyond what the step may write
            if number != right:
                self._misplaced(op, memory, slot, seq, position, right)
            tag = int(tags.tag(rows[row % num_rows], part))
            stored[index][position] = tag
            memory.write(np.array([slot]), tag, op)

    def _is_missing(self, memory: SlotMemory, slot: int) -> bool:
        """Whether the draft has no row there."""
        end = int(memory.held[slot]) // self._tags.num_parts
        return self._tags.prefixes.mark(end)[1] == HOLE

    def _misplaced(  # type: ignore[override]
        self, op: Operation, memory: SlotMemory, slot: int, seq: Seq, position: int, meant: int
    ) -> None:
        name, page = seq.account.name, int(memory.page[slot])
        if page not in seq.pages and page != SINK_PAGE:
            self._tags.pages.refuse(page, f"a {self._kind} of {name}", op)
        text = f"{self._kind} stores token {position} of {name} here, "
        if meant < 0:
            text += "and it ends before"
        else:
            text += f"not in slot {meant % memory.page_size} of page {meant // memory.page_size}"
        self._tags.found(memory, slot, text, op)

    # --- reading

    def _read(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        slots = slots[memory.page[slots] != SINK_PAGE]
        if not len(slots):
            return
        foreign = next((page for page in memory.page[slots].tolist() if page not in self._pages), None)
        if foreign is not None:
            self._tags.pages.refuse(foreign, self._readers(), op)
        part = int(memory.part[slots[0]])
        unread = self._unread.setdefault(part, [])
        while len(slots):
            if not unread:
                self._tags.found(memory, int(slots[0]), f"{self._kind} reads it in addition", op)
                return
            seq = unread.pop(0)
            expected = self._expected(self._seqs.index(seq), part)
            right = slots[: len(expected)]
            if not np.array_equal(memory.held[right], expected):
                self._misread_as(op, memory, slots, seq, expected)
                return
            slots = slots[len(expected) :]

    def _expected(self, index: int, part: int) -> I64:
        """The tags of all slots that the request's rows of the latest forward attend to."""
        first, num_rows = self._forward(part)
        length = self._base(index) + first + num_rows
        ends = np.zeros(length, np.int64)
        known = self._ends_of(index)[self._tags.shifts[part] :][:length]
        ends[: len(known)] = known
        expected = self._tags.tag(ends, part)
        for position, tag in self._stored[part][index].items():
            if position < length:
                expected[position] = tag
        return expected

    def _check_read_by_all(self, op: Operation, part: int) -> None:
        """The forward before has read ``part`` of every request."""
        if self._unread.get(part):
            self._not_read(op, self._unread[part][0], part)

    # --- the tokens

    def _check_all_read(self, op: Operation, rows: Sequence[int]) -> None:
        for part in range(self._tags.num_parts):
            self._check_read_by_all(op, part)

    def _add_tokens(self, seq: Seq, last_token: int) -> None:
        index, tags = self._seqs.index(seq), self._tags
        base, count = self._base(index), int(_values(self._counts)[index])
        for number, token in enumerate(self._row(self._drawn, index)[:count]):
            seq.account.sampled(base + 1 + number, token)
        if self._reads_hidden or count <= max(self._num_rows - 1, 1):
            return
        missing = base + count - 1
        slot = int(seq.slots(tags.page_size)[missing])
        mark = tags.prefixes.marked(seq.account.ends[missing], HOLE)
        for part in range(tags.num_target_parts, tags.num_parts):
            tags.on_device[part].held[slot] = tags.tag(mark, part)


def _values(memory: tuple[Tag, Layout]) -> I64:
    """The present contents."""
    tag, layout = memory
    values: I64 = tag.region.view(layout).numpy()
    return values


class SpeculativeTags(Tags):
    """The tags of an engine that speculates."""

    def __init__(self, gpu: VirtualGpu, runner: ModelRunner) -> None:
        assert runner.speculative is not None, "the engine speculates"
        super().__init__(gpu, runner)
        self._runner = runner.speculative

    def _purpose(self, seqs: Sequence[Seq], batch: ScheduleBatch) -> Step:
        if isinstance(batch, DecodeBatch):
            return SpeculativeStep(self, seqs, self._runner, batch.depth.depth)
        return super()._purpose(seqs, batch)


def make_tags(gpu: VirtualGpu, runner: ModelRunner) -> Tags:
    """The tags of ``runner``'s memory."""
    return Tags(gpu, runner) if runner.speculative is None else SpeculativeTags(gpu, runner)
