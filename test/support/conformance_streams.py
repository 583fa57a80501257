"""Conformance programs: streams, events, and what makes the host wait."""

from __future__ import annotations

from conformance import Machine, Outcome, program, settled, start


@program(1, 2, lags="ab", race="always")
def two_streams_write_one_cell(m: Machine) -> Outcome:
    """Nothing orders two streams."""
    (x,) = start(m, 0)
    a, b = m.stream(), m.stream()
    with m.on(a):
        m.lag("a")
        x.fill_(1)
    with m.on(b):
        m.lag("b")
        x.fill_(2)
    return settled(m, x)


@program(7, lags="ab")
def one_stream_is_in_order(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    with m.on(m.stream()):
        m.lag("a")
        x.fill_(3)
        x.mul_(2)
        m.lag("b")
        x.add_(1)
    return settled(m, x)


@program(1, 2, lags="ab", race="always")
def the_default_stream_orders_nothing(m: Machine) -> Outcome:
    """torch's streams are non-blocking: the default stream is like the others."""
    (x,) = start(m, 0)
    m.lag("a")
    x.fill_(1)
    with m.on(m.stream()):
        m.lag("b")
        x.fill_(2)
    return settled(m, x)


@program(2, lags="ab")
def a_wait_orders(m: Machine) -> Outcome:
    (x,) = start(m, 0)
    a, b, done = m.stream(), m.stream(), m.event()
    with m.on(a):
        m.lag("a")
        x.fill_(1)
    done.record(a)
    done.wait(b)
    with m.on(b):
        m.lag("b")
        x.fill_(2)
    return settled(m, x)


@program(1, 2, lags="ab", race="always")
def a_wait_orders_no_other_way(m: Machine) -> Outcome:
    """The wait does not cover work after the record."""
    x, seen = start(m, 0, 0)
    a, b, done = m.stream(), m.stream(), m.event()
    with m.on(a):
        x.fill_(1)
        done.record(a)
        m.lag("a")
        x.fill_(2)
    done.wait(b)
    with m.on(b):
        m.lag("b")
        seen.copy_(x)
    return settled(m, seen)


@program(1, 2, lags="abc", race="always")
def a_wait_is_for_the_latest_record_at_the_call(m: Machine) -> Outcome:
    """Recording again after the wait does not move the wait: 2 is not certain, but 0 is excluded."""
    x, seen = start(m, 0, 0)
    a, b, done = m.stream(), m.stream(), m.event()
    with m.on(a):
        m.lag("c")
        x.fill_(1)
        done.record(a)
    done.wait(b)
    with m.on(a):
        m.lag("a")
        x.fill_(2)
        done.record(a)
    with m.on(b):
        m.lag("b")
        seen.copy_(x)
    return settled(m, seen)


@program(2, lags="ab")
def of_two_records_the_latest_counts(m: Machine) -> Outcome:
    x, seen = start(m, 0, 0)
    a, b, done = m.stream(), m.stream(), m.event()
    with m.on(a):
        m.lag("a")
        x.fill_(1)
        done.record(a)
        m.lag("b")
        x.fill_(2)
        done.record(a)
    done.wait(b)
    with m.on(b):
        seen.copy_(x)
    return settled(m, seen)


@program(0, 1, lags="ab", race="always")
def a_wait_for_an_unrecorded_event_is_for_nothing(m: Machine) -> Outcome:
    x, seen = start(m, 0, 0)
    a, b, never = m.stream(), m.stream(), m.event()
    never.wait(b)
    with m.on(a):
        m.lag("a")
        x.fill_(1)
        never.record(a)
    with m.on(b):
        m.lag("b")
        seen.copy_(x)
    return settled(m, seen)


@program(True)
def an_unrecorded_event_has_passed(m: Machine) -> Outcome:
    never = m.event()
    never.synchronize()
    return never.query()


@program(1, lags="ab")
def order_is_transitive(m: Machine) -> Outcome:
    x, seen = start(m, 0, 0)
    a, b, c = m.stream(), m.stream(), m.stream()
    first, second = m.event(), m.event()
    with m.on(a):
        m.lag("a")
        x.fill_(1)
    first.record(a)
    first.wait(b)
    with m.on(b):
        m.lag("b")
    second.record(b)
    second.wait(c)
    with m.on(c):
        seen.copy_(x)
    return settled(m, seen)


@program(1, lags="a")
def record_then_synchronize(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    host = m.pinned(0)
    a, done = m.stream(), m.event()
    with m.on(a):
        m.lag("a")
        host.copy_(x, non_blocking=True)
    done.record(a)
    done.synchronize()
    return m.peek(host)


@program((1, 0), (1, 1), lags="abh", race="always")
def synchronize_covers_what_came_before_the_record(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    before, after = m.pinned(0), m.pinned(0)
    a, done = m.stream(), m.event()
    with m.on(a):
        m.lag("a")
        before.copy_(x, non_blocking=True)
        done.record(a)
        m.lag("b")
        after.copy_(x, non_blocking=True)
    done.synchronize()
    m.host_lag("h")
    outcome = m.peek(before), m.peek(after)
    m.synchronize()
    return outcome


@program((True, 1), (False, 0), (False, 1), lags="ah", race="sometimes")
def a_query_tells_the_truth(m: Machine) -> Outcome:
    """If a record has passed, everything before it is done; if not, it may pass at any time."""
    (x,) = start(m, 1)
    host = m.pinned(0)
    a, done = m.stream(), m.event()
    with m.on(a):
        m.lag("a")
        host.copy_(x, non_blocking=True)
    done.record(a)
    m.host_lag("h")
    outcome = done.query(), m.peek(host)
    m.synchronize()
    return outcome


@program((1, 0), (1, 1), lags="abh", race="always")
def synchronizing_a_stream_waits_for_no_other(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    one, two = m.pinned(0), m.pinned(0)
    a, b = m.stream(), m.stream()
    with m.on(a):
        m.lag("a")
        one.copy_(x, non_blocking=True)
    with m.on(b):
        m.lag("b")
        two.copy_(x, non_blocking=True)
    m.synchronize(a)
    m.host_lag("h")
    outcome = m.peek(one), m.peek(two)
    m.synchronize()
    return outcome


@program((1, 1), lags="ab")
def synchronizing_the_device_waits_for_all(m: Machine) -> Outcome:
    (x,) = start(m, 1)
    one, two = m.pinned(0), m.pinned(0)
    for host, lag in ((one, "a"), (two, "b")):
        with m.on(m.stream()):
            m.lag(lag)
            host.copy_(x, non_blocking=True)
    m.synchronize()
    return m.peek(one), m.peek(two)


@program((1, 0), (1, 1), lags="abh", race="always")
def item_waits_for_its_stream_and_no_other(m: Machine) -> Outcome:
    x, y = start(m, 0, 1)
    host = m.pinned(0)
    a, b = m.stream(), m.stream()
    with m.on(b):
        m.lag("b")
        host.copy_(y, non_blocking=True)
    with m.on(a):
        m.lag("a")
        x.fill_(1)
        value = x.item()
    m.host_lag("h")
    outcome = value, m.peek(host)
    m.synchronize()
    return outcome


@program(0, 1, lags="ah", race="always")
def item_does_not_wait_for_the_writer(m: Machine) -> Outcome:
    """The value is read on the current stream, which is not ordered with another stream's write."""
    (x,) = start(m, 0)
    with m.on(m.stream()):
        m.lag("a")
        x.fill_(1)
    m.host_lag("h")
    value = x.item()
    m.synchronize()
    return value


@program(1, 2, lags="ab", race="always")
def the_current_stream_is_the_thread_s_own(m: Machine) -> Outcome:
    """A thread started inside ``on`` works on the default stream."""
    (x,) = start(m, 0)

    def fill() -> None:
        m.lag("a")
        x.fill_(1)

    with m.on(m.stream()):
        m.in_thread(fill)
        m.lag("b")
        x.fill_(2)
    return settled(m, x)


@program((1, 0), (1, 1), lags="abh", race="always")
def events_of_a_stream_that_is_not_current(m: Machine) -> Outcome:
    """Record and wait apply to the stream that they name, not to the current one, whose work goes on."""
    x, y, seen = start(m, 0, 0, 0)
    late = m.pinned(0)
    a, b, c, done = m.stream(), m.stream(), m.stream(), m.event()
    with m.on(a):
        m.lag("a")
        x.fill_(1)
    with m.on(c):
        done.record(a)
        done.wait(b)
        m.lag("b")
        y.fill_(1)
        late.copy_(y, non_blocking=True)
    with m.on(b):
        seen.copy_(x)
    m.synchronize(b)
    m.host_lag("h")
    outcome = m.peek(late)
    return settled(m, seen), outcome
