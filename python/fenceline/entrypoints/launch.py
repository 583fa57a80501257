"""The server's processes: starting, watching and stopping them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Protocol

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.child_entries import run_detokenizer, run_scheduler
from fenceline.frontend.replica_link import ReplicaLink
from fenceline.frontend.scheduler_link import SchedulerLink, SocketLink
from fenceline.frontend.tokenizer import check_vocabulary, load_tokenizer
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.child_process import DUMP_SIGNAL, HEARTBEAT_INTERVAL_S, Silence, heartbeat_path, starting_children
from fenceline.ipc.io_struct import PortArgs
from fenceline.ipc.mailbox import make_ports, remove_ports
from fenceline.ipc.node_link import tell_nodes
from fenceline.ipc.progress import INTERVAL_S, announced
from fenceline.ipc.rank_board import create_rank_board

logger = logging.getLogger(__name__)

MIN_SILENCE_S = 4 * HEARTBEAT_INTERVAL_S
FIRST_HEARTBEAT_S = 120.0  # from the start of a process to its first heartbeat: its interpreter starts
LAST_WORDS_S = 0.5  # a dying process's FatalError may arrive after its death was noticed

ProcessEntry = Callable[..., None]  # of the configuration and the ports; of a scheduler's rank too, if it is not 0


class EngineBackend(Protocol):
    """Where scheduler and detokenizer run: in child processes, or in the caller's process."""

    @property
    def link(self) -> SchedulerLink:
        """The TokenizerManager's connection to them."""
        ...

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call ``on_death(reason)`` on the running event loop if one of them ends without having been told to."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the scheduler to end (ShutdownReq was sent), then end everything by
        force. May be called again, and from any thread. ``link`` stays the caller's to close."""
        ...


