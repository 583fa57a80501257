"""What several ranks' storages have done as far as all have: whatever each says and in whatever order it is heard."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fenceline.mem_cache.storage.agreement import NewsKind, StorageAckCodec, StorageAgreement, StorageNews
from fenceline.mem_cache.storage.controller import Ack, Done, Fetched, Found, TimedOut, Written, apply
from fenceline.mem_cache.storage.worker import Outcome, Prefetch

NUM_KEYS = 6


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, int, bool, bool]:
    """Of a prefetch on one rank: pages found, pages read, whether it is slow, whether its query fails."""
    found = draw(st.integers(0, NUM_KEYS))
    return found, draw(st.integers(0, found)), draw(st.booleans()), draw(st.booleans())


def acks_of(op: Prefetch, life: tuple[int, int, bool, bool], agreed: Prefetch) -> Iterator[Ack | None]:
    """What one rank's controller says of ``op``, None while it waits for the scheduler; ``agreed`` is what the
    scheduler knows, and asks for by fetch or cancel."""
    num_found, num_read, slow, failed = life
    if slow:
        yield TimedOut(op)
    if num_found == 0 or failed:
        yield Done(op, Outcome.SHORT if failed else Outcome.ABSENT)
        return
    yield Found(op, num_found)
    while agreed.num_found == 0 and not agreed.cancelled:
        yield None
    if agreed.cancelled:
        yield Done(op, Outcome.CANCELLED)
        return
    wanted = agreed.num_found
    for first in range(min(num_read, wanted)):
        yield Fetched(op, first, 1)
    yield Done(op, Outcome.COMPLETE if num_read >= wanted else Outcome.SHORT)


@given(st.lists(lives(), min_size=2, max_size=4), st.integers(0, 2**32))
def test_a_failure_on_one_rank_is_a_miss_on_all(lives: list[tuple[int, int, bool, bool]], seed: int) -> None:
    random = Random(seed)  # whose turn it is
    num_ranks = len(lives)
    ops = [Prefetch(7, [bytes(32)] * NUM_KEYS) for _ in lives]
    codecs, agreement = [StorageAckCodec() for _ in lives], StorageAgreement(num_ranks)
    saying = [acks_of(op, life, op) for op, life in zip(ops, lives, strict=True)]
    quiet = 0
    while not ops[0].over:
        rank = random.randrange(num_ranks)
        ack = next(saying[rank], None)
        quiet = quiet + 1 if ack is None else 0
        assert quiet < 1000, "the ranks wait for each other"
        told = codecs[rank].encode([] if ack is None else [ack])
        agreed = agreement.add(rank, told)
        for codec, op in zip(codecs, ops, strict=True):
            for news in codec.decode(agreed):
                assert isinstance(news, Found | Fetched | Done | TimedOut) and news.op is op
                assert not isinstance(news, Fetched) or news.first == op.num_fetched
                apply(news)
                if isinstance(news, Found) and news.num_pages == 0:
                    op.cancelled = True
    found = min(0 if failed else found for found, _, _, failed in lives)
    read = min(min(num_read, found) for _, num_read, _, _ in lives)
    any_slow = any(slow for _, _, slow, _ in lives)
    for op in ops:
        assert (op.num_found, op.num_fetched) == (found, read if found else 0)
        assert op.outcome == ops[0].outcome and (op.outcome is Outcome.COMPLETE) == (found > 0 and read == found)
        assert op.timed_out <= any_slow
    assert all(next(each, None) is None for each in saying)


def test_waits_end_with_the_first_rank_and_writes_with_the_last() -> None:
    """A wait that is over on one rank is over on all once all have said something of the prefetch; a write when all
    have written."""
    ops = [Prefetch(1, [bytes(32)]) for _ in range(2)]
    codecs, agreement = [StorageAckCodec(), StorageAckCodec()], StorageAgreement(2)
    assert agreement.add(0, codecs[0].encode([TimedOut(ops[0])])) == []
    assert agreement.add(1, codecs[1].encode([Found(ops[1], 1)])) == [StorageNews(NewsKind.TIMED_OUT, 1)]
    assert agreement.add(0, codecs[0].encode([Written(4, 3), Written(5, 0)])) == []
    written = agreement.add(1, codecs[1].encode([Written(5, 2), Written(4, 2)]))
    assert codecs[0].decode(written) == [Written(5, 0), Written(4, 2)]
