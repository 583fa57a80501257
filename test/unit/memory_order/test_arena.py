"""The arena: fill writes heads and tails, whatever the fields; outputs are leased until the next replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fenceline.memory_order import Arena, ArenaField, LeaseError, Role, open_device
from fenceline.memory_order.device import CpuDevice
from fenceline.memory_order.edges import Guard

DTYPES = (torch.int64, torch.int32, torch.float32, torch.bool)


@dataclass(frozen=True)
class Fill:
    """A batch of ``num_live`` requests in a graph of ``size`` (None: all rows), and the seed of its values."""

    num_live: int
    seed: int
    size: int | None


fields = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.sampled_from(list(Role)),
        st.sampled_from((0, 1, -1, 7)),
        st.sampled_from(((), (1,), (3,), (2, 2))),
    ),
    min_size=1,
    max_size=6,
)


def make_arena(num_rows: int, specs: list[tuple[torch.dtype, Role, int, tuple[int, ...]]]) -> Arena:
    declared = [
        ArenaField(f"f{number}", dtype, role, bool(pad) if dtype is torch.bool else pad, shape)
        for number, (dtype, role, pad, shape) in enumerate(specs)
    ]
    return Arena(open_device("cpu"), "test", num_rows, declared)


def values(field: ArenaField, num: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 100, (num, *field.shape), generator=generator).to(field.dtype)


@given(
    st.integers(1, 9),
    fields,
    st.lists(st.builds(Fill, st.integers(0, 9), st.integers(0, 99), st.none() | st.integers(0, 9)), max_size=4),
)
def test_fill_writes_heads_and_tails(
    num_rows: int, specs: list[tuple[torch.dtype, Role, int, tuple[int, ...]]], fills: list[Fill]
) -> None:
    arena = make_arena(num_rows, specs)
    for field in arena.fields.values():
        assert arena[field.name].shape == (num_rows, *field.shape)
        assert (arena[field.name] == field.pad).all(), "a new arena is all padding"
    for number, fill in enumerate(fills):
        num_live, generator = min(fill.num_live, num_rows), torch.Generator().manual_seed(fill.seed)
        sources = {f.name: values(f, num_live, generator) for f in arena.fields.values() if f.role is Role.PLAN}
        for field in arena.fields.values():  # what earlier replays have left
            if field.role is not Role.PLAN:
                arena[field.name].copy_(values(field, num_rows, generator))
        before = {name: arena[name].clone() for name in arena.fields}
        size = None if fill.size is None else min(max(fill.size, num_live), num_rows)
        end = num_rows if size is None else size
        arena.fill(sources, num_live, size)
        for field in arena.fields.values():
            rows, untouched = arena[field.name][:end], arena[field.name][end:]
            assert torch.equal(untouched, before[field.name][end:]), "no replay of this batch reads these"
            if field.role is Role.PLAN:
                assert torch.equal(rows[:num_live], sources[field.name])
                assert (rows[num_live:] == field.pad).all()
            elif field.role is Role.INPUT:
                assert (rows == field.pad).all()
            else:
                assert torch.equal(arena[field.name], before[field.name]), "outputs are the replays'"
        assert arena.num_fills == number + 1


SPECS: list[tuple[torch.dtype, Role, int, tuple[int, ...]]] = [
    (torch.int64, Role.PLAN, 0, ()),
    (torch.float32, Role.PLAN, 1, ()),
    (torch.int64, Role.INPUT, 0, ()),
    (torch.int64, Role.OUTPUT, 0, ()),
]


@pytest.mark.parametrize("names", [[], ["f0"], ["f0", "f1", "f2"], ["f0", "f1", "x"], ["f0", "f3"]], ids=str)
def test_fill_wants_exactly_the_plan_fields(names: list[str]) -> None:
    arena = make_arena(4, SPECS)
    arena["f0"].fill_(5)
    with pytest.raises(ValueError, match=r"arena test is filled with f0, f1, all of them"):
        arena.fill({name: torch.ones(2, dtype=torch.int64) for name in names}, 2)
    assert (arena["f0"] == 5).all() and arena.num_fills == 0


def test_fields_do_not_move() -> None:
    arena = make_arena(4, SPECS)
    addresses = [arena[name].data_ptr() for name in arena.fields]
    for num_live in (4, 1, 0):
        arena.fill({"f0": torch.ones(num_live, dtype=torch.int64), "f1": torch.ones(num_live)}, num_live)
        arena.begin_replay()
    assert addresses == [arena[name].data_ptr() for name in arena.fields]


def test_outputs_end_with_the_next_replay() -> None:
    arena = make_arena(4, SPECS)
    first = arena.begin_replay()
    arena["f3"].copy_(torch.tensor([3, 1, 4, 1]))
    assert first.take("f3", 3).tolist() == [3, 1, 4]
    assert first.take("f2", 2).tolist() == [0, 0]
    second = arena.begin_replay()
    for name in ("f2", "f3"):
        with pytest.raises(LeaseError, match=rf"test\.{name} of replay 1 is gone: replay 2 writes it"):
            first.take(name, 1)
    assert second.take("f3", 4).tolist() == [3, 1, 4, 1]


def test_a_plan_is_no_output() -> None:
    with pytest.raises(AssertionError, match="f0 is no output"):
        make_arena(4, SPECS).begin_replay().take("f0", 1)


def test_without_the_guard_tails_keep_the_last_batch() -> None:
    device = open_device("cpu", severed=frozenset({"arena_pad"}))
    arena = Arena(device, "bare", 4, [ArenaField("rows", torch.int64, Role.PLAN, 0)])
    arena.fill({"rows": torch.tensor([5, 6, 7])}, 3)
    arena.fill({"rows": torch.tensor([8])}, 1)
    assert arena["rows"].tolist() == [8, 6, 7, 0]


class WatchingDevice(CpuDevice):
    """Notes what it is told of memory that it is to watch: the first address of each tensor, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, list[int]]] = []

    def protect_from_graphs(self, tensor: torch.Tensor, guard: Guard) -> None:
        self.told.append((guard.name, [tensor.data_ptr()]))

    def begin_fill(self, tensors: Sequence[torch.Tensor], guard: Guard) -> None:
        self.told.append((guard.name, [tensor.data_ptr() for tensor in tensors]))

    def lease(self, tensor: torch.Tensor) -> None:
        self.told.append(("lease", [tensor.data_ptr()]))


def test_a_device_that_watches_memory_is_told_of_every_use() -> None:
    """Without it, the virtual GPU would see no row that keeps an earlier batch's value, and no result used too late."""
    device = WatchingDevice()
    fields = [ArenaField(role.name, torch.int64, role, 0) for role in Role]
    arena = Arena(device, "test", 4, fields)
    plan, derived, output = (arena[role.name].data_ptr() for role in (Role.PLAN, Role.INPUT, Role.OUTPUT))
    arena.fill({Role.PLAN.name: torch.ones(2, dtype=torch.int64)}, 2)
    arena.begin_replay().take(Role.OUTPUT.name, 2)
    assert device.told == [
        ("plan_source", [plan]),
        ("arena_pad", [plan, derived]),
        ("total_buckets", [output]),
        ("lease", [output]),
    ]
