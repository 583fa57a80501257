"""The engine on two ranks, each a thread with a virtual device, schedulers and all: what ranks decide must not depend
on how fast each one's device is. Requests that meet again and again in a pool too small for them, prefixes on the
host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from tempfile import TemporaryDirectory

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import BatchTokenOut, Message, PortArgs, TokenizedGenerateReq
from fenceline.ipc.rank_board import RankBoard, create_rank_board
from fenceline.layers.context import Shard
from fenceline.memory_order import Communicator
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler.ranks import TURN_DECODER, FollowingRank, LeadingRank, Turn
from fenceline.scheduler.scheduler import InFlight, Scheduler
from fenceline.vgpu.device import VgpuDevice
from fenceline.vgpu.gpu import VirtualGpu
from fenceline.vgpu.peers import Grain, Group, PeerRank
from fenceline.vgpu.proving.oracle import Oracle, Query
from fenceline.vgpu.proving.script import Arrival, Scenario, Script
from fenceline.vgpu.proving.steps import make_config
from fenceline.vgpu.threads import Channel, join_all

NUM_RANKS = 2
_GRAIN = Grain(capacity=1, vector_bytes=1 << 16)
_MAX_STEPS = 2000


def make_scenario(random: Random) -> Scenario:
    """A function of the seed: half of the requests share a prefix with another, in a pool that holds few of them."""
    script = Script(random)
    families = [script.prompt(8, 14) for _ in range(3)]
    for turn in range(8):
        prompt = families[turn % 3] + script.prompt(1, 6)
        script.add(turn + random.randrange(2), prompt, random.randint(2, 5))
    return script.scenario(
        max_total_tokens=random.choice((40, 48)),
        max_running_requests=3,
        chunked_prefill_size=16,
        page_size=4,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_write_policy=random.choice(("write_back", "write_through")),
        hicache_io_backend="direct",
        retract_policy="offload",
        schedule_conservativeness=0.01,
    )


@lru_cache
def _oracle(folder: str) -> Oracle:
    return Oracle(folder)


class _Ended(Exception):
    """Rank 0 makes no more turns."""


class RankRun:
    """One run. ``answers[rank]``: output ids by request."""

    def __init__(self, gpu: VirtualGpu, scenario: Scenario, severed: frozenset[str]) -> None:
        self.gpu, self._severed = gpu, severed
        self._arrivals = scenario.arrivals
        self.config: EngineConfig = make_config(scenario.flags, VgpuDevice.kind)
        self.answers: list[dict[str, list[int]]] = [{} for _ in range(NUM_RANKS)]
        self.num_steps = self.num_tokens = 0
        self._group = Group(gpu, NUM_RANKS, _GRAIN)
        self._joined: list[int] = []

    def run(self) -> str:
        """Run both ranks to their end; what is wrong with the answers, "" if nothing is."""
        with TemporaryDirectory(prefix="fenceline-prove-") as folder:
            ports = PortArgs(scheduler=f"ipc://{folder}/scheduler", detokenizer="", tokenizer="")
            create_rank_board(ports, NUM_RANKS)
            turns: Channel[bytes] = self.gpu.channel()
            workers = [
                self.gpu.spawn(f"rank{rank}", self._body(rank, ports, turns), rank)
                for rank in range(NUM_RANKS)
            ]
            join_all(workers)
        if self.answers[0] != self.answers[1]:
            return f"ranks give different answers: {self.answers}"
        return self._compare()

    def _compare(self) -> str:
        """The answers, and each request's alone."""
        oracle = _oracle(self.config.model.model_path)
        for message in (arrival.message for arrival in self._arrivals):
            assert isinstance(message, TokenizedGenerateReq), "nothing else is sent"
            stops = frozenset(self.config.model.eos_token_ids)
            query = Query(tuple(message.input_ids), 0, stops, message.sampling_params.max_new_tokens)
            for index, token in enumerate(self.answers[0][message.rid]):
                step = oracle.answer(query).step(index)
                self.num_tokens += 1
                if token not in step.close | {step.token}:
                    return f"{message.rid}: output {index} is {token} in place of {step.token}"
                if token != step.token:
                    break  # rounding: what follows is another answer
        return ""

    def _body(self, rank: int, ports: PortArgs, turns: Channel[bytes]) -> Callable[[], None]:
        def body() -> None:
            device = VgpuDevice(self._severed, self.gpu)
            backend = PeerRank(self._group, rank, self._severed)
            self._joined.append(rank)
            self.gpu.rotation.block_until(lambda: len(self._joined) == NUM_RANKS, "the other ranks")
            communicator = Communicator("tp", device, device.forward, backend)
            runner = ModelRunner(self.config, device, False, Shard(rank, NUM_RANKS, communicator))
            loop = _RankLoop(self, rank, runner, RankBoard(ports, rank, NUM_RANKS), turns)
            loop.run()
            device.synchronize()

        return body


class _RankLoop:
    """A scheduler of one rank, its inbox and its outbox."""

    def __init__(
        self, run: RankRun, rank: int, runner: ModelRunner, board: RankBoard, turns: Channel[bytes]
    ) -> None:
        self._run, self._rank, self._turns = run, rank, turns
        self._arrivals = deque(run._arrivals if rank == 0 else ())
        self._step_no = 0
        self._flight: InFlight | None = None
        self.scheduler = Scheduler(run.config, runner, self, self)
        if rank == 0:
            self.scheduler.ranks = LeadingRank(board, runner, self.drain, [turns.put])
        else:
            self.scheduler.ranks = FollowingRank(board, runner, self._receive)

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """See ``scheduler.scheduler.Inbox``. If it would block, the other rank goes on."""
        if block:
            self._run.gpu.rotation.give_way()
        if block and timeout_ms is None and self._arrivals:
            self._step_no = max(self._step_no, self._arrivals[0].step)
        found: list[Arrival] = []
        while self._arrivals and self._arrivals[0].step <= self._step_no:
            found.append(self._arrivals.popleft())
        return [arrival.message for arrival in found]

    def _receive(self) -> Turn:
        data = self._turns.get()
        if not data:
            raise _Ended
        return TURN_DECODER.decode(data)

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        """See ``scheduler.scheduler.Outbox``."""
        for out in message.outs:
            self._run.answers[self._rank].setdefault(out.rid, []).extend(out.output_ids)

    def to_tokenizer(self, message: Message) -> None:
        """See ``scheduler.scheduler.Outbox``."""

    def run(self) -> None:
        """Rank 0 until everything is answered and every transfer has ended; the other until rank 0 has ended."""
        scheduler = self.scheduler
        while (
            self._rank
            or self._arrivals
            or self._flight is not None
            or scheduler.reqs
            or scheduler.memory.num_outstanding
        ):
            assert self._step_no < _MAX_STEPS, f"not done after {_MAX_STEPS} steps"
            try:
                self._flight = scheduler.step(self._flight)
            except _Ended:
                break
            self._step_no += 1
        if self._rank == 0:
            self._turns.put(b"")
            self._run.num_steps = scheduler.num_launched
        assert not scheduler.reqs and self._flight is None, "ranks end together"
        scheduler.memory.check_books(every_page=True)
