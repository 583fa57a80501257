"""The scheduler's process: sockets around a Scheduler, a watchdog beside it."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import zmq

from fenceline.config.engine_config import EngineConfig
from fenceline.config.nodes import agreed, described
from fenceline.ipc.child_process import Watchdog, freeze_garbage_collector, prepare_child
from fenceline.ipc.free_memory import FreeMemoryWatch
from fenceline.ipc.io_struct import (
    SCHEDULER_DECODER,
    BatchTokenOut,
    FatalError,
    Message,
    PortArgs,
    SchedulerReady,
    encode,
)
from fenceline.ipc.node_link import NodeListener, NodePeers, bind_tcp, own_address, own_interface
from fenceline.ipc.rank_board import RankBoard, rank_endpoint, rank_meeting
from fenceline.ipc.sockets import MAX_STEP_BYTES, MAX_STEP_MESSAGES, Inbox, bind_pull, connect_push
from fenceline.layers.context import Shard
from fenceline.memory_order import CollectiveBackend, Communicator, Device, PeerLostError, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler.core_dumps import CoreDumps, core_dump_environment, is_complete
from fenceline.scheduler.flight_dump import dump_and_log, dump_on_signal
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.ranks import (
    TURN_DECODER,
    FollowingRank,
    LeadingRank,
    RankLink,
    RanksDifferError,
    Turn,
)
from fenceline.scheduler.scheduler import InFlight, Scheduler

logger = logging.getLogger(__name__)


_QUIET_MS = 1000
_LOST_S = 10.0  # much longer than the parent takes to notice the end of a process and to kill the others
_RECORDS_S = 5.0  # for the flight records of ranks that differ


class ZmqInbox:
    """The scheduler's messages. Between steps, and when none has come for a second, freed memory is given back: a large
    batch leaves hundreds of megabytes of it."""

    def __init__(self, inbox: Inbox, watchdog: Watchdog, memory: FreeMemoryWatch) -> None:
        self._inbox = inbox
        self._watchdog = watchdog
        self._memory = memory

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """See :class:`fenceline.scheduler.scheduler.Inbox`."""
        if block:
            self._watchdog.waiting()
            self._wait(timeout_ms)
        else:
            self._memory.look()
        self._watchdog.busy()
        return self._inbox.drain(MAX_STEP_MESSAGES, MAX_STEP_BYTES)

    def _wait(self, timeout_ms: int | None) -> None:
        if timeout_ms is not None and timeout_ms <= _QUIET_MS:
            self._inbox.wait(timeout_ms)
        elif not self._inbox.wait(_QUIET_MS):
            self._memory.look()
            self._inbox.wait(None if timeout_ms is None else timeout_ms - _QUIET_MS)


class TurnInbox:
    """The turns of a rank that is not rank 0, from ``socket``. It gives memory back when :class:`ZmqInbox` does."""

    def __init__(self, socket: zmq.Socket[bytes], watchdog: Watchdog, memory: FreeMemoryWatch) -> None:
        self._socket = socket
        self._watchdog = watchdog
        self._memory = memory

    def receive(self) -> Turn:
        """Wait for the next one."""
        self._watchdog.waiting()
        self._memory.look()
        if not self._socket.poll(_QUIET_MS):
            self._memory.look()
        data = self._socket.recv()
        self._watchdog.busy()
        return TURN_DECODER.decode(data)


class ZmqOutbox:
    """The scheduler's news. Without a detokenizer tokens go straight to the tokenizer manager. Any thread may send."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], ports: PortArgs, skip_detokenizer: bool
    ) -> None:
        self._tokenizer = connect_push(context, ports.tokenizer)
        self._tokens = self._tokenizer if skip_detokenizer else connect_push(context, ports.detokenizer)
        self._lock = threading.Lock()  # a socket of zmq belongs to one thread at a time

    def to_detokenizer(self, message: BatchTokenOut | SchedulerReady) -> None:
        """See :class:`fenceline.scheduler.scheduler.Outbox`."""
        with self._lock:
            self._tokens.send(encode(message), zmq.NOBLOCK)

    def to_tokenizer(self, message: Message) -> None:
        """See :class:`fenceline.scheduler.scheduler.Outbox`."""
        data = encode(message)
        with self._lock:
            if not self._tokenizer.closed:
                self._tokenizer.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        """What a thread sends from now on is dropped. What has been sent gets a second to arrive."""
        with self._lock:
            self._tokens.close()
            self._tokenizer.close()


