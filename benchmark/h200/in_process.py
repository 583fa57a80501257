"""Runs the scheduler without HTTP: the real loop and model runner, and a process that receives their messages.

Messages are encoded and sent over the same sockets as in a server, so a step takes as long as in a server's scheduler
process. With --tp-size the other ranks run in processes of their own, as in a server, and this one is rank 0.
"""

from __future__ import annotations

import gc
import multiprocessing
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import parse_args
from fenceline.ipc.io_struct import (
    AbortReq,
    FlushCacheReq,
    LoadGrammarReq,
    Message,
    PortArgs,
    TokenizedGenerateReq,
    id_array,
)
from fenceline.ipc.mailbox import Inbox, Outbox, make_ports, remove_ports
from fenceline.ipc.rank_board import RankBoard, create_rank_board, rank_endpoint
from fenceline.layers.context import Shard
from fenceline.memory_order import open_device
from fenceline.model_executor.decode_runner import DecodeRunner
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.process import SocketOutbox, join_ranks, run_scheduler_process
from fenceline.scheduler.ranks import LeadingRank
from fenceline.scheduler.scheduler import Scheduler

_VOCAB = 151643


def _take_everything(ports: PortArgs) -> None:
    selector = selectors.DefaultSelector()
    for endpoint in (ports.detokenizer, ports.tokenizer):
        selector.register(Inbox(endpoint, msgspec.msgpack.Decoder(msgspec.Raw)), selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            while key.fileobj.has_arrived():  # type: ignore[union-attr]
                key.fileobj.drain()  # type: ignore[union-attr]


class _Inbox:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        messages, self.messages = self.messages, []
        return messages


class InProcessEngine:
    """One model and one scheduler. Use it in a ``with`` block."""

    def __init__(self, model_dir: Path, flags: Sequence[str]) -> None:
        begin = time.perf_counter()
        argv = ["--model-path", str(model_dir), "--load-format", "dummy", "--decode-log-interval", "1000000000"]
        self.config = resolve(parse_args([*argv, *flags]))
        self._ports = make_ports()
        context = multiprocessing.get_context("spawn")
        num_ranks = self.config.server_args.tp_size
        if num_ranks > 1:
            create_rank_board(self._ports, num_ranks)
        self._children = [
            context.Process(target=_take_everything, args=(self._ports,), daemon=True),
            *(
                context.Process(target=run_scheduler_process, args=(self.config, self._ports, rank), daemon=True)
                for rank in range(1, num_ranks)
            ),
        ]
        for child in self._children:
            child.start()
        self._inbox = _Inbox()
        self.device = open_device(self.config.device, index=None if num_ranks == 1 else 0)
        shard = Shard() if num_ranks == 1 else join_ranks(self.config, self._ports, 0, self.device)
        self.runner = ModelRunner(self.config, self.device, show_progress=False, shard=shard)
        compilers = [thread for thread in threading.enumerate() if thread.name == "compile"]
        for thread in compilers:
            thread.join()
        if compilers:
            print("FlashInfer has been compiled: run this again if prefill steps matter, which do not use it yet")
        outbox = SocketOutbox(self._ports, skip_detokenizer=False)
        link = None
        if num_ranks > 1:
            endpoints = [rank_endpoint(self._ports, rank) for rank in range(1, num_ranks)]
            turns = Outbox(*endpoints)
            send = [partial(turns.send, endpoint) for endpoint in endpoints]
            link = LeadingRank(RankBoard(self._ports, 0, num_ranks), self.runner, self._inbox.drain, send)
        self.scheduler = Scheduler(self.config, self.runner, self._inbox, outbox, link)
        with self.device.forward.active():
            shard.smallest(0)  # wait until all ranks are here
        self._flight: InFlight | None = None
        self._num_submitted = 0
        self._grammar = 0  # of the requests that are submitted
        self.blocked_s = 0.0
        self._time_waiting()
        gc.collect()
        gc.freeze()
        self.start_s = time.perf_counter() - begin

    def __enter__(self) -> InProcessEngine:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.join()
        remove_ports(self._ports)

    @property
    def decode(self) -> DecodeRunner:
        """The runner of decode steps."""
        return self.runner.decode

    @property
    def graphs(self) -> DecodeRunner | None:
        """The runner of decode steps if there are captured graphs, else None."""
        return self.decode if self.decode.has_graphs else None

    def submit(self, num_reqs: int, prompt_len: int, output_lens: Sequence[int], **sampling: float) -> None:
        """Queue requests with random prompts; ``output_lens`` are used in turn. ``sampling`` sets fields of
        SamplingParams; without it requests are greedy."""
        draw = torch.Generator().manual_seed(self._num_submitted)
        for i in range(num_reqs):
            vocab = min(_VOCAB, self.config.model.vocab_size)
            ids = torch.randint(0, vocab, (prompt_len,), generator=draw).tolist()
            self.submit_ids(ids, output_lens[i % len(output_lens)], **sampling)

    def submit_ids(self, ids: list[int], output_len: int, **sampling: float) -> str:
        """Queue one request, greedy unless ``sampling`` says otherwise; returns its id."""
        fields: dict[str, Any] = {"temperature": 0.0} | sampling
        params = SamplingParams(max_new_tokens=output_len, ignore_eos=True, **fields)
        rid = f"req-{self._num_submitted}"
        self._num_submitted += 1
        self._inbox.messages.append(
            TokenizedGenerateReq(
                rid=rid, input_ids=id_array(ids), sampling_params=params, stream=True, grammar=self._grammar
            )
        )
        return rid

    def load_grammar(self, data: bytes, vocabulary: bytes) -> None:
        """All requests from now on follow this compiled grammar; to be called once."""
        self._grammar = 1
        self._inbox.messages.append(LoadGrammarReq("grammar", self._grammar, data, vocabulary))
        self.step()

    def flush(self) -> None:
        """Empty the prefix cache, all tiers; no request may run or wait."""
        self._inbox.messages.append(FlushCacheReq(id="flush"))
        self.step()

    def step(self) -> None:
        """One step of the loop: it submits a step and waits for the preceding one."""
        self._flight = self.scheduler.step(self._flight)

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Step until ``condition`` is true."""
        while not condition():
            self.step()

    def abort_all(self) -> None:
        """End every request and wait until nothing is in flight."""
        self._inbox.messages.append(AbortReq(abort_all=True))
        self.step()
        self.step_until(lambda: self._flight is None and not self.scheduler.reqs)

    def _time_waiting(self) -> None:
        """Measure how long the host waits for results; the rest of a step is its own work."""
        for stream in (self.device.copy, self.device.forward):
            stream.synchronize = self._timed(stream.synchronize)  # type: ignore[method-assign]

    def _timed(self, synchronize: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            begin = time.perf_counter()
            synchronize(*args)
            self.blocked_s += time.perf_counter() - begin

        return timed


def owner_of(scheduler: Scheduler, name: str) -> object:
    """The object that has the method ``name``: the scheduler, or its steps under masks."""
    return scheduler if hasattr(scheduler, name) else scheduler.masks


def call_times(owner: object, name: str) -> list[float]:
    """The microseconds of each call of a method from now on."""
    method: Callable[..., object] = getattr(owner, name)
    times: list[float] = []

    def timed(*args: object) -> object:
        begin = time.perf_counter()
        result = method(*args)
        times.append((time.perf_counter() - begin) * 1e6)
        return result

    setattr(owner, name, timed)
    return times


def percent(ratio: float) -> str:
    """``1.034`` as ``+3.4%``."""
    return f"{(ratio - 1) * 100:+.1f}%"
