"""Which replica gets a request, and what a front end of several replicas is told."""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fenceline
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import LoadBalanceMethod, ServerArgs
from fenceline.frontend.control import ControlClient
from fenceline.frontend.load_balance import LoadBalancer
from fenceline.frontend.metrics import Metrics
from fenceline.frontend.replica_link import ReplicaLink
from fenceline.frontend.request_types import RequestError
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchTokenOut,
    CancelFlushReq,
    ControlReply,
    FatalError,
    FinishReason,
    FlushCacheReq,
    InternalState,
    Message,
    PauseGenerationReq,
    SchedulerReady,
    ShutdownReq,
    StatsReport,
    TokenizedGenerateReq,
    TokenOut,
    UpdateWeightsReq,
    id_array,
)
from fenceline.sampling.sampling_params import SamplingParams

METHODS: tuple[LoadBalanceMethod, ...] = ("round_robin", "shortest_queue", "cache_aware")


def prompt(seed: int, num_tokens: int = 200) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000) for _ in range(num_tokens)]


def place(balancer: LoadBalancer, tokens: list[int], extra_key: str = "") -> int:
    replica = balancer.choose(tokens, extra_key)
    balancer.begun(replica, len(tokens))
    return replica


def test_in_turn() -> None:
    balancer = LoadBalancer("round_robin", 3)
    assert [place(balancer, prompt(0)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_shortest_queue() -> None:
    balancer = LoadBalancer("shortest_queue", 3)
    assert sorted(place(balancer, prompt(seed)) for seed in range(3)) == [0, 1, 2]
    balancer.ended(1, 200)
    assert place(balancer, prompt(0)) == 1
    balancer.ended(2, 200)
    balancer.ended(0, 200)
    balancer.begun(2, 10)
    balancer.begun(0, 5)
    balancer.ended(1, 200)
    balancer.begun(1, 7)
    assert place(balancer, prompt(0)) == 0, "as many requests, and the fewest tokens"


def test_a_prefix_goes_where_it_went_before() -> None:
    balancer = LoadBalancer("cache_aware", 4)
    first = {seed: place(balancer, prompt(seed)) for seed in range(4)}
    assert sorted(first.values()) == [0, 1, 2, 3], "new prompts are spread"
    for seed, replica in first.items():
        assert place(balancer, [*prompt(seed), *prompt(99, 70)]) == replica
    assert place(balancer, prompt(0)) == first[0]
    assert place(balancer, prompt(0), "other") != first[0], "its namespace has nothing of it, and it has most to do"
    balancer.flushed()
    assert place(balancer, prompt(0)) != first[0]


def test_a_prefix_that_all_share_spreads_over_replicas() -> None:
    balancer = LoadBalancer("cache_aware", 4)
    for seed in range(400):
        place(balancer, [*prompt(0, 640), *prompt(seed, 64)])
    assert max(balancer.num_reqs) - min(balancer.num_reqs) <= max(5, min(balancer.num_reqs) // 4 + 1)
    assert sum(balancer.num_reqs) == 400


@given(st.sampled_from(METHODS), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_loads_are_those_of_the_requests_in_flight(
    method: LoadBalanceMethod, num_replicas: int, requests: list[tuple[int, bool]]
) -> None:
    balancer = LoadBalancer(method, num_replicas)
    running: deque[tuple[int, int]] = deque()
    for seed, ends in requests:
        if ends and running:
            balancer.ended(*running.popleft())
        else:
            tokens = prompt(seed, 64 * seed + 3)
            replica = place(balancer, tokens)
            assert 0 <= replica < num_replicas
            running.append((replica, len(tokens)))
    by_replica = [sum(replica == number for replica, _ in running) for number in range(num_replicas)]
    assert list(balancer.num_reqs) == by_replica


# --- the link


class FakeLink:
    """A replica's link: what was sent, and what it says next."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.news: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.closed = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        pass

    async def receive(self) -> list[Message]:
        return await self.news.get()

    def close(self) -> None:
        self.closed = True


def config(num: int, method: LoadBalanceMethod = "round_robin") -> EngineConfig:
    return resolve(
        ServerArgs(
            model_path=fenceline.demo_model_path(), device="cpu", dp_size=num, load_balance_method=method, random_seed=1
        )
    )


def req(rid: str, replica: int | None = None, seed: int | None = None) -> TokenizedGenerateReq:
    params = SamplingParams(seed=seed)
    return TokenizedGenerateReq(rid=rid, input_ids=id_array([1, 2, 3]), sampling_params=params, replica=replica)


def last(rid: str) -> BatchTokenOut:
    end = FinishReason(type="stop")
    counts = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0}
    return BatchTokenOut(outs=[TokenOut(rid=rid, output_ids=[5], finish_reason=end, **counts)])


def test_a_request_and_its_abort_go_to_one_replica() -> None:
    links = [FakeLink(), FakeLink()]
    link = ReplicaLink(links, config(2))
    for rid in ("a", "b", "c"):
        link.send(req(rid))
    link.send(req("d", replica=1, seed=9))
    link.send(AbortReq(rid="b"))
    link.send(AbortReq(rid="unknown"))
    everybody: list[Message] = [AbortReq(abort_all=True), PauseGenerationReq(id="p", mode="retract"), ShutdownReq()]
    for message in everybody:
        link.send(message)
    names = [[message.rid for message in each.sent if isinstance(message, TokenizedGenerateReq)] for each in links]
    assert names == [["a", "c"], ["b", "d"]]
    assert AbortReq(rid="b") not in links[0].sent and AbortReq(rid="b") in links[1].sent
    for each in links:
        assert each.sent[-3:] == everybody and AbortReq(rid="unknown") not in each.sent
    seeds = [m.sampling_params.seed for each in links for m in each.sent if isinstance(m, TokenizedGenerateReq)]
    assert None not in seeds and len(set(seeds)) == 4 and seeds[3] == 9, "replicas would draw the same"


def test_caches_are_flushed_on_all_replicas_or_on_none() -> None:
    async def run() -> None:
        links = [FakeLink(), FakeLink()]
        link = ReplicaLink(links, config(2))

        def flushes() -> list[list[str]]:
            return [[message.id for message in each.sent if isinstance(message, FlushCacheReq)] for each in links]

        async def refusals(id: str) -> list[int]:
            replies = await asyncio.wait_for(link.receive(), 10)
            assert all(isinstance(r, ControlReply) and r.id == id and not r.success for r in replies)
            assert "requests are pending" in replies[0].message  # type: ignore[union-attr]
            return [reply.replica for reply in replies]  # type: ignore[union-attr]

        link.send(FlushCacheReq(id="idle"))
        assert flushes() == [["idle"]] * 2
        link.send(req("a", replica=0))
        link.send(FlushCacheReq(id="busy"))  # replica 1 has no request, and would do it
        assert flushes() == [["idle"]] * 2 and await refusals("busy") == [0, 1]
        link.send(FlushCacheReq(id="patient", wait=True))
        link.send(FlushCacheReq(id="impatient", wait=True))
        link.send(CancelFlushReq(id="impatient"))
        assert flushes() == [["idle"]] * 2 and await refusals("impatient") == [0, 1]
        links[0].news.put_nowait([last("a")])
        await link.receive()
        assert flushes() == [["idle", "patient"]] * 2
        link.send(CancelFlushReq(id="patient"))  # too late: they answer
        assert all(CancelFlushReq(id="patient") in each.sent for each in links)
        link.close()

    asyncio.run(run())


def test_a_flush_that_does_not_wait_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas wait with it for requests that are about to end; one that does not end must not keep it for ever."""
    monkeypatch.setattr("fenceline.frontend.control.FLUSH_GRACE_S", 0.0)

    async def run() -> None:
        sent: asyncio.Queue[Message] = asyncio.Queue()
        control = ControlClient(sent.put_nowait)
        asked = asyncio.ensure_future(control.flush_cache())
        flush, cancel = [await asyncio.wait_for(sent.get(), 10) for _ in range(2)]
        assert isinstance(flush, FlushCacheReq) and not flush.wait
        assert cancel == CancelFlushReq(id=flush.id)
        control.resolve(ControlReply(flush.id, False, "requests are pending"))
        assert not (await asked).success

    asyncio.run(run())


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("message", [FlushCacheReq(id="it"), UpdateWeightsReq(id="it", model_path="x")])
def test_prefixes_are_forgotten_only_where_caches_were_emptied(message: Message, success: bool) -> None:
    async def run() -> None:
        links = [FakeLink(), FakeLink()]
        link = ReplicaLink(links, config(2, "cache_aware"))

        async def placed(rid: str) -> int:
            tokens = prompt(1)
            link.send(TokenizedGenerateReq(rid=rid, input_ids=id_array(tokens), sampling_params=SamplingParams()))
            number = next(number for number, each in enumerate(links) if _has(each, rid))
            links[number].news.put_nowait([last(rid)])
            await link.receive()
            return number

        first = await placed("first")
        assert first == 0 == await placed("again")
        link.send(req("other", replica=0))  # the replica with the prefix has more to do
        assert await placed("with load") == 0
        links[0].news.put_nowait([last("other")])
        await link.receive()
        link.send(message)
        for each in links:
            each.news.put_nowait([ControlReply("it", success)])
            (reply,) = await link.receive()
            assert isinstance(reply, ControlReply)
        link.send(req("other", replica=0))
        assert await placed("later") == (1 if success else 0)
        link.close()

    asyncio.run(run())


def _has(link: FakeLink, rid: str) -> bool:
    return any(isinstance(message, TokenizedGenerateReq) and message.rid == rid for message in link.sent)


def test_while_weights_are_replaced_other_questions_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlClient._ask_all, "__defaults__", (0.01,))
    monkeypatch.setattr(ControlClient._ask, "__defaults__", (0.01,))

    async def run() -> None:
        sent: list[Message] = []
        control = ControlClient(sent.append)
        with pytest.raises(RequestError, match="did not answer within 0.01 s"):
            await control.internal_states()
        assert not control.updating
        update = asyncio.ensure_future(control.update_weights(UpdateWeightsReq(id="u", model_path="x")))
        await asyncio.sleep(0)
        assert control.updating
        states = asyncio.ensure_future(control.internal_states())
        done, _ = await asyncio.wait((states,), timeout=0.1)
        assert not done, "it waits beyond its own limit"
        control.resolve(ControlReply("u", True))
        assert (await update).success and not control.updating
        with pytest.raises(RequestError, match="did not answer"):
            await states

    asyncio.run(run())


def test_what_is_still_awaited_of_replicas_ends_with_the_link() -> None:
    """A front end that ends for another reason than a cancelled receive, such as one replica's failure."""

    class BrokenLink(FakeLink):
        async def receive(self) -> list[Message]:
            raise RuntimeError("the socket is gone")

    async def run() -> None:
        link = ReplicaLink([FakeLink(), BrokenLink()], config(2))
        with pytest.raises(RuntimeError, match="the socket is gone"):
            await link.receive()
        link.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 10)
        assert all(task.cancelled() for task in others)

    asyncio.run(run())


def test_what_comes_from_replicas_is_told_apart() -> None:
    async def run() -> None:
        links = [FakeLink(), FakeLink()]
        link = ReplicaLink(links, config(2, "shortest_queue"))
        ready = SchedulerReady(
            max_total_num_tokens=100, max_running_requests=8, max_req_input_len=50, context_length=60, memory_bytes={}
        )
        links[0].news.put_nowait([ready])
        links[1].news.put_nowait([msgspec.structs.replace(ready, max_total_num_tokens=90, max_req_input_len=40)])
        (both,) = await link.receive()
        assert isinstance(both, SchedulerReady)
        assert (both.max_total_num_tokens, both.max_running_requests, both.max_req_input_len) == (90, 16, 40)
        assert both.num_replicas == 2, "the front end admits what fits into all of them"
        link.send(req("a"))
        link.send(req("b"))
        links[1].news.put_nowait([last("b"), FatalError(source="scheduler", message="gone")])
        done, fatal = await link.receive()
        assert isinstance(done, BatchTokenOut) and done.replica == 1
        assert fatal == FatalError(source="replica 1: scheduler", message="gone")
        link.send(req("c"))
        assert [m.rid for m in links[1].sent if isinstance(m, TokenizedGenerateReq)] == ["b", "c"]
        waiting = asyncio.ensure_future(link.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        link.close()
        assert all(each.closed for each in links)

    asyncio.run(run())


def test_control_messages_are_answered_by_all() -> None:
    async def run() -> None:
        sent: list[Message] = []
        control = ControlClient(sent.append, 2)

        async def ask(replies: list[dict[str, object]]) -> ControlReply:
            asked = asyncio.ensure_future(control.pause("abort"))
            await asyncio.sleep(0)
            for number in (1, 0):
                assert not asked.done()
                control.resolve(ControlReply(id=sent[-1].id, replica=number, **replies[number]))  # type: ignore
                await asyncio.sleep(0)
            return await asked

        both = await ask([{"success": True, "message": "paused"}] * 2)
        assert both.success and both.message == "paused"
        one = await ask([{"success": True, "message": "paused"}, {"success": False, "message": "no"}])
        assert not one.success and one.message == "replica 0: paused; replica 1: no"
        parts = await ask([{"success": True, "payload": b"{}"}, {"success": True, "payload": b"[1]"}])
        assert parts.payload == b"[{},[1]]"
        asked = asyncio.ensure_future(control.pause("abort"))
        await asyncio.sleep(0)
        control.resolve(ControlReply(id=sent[-1].id, success=True))
        control.fail(RequestError(503, "gone"))
        with pytest.raises(RequestError, match="gone"):
            await asked

    asyncio.run(run())


def state(num_running: int) -> InternalState:
    return InternalState(
        num_running_reqs=num_running, num_queue_reqs=0, num_used_tokens=0, num_evictable_tokens=0,
        max_total_num_tokens=9, token_usage=0.0,
        cache_hit_rate=0.0, gen_throughput=0.0, num_retractions=0, num_aborts=0, num_generated_tokens=0,
        num_prompt_tokens=0, num_cached_tokens=0, new_token_ratio=0.0, paused=False, memory_bytes={},
    )  # fmt: skip


def test_metrics_carry_the_replica() -> None:
    metrics = Metrics("m", num_replicas=2)
    for replica in range(2):
        metrics.report(StatsReport(state=state(3 + replica)).state, replica)
    text = metrics.exposition().decode()
    for name in ("fenceline", "sglang"):
        assert f'{name}:num_running_reqs{{dp_rank="0",model_name="m"}} 3.0' in text
        assert f'{name}:num_running_reqs{{dp_rank="1",model_name="m"}} 4.0' in text
    assert text.count("# TYPE fenceline:num_running_reqs gauge") == 1
    alone = Metrics("m")
    alone.report(state(3))
    assert 'fenceline:num_running_reqs{model_name="m"} 3.0' in alone.exposition().decode()
