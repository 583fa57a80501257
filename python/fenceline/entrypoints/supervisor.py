"""The main process: starts the server, waits for a reason to stop, and ends everything in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from dataclasses import dataclass

import uvloop

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.child_entries import run_scheduler
from fenceline.entrypoints.http_server import HttpServer, create_app, raise_descriptor_limit
from fenceline.entrypoints.launch import (
    LAST_WORDS_S,
    EngineProcesses,
    FrontEnd,
    ProcessEntry,
    Replicas,
    launch,
    launch_processes,
)
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.child_process import DUMP_SIGNAL, PARENTS_SIGNALS, freeze_garbage_collector, setup_logging
from fenceline.ipc.io_struct import FatalError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
# How long another thread of this process may run Python while the event loop waits for the interpreter, which it does
# after each wait for news and after many system calls, so several times for one answer. Python's own 5 ms would add up
# to tens of milliseconds for everybody while a thread writes logprobs. The thread loses a hundredth of its speed.
SWITCH_INTERVAL_S = 0.0002


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the server stops. ``status`` 0: it was asked to stop, and finishes running requests."""

    status: int
    reason: str


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, and whose port no other process can take until it does. Raises
    ValueError with one line if the address cannot be used. Between bind() and listen() Linux lets others take the port
    if both sides have SO_REUSEADDR, and then listen() fails minutes later. So it is set only if the port cannot be had
    without: connections of a server that has just ended are still in TIME_WAIT."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(_why_unusable(host, port, error)) from error
    return sock


def listen(sock: socket.socket, backlog: int) -> None:
    """Listen on a socket of :func:`bind_socket`. Raises ValueError with one line if another process took the port."""
    # Its connections inherit this, so a restart need not wait until they have left TIME_WAIT.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(backlog)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise ValueError(_why_unusable(host, port, error)) from error


def _why_unusable(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop the other server or choose another with --port"
    return f"cannot listen on {host}:{port} ({error.strerror}): check --host, --port"


def serve_until_stopped(config: EngineConfig, scheduler_entry: ProcessEntry = run_scheduler) -> int:
    """Run the whole server, or this host's part if there are several hosts. Returns the exit status: 0 if it was asked
    to stop; otherwise the reason has been logged."""
    setup_logging(config.server_args)
    if config.server_args.node_rank > 0:
        return serve_node(config, scheduler_entry)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        sock = bind_socket(config.server_args.host, config.server_args.port)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    logger.info("Loading %s; the address follows when it can answer (Ctrl-C stops).", config.served_model_name)
    logger.debug("Configuration: %s", config.public_dict())
    with sock:
        backend = launch(config, scheduler_entry)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(Supervisor(config, backend, sock).run())
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            backend.stop(0.0)
            backend.link.close()


def serve_node(config: EngineConfig, scheduler_entry: ProcessEntry) -> int:
    """Run the ranks of this host until node 0 stops. Returns the exit status; if it is not 0, the reason was logged."""
    args = config.server_args
    ranks = ", ".join(map(str, config.local_ranks))
    logger.info("Node %d of %d: rank %s; node 0 answers requests.", args.node_rank, args.nnodes, ranks)
    backend = launch_processes(config, scheduler_entry)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            reason = runner.run(_wait(backend))
        if reason is None:
            logger.info("The server has stopped.")
            return 0
        backend.tell_nodes(f"node {args.node_rank}: {reason}")
        logger.error("The node stops: %s", reason)
        return 1
    finally:
        backend.stop(0.0)
        backend.link.close()


async def _wait(backend: EngineProcesses) -> str | None:
    """Wait until this host's part has ended. Returns the reason, or None if all ranks have ended as told."""
    loop = asyncio.get_running_loop()
    reasons: asyncio.Queue[str | None] = asyncio.Queue()

    def died(reason: str) -> None:
        statuses = [process.exitcode for process in backend.processes]
        if any(statuses):
            loop.call_later(LAST_WORDS_S, reasons.put_nowait, reason)  # it may have said why itself
        elif None not in statuses:
            reasons.put_nowait(None)

    async def listen() -> None:
        while True:
            for message in await backend.link.receive():
                if isinstance(message, FatalError):
                    reasons.put_nowait(f"{message.source}: {message.message}")

    for number in PARENTS_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, reasons.put_nowait, signal.Signals(number).name)
    loop.add_signal_handler(DUMP_SIGNAL, backend.dump_flight_recorder)
    backend.watch(died)
    listening = asyncio.ensure_future(listen())
    try:
        return await reasons.get()
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


