"""Conformance programs: graphs, their memory, events around and inside them, and what a capture forbids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conformance import Machine, Outcome, program, settled, start


@program((0, 2), lags="a")
def capture_runs_nothing(m: Machine) -> Outcome:
    """(after the capture, after two replays)"""
    (x,) = start(m, 0)
    s, graph = m.stream(), m.graph()
    with m.capture(graph, s):
        m.lag("a")
        x.add_(1)
    before = settled(m, x)
    m.replay(graph, s)
    m.replay(graph, s)
    return before, settled(m, x)


@program(10, lags="ab")
def replay_reads_what_is_there_when_it_runs(m: Machine) -> Outcome:
    x, y = start(m, 1, 0)
    s, graph = m.stream(), m.graph()
    with m.capture(graph, s):
        y.copy_(x)
        m.lag("b")
        y.mul_(2)
    with m.on(s):
        m.lag("a")
        x.fill_(5)
    m.replay(graph, s)
    return settled(m, y)


@program(6)
def scalars_are_baked_in(m: Machine) -> Outcome:
    """Python's and those of host tensors."""
    x, y = start(m, 1, 0)
    s, graph = m.stream(), m.graph()
    addend, factor = 2, torch.tensor(2)
    with m.capture(graph, s):
        y.copy_(x)
        y.add_(addend)
        y.mul_(factor)
    addend = 50
    factor.fill_(addend)
    m.replay(graph, s)
    return settled(m, y)


