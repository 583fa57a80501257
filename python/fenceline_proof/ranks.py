"""The engine on two ranks, each a thread with a scheduler and a virtual device: the decisions of the ranks must not
depend on how fast their devices and disks are, nor on which of them fails. The requests compete for a pool that is too
small for them, with prefixes on the host and in storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import AbortReq, BatchTokenOut, ControlReply, Message, PortArgs, UpdateWeightsReq
from fenceline.ipc.rank_board import RankBoard, create_rank_board
from fenceline.layers.context import Shard
from fenceline.mem_cache.storage.controller import StorageController
from fenceline.memory_order import Communicator
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.ranks import TURN_DECODER, FollowingRank, LeadingRank, Turn
from fenceline.scheduler.scheduler import Scheduler
from fenceline_proof.answers import Transcript
from fenceline_proof.bad_days import BadDays, order_calls
from fenceline_proof.hicache_workloads import with_storage_limits
from fenceline_proof.oracle import Oracle
from fenceline_proof.pictures import PICTURES, with_pictures
from fenceline_proof.script import Flag, Flags, Scenario, Script
from fenceline_proof.speculative_workloads import chains_beside_states, without_drafts
from fenceline_proof.steps import STEP_S, make_config, setting_of
from fenceline_proof.tiny_model import PLAIN, tiny_model_path
from fenceline_sim.device import VgpuDevice
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.peers import Grain, Group, PeerRank
from fenceline_sim.threads import Channel, join_all

NUM_RANKS = 2
_GRAIN = Grain(capacity=1, vector_bytes=1 << 16)
_MAX_STEPS = 2000
_MODELS = ("odd", "windows", "experts", PICTURES, "sparse")
_HOT = {"temperature": 4.0}  # at which every token of the vocabulary is drawn


def make_scenario(random: Random) -> Scenario:
    """A function of the seed: half of the requests share a prefix with another, in a pool that holds few of them. Some
    runs speculate, and some have recurrent layers."""
    script = Script(random)
    _requests(script)
    flags = _with_states(random, _flags(script))
    return _illustrated(script.scenario(**flags, **_new_weights(script, flags)), random)


def _with_states(random: Random, flags: Flags) -> Flags:
    """The model with recurrent layers in some runs, with drafts of its own. The other runs stay as they are."""
    own = Random(str(random.getstate()[1][:8]))
    if own.random() >= 0.4:
        return flags
    if "draft" in flags:
        flags = {**without_drafts(flags), **chains_beside_states(own)}
    return {**flags, "model": "states", "max_mamba_cache_size": own.choice((4, 6)), "ep_size": 1}


def _illustrated(scenario: Scenario, random: Random) -> Scenario:
    return with_pictures(scenario, random) if scenario.flags.get("model") == PICTURES else scenario


def make_storage_scenario(random: Random) -> Scenario:
    """The same with storage. Some requests are aborted, then all are and device and host are emptied; the same prompts
    come back, and only storage has them."""
    script = Script(random)
    families = _requests(script, 12, 18)  # some pages, so that they are fetched in several batches
    for turn in random.sample(range(8), 2):
        script.send(turn + random.randint(1, 3), AbortReq(rid=f"r{turn}"))
    step = random.randint(9, 16)
    script.empty(step)
    for turn in range(4):
        rid = script.add(step + 1 + turn, families[turn % 3] + script.prompt(1, 6), random.randint(2, 5))
        if random.random() < 0.2:
            script.send(step + 2 + turn, AbortReq(rid=rid))
    policy = random.choice(("best_effort", "wait_complete", "timeout"))
    flags: dict[str, Flag] = {
        **_with_states(random, _flags(script)),
        "hicache_write_policy": "write_through", "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": policy,
    }  # fmt: skip
    if policy == "timeout":
        flags["hicache_storage_prefetch_timeout"] = random.choice((0.02, 0.1))
    scenario = script.scenario(**(flags if random.random() < 0.3 else with_storage_limits(random, flags)))
    return _illustrated(scenario, random)


def _requests(script: Script, shortest: int = 8, longest: int = 14) -> Sequence[list[int]]:
    """Adds the requests r0 to r7; returns the three beginnings of their prompts, from ``shortest`` to ``longest``
    tokens."""
    random = script.random
    families = [script.prompt(shortest, longest) for _ in range(3)]
    for turn in range(8):
        prompt = families[turn % 3] + script.prompt(1, 6)
        options = random.choice(({}, {}, _HOT, _HOT, {"temperature": 1.0, "top_k": 8, "top_p": 0.9}))
        script.add(turn + random.randrange(2), prompt, random.randint(2, 5), **options)
    return families


def _flags(script: Script) -> Flags:
    random = script.random
    flags: dict[str, Flag] = {
        "max_total_tokens": random.choice((40, 48)), "max_running_requests": 3, "chunked_prefill_size": 16,
        "page_size": 4, "enable_hierarchical_cache": True, "hicache_ratio": 2.0,
        "hicache_write_policy": random.choice(("write_back", "write_through")), "hicache_io_backend": "direct",
        "retract_policy": "offload", "schedule_conservativeness": 0.01,
    }  # fmt: skip
    if random.random() > 0.6:
        flags |= {"draft": random.choice(("EAGLE3", "ITSELF")), "speculative_num_steps": 2}
        flags |= script.graphs(1, 2, 3)
    if flags.get("draft") != "EAGLE3":  # which is the plain model's
        flags["model"] = model = random.choice(_MODELS)
        if model == "experts":
            flags["ep_size"] = random.choice((1, NUM_RANKS))
    return flags


def _new_weights(script: Script, flags: Flags) -> Flags:
    """In half of the runs the weights are replaced by the same ones, which in half of these some rank cannot read."""
    random = script.random
    if random.random() < 0.5:
        return {}
    folder = tiny_model_path(str(flags.get("model", PLAIN)))
    script.send(random.randrange(2, 14), UpdateWeightsReq(id="weights", model_path=folder))
    # A rank, or a number that none has.
    return {"rank_without_weights": random.randrange(2 * NUM_RANKS)}


@lru_cache
def _oracle(folder: str) -> Oracle:
    return Oracle(folder)


class _Ended(Exception):
    """Rank 0 makes no more turns."""


class RankRun:
    """One run. ``answers[rank]``: by request, its output ids and how it has ended."""

    def __init__(self, gpu: VirtualGpu, scenario: Scenario, severed: frozenset[str]) -> None:
        self.gpu, self._severed = gpu, severed
        self.scenario = scenario
        self.answers: list[dict[str, list[int | str]]] = [{} for _ in range(NUM_RANKS)]
        # Of each rank and each update of the weights whether it says that it was made.
        self.updated: list[list[bool]] = [[] for _ in range(NUM_RANKS)]
        self.num_tokens = 0
        self.transcript: Transcript  # of rank 0
        self._group = Group(gpu, NUM_RANKS, _GRAIN)
        self._joined: list[int] = []

    def run(self) -> str:
        """Run both ranks to their end; what is wrong with the answers and with the storages, "" if nothing is."""
        with TemporaryDirectory(prefix="fenceline-prove-") as folder:
            ports = PortArgs(scheduler=f"ipc://{folder}/scheduler", detokenizer="", tokenizer="")
            create_rank_board(ports, NUM_RANKS)
            turns: Channel[bytes] = self.gpu.channel()
            configs = [self._config(rank, Path(folder)) for rank in range(NUM_RANKS)]
            bodies = [self._body(rank, config, ports, turns) for rank, config in enumerate(configs)]
            join_all([self.gpu.spawn(f"rank{rank}", body, rank) for rank, body in enumerate(bodies)])
        if self.answers[0] != self.answers[1]:
            return f"ranks give different answers: {self.answers}"
        found = self.transcript.compare(_oracle(configs[0].model.model_path))
        self.num_tokens = found.num_tokens
        return "\n".join(part for part in (found.wrong, self._compare_updates()) if part)

    def _config(self, rank: int, folder: Path) -> EngineConfig:
        """Of a rank whose storage may fail, the directory is its own."""
        flags = dict(self.scenario.flags)
        if "hicache_storage_backend" in flags:
            directory = folder / ("storage" if self._shares_storage else f"storage-{rank}")
            directory.mkdir(mode=0o700, exist_ok=True)
            flags["hicache_storage_dir"] = str(directory)
        flags.pop("rank_without_weights", None)
        ep_size = int(str(flags.pop("ep_size", 1)))
        config = make_config(flags, VgpuDevice.kind)
        return replace(config, server_args=replace(config.server_args, tp_size=NUM_RANKS, ep_size=ep_size))

    @property
    def _shares_storage(self) -> bool:
        """Whether the ranks have one directory, as those of one host do. Its limits and failures are those of all
        ranks together, and are left to other runs."""
        return not {"hicache_storage_size", "hicache_storage_key", "bad_days"} & set(self.scenario.flags)

    def spoil_storage(self, rank: int, controller: StorageController) -> None:
        """In some runs ``rank``'s storage fails, in some of them on this rank alone."""
        days = self.scenario.flags.get("bad_days")
        if days is not None and int(str(days)) % (NUM_RANKS + 1) in (rank, NUM_RANKS):
            BadDays(controller, int(str(days)))

    def fail_to_read(self, rank: int, runner: ModelRunner) -> None:
        if self.scenario.flags.get("rank_without_weights") != rank:
            return

        def unreadable(weights: object) -> None:
            raise OSError("the file cannot be read")

        runner._check_weights = unreadable  # type: ignore[method-assign]

    def _compare_updates(self) -> str:
        """Weights that one rank cannot read are replaced on none."""
        rank = self.scenario.flags.get("rank_without_weights")
        right = [[] if rank is None else [int(str(rank)) >= NUM_RANKS]] * NUM_RANKS
        return "" if self.updated == right else f"updates of the weights were made: {self.updated}, not {right}"

    def _body(self, rank: int, config: EngineConfig, ports: PortArgs, turns: Channel[bytes]) -> Callable[[], None]:
        def body() -> None:
            device = VgpuDevice(self._severed, self.gpu)
            backend = PeerRank(self._group, rank, self._severed)
            self._joined.append(rank)
            self.gpu.rotation.block_until(lambda: len(self._joined) == NUM_RANKS, "the other ranks")
            communicator = Communicator("tp", device, device.forward, backend)
            shard = Shard(rank, NUM_RANKS, communicator, config.server_args.ep_size)
            runner = ModelRunner(config, device, False, shard)
            self.fail_to_read(rank, runner)
            loop = _RankLoop(self, rank, config, runner, RankBoard(ports, rank, NUM_RANKS), turns)
            loop.run()
            device.synchronize()

        return body