class Supervisor:
    """One server's life on one event loop."""

    def __init__(self, config: EngineConfig, backend: EngineProcesses | Replicas, sock: socket.socket) -> None:
        self._config = config
        self._backend = backend
        self._sock = sock
        self._stop: asyncio.Queue[Stop] = asyncio.Queue()
        self._signals: list[int] = []
        self._forced = asyncio.Event()

    async def run(self) -> int:
        """Until the end; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in PARENTS_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the server is to outlive its terminal
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(DUMP_SIGNAL, self._backend.dump_flight_recorder)
        try:
            front_end = FrontEnd(self._config, self._backend)
        except ValueError as error:
            logger.error("error: %s", error)
            return 1
        death = asyncio.ensure_future(self._report_death(front_end.manager))
        try:
            return await self._serve(front_end.manager)
        finally:
            death.cancel()
            await front_end.close()

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self._forced.set()
        self._stop.put_nowait(Stop(0, signal.Signals(number).name))

    async def _report_death(self, manager: TokenizerManager) -> None:
        self._stop.put_nowait(Stop(1, await manager.wait_dead()))

    async def _serve(self, manager: TokenizerManager) -> int:
        stop = asyncio.ensure_future(self._stop.get())
        ready = asyncio.ensure_future(manager.wait_ready())
        await asyncio.wait((stop, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if manager.limits is None or stop.done():
            return await self._finish(manager, await stop)
        server = HttpServer(create_app(manager, self._config), self._config, manager.metrics.refused)
        try:
            listen(self._sock, server.config.backlog)  # whoever reads the address may connect at once
        except ValueError as error:
            return await self._finish(manager, Stop(1, str(error)))
        serving = asyncio.ensure_future(server.serve(sockets=[self._sock]))
        freeze_garbage_collector()
        self._announce(manager)
        try:
            return await self._finish(manager, await stop, server)
        finally:
            server.should_exit = True
            await serving

    def _announce(self, manager: TokenizerManager) -> None:
        host, port = self._sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        shown = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(shown, shown)
        limits = manager.limits
        assert limits is not None
        logger.info(
            "max_total_num_tokens=%d, max_running_requests=%d, context_length=%d",
            limits.max_total_num_tokens, limits.max_running_requests, limits.context_length,
        )  # fmt: skip
        args = self._config.server_args
        if args.api_key is None and not _is_loopback(args.host):
            logger.warning(
                "Without --api-key everybody who reaches port %d may use this server, since it listens on --host %s",
                port, args.host,
            )  # fmt: skip
        key = "" if args.api_key is None else " -H 'Authorization: Bearer YOUR_KEY'"
        logger.info("The server is fired up and ready to roll!")
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is 12 + 30?"}]}'
        if self._config.model.embeds:
            path, body = "embeddings", '{"input": "What is 12 + 30?"}'
        print(
            f"\nFenceline serves {self._config.served_model_name} at http://{shown}:{port}\n"
            f"Try it:\n  curl http://{shown}:{port}/v1/{path}{key} -H 'Content-Type: application/json' \\\n"
            f"    -d '{body}'\n",
            flush=True,
        )

    async def _finish(self, manager: TokenizerManager, stop: Stop, server: HttpServer | None = None) -> int:
        """Let requests end as ``stop`` says, then end the engine."""
        if stop.status == 0 and manager.fatal is None:
            stop = await self._drain(manager, stop)
        manager.fail(stop.reason)  # requests that still wait get the reason
        manager.shutdown()
        patience_s = STOP_TIMEOUT_S if stop.status == 0 and manager.limits is not None else 0.0
        if stop.status:
            self._backend.tell_nodes(f"node 0 has stopped: {stop.reason}")
        await asyncio.to_thread(self._backend.stop, patience_s)
        if server is not None:
            server.access_log.write()  # the reason comes last
        if stop.status:
            logger.error("The server stops: %s", stop.reason)
        else:
            logger.info("The server has stopped (%s).", stop.reason)
        return stop.status

    async def _drain(self, manager: TokenizerManager, stop: Stop) -> Stop:
        timeout_s = self._config.server_args.shutdown_timeout
        if manager.num_active:
            logger.info(
                "%s: finishing %d requests, for at most %g s; the same signal again stops now",
                stop.reason, manager.num_active, timeout_s,
            )  # fmt: skip
        drain = asyncio.ensure_future(manager.drain(timeout_s))
        forced = asyncio.ensure_future(self._forced.wait())
        dead = asyncio.ensure_future(manager.wait_dead())
        await asyncio.wait((drain, forced, dead), return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, forced, dead):
            task.cancel()
        if manager.fatal is not None:
            return Stop(1, manager.fatal)
        if manager.num_active and not self._forced.is_set():
            logger.warning(
                "%d requests have not ended within %g s and are aborted (--shutdown-timeout)",
                manager.num_active, timeout_s,
            )  # fmt: skip
        if self._forced.is_set():
            return Stop(128 + self._signals[-1], f"a second signal came with {manager.num_active} requests running")
        return stop