class EngineProcesses:
    """Scheduler and detokenizer as child processes that end together with this process, even if it is killed."""

    def __init__(
        self, processes: list[BaseProcess], ports: PortArgs, link: SchedulerLink, watchdog_timeout_s: float
    ) -> None:
        self.processes = processes
        self.link = link
        self._ports = ports
        self._watchdog_timeout_s = watchdog_timeout_s
        self._stopping = False
        self._heartbeats: dict[str, int] = {}  # file descriptors
        self._reasons: dict[str, str] = {}  # why a process was killed, by name

    def watch(self, on_death: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()

        def died(process: BaseProcess) -> None:
            loop.remove_reader(process.sentinel)
            if not self._stopping:
                process.join()
                ended = f"the {process.name} process ended unexpectedly ({_how(process.exitcode)})"
                on_death(self._reasons.get(process.name, ended))

        for process in self.processes:
            loop.add_reader(process.sentinel, died, process)
        self._watch_heartbeats(loop)

    def _watch_heartbeats(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kill a process that was stopped, or got no CPU time, for --watchdog-timeout. (A step that does not end is
        found by the scheduler's own watchdog, which also says where it hangs.)"""
        interval_s = min(self._watchdog_timeout_s / 4, 1.0)
        silences = {process: Silence(interval_s) for process in self.processes}
        begin = says_at = time.monotonic()

        def look() -> None:
            nonlocal says_at
            if self._stopping:
                return
            now = time.monotonic()
            starting = [process.name for process in silences if self._last_beat(process.name) is None]
            if starting and now - says_at >= INTERVAL_S:
                says_at = now
                text = "Still waiting for processes to start, which takes as long as importing torch (%.0f s): %s"
                logger.info(text, now - begin, ", ".join(starting))
            for process, silence in silences.items():
                beat = self._last_beat(process.name)
                limit_s = max(self._watchdog_timeout_s, MIN_SILENCE_S if beat else FIRST_HEARTBEAT_S)
                if silence.look(beat, now) > limit_s and process.is_alive():
                    self._kill_silent(process)
            loop.call_later(interval_s, look)

        look()

    def _last_beat(self, name: str) -> int | None:
        """A number that changes while the process runs; None before it has begun. The file stays open, so that
        cleaning up the temporary folder does not end the server."""
        if name not in self._heartbeats:
            try:
                self._heartbeats[name] = os.open(heartbeat_path(self._ports, name), os.O_RDONLY)
            except FileNotFoundError:
                return None
        return os.fstat(self._heartbeats[name]).st_mtime_ns

    def _kill_silent(self, process: BaseProcess) -> None:
        if process.name not in self._reasons:
            self._reasons[process.name] = reason = (
                f"the {process.name} process has not run for {self._watchdog_timeout_s:g} s (--watchdog-timeout): it "
                "was stopped, or starved of CPU time or memory"
            )
            logger.error("%s; it is killed", reason)
            process.kill()

    def tell_nodes(self, reason: str) -> None:
        """Other hosts, if there are any, end for this reason."""
        tell_nodes(self._ports, reason)

    def dump_flight_recorder(self) -> None:
        """Have each scheduler write its last steps to a file, even while it hangs."""
        for scheduler in self._schedulers:
            if scheduler.pid is not None and scheduler.is_alive():
                os.kill(scheduler.pid, DUMP_SIGNAL)

    @property
    def _schedulers(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.name.startswith("scheduler")]

    def ending(self) -> None:
        """From now on the end of a process is not reported."""
        self._stopping = True

    def stop(self, timeout_s: float) -> None:
        self.ending()
        deadline = time.monotonic() + timeout_s
        for process in self._schedulers:  # without them the detokenizer has nothing left to do
            process.join(max(deadline - time.monotonic(), 0.0))
        if any(process.is_alive() for process in self._schedulers):  # the other hosts' would wait for them
            self.tell_nodes("the scheduler of another host has been ended by force")
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        while self._heartbeats:
            os.close(self._heartbeats.popitem()[1])
        remove_ports(self._ports)


def _how(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit status {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"killed by {name}" + ("; out of memory?" if name == "SIGKILL" else "")


def explain_flags(config: EngineConfig) -> None:
    """Log the effect of flags that have another effect in other servers, or none here."""
    if config.server_args.trust_remote_code:
        logger.warning(
            "--trust-remote-code has no effect: %s is built in, and code from a model's directory is never run",
            config.model.architecture,
        )
    args = config.server_args
    if (args.enable_mixed_chunk or args.max_inter_token_ms is not None) and not config.mixes_steps:
        why = "images are seen whole" if config.speculative is None else "steps verify drafts"
        if config.model.embeds:
            why = "a server of embeddings decodes nothing"
        logger.warning("--enable-mixed-chunk, --max-inter-token-ms: without effect here, because %s", why)


def launch_processes(
    config: EngineConfig,
    scheduler_entry: ProcessEntry = run_scheduler,
    detokenizer_entry: ProcessEntry = run_detokenizer,
) -> EngineProcesses:
    """Start a scheduler for each rank of this host and, on node 0 and unless --skip-tokenizer-init, the detokenizer."""
    explain_flags(config)
    context = multiprocessing.get_context("spawn")
    ports = make_ports()
    link = SocketLink(ports)
    entries: dict[str, tuple[ProcessEntry, tuple[object, ...]]] = {}
    num_ranks = config.server_args.tp_size
    if num_ranks > 1:
        create_rank_board(ports, num_ranks)
    for rank in config.local_ranks:
        entries[f"scheduler-{rank}" if rank else "scheduler"] = scheduler_entry, (rank,) if rank else ()
    if 0 in config.local_ranks and not config.server_args.skip_tokenizer_init:
        entries["detokenizer"] = detokenizer_entry, ()
    processes: list[BaseProcess] = []
    backend = EngineProcesses(processes, ports, link, config.server_args.watchdog_timeout)
    try:
        for name, (entry, others) in entries.items():
            process = context.Process(target=entry, args=(config, ports, *others), name=name, daemon=True)
            with starting_children():
                process.start()
            processes.append(process)
    except BaseException:
        backend.stop(0.0)
        link.close()
        raise
    return backend


class Replicas:
    """See :class:`EngineBackend`. If one replica ends, all end."""

    def __init__(self, backends: Sequence[EngineProcesses], config: EngineConfig) -> None:
        self._backends = backends
        self.link = ReplicaLink([backend.link for backend in backends], config)

    def watch(self, on_death: Callable[[str], None]) -> None:

        def died(number: int, reason: str) -> None:
            on_death(f"replica {number}: {reason}")

        for number, backend in enumerate(self._backends):
            backend.watch(partial(died, number))

    def dump_flight_recorder(self) -> None:
        """Have each scheduler write its last steps to a file, even while it hangs."""
        for backend in self._backends:
            backend.dump_flight_recorder()

    def tell_nodes(self, reason: str) -> None:
        """Replicas are all on this host."""

    def stop(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for backend in self._backends:
            backend.ending()
        for backend in self._backends:
            backend.stop(max(deadline - time.monotonic(), 0.0))


def launch(
    config: EngineConfig,
    scheduler_entry: ProcessEntry = run_scheduler,
    detokenizer_entry: ProcessEntry = run_detokenizer,
) -> EngineProcesses | Replicas:
    """The processes of all replicas of the engine. Entry functions must be importable."""
    backends: list[EngineProcesses] = []
    try:
        for replica in range(config.server_args.dp_size):
            own = dataclasses.replace(config, replica=replica)
            backends.append(launch_processes(own, scheduler_entry, detokenizer_entry))
    except BaseException:
        for backend in backends:
            backend.stop(0.0)
            backend.link.close()
        raise
    return backends[0] if len(backends) == 1 else Replicas(backends, config)


def make_manager(config: EngineConfig, link: SchedulerLink) -> TokenizerManager:
    """The TokenizerManager with its tokenizer. Raises ValueError if there is none that fits."""
    begin, tokenizer = time.perf_counter(), None
    if not config.server_args.skip_tokenizer_init:
        with announced("loading the tokenizer"):
            tokenizer = load_tokenizer(config.tokenizer_path)
        check_vocabulary(tokenizer, config.model.vocab_size, config.tokenizer_path)
        seconds = time.perf_counter() - begin
        logger.info("Loaded the tokenizer (%d tokens) in %.1f s", tokenizer.vocab_size, seconds)
    return TokenizerManager(config, tokenizer, link)


class FrontEnd:
    """The TokenizerManager of a backend and the task that brings it messages. Lives on the running event loop."""

    def __init__(self, config: EngineConfig, backend: EngineBackend) -> None:
        try:
            self.manager = make_manager(config, backend.link)
        except ValueError:
            backend.link.close()
            raise
        self._tasks = [asyncio.ensure_future(self._listen())]
        self._link = backend.link
        backend.watch(self._on_death)

    async def _listen(self) -> None:
        try:
            await self.manager.run()
        except Exception as error:
            logger.exception("the front end failed")
            self.manager.fail(f"front end: {type(error).__name__}: {error}")

    def _on_death(self, reason: str) -> None:
        self._tasks.append(asyncio.ensure_future(self._fail_soon(reason)))

    async def _fail_soon(self, reason: str) -> None:
        await asyncio.sleep(LAST_WORDS_S)
        self.manager.fail(reason)

    async def close(self) -> None:
        """Stop listening and close the link. The backend must have been told to stop before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.close()
