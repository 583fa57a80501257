"""The scheduler's process: it connects a Scheduler to its sockets, and runs a watchdog beside it."""

from __future__ import annotations

import dataclasses
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

from fenceline.config import ConfigError, num_usable_cores
from fenceline.config.engine_config import EngineConfig
from fenceline.config.nodes import agreed, described
from fenceline.distributed import ranks_share_gpu
from fenceline.ipc.child_process import Watchdog, freeze_garbage_collector, prepare_child
from fenceline.ipc.free_memory import FreeMemoryWatch
from fenceline.ipc.io_struct import (
    SCHEDULER_DECODER,
    BatchTokenOut,
    FatalError,
    Message,
    PortArgs,
    SchedulerInput,
    SchedulerReady,
    encode,
)
from fenceline.ipc.mailbox import Inbox, Outbox
from fenceline.ipc.node_link import NodeListener, NodePeers, own_address, own_interface
from fenceline.ipc.progress import announced
from fenceline.ipc.rank_board import RankBoard, rank_endpoint, rank_meeting
from fenceline.layers.context import Shard
from fenceline.mem_cache.kv_events import KVEventLog
from fenceline.memory_order import CollectiveBackend, Communicator, Device, PeerLostError, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler.core_dumps import CoreDumps, core_dump_environment, is_complete
from fenceline.scheduler.flight_dump import dump_and_log, dump_on_signal
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.kv_event_publisher import KVEventPublisher
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.ranks import TURN_DECODER, FollowingRank, LeadingRank, RankLink, RanksDifferError, Turn
from fenceline.scheduler.request_memory import note_kv_events
from fenceline.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


# What the scheduler takes in before a step. Requests beyond that are in no hurry: they fill many steps. The limit in
# bytes is for long prompts: a megabyte of their ids takes one millisecond.
MAX_STEP_MESSAGES, MAX_STEP_BYTES = 512, 4 << 20
_MOST_MASK_THREADS = 3  # with more, a step waits longer for their turns with the interpreter lock
_QUIET_MS = 1000  # freed memory is given back after this long without a message
# Much longer than the parent takes to notice that a process has ended, and to kill the others.
_PEER_LOST_WAIT_S = 10.0
_RECORDS_WAIT_S = 5.0  # how long a rank waits for the others to write their flight records when ranks differ
_FAILED_POLL_S = 0.1  # the interval of checks whether another rank has failed


class SocketInbox:
    """Receives the scheduler's messages. It also gives freed memory back to the operating system, between steps and
    when no message has come for a second, because a large batch leaves hundreds of megabytes of it."""

    def __init__(self, inbox: Inbox[SchedulerInput], watchdog: Watchdog, memory: FreeMemoryWatch) -> None:
        self._inbox = inbox
        self._watchdog = watchdog
        self._memory = memory

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
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
    """Receives the turns from ``inbox``, on a rank other than 0. Gives memory back like :class:`SocketInbox`."""

    def __init__(self, inbox: Inbox[Turn], watchdog: Watchdog, memory: FreeMemoryWatch) -> None:
        self._inbox = inbox
        self._watchdog = watchdog
        self._memory = memory

    def receive(self) -> Turn:
        self._watchdog.waiting()
        self._memory.look()
        if not self._inbox.wait(_QUIET_MS):
            self._memory.look()
        turns: list[Turn] = []
        while not turns:
            turns = self._inbox.receive()
        self._watchdog.busy()
        return turns[0]


class SocketOutbox:
    """Sends the scheduler's messages. Without a detokenizer, tokens skip it. Any thread may send."""

    def __init__(self, ports: PortArgs, skip_detokenizer: bool) -> None:
        self._tokenizer = ports.tokenizer
        self._tokens = ports.tokenizer if skip_detokenizer else ports.detokenizer
        self._outbox = Outbox(*{self._tokenizer, self._tokens})

    def expect_tokens(self) -> None:
        """First tokens are about to come, for which a client waits."""
        self._outbox.wake(self._tokens)

    def to_detokenizer(self, message: BatchTokenOut | SchedulerReady) -> None:
        self._outbox.send(self._tokens, encode(message))

    def to_tokenizer(self, message: Message) -> None:
        self._outbox.send(self._tokenizer, encode(message))

    def close(self) -> None:
        """What a thread sends from now on is dropped. What has been sent gets a second to arrive."""
        self._outbox.close()