class _RankLoop:
    def __init__(
        self, run: RankRun, rank: int, config: EngineConfig, runner: ModelRunner, board: RankBoard,
        turns: Channel[bytes],
    ) -> None:  # fmt: skip
        self._run, self._rank, self._turns = run, rank, turns
        self._arrivals = deque(run.scenario.arrivals if rank == 0 else ())
        self._step_no = self._num_readings = 0
        self._flight: InFlight | None = None
        if runner.storage is not None:
            controller = runner.storage.controller
            order_calls(controller, self._clock)
            run.spoil_storage(rank, controller)
        self.scheduler = Scheduler(config, runner, self, self)
        if rank == 0:
            run.transcript = Transcript(setting_of(self.scheduler))
            self.scheduler.ranks = LeadingRank(board, runner, self.drain, [turns.put])
        else:
            self.scheduler.ranks = FollowingRank(board, runner, self._receive)

    def _clock(self) -> float:
        """Seconds, computed from the number of steps. Each call returns a later time."""
        self._num_readings += 1
        return self._step_no * STEP_S + self._num_readings * 1e-6

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """See ``scheduler.scheduler.Inbox``. If it would block, the other rank continues."""
        if block:
            self._run.gpu.rotation.give_way()
        self._run.transcript.turn()
        if block and timeout_ms is None and self._arrivals:
            self._step_no = max(self._step_no, self._arrivals[0].step)
        found: list[Message] = []
        while self._arrivals and self._arrivals[0].step <= self._step_no:
            found.append(self._arrivals.popleft().message)
            self._run.transcript.received(found[-1])
        return found

    def _receive(self) -> Turn:
        data = self._turns.get()
        if not data:
            raise _Ended
        return TURN_DECODER.decode(data)

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        for out in message.outs:
            if self._rank == 0:
                self._run.transcript.sent(out)
            answer = self._run.answers[self._rank].setdefault(out.rid, [])
            answer += [*out.output_ids, *([] if out.finish_reason is None else [out.finish_reason.type])]

    def to_tokenizer(self, message: Message) -> None:
        if isinstance(message, ControlReply) and message.id == "weights":
            self._run.updated[self._rank].append(message.success)

    def run(self) -> None:
        """Run rank 0 until everything is answered and every transfer has ended, and the other rank until rank 0 has
        ended."""
        scheduler = self.scheduler
        while self._rank or self._arrivals or self._flight or scheduler.reqs or scheduler.memory.num_outstanding:
            assert self._step_no < _MAX_STEPS, f"not done after {_MAX_STEPS} steps"
            try:
                self._flight = scheduler.step(self._flight)
            except _Ended:
                break
            self._step_no += 1
        if self._rank == 0:
            self._turns.put(b"")
        assert not scheduler.reqs and self._flight is None, "ranks end together"
        scheduler.memory.check_memory(every_page=True)
        if scheduler.memory.tiers is not None:
            scheduler.memory.tiers.close()
