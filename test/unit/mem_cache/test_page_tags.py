"""PageTags: what pages carry under --memory-check full, and what a comparison finds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from page_pools import Shape, make_pools

from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.mem_cache.page_tags import FIELDS, PageFinding, PageTags, Visited, When
from fenceline.memory_order import LeasePool, Points, open_device

PAGE_SIZE, NUM_ROWS, NUM_COLUMNS = 2, 5, 4


@dataclass
class Pages:
    """A pool of pages, the rows that use them, and their tags: what a scheduler and its steps do with them."""

    lens: dict[int, int] = field(default_factory=dict)  # the tokens of the rows in use
    tables: dict[int, list[int]] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)  # how many rows use a page

    def __post_init__(self) -> None:
        device = open_device("cpu")
        kv_pool, _ = make_pools(device, "layer_first", Shape(num_device_pages=12, page_size=PAGE_SIZE))
        self.rows = ReqPool(NUM_ROWS, NUM_COLUMNS, device.torch_device)
        self.pages = LeasePool("KV pages", kv_pool.num_pages)
        self.tags = PageTags(device, kv_pool, self.rows, self.pages)

    def step(
        self, row: int, num_new: int, fault: tuple[int, int] | None = None, astray: int | None = None
    ) -> list[PageFinding]:
        """A step that computes ``num_new`` tokens of ``row``. ``fault``: this column names that page instead.
        ``astray``: the slot of its last token."""
        start, end = self.lens.get(row, 0), min(self.lens.get(row, 0) + num_new, PAGE_SIZE * NUM_COLUMNS)
        table = self.tables.setdefault(row, [])
        first = len(table)
        leased = self.pages.alloc(-(-end // PAGE_SIZE) - first)
        if leased is None:
            return []
        for page in leased[0].tolist():
            table.append(page)
            self.shared[page] = 1
        self._write_table(row, first)
        if fault is not None:
            self.rows.page_table[row, fault[0]] = fault[1]
        positions = np.arange(start, end)
        slots = np.array(table)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        if astray is not None:
            slots[-1] = astray
        bounds = torch.tensor([0, len(slots), len(slots) + 1]).int()
        visited = Visited(
            torch.tensor([row, 0]), torch.tensor([start, 0]), torch.tensor([end, 1]),
            torch.tensor([*slots.tolist(), 0]), bounds,
        )  # fmt: skip
        self.tags.visit(visited, When.BEFORE)
        self.tags.visit(visited, When.AFTER)
        self.lens[row] = end
        return list(self.tags.read(self.tags.findings.numpy()))

    def share(self, row: int, other: int) -> None:
        """``other`` begins with the whole pages of ``row``."""
        num = self.lens.get(row, 0) // PAGE_SIZE
        if row == other or not num:
            return
        self.leave(other)
        self.tables[other], self.lens[other] = self.tables[row][:num], num * PAGE_SIZE
        for page in self.tables[other]:
            self.shared[page] += 1
        self._write_table(other, 0)

    def leave(self, row: int) -> None:
        for page in self.tables.pop(row, []):
            self.shared[page] -= 1
            if not self.shared[page]:
                self.pages.retire(np.array([page], np.int32), Points.none())
        self.lens.pop(row, None)

    def _write_table(self, row: int, first: int) -> None:
        pages = np.array(self.tables[row][first:], np.int32)
        columns = torch.arange(first, first + len(pages))
        rows = torch.full_like(columns, row)
        self.rows.write_pages(rows, columns, torch.from_numpy(pages))
        views = {name: torch.from_numpy(array) for name, array in self.tags.arrays(pages).items()}
        self.tags.begin_step(views | {"page_rows": rows, "page_columns": columns})


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "share", "leave"]), st.integers(1, 4), st.integers(1, 4)), max_size=30
)


@given(ACTIONS, st.integers(0, NUM_COLUMNS - 1), st.integers(0, 11))
def test_only_a_page_that_is_not_the_rows_own_is_found(
    actions: list[tuple[str, int, int]], column: int, page: int
) -> None:
    """Whatever rows did before: no finding. Then one row's table names one page more or less: that is found, wherever
    the page came from, unless it is the same page."""
    pages = Pages()
    for action, row, number in actions:
        if action == "step":
            assert pages.step(row, number) == []
        elif action == "share":
            pages.share(row, number)
        else:
            pages.leave(row)
    for row, length in pages.lens.items():
        if column * PAGE_SIZE < length and length < PAGE_SIZE * NUM_COLUMNS:
            own = pages.tables[row][column]
            found = pages.step(row, 1, (column, page))
            assert bool(found) == (page != own)
            if found:
                assert (found[0].row, found[0].position, found[0].page) == (row, column, page)
                assert page == 0 or f"should name page {own}" in str(found[0].error("r", ""))
            return


def test_a_page_loses_its_lease_when_it_is_retired() -> None:
    pages = Pages()
    pages.step(1, 3)
    stale = list(pages.tables[1])
    pages.leave(1)
    pages.step(2, 1)  # uploads what has been retired, and leases the page that was retired last
    assert (pages.tags.tags[stale, 0] < 0).tolist() == [True, False]
    pages.tables[1], pages.lens[1] = [], 4
    visited = Visited(torch.tensor([1]), torch.tensor([4]), torch.tensor([4]), torch.zeros(0).long())
    pages.tags.visit(visited, When.AFTER)
    retired, reused = pages.tags.read(pages.tags.findings.numpy())
    text = str(reused.error("r1", "r2"))
    assert "kv_pool page 2 (slots 4-5)" in text and "owner r2" in text and "written by another" in text
    assert "the page has been retired; missing: retired_after" in str(retired.error("r1", ""))


def test_a_row_that_goes_to_another_page_is_found_by_both() -> None:
    """By the step that writes it, and by the next one of the page's owner."""
    pages = Pages()
    pages.step(1, 3)
    theirs = pages.tables[1][0]
    (found,) = pages.step(2, 1, astray=theirs * PAGE_SIZE)[:1]
    assert (found.row, found.page, found.home) == (2, theirs, pages.tables[2][0]) and found.when == When.BEFORE
    assert pages.step(1, 1)[-1].page == theirs