def ready_message(config: EngineConfig, scheduler: Scheduler) -> SchedulerReady:
    """What the front end must know of the scheduler's limits."""
    num_tokens = scheduler.memory.num_pages * config.server_args.page_size
    return SchedulerReady(
        max_total_num_tokens=num_tokens,
        max_running_requests=config.max_running_requests,
        max_req_input_len=min(
            config.model.context_length, num_tokens - scheduler.running.largest.num_slots + 1
        )
        - 1,
        context_length=config.model.context_length,
        memory_bytes=scheduler.worker.memory_bytes,
    )


def run_loop(scheduler: Scheduler) -> None:
    """Serve until told to stop and every request is done."""
    flight: InFlight | None = None
    while flight is not None or not scheduler.stopped:
        flight = scheduler.step(flight)


def run_scheduler_process(config: EngineConfig, ports: PortArgs, rank: int = 0) -> None:
    """Entry of the scheduler's process, one for each rank: load the model, say so, serve.

    Whatever goes wrong is told to the front end as :class:`FatalError` and ends the process with status 1.
    """
    num_ranks = config.server_args.tp_size
    name, log_level = scheduler_name(rank), config.server_args.log_level
    if rank == 0:
        prepare_child(name, log_level, ports)
    else:  # what goes well rank 0 says for all; what does not is this rank's own, and carries its name
        prepare_child(name, follower_log_level(log_level), ports, name)
    faulthandler.enable()
    dumps = enable_core_dumps(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    recorder: FlightRecorder | None = None
    device: Device | None = None
    link: RankLink | None = None
    watchdog = Watchdog(
        config.server_args.watchdog_timeout,
        lambda reason: _die_of_hang(ports, rank, recorder, _explained(reason, link)),
    )
    try:
        messages = None if rank else Inbox(context, ports.scheduler, SCHEDULER_DECODER)
        outbox = ZmqOutbox(context, ports, config.server_args.skip_tokenizer_init)
        begin = time.perf_counter()
        device = open_device(config.device, index=None if num_ranks == 1 else rank - config.local_ranks[0])
        logger.info("Opened the device (%s) in %.1f s", config.device, time.perf_counter() - begin)
        if device.kind == "cpu" and config.num_sharing > 1:
            torch.set_num_threads(max(torch.get_num_threads() // config.num_sharing, 1))
        shard = Shard() if num_ranks == 1 else _meet_ranks(config, ports, rank, device)
        if config.server_args.nnodes > 1:
            with device.forward.active():
                config = agreed(config, shard.exchange(described(config)))
        worker = ModelRunner(config, device, show_progress=rank == 0, shard=shard)
        inbox = _NoInbox() if messages is None else ZmqInbox(messages, watchdog, FreeMemoryWatch())
        if num_ranks > 1:
            nodes = _Nodes(context, config, ports, shard, device)
            link = _link_ranks(context, nodes, worker, inbox, watchdog)
        scheduler = Scheduler(config, worker, inbox, outbox if rank == 0 else _NoOutbox(), link)
        recorder = scheduler.recorder
        dump_on_signal(recorder)
        scheduler.control.run_beside = _run_in_thread
        scheduler.still_working = watchdog.busy
        scheduler.grammars.run_beside = ThreadPoolExecutor(1, thread_name_prefix="grammars").submit
        if config.device == "cuda" and config.refuses_grammars is None:
            scheduler.grammars.prepare()  # a server on a CPU starts at once, and its first grammar waits
        with device.forward.active():
            shard.smallest(0)  # all ranks have come so far
        if rank == 0:
            scheduler.report()  # an idle server's gauges are 0, not absent
            outbox.to_detokenizer(ready_message(config, scheduler))
        freeze_garbage_collector()
        run_loop(scheduler)
        watchdog.waiting()
        scheduler.close()
        outbox.close()
    except Exception as error:
        watchdog.waiting()  # the step has ended; what follows may take longer than one
        logger.exception("the scheduler fails")
        reason = _explained(f"{type(error).__name__}: {error}", link)
        try:
            dump_and_log(recorder, reason)
            log_core_dumps(dumps, device)
            if link is not None:
                _leave_ranks(link, shard, error)
            if isinstance(error, PeerLostError):
                # Another rank has failed, perhaps while it loaded the model. It says why, or its end is noticed, and
                # the parent ends this process long before the time is over.
                time.sleep(_LOST_S)
        finally:
            _tell_fatal(context, ports, rank, reason)
        sys.exit(1)
    context.destroy(linger=1000)


def follower_log_level(log_level: str) -> str:
    """The level of ranks other than 0: ``log_level``, but "warning" at least."""
    levels = logging.getLevelNamesMapping()
    return max(log_level, "warning", key=lambda level: levels[level.upper()])


def scheduler_name(rank: int) -> str:
    """The name of a rank's process."""
    return f"scheduler-{rank}" if rank else "scheduler"


class _NoInbox:
    """Of a rank to which nobody sends but rank 0."""

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        raise AssertionError("messages come in turns")


class _NoOutbox:
    """Of a rank whose news rank 0 tells."""

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        return

    def to_tokenizer(self, message: Message) -> None:
        return


def _meet_ranks(config: EngineConfig, ports: PortArgs, rank: int, device: Device) -> Shard:
    """This rank's part of the model, once all ranks have come."""
    args = config.server_args
    num_ranks, meeting = args.tp_size, rank_meeting(ports).as_uri()
    interface = None
    if args.dist_init_addr is not None:
        interface = own_interface(own_address(args.dist_init_addr))
        meeting = f"tcp://{args.dist_init_addr}"
        logger.info("Waiting until all %d ranks have come to %s", num_ranks, meeting)
    backend: CollectiveBackend
    if device.kind == "cuda":
        from fenceline.distributed.nccl import NcclBackend  # with one rank nobody needs it

        backend = NcclBackend(rank, num_ranks, meeting, device.torch_device)
        if args.nnodes == 1:
            from fenceline.distributed.peer import PeerBackend

            backend = PeerBackend(backend, device.torch_device)
    else:
        from fenceline.distributed.gloo import GlooBackend

        backend = GlooBackend(rank, num_ranks, meeting, interface)
    return Shard(rank, num_ranks, Communicator("tp", device, device.forward, backend), args.ep_size)


class _Nodes:
    """Where this rank receives turns, where the others do, and its board, which other hosts' ranks see too."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: EngineConfig,
        ports: PortArgs,
        shard: Shard,
        device: Device,
    ) -> None:
        args, rank = config.server_args, shard.rank
        self.board = RankBoard(ports, rank, shard.size)
        self.turns: zmq.Socket[bytes] | None = None
        if args.dist_init_addr is None:
            self.endpoints = [rank_endpoint(ports, other) for other in range(shard.size)]
            if rank:
                self.turns = bind_pull(context, self.endpoints[rank])
            return
        address = own_address(args.dist_init_addr)
        self.turns, turns = bind_tcp(context, address)
        listens = rank == config.local_ranks[0]
        listener = None
        if listens:
            copy = RankBoard(ports, rank, shard.size, config.local_ranks)
            listener = NodeListener(ports, copy, address, args.node_rank, args.watchdog_timeout)
        ours = turns if listener is None else f"{turns} {listener.endpoint}"
        with device.forward.active():
            told = [data.decode().split() for data in shard.exchange(ours.encode())]
        self.endpoints = [endpoints[0] for endpoints in told]
        boards = [endpoints[1] for endpoints in told if len(endpoints) > 1]
        peers = NodePeers(context, [each for node, each in enumerate(boards) if node != args.node_rank])
        self.board.mirror = peers.write
        if listener is not None:
            listener.start(boards)


def _link_ranks(
    context: zmq.Context[zmq.Socket[bytes]],
    nodes: _Nodes,
    worker: ModelRunner,
    inbox: ZmqInbox | _NoInbox,
    watchdog: Watchdog,
) -> RankLink:
    board, turns = nodes.board, nodes.turns
    if board.rank == 0:
        sockets = [connect_push(context, endpoint) for endpoint in nodes.endpoints[1:]]
        return LeadingRank(
            board, worker, inbox.drain, [partial(socket.send, flags=zmq.NOBLOCK) for socket in sockets]
        )
    assert turns is not None, "rank 0 alone receives no turns"
    return FollowingRank(board, worker, TurnInbox(turns, watchdog, FreeMemoryWatch()).receive)


def _leave_ranks(link: RankLink, shard: Shard, error: Exception) -> None:
    """Before this rank says why it fails: the server ends then, and the others with it, whatever they are doing."""
    link.board.post_failed()
    if isinstance(error, RanksDifferError):
        assert shard.communicator is not None, "one rank does not differ"
        shard.communicator.close()  # who waits for this rank in a collective learns of it, and writes its record
        deadline = time.monotonic() + _RECORDS_S
        while not link.board.all_failed() and time.monotonic() < deadline:
            time.sleep(0.01)  # the board is shared memory, which wakes nobody


def _explained(reason: str, link: RankLink | None) -> str:
    """``reason``, or why ranks wait for each other in vain."""
    try:
        if link is not None:
            link.compare()
    except RanksDifferError as error:
        return f"{type(error).__name__}: {error}"
    return reason


def _run_in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="flight-recorder-request", daemon=True).start()


def enable_core_dumps(config: EngineConfig) -> CoreDumps | None:
    """With --cuda-coredump-dir: have the driver dump the GPU when a kernel fails. Before CUDA is initialised. None if
    there will be no dumps, or none in that folder."""
    if config.cuda_coredump_dir is None:
        return None
    if config.device != "cuda":
        logger.warning("--cuda-coredump-dir: no CUDA device is used, so there will be no core dumps")
        return None
    ours = core_dump_environment(config.cuda_coredump_dir)
    for name, value in ours.items():
        os.environ.setdefault(name, value)  # who has set one by hand knows why
    if os.environ["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"].strip() in ("", "0"):
        logger.warning("--cuda-coredump-dir: CUDA_ENABLE_COREDUMP_ON_EXCEPTION turns the core dumps off")
        return None
    pattern = os.environ["CUDA_COREDUMP_FILE"]
    logger.info("If a kernel fails, the driver dumps the GPU to %s", pattern)
    if pattern != ours["CUDA_COREDUMP_FILE"]:
        logger.warning(
            "CUDA_COREDUMP_FILE is not in --cuda-coredump-dir: nobody waits until such a dump is whole"
        )
        return None
    return CoreDumps(config.cuda_coredump_dir)


def log_core_dumps(dumps: CoreDumps | None, device: Device | None) -> None:
    """After a failure: wait until the driver has written its dump, if one is begun or ``device`` is in error, and name
    it. ``device`` is None where it could not be opened."""
    if dumps is None:
        return
    for path in dumps.wait(_may_be_in_error(device)):
        if is_complete(path):
            logger.error("GPU core dump: %s; look at it with cuda-gdb -ex 'target cudacore %s'", path, path)
        else:
            logger.error("GPU core dump: %s is only begun: the driver stopped writing, or is too slow", path)


def _may_be_in_error(device: Device | None) -> Callable[[], bool]:
    """Whether ``device`` has failed, or has not said yet that it has not. Another thread asks it: after a failure of
    the host, the device may be at work, or hang. What the error says does not tell, each library has its words."""
    if device is None:
        return lambda: False
    sound = threading.Event()

    def ask() -> None:
        try:
            device.synchronize()
        except Exception as error:  # of any kind: that the device fails is all that is asked
            logger.error("the device is in error: %s", error)
        else:
            sound.set()

    threading.Thread(target=ask, name="device-check", daemon=True).start()
    return lambda: not sound.is_set()


def _tell_fatal(context: zmq.Context[zmq.Socket[bytes]], ports: PortArgs, rank: int, message: str) -> None:
    socket = connect_push(context, ports.tokenizer)
    socket.send(encode(FatalError(source=scheduler_name(rank), message=message)))
    context.destroy(linger=1000)


def _die_of_hang(ports: PortArgs, rank: int, recorder: FlightRecorder | None, reason: str) -> None:
    """From the watchdog's thread: say why, show where, and go. Sockets of the hung thread are not touched."""
    faulthandler.dump_traceback(all_threads=True)
    dump_and_log(recorder, reason)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _tell_fatal(context, ports, rank, reason)
    os._exit(1)