def ready_message(config: EngineConfig, scheduler: Scheduler) -> SchedulerReady:
    """The message with the scheduler's limits, which the front end needs."""
    num_tokens = scheduler.memory.num_pages * config.server_args.page_size
    longest = min(config.model.context_length, num_tokens - scheduler.running.largest.num_slots + 1)
    return SchedulerReady(
        max_total_num_tokens=num_tokens,
        max_running_requests=config.max_running_requests,
        max_req_input_len=longest if config.model.embeds else longest - 1,  # there is room for a token of the answer
        context_length=config.model.context_length,
        memory_bytes=scheduler.worker.memory_bytes,
    )


def warn_of_small_pool(limits: SchedulerReady) -> None:
    """Log it if the KV pool is smaller than one request may be."""
    if limits.max_total_num_tokens < limits.context_length:
        logger.warning(
            "the KV cache has room for %d tokens, fewer than one request of --context-length %d may have: prompts of"
            " more than %d tokens are refused; raise --mem-fraction-static or --max-total-tokens, or lower"
            " --context-length",
            limits.max_total_num_tokens, limits.context_length, limits.max_req_input_len,
        )  # fmt: skip


def run_loop(scheduler: Scheduler) -> None:
    """Serve until the scheduler has been told to stop and every request is done."""
    flight: InFlight | None = None
    while flight is not None or not scheduler.stopped:
        flight = scheduler.step(flight)