@program(15, lags="a")
def replays_of_one_stream_are_in_order(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    s, graph = m.stream(), m.graph()
    with m.capture(graph, s):
        x.mul_(2)
        m.lag("a")
        x.add_(1)
    for _ in range(3):
        m.replay(graph, s)
    return settled(m, x)


@program(2, lags="ab")
def replays_of_one_graph_are_in_order_on_any_streams(m: Machine) -> Outcome:
    """A launch runs after earlier launches of the same graph, whatever their streams (``cudaGraphLaunch``)."""
    x, y = start(m, 0, 0)
    s, a, b, graph = m.stream(), m.stream(), m.stream(), m.graph()
    with m.capture(graph, s):
        y.copy_(x)
        m.lag("a")
        y.add_(1)
        m.lag("b")
        x.copy_(y)
    m.replay(graph, a)
    m.replay(graph, b)
    return settled(m, x)


@program(1, 2, lags="ab", race="always")
def two_graphs_on_two_streams_are_not(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    graphs = []
    for value, lag in ((1, "a"), (2, "b")):
        graph = m.graph()
        with m.capture(graph, m.stream()):
            m.lag(lag)
            x.fill_(value)
        graphs.append(graph)
    for graph in graphs:
        m.replay(graph, m.stream())
    return settled(m, x)


@program((2, 6), lags="ab")
def the_next_replay_overwrites_the_output(m: Machine) -> Outcome:
    """(copied out between the replays on their stream, looked at after both)"""
    (x,) = start(m, 1)
    host = m.pinned(0)
    s, graph = m.stream(), m.graph()
    with m.capture(graph, s):
        y = x + 1
    m.replay(graph, s)
    with m.on(s):
        m.lag("a")
        host.copy_(y, non_blocking=True)
        x.fill_(5)
    m.replay(graph, s)
    return m.synchronize() or m.peek(host), settled(m, y)


@program(2, 6, lags="ab", race="always")
def a_reader_on_another_stream_may_see_the_next_replay(m: Machine) -> Outcome:
    x, seen = start(m, 1, 0)
    s, b, done, graph = m.stream(), m.stream(), m.event(), m.graph()
    with m.capture(graph, s):
        y = x + 1
    m.replay(graph, s)
    done.record(s)
    done.wait(b)
    with m.on(b):
        m.lag("b")
        seen.copy_(y)
    with m.on(s):
        m.lag("a")
        x.fill_(5)
    m.replay(graph, s)
    return settled(m, seen)


@program(0, 1, lags="ab", race="always")
def a_replay_is_on_its_stream(m: Machine) -> Outcome:
    """It is not ordered with the stream on which it was captured, nor with any other."""
    x, seen = start(m, 0, 0)
    s, b, graph = m.stream(), m.stream(), m.graph()
    with m.capture(graph, s):
        m.lag("a")
        x.fill_(1)
    m.replay(graph, b)
    with m.on(s):
        m.lag("b")
        seen.copy_(x)
    return settled(m, seen)


@program(6, lags="abc")
def events_around_a_replay(m: Machine) -> Outcome:
    x, y, seen = start(m, 1, 0, 0)
    a, s, b, graph = m.stream(), m.stream(), m.stream(), m.graph()
    ready, done = m.event(), m.event()
    with m.capture(graph, s):
        m.lag("b")
        y.copy_(x)
        y.add_(1)
    with m.on(a):
        m.lag("a")
        x.fill_(5)
    ready.record(a)
    ready.wait(s)
    m.replay(graph, s)
    done.record(s)
    done.wait(b)
    with m.on(b):
        seen.copy_(y)
    return settled(m, seen)


@program(50, lags="abc")
def branches_of_a_graph_fork_and_join(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    s, b, graph = m.stream(), m.stream(), m.graph()
    fork, join = m.event(), m.event()
    with m.capture(graph, s):
        y = x + 1
        fork.record(s)
        fork.wait(b)
        with m.on(b):
            m.lag("b")
            z = y * 2
            join.record(b)
        m.lag("a")
        w = y * 3
        join.wait(s)
        out = z + w
    with m.on(s):
        m.lag("c")
        x.fill_(9)
    m.replay(graph, s)
    return settled(m, out)


@program(1, 2, lags="ab", race="always")
def branches_of_a_graph_are_not_ordered(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    s, b, graph = m.stream(), m.stream(), m.graph()
    fork, join = m.event(), m.event()
    with m.capture(graph, s):
        fork.record(s)
        fork.wait(b)
        with m.on(b):
            m.lag("b")
            x.fill_(1)
            join.record(b)
        m.lag("a")
        x.fill_(2)
        join.wait(s)
    m.replay(graph, s)
    return settled(m, x)


@program((1, 2), (2, 2), lags="ah", race="always")
def a_captured_copy_reads_pinned_memory_at_each_replay(m: Machine) -> Outcome:
    """(a replay after which the host rewrites at once, a replay before which it waited)"""
    (x,) = start(m, 0)
    host = m.pinned(0)
    s, graph = m.stream(), m.graph()
    with m.capture(graph, s):
        m.lag("a")
        x.copy_(host, non_blocking=True)
    m.poke(host, 1)
    m.replay(graph, s)
    m.host_lag("h")
    m.poke(host, 2)
    first = settled(m, x)
    m.replay(graph, s)
    return first, settled(m, x)


@program((0, 1), (1, 1), lags="ah", race="always")
def a_captured_copy_to_pinned_arrives_when_it_runs(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    host = m.pinned(0)
    s, graph = m.stream(), m.graph()
    with m.capture(graph, s):
        m.lag("a")
        host.copy_(x, non_blocking=True)
    m.replay(graph, s)
    m.host_lag("h")
    before = m.peek(host)
    m.synchronize()
    return before, m.peek(host)


@program((1, 0, 1), lags="a")
def a_stream_beside_a_capture_works_on(m: Machine) -> Outcome:
    """Work of a stream that is not part of it runs, and is not in the graph: (after the capture, after a replay)"""
    x, y = start(m, 0, 0)
    s, b, graph = m.stream(), m.stream(), m.graph()
    with m.capture(graph, s):
        y.add_(1)
        with m.on(b):
            m.lag("a")
            x.fill_(1)
    before = settled(m, x)
    x.fill_(0)
    m.synchronize()
    m.replay(graph, s)
    return before, *settled(m, x, y)


@program((False, 7), lags="a")
def memory_of_a_capture_is_the_graph_s(m: Machine) -> Outcome:
    """Even when no tensor is left: (whether it is allocated again, the new tensor's value after a replay)"""
    (x,) = start(m, 1)
    s, graph = m.stream(), m.graph()
    with m.capture(graph, s):
        y = m.large(2)
        y[:1].add_(x)
    address = m.address(y)
    del y
    with m.on(s):
        m.lag("a")
        z = m.large(7)
    m.replay(graph, s)
    return m.address(z) == address, settled(m, z)


@program((True, 2))
def graphs_of_one_pool_overwrite_each_other(m: Machine) -> Outcome:
    """The first one's output is dropped, its memory becomes the second one's, and the first is replayed again."""
    s, first = m.stream(), m.graph()
    with m.capture(first, s):
        a = m.large(2)
    address = m.address(a)
    del a
    second = m.graph(pool=first)
    with m.capture(second, s):
        b = m.large(3)
    m.replay(second, s)
    m.replay(first, s)
    return m.address(b) == address, settled(m, b)


@program((False, 3))
def graphs_of_one_pool_leave_what_is_held(m: Machine) -> Outcome:
    s, first = m.stream(), m.graph()
    with m.capture(first, s):
        a = m.large(2)
    second = m.graph(pool=first)
    with m.capture(second, s):
        b = m.large(3)
    m.replay(second, s)
    m.replay(first, s)
    return m.address(b) == m.address(a), settled(m, b)


# --- what a capture forbids ----------------------------------------------------------------------------------


def attempt(m: Machine, act: Callable[[Any, torch.Tensor], object]) -> Outcome:
    """Capture ``act(stream, x)`` with x = 1: (whether it is refused, the value of x afterwards, read without a
    graph)."""
    (x,) = start(m, 1)
    s, graph = m.stream(), m.graph()
    try:
        with m.capture(graph, s):
            act(s, x)
    except m.capture_errors:
        return "refused", settled(m, x)
    return "captured", settled(m, x)


REFUSED = ("refused", 1)


@program(REFUSED, tainting=True)
def item_in_a_capture(m: Machine) -> Outcome:
    return attempt(m, lambda s, x: x.item())


@program(REFUSED, tainting=True)
def nonzero_in_a_capture(m: Machine) -> Outcome:
    return attempt(m, lambda s, x: x.nonzero())


@program(REFUSED, tainting=True)
def synchronizing_the_stream_in_its_capture(m: Machine) -> Outcome:
    return attempt(m, lambda s, x: m.synchronize(s))


@program(REFUSED, tainting=True)
def synchronizing_the_device_in_a_capture(m: Machine) -> Outcome:
    return attempt(m, lambda s, x: m.synchronize())


@program(REFUSED, tainting=True)
def synchronizing_a_captured_event(m: Machine) -> Outcome:
    event = m.event()

    def act(s: Any, x: torch.Tensor) -> None:
        event.record(s)
        event.synchronize()

    return attempt(m, act)


@program(REFUSED, tainting=True)
def querying_a_captured_event(m: Machine) -> Outcome:
    event = m.event()

    def act(s: Any, x: torch.Tensor) -> None:
        event.record(s)
        event.query()

    return attempt(m, act)


@program(REFUSED, tainting=True)
def blocking_copy_from_pageable_in_a_capture(m: Machine) -> Outcome:
    host = m.pageable(5)
    return attempt(m, lambda s, x: x.copy_(host))


@program(REFUSED, tainting=True)
def copy_from_pageable_in_a_capture(m: Machine) -> Outcome:
    host = m.pageable(5)
    return attempt(m, lambda s, x: x.copy_(host, non_blocking=True))


@program(REFUSED, tainting=True)
def copy_to_pageable_in_a_capture(m: Machine) -> Outcome:
    host = m.pageable(5)
    return attempt(m, lambda s, x: host.copy_(x, non_blocking=True))


@program(REFUSED, tainting=True)
def blocking_copy_from_pinned_in_a_capture(m: Machine) -> Outcome:
    host = m.pinned(5)
    return attempt(m, lambda s, x: x.copy_(host))


@program(REFUSED, tainting=True)
def blocking_copy_to_pinned_in_a_capture(m: Machine) -> Outcome:
    host = m.pinned(5)
    return attempt(m, lambda s, x: host.copy_(x))


@program(REFUSED, tainting=True)
def waiting_in_a_capture_for_work_outside(m: Machine) -> Outcome:
    other, event = m.stream(), m.event()
    event.record(other)
    return attempt(m, lambda s, x: event.wait(s))


@program(REFUSED, tainting=True)
def a_branch_that_is_not_joined(m: Machine) -> Outcome:
    b, fork = m.stream(), m.event()

    def act(s: Any, x: torch.Tensor) -> None:
        fork.record(s)
        fork.wait(b)
        with m.on(b):
            x.fill_(5)

    return attempt(m, act)


@program(REFUSED, tainting=True)
def an_error_that_is_swallowed_breaks_the_capture(m: Machine) -> Outcome:
    def act(s: Any, x: torch.Tensor) -> None:
        try:
            x.item()
        except m.capture_errors:
            x.fill_(5)

    return attempt(m, act)


@program(("captured", 1), tainting=True)
def waiting_in_a_capture_for_an_unrecorded_event(m: Machine) -> Outcome:
    """It waits for nothing, as outside a capture."""
    event = m.event()
    return attempt(m, lambda s, x: event.wait(s) or x.fill_(5))
