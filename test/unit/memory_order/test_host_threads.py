"""Threads of the host on real devices; those of the virtual GPU are agents, see test/sim/test_page_streams.py."""

from __future__ import annotations

import pytest

from fenceline.memory_order import HostChannel, open_device


def test_a_worker_takes_jobs_and_reports() -> None:
    device = open_device("cpu")
    jobs: HostChannel[int | None] = device.make_channel()
    done: HostChannel[int] = device.make_channel()

    def work() -> None:
        while (job := jobs.get()) is not None:
            done.put(job * job)

    worker = device.start_worker("squares", work)
    assert done.poll() is None
    for number in range(5):
        jobs.put(number)
    assert [done.get() for _ in range(5)] == [0, 1, 4, 9, 16]
    jobs.put(None)
    worker.join()
    assert done.poll() is None


def test_what_is_polled_is_the_oldest() -> None:
    channel: HostChannel[str] = open_device("cpu").make_channel()
    channel.put("a")
    channel.put("b")
    assert [channel.poll(), channel.poll(), channel.poll()] == ["a", "b", None]


def test_an_error_is_logged_and_raised_by_join(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("disk full")

    worker = open_device("cpu").start_worker("failing", fail)
    with pytest.raises(OSError, match="disk full"):
        worker.join()
    assert "thread failing has failed" in caplog.text