def run_scheduler_process(config: EngineConfig, ports: PortArgs, rank: int = 0) -> None:
    """Entry point of a scheduler process, of which each rank has one: load the model, report that it is ready, serve.
    Any error is reported to the front end as :class:`FatalError` and ends the process with status 1."""
    num_ranks = config.server_args.tp_size
    args = config.server_args
    if rank:  # rank 0 logs progress for all
        args = dataclasses.replace(args, log_level=follower_log_level(args.log_level))
    prepare_child(scheduler_name(rank), args, ports, config.replica)
    faulthandler.enable()
    dumps = enable_core_dumps(config)
    recorder: FlightRecorder | None = None
    device: Device | None = None
    link: RankLink | None = None
    channels: _RankChannels | None = None
    watchdog = Watchdog(
        config.server_args.watchdog_timeout, lambda reason: _exit_hung(ports, rank, recorder, _root_cause(reason, link))
    )
    try:
        messages: Inbox[SchedulerInput] | None = None if rank else Inbox(ports.scheduler, SCHEDULER_DECODER)
        outbox = SocketOutbox(ports, config.server_args.skip_tokenizer_init)
        kv_events = None if rank else _kv_event_publisher(config)  # before the model is loaded: its ports may be taken
        begin = time.perf_counter()
        with announced(f"opening the device ({config.device})"):
            device = open_device(config.device, index=_device_of(rank, config))
        logger.info("Opened the device (%s) in %.1f s", config.device, time.perf_counter() - begin)
        if device.kind == "cpu" and config.num_sharing > 1:
            torch.set_num_threads(max(torch.get_num_threads() // config.num_sharing, 1))
        with announced(f"waiting for all {num_ranks} ranks, which import torch and meet"):
            shard = Shard() if num_ranks == 1 else join_ranks(config, ports, rank, device)
        if config.server_args.nnodes > 1:
            with device.forward.active():
                config = agreed(config, shard.exchange(described(config)))
        worker = ModelRunner(config, device, show_progress=rank == 0, shard=shard)
        config = worker.parts.config
        inbox = _NoInbox() if messages is None else SocketInbox(messages, watchdog, FreeMemoryWatch())
        if num_ranks > 1:
            channels = _RankChannels(config, ports, shard, device)
            link = _link_ranks(channels, worker, inbox, watchdog)
            if device.kind == "cuda":
                _watch_ranks(link, shard)
        scheduler = Scheduler(config, worker, inbox, outbox if rank == 0 else _NoOutbox(), link)
        scheduler.expect_tokens = outbox.expect_tokens if rank == 0 else None
        recorder = scheduler.recorder
        dump_on_signal(recorder)
        if kv_events is not None:
            note_kv_events(kv_events.log, config, scheduler.memory)
            scheduler.kv_events = kv_events
        scheduler.control.run_in_background = _run_in_thread
        scheduler.control.still_working = watchdog.busy
        scheduler.grammars.run_in_background = ThreadPoolExecutor(1, thread_name_prefix="grammars").submit
        if config.refuses_grammars is None:
            with announced("importing the library of grammars"):
                scheduler.grammars.prepare()
            if config.device == "cuda":
                # The front end's processes need the other half of the cores.
                num_threads = num_usable_cores() // (2 * config.num_sharing)
                scheduler.grammars.use_threads(min(max(num_threads, 1), _MOST_MASK_THREADS))
        with device.forward.active(), announced("waiting for the other ranks, which load the model"):
            shard.smallest(0)
        if rank == 0:
            limits = ready_message(config, scheduler)
            warn_of_small_pool(limits)
            scheduler.control.report()  # so that an idle server's gauges are 0 instead of absent
            outbox.to_detokenizer(limits)
        freeze_garbage_collector()
        run_loop(scheduler)
        watchdog.waiting()
        scheduler.close()
        if shard.communicator is not None:
            shard.communicator.close()
        outbox.close()
    except Exception as error:
        watchdog.waiting()  # the step has ended; what follows may take longer than a step may
        # What a user can mend is one line, which the front end logs.
        logger.error("the scheduler has failed", exc_info=None if isinstance(error, ConfigError) else error)
        reason = _root_cause(f"{type(error).__name__}: {error}", link)
        try:
            dump_and_log(recorder, reason)
            log_core_dumps(dumps, device)
            if link is not None:
                _tell_ranks(link, shard, error)
            if isinstance(error, PeerLostError):
                # Another rank has failed, perhaps while it loaded the model. It reports the reason, or the parent
                # notices that it has ended; then the parent ends this process, long before the sleep is over.
                time.sleep(_PEER_LOST_WAIT_S)
        finally:
            try:
                _send_fatal(ports, rank, reason)
            finally:
                if num_ranks > 1:
                    _end_rank(1, channels)
        sys.exit(1)
    if messages is not None:
        messages.close()
    if num_ranks > 1:
        _end_rank(0, channels)


def _kv_event_publisher(config: EngineConfig) -> KVEventPublisher | None:
    if config.kv_events is None:
        return None
    vision = config.model.vision
    log = KVEventLog(config.server_args.page_size, None if vision is None else vision.placeholder)
    return KVEventPublisher(config.kv_events, log, config.replica)


def _end_rank(status: int, channels: _RankChannels | None) -> None:
    """End the process, once the other ranks have been told the rest, without what Python and libraries do at the end:
    NCCL would abort its communicator while CUDA shuts down, which can end the process by SIGABRT instead."""
    if channels is not None:
        for outbox in channels.outboxes:
            outbox.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def follower_log_level(log_level: str) -> str:
    """The log level of ranks other than 0: ``log_level``, but at least "warning"."""
    levels = logging.getLevelNamesMapping()
    return max(log_level, "warning", key=lambda level: levels[level.upper()])


def scheduler_name(rank: int) -> str:
    """The name of the scheduler process of ``rank``, as in logs and errors."""
    return f"scheduler-{rank}" if rank else "scheduler"


class _NoInbox:
    """The inbox of a rank other than 0. It is never read, because such a rank gets its messages in turns."""

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        raise AssertionError("messages come in turns")


class _NoOutbox:
    """The outbox of a rank other than 0. It drops everything, because rank 0 sends the same messages."""

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        return

    def to_tokenizer(self, message: Message) -> None:
        return


def _device_of(rank: int, config: EngineConfig) -> int | None:
    """The index of the rank's device among those that are visible on this host (CUDA_VISIBLE_DEVICES): each replica's
    ranks have the devices behind those of the replica before. None: this host has one rank, and any device will do."""
    if config.num_sharing == 1:
        return None
    if ranks_share_gpu():
        return 0
    return config.replica * len(config.local_ranks) + rank - config.local_ranks[0]


def join_ranks(config: EngineConfig, ports: PortArgs, rank: int, device: Device) -> Shard:
    """Wait for all ranks and connect to them. Returns this rank's Shard."""
    args = config.server_args
    num_ranks, meeting = args.tp_size, rank_meeting(ports).as_uri()
    interface = None
    if args.dist_init_addr is not None:
        interface = own_interface(own_address(args.dist_init_addr))
        meeting = f"tcp://{args.dist_init_addr}"
        logger.info("Waiting for all %d ranks at %s", num_ranks, meeting)
    backend: CollectiveBackend
    if device.kind == "cuda":
        # Imported here because a server with one rank does not need them.
        from fenceline.distributed.gloo import GlooBackend
        from fenceline.distributed.nccl import NcclBackend
        from fenceline.distributed.peer import PeerBackend
        from fenceline.distributed.staged import StagedBackend

        others: NcclBackend | StagedBackend
        if ranks_share_gpu():
            others = StagedBackend(GlooBackend(rank, num_ranks, meeting, interface))
        else:
            others = NcclBackend(rank, num_ranks, meeting, device.torch_device, interface)
        fuses_norm, backend = not args.enable_deterministic_inference, others
        if args.nnodes == 1:
            backend = PeerBackend(others, device.torch_device, fuses_norm)
    else:
        from fenceline.distributed.gloo import GlooBackend

        backend = GlooBackend(rank, num_ranks, meeting, interface)
    return Shard(rank, num_ranks, Communicator("tp", device, device.forward, backend), args.ep_size)


class _RankChannels:
    """This rank's RankBoard, which is mirrored to other hosts if there are several; the socket on which it receives
    turns; and the endpoints on which all ranks do."""

    def __init__(self, config: EngineConfig, ports: PortArgs, shard: Shard, device: Device) -> None:
        args, rank = config.server_args, shard.rank
        self.board = RankBoard(ports, rank, shard.size)
        self.turns: Inbox[Turn] | None = None
        self.outboxes: list[Outbox] = []  # to other ranks and nodes
        if args.dist_init_addr is None:
            self.endpoints = [rank_endpoint(ports, other) for other in range(shard.size)]
            if rank:
                self.turns = Inbox(self.endpoints[rank], TURN_DECODER)
            return
        address = own_address(args.dist_init_addr)
        self.turns = Inbox(f"tcp://{address}:*", TURN_DECODER)
        turns = self.turns.endpoint
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
        peers = NodePeers([each for node, each in enumerate(boards) if node != args.node_rank])
        self.outboxes.append(peers.outbox)
        self.board.mirror = peers.write
        if listener is not None:
            listener.start(boards)


def _link_ranks(
    channels: _RankChannels, worker: ModelRunner, inbox: SocketInbox | _NoInbox, watchdog: Watchdog
) -> RankLink:
    board, turns = channels.board, channels.turns
    if board.rank == 0:
        outbox = Outbox(*channels.endpoints[1:])
        channels.outboxes.append(outbox)
        return LeadingRank(board, worker, inbox.drain, [partial(outbox.send, to) for to in channels.endpoints[1:]])
    assert turns is not None, "rank 0 alone receives no turns"
    return FollowingRank(board, worker, TurnInbox(turns, watchdog, FreeMemoryWatch()).receive)


def _watch_ranks(link: RankLink, shard: Shard) -> None:
    """Start a thread that ends this rank's collective operations as soon as another rank has failed. Otherwise the
    kernels on the device could wait for ever for the failed rank, and the host for the device."""
    communicator = shard.communicator
    assert communicator is not None, "several ranks have a communicator"

    def watch() -> None:
        while not link.board.any_failed():
            time.sleep(_FAILED_POLL_S)  # the board is shared memory, which cannot wake a thread
        communicator.give_up()

    threading.Thread(target=watch, name="ranks-watch", daemon=True).start()


def _tell_ranks(link: RankLink, shard: Shard, error: Exception) -> None:
    """Tell the other ranks that this one fails. This comes before the report to the front end, which ends the server
    and all ranks, whatever they are doing. If ranks differ, the flight records of all of them are needed, so this waits
    until the others have failed too."""
    link.board.post_failed()
    if isinstance(error, RanksDifferError):
        assert shard.communicator is not None, "several ranks have a communicator"
        shard.communicator.give_up()  # a rank that waits for this one in a collective fails too, and writes its record
        deadline = time.monotonic() + _RECORDS_WAIT_S
        while not link.board.all_failed() and time.monotonic() < deadline:
            time.sleep(0.01)  # the board is shared memory, which cannot wake a thread


def _root_cause(reason: str, link: RankLink | None) -> str:
    """``reason``; or, if ranks have made different decisions, that error instead, since it is the cause."""
    try:
        if link is not None:
            link.compare()
    except RanksDifferError as error:
        return f"{type(error).__name__}: {error}"
    return reason


def _run_in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="flight-recorder-request", daemon=True).start()


def enable_core_dumps(config: EngineConfig) -> CoreDumps | None:
    """With --cuda-coredump-dir, make the driver write a core dump of the GPU when a kernel fails. Must be called before
    CUDA is initialised. Returns None if there will be no dumps, or none in that folder."""
    if config.cuda_coredump_dir is None:
        return None
    if config.device != "cuda":
        logger.warning("--cuda-coredump-dir: no CUDA device is used, so there will be no core dumps")
        return None
    ours = core_dump_environment(config.cuda_coredump_dir)
    for name, value in ours.items():
        os.environ.setdefault(name, value)  # a variable that the user has set is kept
    if os.environ["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"].strip() in ("", "0"):
        logger.warning("--cuda-coredump-dir: CUDA_ENABLE_COREDUMP_ON_EXCEPTION turns the core dumps off")
        return None
    os.umask(0o077)  # registers and stacks may hold tokens; the driver makes the file when it has failed
    pattern = os.environ["CUDA_COREDUMP_FILE"]
    logger.info("If a kernel fails, the driver dumps the GPU to %s", pattern)
    if pattern != ours["CUDA_COREDUMP_FILE"]:
        logger.warning(
            "CUDA_COREDUMP_FILE is not in --cuda-coredump-dir: the server will not wait until a dump is complete"
        )
        return None
    return CoreDumps(config.cuda_coredump_dir)


def log_core_dumps(dumps: CoreDumps | None, device: Device | None) -> None:
    """After a failure, wait until the driver has written its core dump, and log the file's path. It waits if a dump has
    been begun or if ``device`` is in error. ``device`` is None if it could not be opened."""
    if dumps is None:
        return
    for path in dumps.wait(_may_be_in_error(device)):
        if is_complete(path):
            logger.error("GPU core dump: %s; look at it with cuda-gdb -ex 'target cudacore %s'", path, path)
        else:
            logger.error("GPU core dump: %s is incomplete: the driver stopped writing, or is too slow", path)


def _may_be_in_error(device: Device | None) -> Callable[[], bool]:
    """Returns a function that says whether ``device`` may be in error: it is, or it is not known yet. A thread
    synchronises with the device to find out, because the device may still be busy, or hang. The text of the exception
    does not say it reliably, since each library has its own."""
    if device is None:
        return lambda: False
    sound = threading.Event()

    def ask() -> None:
        try:
            device.synchronize()
        except Exception as error:  # any kind means that the device is in error
            logger.error("the device is in error: %s", error)
        else:
            sound.set()

    threading.Thread(target=ask, name="device-check", daemon=True).start()
    return lambda: not sound.is_set()


def _send_fatal(ports: PortArgs, rank: int, message: str) -> None:
    outbox = Outbox(ports.tokenizer)
    outbox.send(ports.tokenizer, encode(FatalError(source=scheduler_name(rank), message=message)))
    outbox.close()


def _exit_hung(ports: PortArgs, rank: int, recorder: FlightRecorder | None, reason: str) -> None:
    """Called by the watchdog's thread when a step hangs: log the stacks, write a dump, report the reason, and end the
    process. The sockets of the hung thread are not used."""
    faulthandler.dump_traceback(all_threads=True)
    dump_and_log(recorder, reason)
    _send_fatal(ports, rank, reason)
    os._exit(1)
