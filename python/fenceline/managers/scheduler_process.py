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

from fenceline.config.core_dumps import core_dump_environment, is_complete, wait_for_core_dumps
from fenceline.config.engine_config import EngineConfig
from fenceline.managers.flight_dump import dump_and_log, dump_on_signal
from fenceline.managers.flight_recorder import FlightRecorder
from fenceline.managers.io_struct import BatchTokenOut, FatalError, Message, PortArgs, SchedulerReady, encode
from fenceline.managers.ipc import bind_pull, connect_push, drain
from fenceline.managers.process import freeze_garbage_collector, prepare_child
from fenceline.managers.scheduler import Scheduler
from fenceline.managers.scheduler_types import InFlight
from fenceline.memory_order import open_device
from fenceline.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_WATCHDOG_EXIT = 1
_CORE_DUMP_PATIENCE_S = 10.0  # for the driver to begin a dump, and to go on with it


class Watchdog:
    """Ends the process when a step does not end. Waiting for messages is not a step."""

    def __init__(self, timeout_s: float, on_hang: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._busy_since: float | None = None
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def busy(self) -> None:
        """A step begins."""
        self._busy_since = time.monotonic()

    def waiting(self) -> None:
        """Nothing to do until a message comes."""
        self._busy_since = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._timeout_s / 4, 1.0))
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._timeout_s:
                self._on_hang(f"a step has not ended for {self._timeout_s:g} s (--watchdog-timeout)")
                return


class ZmqInbox:
    """The scheduler's messages."""

    def __init__(self, socket: zmq.Socket[bytes], watchdog: Watchdog) -> None:
        self._socket = socket
        self._watchdog = watchdog

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """See :class:`fenceline.managers.scheduler.Inbox`."""
        if block:
            self._watchdog.waiting()
            self._socket.poll(timeout_ms)
        self._watchdog.busy()
        return drain(self._socket)


class ZmqOutbox:
    """The scheduler's news. Without a detokenizer tokens go straight to the tokenizer manager."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], ports: PortArgs, skip_detokenizer: bool
    ) -> None:
        self._tokenizer = connect_push(context, ports.tokenizer)
        self._tokens = self._tokenizer if skip_detokenizer else connect_push(context, ports.detokenizer)

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        """See :class:`fenceline.managers.scheduler.Outbox`."""
        self._tokens.send(encode(message), zmq.NOBLOCK)

    def to_tokenizer(self, message: Message) -> None:
        """See :class:`fenceline.managers.scheduler.Outbox`."""
        self._tokenizer.send(encode(message), zmq.NOBLOCK)


def ready_message(config: EngineConfig, scheduler: Scheduler) -> SchedulerReady:
    """What the front end must know of the scheduler's limits."""
    num_tokens = scheduler.memory.num_pages * config.page_size
    return SchedulerReady(
        max_total_num_tokens=num_tokens,
        max_running_requests=config.max_running_requests,
        max_req_input_len=min(config.context_length, num_tokens) - 1,
        context_length=config.context_length,
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
    prepare_child("scheduler", config.log_level, ports)
    faulthandler.enable()
    enable_core_dumps(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    recorder: FlightRecorder | None = None
    try:
        inbox_socket = bind_pull(context, ports.scheduler)
        outbox = ZmqOutbox(context, ports, config.skip_tokenizer_init)
        watchdog = Watchdog(config.watchdog_timeout_s, lambda reason: _die_of_hang(ports, recorder, reason))
        worker = ModelRunner(config, open_device(config.device))
        scheduler = Scheduler(config, worker, ZmqInbox(inbox_socket, watchdog), outbox)
        recorder = scheduler.recorder
        dump_on_signal(recorder)
        outbox.to_tokenizer(ready_message(config, scheduler))
        freeze_garbage_collector()
        run_loop(scheduler)
        watchdog.waiting()
        scheduler.close()
    except Exception as error:
        logger.exception("the scheduler fails")
        reason = f"{type(error).__name__}: {error}"
        dump_and_log(recorder, reason)
        log_core_dumps(config, reason)
        _tell_fatal(context, ports, reason)
        sys.exit(1)
    context.destroy(linger=1000)


def enable_core_dumps(config: EngineConfig) -> None:
    """With --cuda-coredump-dir: have the driver dump the GPU when a kernel fails. Before CUDA is initialised."""
    if config.cuda_coredump_dir is None:
        return
    if config.device != "cuda":
        logger.warning("--cuda-coredump-dir: no CUDA device is used, so there will be no core dumps")
        return
    for name, value in core_dump_environment(config.cuda_coredump_dir).items():
        os.environ.setdefault(name, value)  # who has set one by hand knows why
    logger.info("If a kernel fails, the driver dumps the GPU to %s", os.environ["CUDA_COREDUMP_FILE"])


def log_core_dumps(config: EngineConfig, reason: str, patience_s: float = _CORE_DUMP_PATIENCE_S) -> None:
    """With --cuda-coredump-dir, after a failure of the GPU: wait until the driver has written its dump, and name it."""
    if config.cuda_coredump_dir is None or config.device != "cuda" or "CUDA" not in reason:
        return
    for path in wait_for_core_dumps(config.cuda_coredump_dir, patience_s):
        if is_complete(path):
            logger.error("GPU core dump: %s; look at it with cuda-gdb -ex 'target cudacore %s'", path, path)
        else:
            logger.error("GPU core dump: %s is only begun: the driver stopped writing", path)


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
    os._exit(_WATCHDOG_EXIT)
