"""The main process of a host that is not node 0: watches its ranks, and ends with the server or for its own reason."""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.launch import LAST_WORDS_S, EngineProcesses, ProcessEntry, launch_processes
from fenceline.ipc.child_process import DUMP_SIGNAL, PARENTS_SIGNALS
from fenceline.ipc.io_struct import FatalError

logger = logging.getLogger(__name__)


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