@pytest.mark.parametrize("reused", [False, True])
def test_a_page_that_is_retired_before_it_is_first_written(reused: bool) -> None:
    pages = Pages()
    pages.step(1, 2)
    leased = pages.pages.alloc(1)
    assert leased is not None
    pages.tables[1].append(int(leased[0][0]))
    pages._write_table(1, 1)
    pages.pages.retire(leased[0], Points.none())
    pages.step(2, 1 if reused else 0)
    pages.pages.alloc(1)
    (found,) = pages.step(1, 1)[:1]
    assert (found.row, found.page, found.when) == (1, int(leased[0][0]), When.BEFORE)


def finding(**fields: int) -> PageFinding:
    tag = {"expected": 40, "lease": 40, "held_position": 3, "arrived": 40, "writer": 7, "layer": 3}
    where = {"when": 3, "step": 9, "row": 2, "position": 3, "page": 17, "page_size": 16, "num_pages": 64, "home": 17}
    return PageFinding(**(where | tag | fields))


@pytest.mark.parametrize(
    ("fields", "why", "remedy"),
    [
        ({"page": 0}, "names no page of a request", "step_slots"),
        ({"page": 1 << 30}, "names no page of a request", "step_slots"),
        ({"home": 18}, "should name page 18", "queued_match"),
        ({"held_position": 2}, "holds another position", "queued_match"),
        ({"arrived": 12, "writer": -5}, "layer 3 has not been loaded", "forward_after_load"),
        ({"arrived": -1, "writer": -5}, "did not hold what was backed up", "load_after_store"),
        ({"when": 2, "layer": 1, "arrived": 12}, "layer 1 has not been loaded", "forward_after_load"),
        ({"lease": 12}, "has not been written since it was leased", "forward_after_load"),
        ({"lease": -12}, "has not been written since it was leased", "forward_after_load"),
        ({"lease": -40}, "has been retired", "retired_after"),
        ({"lease": 41, "writer": -5}, "has been loaded for another", "load_after_forward"),
        ({"lease": 41}, "has been written by another", "retired_after"),
    ],
)
def test_a_report_says_what_is_wrong_and_what_would_have_ordered_it(
    fields: dict[str, int], why: str, remedy: str
) -> None:
    error = finding(**fields).error("r5", "r6")
    assert why in str(error) and remedy in error.edges and remedy in str(error)


def test_a_report_names_request_page_slot_step_and_last_writer() -> None:
    assert str(finding(lease=41).error("r5", "r6")).splitlines() == [
        "memory order: WAR on kv_pool page 17 (slots 272-287)",
        "  1. step 7 writes it on forward (lease 41, position 3), owner r6",
        "  2. step 9 reads it on forward for request r5 (row 2, tokens 48-63, lease 40; found after its forward)",
        "  the page has been written by another; missing: retired_after",
    ]


def test_findings_beyond_the_first_are_counted_only() -> None:
    pages = Pages()
    pages.step(1, 8)
    visited = Visited(torch.full((4,), 1), torch.full((4,), 8), torch.full((4,), 8), torch.zeros(4).long())
    pages.tags.tags.zero_()
    pages.tags.visit(visited, When.AFTER)
    assert pages.tags.findings[0, 0] == 16
    assert len(pages.tags.read(pages.tags.findings.numpy())) == 8 and pages.tags.findings.shape[1] == FIELDS
