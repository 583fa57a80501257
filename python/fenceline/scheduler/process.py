"""The scheduler's process: sockets around a Scheduler, a watchdog beside it."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from fenceline.config.engine_config import EngineConfig
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
from fenceline.ipc.sockets import MAX_STEP_BYTES, MAX_STEP_MESSAGES, Inbox, connect_push
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler.core_dumps import CoreDumps, core_dump_environment, is_complete
from fenceline.scheduler.flight_dump import dump_and_log, dump_on_signal
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.scheduler import InFlight, Scheduler

logger = logging.getLogger(__name__)


_QUIET_MS = 1000


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
        max_req_input_len=min(config.model.context_length, num_tokens - scheduler.worker.max_step_tokens + 1)
        - 1,
        context_length=config.model.context_length,
        memory_bytes=scheduler.worker.memory_bytes,
    )


def run_loop(scheduler: Scheduler) -> None:
    """Serve until told to stop and every request is done."""
    flight: InFlight | None = None
    while flight is not None or not scheduler.stopped:
        flight = scheduler.step(flight)


def run_scheduler_process(config: EngineConfig, ports: PortArgs) -> None:
    """Entry of the scheduler process: load the model, say so, serve.

    Whatever goes wrong is told to the front end as :class:`FatalError` and ends the process with status 1.
    """
    prepare_child("scheduler", config.server_args.log_level, ports)
    faulthandler.enable()
    dumps = enable_core_dumps(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    recorder: FlightRecorder | None = None
    device: Device | None = None
    watchdog = Watchdog(
        config.server_args.watchdog_timeout, lambda reason: _die_of_hang(ports, recorder, reason)
    )
    try:
        inbox = Inbox(context, ports.scheduler, SCHEDULER_DECODER)
        outbox = ZmqOutbox(context, ports, config.server_args.skip_tokenizer_init)
        begin = time.perf_counter()
        device = open_device(config.device)
        logger.info("Opened the device (%s) in %.1f s", config.device, time.perf_counter() - begin)
        worker = ModelRunner(config, device)
        scheduler = Scheduler(config, worker, ZmqInbox(inbox, watchdog, FreeMemoryWatch()), outbox)
        recorder = scheduler.recorder
        dump_on_signal(recorder)
        scheduler.control.run_beside = _run_in_thread
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
        reason = f"{type(error).__name__}: {error}"
        try:
            dump_and_log(recorder, reason)
            log_core_dumps(dumps, device)
        finally:
            _tell_fatal(context, ports, reason)
        sys.exit(1)
    context.destroy(linger=1000)


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


def _tell_fatal(context: zmq.Context[zmq.Socket[bytes]], ports: PortArgs, message: str) -> None:
    socket = connect_push(context, ports.tokenizer)
    socket.send(encode(FatalError(source="scheduler", message=message)))
    context.destroy(linger=1000)


def _die_of_hang(ports: PortArgs, recorder: FlightRecorder | None, reason: str) -> None:
    """From the watchdog's thread: say why, show where, and go. Sockets of the hung thread are not touched."""
    faulthandler.dump_traceback(all_threads=True)
    dump_and_log(recorder, reason)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _tell_fatal(context, ports, reason)
    os._exit(1)
