"""The shadow tags of speculative steps: the slots to which the rows of draft and target go, and their tags.

A step makes several forwards over the same slots, and only the device knows where they begin. The required tags follow
from the request's tokens so far (``tags.Account``) and from the tokens that the step has proposed and drawn at that
moment: the tag of a row is the tokens before it on its own path. So the tag of a rejected token's row is a prefix that
no request has, and any read of it as a token of a request is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fenceline.config.draft_config import StepShape
from fenceline.memory_order.edges import ROW_TOKENS
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.model_executor.step import StepBatch
from fenceline.speculative.kv_rows import KERNEL as MOVE
from fenceline.speculative.token_lookup import LOOK_UP
from fenceline_sim.accounts import GUESS, I64, Seq
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.layout import Layout
from fenceline_sim.memory import Tag
from fenceline_sim.state_tags import StatePart
from fenceline_sim.streams import Operation
from fenceline_sim.tags import HOLE, SINK_PAGE, SlotMemory, Step, Tags, memory_of


class SpeculativeStep(Step):
    """The purpose of a speculative step's operations.

    Of each request the target stores the rows of its last token and of n proposed ones, at positions L - 1 to
    L - 1 + n, L being the number of its tokens as the step begins. Before that the draft proposes. One that reads
    hidden states stores a row each time, from L - 1 on, computed from its own hidden states; afterwards it stores all
    n + 1 rows again, from the target's. One that reads none begins with two rows, at L - 2 and L - 1, the first of
    which goes to the sink unless the row is missing; it has no row of the last of n accepted tokens. n, the depth, may
    be 0. If a draft has a layer for each step, layer k stores the rows from L - 1 - k on, and nothing before.

    Of a tree the rows are those of its nodes, in the order of the slots from L - 1 on. The draft stores rows of each
    frontier, one frontier behind the other. What of them is accepted is then moved to its tokens' slots.
    """

    _tags: SpeculativeTags

    def __init__(self, tags: SpeculativeTags, seqs: Sequence[Seq], runner: SpeculativeRunner, shape: StepShape) -> None:
        super().__init__(tags, seqs)
        self._kind = "speculative step"
        self._shape = shape
        self._num_rows = shape.num_nodes
        self._reads_hidden = runner.draft.first_row < 0
        self._layer_per_step = max(tags.shifts) > 1
        arena = runner.arena
        self._topk = runner.config.topk if shape.depth else 1
        names = ["input_ids", "drawn", "counts"]
        if self._topk > 1:
            names += ["parents", "path", "path_tokens", "draft_nodes"]
        self._arena = {name: memory_of(arena[name]) for name in names}
        self._known: list[I64] | None = None  # of each request, the prefixes that end at its tokens
        self._num_stores: Counter[int] = Counter()  # by part
        self._stored: dict[int, list[dict[int, int]]] = {}  # by part and request: tags by position

    # --- what is known

    def _row(self, name: str, index: int, width: int) -> list[int]:
        """The ``width`` values of a request's rows; requests lie one after the other."""
        row: list[int] = _values(self._arena[name]).reshape(-1)[index * width :][:width].tolist()
        return row

    def _tokens(self, index: int) -> list[int]:
        count, is_tree = int(_values(self._arena["counts"])[index]), self._topk > 1
        name = "path_tokens" if is_tree else "drawn"
        return self._row(name, index, self._shape.num_tokens if is_tree else self._num_rows)[:count]

    def _ends_of(self, index: int) -> I64:
        """The prefixes that end at the request's tokens as the step begins."""
        if self._known is None:
            self._known = [np.array(seq.account.ends, np.int64) for seq in self.seqs]
        return self._known[index]

    def _base(self, index: int) -> int:
        """The position of its last token."""
        return len(self._ends_of(index)) - 1

    def _forward(self, part: int) -> tuple[int, int]:
        """Of the forward that has stored ``part`` last: its first position, from the base, and its rows a request."""
        number, depth, topk = self._num_stores[part] - 1, self._shape.depth, self._topk
        if part < self._tags.num_target_parts:
            rows = [(0, self._num_rows)]
        elif self._layer_per_step:
            behind = self._tags.shifts[part] - 1
            rows = [(-behind, depth + 1 + behind)]
        elif self._reads_hidden:
            rows = [(k * topk, topk) for k in range(depth - 1)] + [(0, depth + 1)]
        else:
            rows = [(-1, 2)] + [(1 + k * topk, topk) for k in range(depth - 1)]
        assert number < len(rows), f"{self._tags.part_names[part]} is stored {number + 1} times in a step"
        return rows[number]

    def _path(self, index: int, num_tokens: int) -> list[int]:
        """The prefixes that end at its last token and at the first ``num_tokens - 1`` proposed ones."""
        seq, ends = self.seqs[index], self._ends_of(index)
        parents = self._row("parents", index, self._num_rows) if self._topk > 1 else range(-1, num_tokens)
        prefixes, path = self._tags.prefixes, list[int]()
        for node, token in enumerate(self._row("input_ids", index, self._num_rows)[:num_tokens]):
            above = path[parents[node]] if node > 0 else int(ends[-2])
            path.append(prefixes.then(above, token, seq.account.name))
        return path

    def _rows_of(self, index: int, part: int) -> list[int]:
        """The tags of the request's rows in the forward that stores ``part``."""
        (first, num_rows), prefixes = self._forward(part), self._tags.prefixes
        is_target = part < self._tags.num_target_parts
        if is_target or (first < 0 and not self._reads_hidden):
            path = self._path(index, first + num_rows)
            return path if is_target else [int(self._ends_of(index)[-2]), *path]
        proposes = not self._reads_hidden or (not self._layer_per_step and self._num_stores[part] < self._shape.depth)
        if proposes and self._topk > 1:
            root = int(self._ends_of(index)[-1])
            return [prefixes.marked(root, f"{GUESS}, row {first + row}") for row in range(num_rows)]
        if proposes and self._reads_hidden:
            return [prefixes.marked(self._path(index, first + 2)[-1], GUESS)]
        if proposes:
            return self._path(index, first + num_rows)[first:]
        name = self.seqs[index].account.name
        known = self._ends_of(index).tolist()
        for token in self._tokens(index):
            known.append(prefixes.then(known[-1], token, name))
        known = known[self._base(index) + 1 :]
        further = [prefixes.marked(known[-1], f"{GUESS}, row {row}") for row in range(len(known), num_rows)]
        return known + further

    # --- writing

    def _write(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        if not len(slots):
            return
        tags, size, part = self._tags, memory.page_size, int(memory.part[slots[0]])
        if part in self._stored:
            self._check_read_by_all(op, part)
        self._num_stores[part] += 1
        self._unread[part] = list(self.seqs)
        first, num_rows = self._forward(part)
        stored = self._stored.setdefault(part, [{} for _ in self.seqs])
        num_live = len(self.seqs) * num_rows
        self._check_padding(op, memory, slots, num_live)
        for row, slot in enumerate(slots[:num_live].tolist()):
            index, seq = row // num_rows, self.seqs[row // num_rows]
            if row % num_rows == 0:
                rows, meant = self._rows_of(index, part), seq.slots(size)
            position = self._base(index) + first + row % num_rows
            if position < 0:  # in front of the first token
                self._check_padding(op, memory, np.array([slot]), 0)
                continue
            number = int(memory.page[slot]) * size + int(memory.offset[slot])
            is_before = not self._reads_hidden and position == self._base(index) - 1
            if is_before and not self._is_missing(memory, int(meant[position])):
                if memory.page[slot] != SINK_PAGE:
                    text = f"{self._kind} computes token {position} of {seq.account.name} again, which is there"
                    tags.found(memory, slot, text, op)
                continue
            right = int(meant[position]) if position < len(meant) else -1  # beyond what the step may write
            if number != right:
                self._misplaced(op, memory, slot, seq, position, right)
            tag = int(tags.tag(rows[row % num_rows], part))
            stored[index][position] = tag
            memory.write(np.array([slot]), tag, op)

    def _is_missing(self, memory: SlotMemory, slot: int) -> bool:
        end = int(memory.held[slot]) // self._tags.num_parts
        return self._tags.prefixes.mark(end)[1] == HOLE

    # --- reading

    def _read(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        slots = self._own(op, memory, slots)
        if not len(slots):
            return
        part = int(memory.part[slots[0]])
        unread = self._unread.setdefault(part, [])
        while len(slots):
            if not unread:
                self._tags.found(memory, int(slots[0]), f"{self._kind} reads it in addition", op)
                return
            seq = unread.pop(0)
            expected = self._expected(self.seqs.index(seq), part)
            right = slots[: len(expected)]
            if not np.array_equal(memory.held[right], expected):
                first = self._first_attended(self.seqs.index(seq), part)
                self._misread_as(op, memory, slots, seq, expected, first)
                return
            slots = slots[len(expected) :]

    def _first_attended(self, index: int, part: int) -> int:
        """The first token that the request's rows of the latest forward attend to: the first row's window begins there.
        The nodes of a tree are in every window, and all frontiers of a draft read from where the window of the first
        one begins."""
        first, window = self._forward(part)[0], self._tags.windows[part]
        if self._topk > 1:
            first = min(first, 1)
        return 0 if window is None else max(self._base(index) + first - window + 1, 0)

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
        return expected[self._first_attended(index, part) :]

    def _readable(self, part: int) -> Sequence[I64]:
        return [self._expected(index, part) for index in range(len(self.seqs))]

    def _check_read_by_all(self, op: Operation, part: int) -> None:
        """The forward before has read ``part`` of every request."""
        if self._unread.get(part):
            self._not_read(op, self._unread[part][0], part)

    def _check_looked_up(self, op: Operation) -> None:
        """A request's row has its tokens, and -1 for those of images."""
        assert self._tags.looked_up is not None, "rows have their tokens"
        for index, seq in enumerate(self.seqs):
            end, account = seq.account._root, seq.account
            for place, right in enumerate(self._ends_of(index).tolist()):
                token = int(_values(self._tags.looked_up)[seq.row, place])
                of_image = any(image.offset <= place < image.end for image in account.images)
                if token != -1 if of_image else self._tags.prefixes.then(end, token, account.name) != right:
                    text = f"row {seq.row} has {token} in place of token {place} of {account.name}\n  read by"
                    self._tags.report(op, "req_pool.tokens", text, ROW_TOKENS.name)
                    return
                end = right

    # --- states

    def state_parts(self, absorbs: bool) -> Mapping[int, StatePart]:
        """By row: the tokens before the step, and if it ``absorbs`` them those that it verifies."""
        states, parts = self._tags.states, dict[int, StatePart]()
        assert states is not None, "the model has recurrent layers"
        for index, seq in enumerate(self.seqs):
            base, ends = self._base(index), self._ends_of(index)[:-1].tolist()
            own = self._path(index, self._num_rows) if absorbs else []
            parts[seq.row] = StatePart(seq.account.name, states.absorbed[seq.row], base + len(own), ends + own)
            states.absorbed[seq.row] = base // states.grid * states.grid
        return parts

    # --- the tokens

    def _check_all_read(self, op: Operation, rows: Sequence[int]) -> None:
        for part in range(self._tags.num_parts):
            self._check_read_by_all(op, part)

    def _add_tokens(self, seq: Seq, last_token: int) -> None:
        index, tags, tokens = self.seqs.index(seq), self._tags, self._tokens(self.seqs.index(seq))
        base = self._base(index)
        for number, token in enumerate(tokens):
            seq.account.sampled(base + 1 + number, token)
        moves = self._topk > 1 and self._shape.depth > 1  # afterwards: the slot may be one that is moved from
        if self._reads_hidden or moves or not self._is_behind(index, len(tokens)):
            return
        for part in range(tags.num_target_parts, tags.num_parts):
            self._mark_missing(part, seq, base + len(tokens) - 1)

    def _mark_missing(self, part: int, seq: Seq, position: int) -> None:
        """The draft has no row of the request's token there."""
        tags = self._tags
        slot = int(seq.slots(tags.page_size)[position])
        mark = tags.prefixes.marked(seq.account.ends[position], HOLE)
        tags.on_device[part].held[slot] = tags.tag(mark, part)

    def _is_behind(self, index: int, count: int) -> bool:
        """Whether a draft that reads no hidden states has not computed the last accepted token."""
        if self._topk == 1:
            return count > max(self._shape.depth, 1)
        return count > 1 and self._draft_path(index)[count - 1] == 0

    # --- trees

    def _draft_path(self, index: int) -> list[int]:
        """The draft's row of each node of the accepted path, 0 where it has none but for the root."""
        nodes = self._row("draft_nodes", index, self._num_rows)
        return [nodes[node] for node in self._row("path", index, self._shape.num_tokens)]

    def declare(self, accessed: frozenset[int], written: frozenset[int]) -> None:
        """It has declared these pages. The host does not know where it begins, so they may be more than its own."""
        self.declared = accessed, written

    def ran(self, op: Operation) -> None:
        if op.label == LOOK_UP.name:
            self._check_looked_up(op)
        if op.label != MOVE.name:
            super().ran(op)
            return
        for access in op.writes:
            memory = self._tags.memories.get(access.tag)
            if memory is not None:
                slots = memory.slots(access)
                self._check_declared(op, memory, slots, True)
                self._move(op, memory, slots)

    def _move(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        """Rows of accepted nodes have been moved to their tokens' slots; ``slots``: of all rows, request by request."""
        tags, size, part = self._tags, memory.page_size, int(memory.part[slots[0]])
        is_target = part < tags.num_target_parts
        num_rows = self._num_rows if is_target else 1 + (self._shape.depth - 1) * self._topk
        self._check_padding(op, memory, slots, len(self.seqs) * num_rows)
        for index, seq in enumerate(self.seqs):
            mine, base = slots[index * num_rows :][:num_rows], self._base(index)
            meant = seq.slots(size)[base:][:num_rows]
            wrong = np.flatnonzero(memory.page[mine] * size + memory.offset[mine] != meant)
            if len(wrong):
                self._misplaced(op, memory, int(mine[wrong[0]]), seq, base + int(wrong[0]), int(meant[wrong[0]]))
            count = int(_values(self._arena["counts"])[index])
            path = self._row("path", index, self._shape.num_tokens)[:count]
            rows = path if is_target else self._draft_path(index)[: count - self._is_behind(index, count)]
            ends = self._path(index, self._num_rows)
            stored = self._stored[part][index]
            for row in rows:
                if memory.held[mine[row]] != stored[base + row]:
                    text = f"{self._kind} moves it as row {row} of {seq.account.name}"
                    tags.found(memory, int(mine[row]), text, op)
            source, target = mine[rows], mine[: len(rows)]
            tags.carry(op, memory, source, memory, target)
            moved = np.array([ends[node] for node in path[: len(rows)]], np.int64)
            memory.held[target] = tags.tag(moved, part)
            if len(rows) < count:
                self._mark_missing(part, seq, base + count - 1)


def _values(memory: tuple[Tag, Layout]) -> I64:
    tag, layout = memory
    values: I64 = tag.region.view(layout).numpy()
    return values


class SpeculativeTags(Tags):
    def __init__(self, gpu: VirtualGpu, runner: ModelRunner) -> None:
        assert runner.speculative is not None, "the engine speculates"
        super().__init__(gpu, runner)
        self._runner, self._shapes = runner.speculative, runner.speculative.config.shapes

    def _purpose(self, seqs: Sequence[Seq], batch: StepBatch) -> Step:
        if batch.is_decode:
            step = SpeculativeStep(self, seqs, self._runner, self._shapes[batch.depth.depth])
            step.images = self._images_of(seqs, batch)
            step.states = self._states_of(seqs, batch)
            if step.states is not None:
                step.states.verified = step.state_parts
            return step
        return super()._purpose(seqs, batch)


def make_tags(gpu: VirtualGpu, runner: ModelRunner) -> Tags:
    return Tags(gpu, runner) if runner.speculative is None else SpeculativeTags(gpu, runner)
