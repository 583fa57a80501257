"""Conformance programs: copies between host and device, and memory that is allocated again."""

from __future__ import annotations

import torch
from conformance import Machine, Outcome, program, settled, start


@program((0, 1), (1, 1), lags="ah", race="always")
def to_pinned_arrives_when_it_runs(m: Machine) -> Outcome:
    """(before synchronising, after)"""
    (x,) = start(m, 1)
    host = m.pinned(0)
    with m.on(m.stream()):
        m.lag("a")
        host.copy_(x, non_blocking=True)
    m.host_lag("h")
    before = m.peek(host)
    m.synchronize()
    return before, m.peek(host)


@program(1, 2, lags="ah", race="always")
def from_pinned_is_read_when_it_runs(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    host = m.pinned(1)
    with m.on(m.stream()):
        m.lag("a")
        x.copy_(host, non_blocking=True)
    m.host_lag("h")
    m.poke(host, 2)
    return settled(m, x)


@program(1, lags="a")
def from_pinned_rewritten_after_synchronising(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    host = m.pinned(1)
    a = m.stream()
    with m.on(a):
        m.lag("a")
        x.copy_(host, non_blocking=True)
    m.synchronize(a)
    m.poke(host, 2)
    return settled(m, x)


@program(1, lags="a")
def from_pageable_is_staged_at_the_call(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    host = m.pageable(1)
    with m.on(m.stream()):
        m.lag("a")
        x.copy_(host, non_blocking=True)
    host.fill_(2)
    return settled(m, x)


@program((1, 1), lags="a")
def from_large_pageable_is_staged_at_the_call(m: Machine) -> Outcome:
    """A tensor larger than the driver's staging buffers: (first cell, last cell)."""
    x = m.large(0)
    m.synchronize()
    host = m.pageable(1, large=True)
    with m.on(m.stream()):
        m.lag("a")
        x.copy_(host, non_blocking=True)
    host.fill_(2)
    return settled(m, x[:1], x[-1:])


@program(1, lags="a")
def to_pageable_blocks_even_if_asked_not_to(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    host = m.pageable(0)
    with m.on(m.stream()):
        m.lag("a")
        host.copy_(x, non_blocking=True)
    return int(host[0])


@program((1, 1), lags="a")
def to_large_pageable_blocks_even_if_asked_not_to(m: Machine) -> Outcome:
    x = m.large(1)
    m.synchronize()
    host = m.pageable(0, large=True)
    with m.on(m.stream()):
        m.lag("a")
        host.copy_(x, non_blocking=True)
    return int(host[0]), int(host[-1])


@program((1, 1, 1, 1), lags="a")
def blocking_copies_block(m: Machine) -> Outcome:
    """(to pinned, to pageable, from pinned, from pageable), each rewritten or read at once"""
    x, y, z = start(m, 1, 0, 0)
    pinned, pageable = m.pinned(0), m.pageable(0)
    from_pinned, from_pageable = m.pinned(1), m.pageable(1)
    with m.on(m.stream()):
        m.lag("a")
        pinned.copy_(x)
        first = m.peek(pinned)
        m.lag("a")
        pageable.copy_(x)
        m.lag("a")
        y.copy_(from_pinned)
        m.poke(from_pinned, 2)
        m.lag("a")
        z.copy_(from_pageable)
        from_pageable.fill_(2)
    return first, int(pageable[0]), *settled(m, y, z)


@program((1, 0), (1, 1), lags="abh", race="always")
def a_blocking_copy_waits_for_its_stream_and_no_other(m: Machine) -> Outcome:
    x, y = start(m, 1, 1)
    one, two = m.pinned(0), m.pinned(0)
    with m.on(m.stream()):
        m.lag("a")
        one.copy_(x, non_blocking=True)
    with m.on(m.stream()):
        m.lag("b")
        two.copy_(y)
    m.host_lag("h")
    outcome = m.peek(two), m.peek(one)
    m.synchronize()
    return outcome


@program((True, 1), lags="a")
def to_cpu_without_blocking_is_pinned(m: Machine) -> Outcome:
    """(whether the result is pinned, its value after synchronising)"""
    (x,) = start(m, 1)
    with m.on(m.stream()):
        m.lag("a")
        host = x.to("cpu", non_blocking=True)
    m.synchronize()
    return m.is_pinned(host), m.peek(host)


@program(1, lags="ab")
def there_and_back_on_one_stream(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    out, back = m.pinned(1), m.pinned(0)
    with m.on(m.stream()):
        m.lag("a")
        x.copy_(out, non_blocking=True)
        m.lag("b")
        back.copy_(x, non_blocking=True)
    m.synchronize()
    return m.peek(back)


@program(1, 2, lags="ab", race="always")
def a_copy_within_the_device_is_on_the_current_stream(m: Machine) -> Outcome:
    x, seen = start(m, 1, 0)
    with m.on(m.stream()):
        m.lag("a")
        seen.copy_(x)
    with m.on(m.stream()):
        m.lag("b")
        x.fill_(2)
    return settled(m, seen)


# --- memory that is handed out again -------------------------------------------------------------------------


@program((True, 2), lags="a")
def freed_memory_is_handed_out_at_once_on_its_stream(m: Machine) -> Outcome:
    """Its last use has not run yet: (whether it is the same memory, what the last use saw)"""
    (seen,) = start(m, 0)
    with m.on(m.stream()):
        x = m.large(2)
        m.lag("a")
        seen.copy_(x[:1])
        address = m.address(x)
        del x
        y = m.large(3)
    return m.address(y) == address, settled(m, seen)


@program(False)
def freed_memory_is_not_handed_out_on_another_stream(m: Machine) -> Outcome:
    with m.on(m.stream()):
        x = m.large(1)
    m.synchronize()
    address = m.address(x)
    del x
    with m.on(m.stream()):
        y = m.large(2)
    m.synchronize()
    return m.address(y) == address


@program(1, 2, "undefined", lags="ab", race="always")
def freed_while_another_stream_reads(m: Machine) -> Outcome:
    """Without ``record_stream`` the old reader may see the values of the new tensor."""
    (seen,) = start(m, 0)
    a, b = m.stream(), m.stream()
    with m.on(a):
        x = m.large(1)
    m.synchronize()
    with m.on(b):
        m.lag("b")
        seen.copy_(x[:1])
    del x
    with m.on(a):
        m.lag("a")
        y = m.large(2)
    outcome = settled(m, seen)
    del y
    return outcome


@program(1, lags="ab")
def freed_after_waiting_for_the_reader(m: Machine) -> Outcome:
    (seen,) = start(m, 0)
    a, b, read = m.stream(), m.stream(), m.event()
    with m.on(a):
        x = m.large(1)
    m.synchronize()
    with m.on(b):
        m.lag("b")
        seen.copy_(x[:1])
    read.record(b)
    read.wait(a)
    del x
    with m.on(a):
        m.lag("a")
        y = m.large(2)
    outcome = settled(m, seen)
    del y
    return outcome


@program(1, 2, lags="ab", race="always")
def freed_while_another_stream_writes(m: Machine) -> Outcome:
    """The write to the old tensor goes to the new one's memory."""
    a, b = m.stream(), m.stream()
    with m.on(a):
        x = m.large(0)
    m.synchronize()
    with m.on(b):
        m.lag("b")
        x[:1].fill_(1)
    del x
    with m.on(a):
        m.lag("a")
        y = m.large(2)
    return settled(m, y)


@program(3, lags="a")
def host_scalars_are_taken_at_the_call(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    addend = torch.tensor(2)
    with m.on(m.stream()):
        m.lag("a")
        x.add_(addend)
    addend.fill_(50)
    return settled(m, x)
