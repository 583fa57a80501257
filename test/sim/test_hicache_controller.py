"""HiCacheController on the virtual GPU: every schedule leaves the same bytes, and a missing edge is named."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import count

import numpy as np
import pytest
import torch
from transfer_rounds import POLICIES, RandomTransfers, Rounds, layouts

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.mem_cache.host.cache_controller import _warm_up
from fenceline.mem_cache.host.page_copy import make_page_copier
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Device, Points, open_device
from fenceline.memory_order.edges import HOST_PAGE_REUSE, PAGE_EDGES
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import Chunk, ForwardResult, PageWrites, StepBatch
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.sampling.sampling_params import SamplingParams
from fenceline_proof.persistent_attention import PERSISTENT
from fenceline_proof.tiny_model import tiny_model_path
from fenceline_sim import VgpuDevice, VirtualGpu

torch.set_num_threads(1)
EDGES = [edge.name for edge in (*PAGE_EDGES, HOST_PAGE_REUSE)]


def play(gpu: VirtualGpu, num_turns: int, severed: str = "", **fields: object) -> None:
    rounds = Rounds(VgpuDevice(frozenset({severed} if severed else ()), gpu), **fields)  # type: ignore[arg-type]
    transfers = RandomTransfers(rounds, gpu.seed)
    for _ in range(num_turns):
        transfers.turn()
    transfers.check()


@layouts
@pytest.mark.parametrize("policy", POLICIES)
def test_random_transfers_leave_the_same_bytes_on_every_schedule(policy: str, layout: str) -> None:
    for seed in range(2):
        play(VirtualGpu(seed=seed, policy=policy), 40, layout=layout)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_copies_are_in_order_with_all_around_them(policy: str) -> None:
    """At the start, pages are written before them, and used after them without a Point."""
    rounds = Rounds(VgpuDevice(frozenset(), VirtualGpu(seed=0, policy=policy)))
    device, kv_pool = rounds.device, rounds.kv_pool
    rounds.write(0, 1)
    with torch.inference_mode():
        _warm_up(device, make_page_copier(device, kv_pool, rounds.host_pool, "direct"), kv_pool.num_layers)
    rounds.write(0, 2)
    device.synchronize()


@pytest.mark.parametrize("edge", EDGES)
def test_without_an_edge_the_detector_names_it(edge: str) -> None:
    named = set()
    for seed in range(6):
        gpu = VirtualGpu(seed=seed, policy=POLICIES[seed % len(POLICIES)], collect=True)
        try:
            play(gpu, 40, edge)
        except AssertionError:
            pass  # and the bytes are wrong
        cause = min(gpu.races, key=lambda race: race.order, default=None)
        named.add(None if cause is None else cause.edge)
        if edge in named:
            return
    pytest.fail(f"named {named}")


# --- under the model runner --------------------------------------------------------------------------

PAGE = 4
PROMPT = np.arange(2, 2 + 5 * PAGE + 2)  # five whole pages, and a part of a sixth
PREFIX_LEN = 5 * PAGE - 1  # the last page loaded is one that the step goes on with
HICACHE = {"enable_hierarchical_cache": True, "hicache_ratio": 1.0}


class Runner:
    """The tiny model with a host tier. Requests have the pages that the test names."""

    def __init__(self, device: Device | str = "cpu", backend: str = "torch", **flags: object) -> None:
        self.device = open_device(device) if isinstance(device, str) else device
        flags = HICACHE | {"max_total_tokens": 160, "page_size": PAGE, "context_length": 64} | flags
        args = ServerArgs(model_path=tiny_model_path(), device=self.device.kind, random_seed=1, **flags)  # type: ignore[arg-type]
        config = dataclasses.replace(
            resolve(args), max_running_requests=6, prefill_attention_backend=backend, decode_attention_backend=backend
        )
        self.runner = ModelRunner(config, self.device, show_progress=False)
        assert self.runner.hicache is not None
        self.hicache = self.runner.hicache
        self._tickets = count(1)

    def extend(
        self, row: int, pages: list[int], prefix_len: int = 0, loads: tuple[Ticket, ...] = (),
        after: Points = Points.none(),
    ) -> ForwardResult:  # fmt: skip
        positions = np.arange(prefix_len, len(PROMPT))
        chunk = Chunk(PROMPT[prefix_len:], np.array(pages)[positions // PAGE] * PAGE + positions % PAGE)
        columns = np.arange(len(pages))
        writes = PageWrites(np.full(len(pages), row), columns, np.array(pages, np.int32))
        return self.runner.launch(
            StepBatch.of_chunks([row], [prefix_len], [chunk], [greedy(row)], writes, after, loads)
        )

    def decode(self, row: int, seq_len: int) -> ForwardResult:
        """``seq_len`` with the new token, which has room in the last page of the prompt."""
        rows, lens, samples = np.array([row]), np.array([seq_len]), np.ones(1, np.bool_)
        none, after = PageWrites.none(), Points.none()
        batch = StepBatch(rows, lens - 1, lens, samples, (greedy(row),), none, after, composition=row)
        return self.runner.launch(batch)

    def store(self, pages: list[int], host: list[int], after: Points) -> Ticket:
        ticket = Ticket(next(self._tickets), TransferKind.STORE)
        self.hicache.store(ticket, np.array(pages, np.int32), np.array(host, np.int32), after)
        return ticket

    def load(self, pages: list[int], host: list[int], after: Points) -> Ticket:
        ticket = Ticket(next(self._tickets), TransferKind.LOAD)
        self.hicache.load(ticket, np.array(pages, np.int32), np.array(host, np.int32), after)
        return ticket


def greedy(row: int) -> ReqSampling:
    return ReqSampling(SamplingParams(temperature=0.0), 1, row, len(PROMPT), (0,), False, 0)


def there_and_back(runner: Runner) -> list[int]:
    """First tokens of a prompt computed whole, of the same with a prefix that went to the host and back, and of a
    decode step of each."""
    first = runner.extend(1, [1, 2, 3, 4, 5, 6])
    stored = runner.store([1, 2, 3, 4, 5], [7, 8, 9, 3, 4], Points.of(first.done))
    tokens = [*first.wait().tokens.tolist()]
    runner.runner.hicache.drain_acks()  # type: ignore[union-attr]
    loaded = runner.load([11, 15, 14, 13, 12], [7, 8, 9, 3, 4], stored.points)
    second = runner.extend(2, [11, 15, 14, 13, 12, 16], PREFIX_LEN, (loaded,))
    third = runner.decode(1, len(PROMPT) + 1)
    tokens += second.wait().tokens.tolist()
    tokens += third.wait().tokens.tolist()
    tokens += runner.decode(2, len(PROMPT) + 1).wait().tokens.tolist()
    runner.device.synchronize()
    return tokens


@lru_cache
def expected() -> list[int]:
    first, second, *decoded = there_and_back(Runner())
    assert first == second and decoded[0] == decoded[1]
    return [first, second, *decoded]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("torch", {}),
        ("torch", {"hicache_io_backend": "kernel", "cuda_graph_bs": (1, 2)}),
        (PERSISTENT, {"hicache_io_backend": "kernel", "cuda_graph_bs": (1, 2)}),
        (PERSISTENT, {"hicache_mem_layout": "page_first", "memory_check": "order"}),
    ],
    ids=str,
)
def test_pages_that_were_on_the_host_give_the_same_tokens(backend: str, flags: dict[str, object], policy: str) -> None:
    device = VgpuDevice(gpu=VirtualGpu(seed=1, policy=policy))
    assert there_and_back(Runner(device, backend, **flags)) == expected()


@pytest.mark.parametrize("edge", ["store_after_forward", "load_after_store", "forward_after_load"])
def test_a_step_without_an_edge_is_caught(edge: str) -> None:
    gpu = VirtualGpu(seed=1, collect=True)
    there_and_back(Runner(VgpuDevice(frozenset({edge}), gpu)))
    assert min(gpu.races, key=lambda race: race.order).edge == edge


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
@pytest.mark.parametrize("backend", ["torch", PERSISTENT])
@pytest.mark.parametrize("graphs", [{}, {"cuda_graph_bs": (1, 2)}], ids=["eager", "graphs"])
def test_persistent_attention_and_backups_on_sms_exclude(
    backend: str, io_backend: str, graphs: dict[str, object]
) -> None:
    """Both ways, prefill and decode; without the edge that is seen, and only where both want the SMs (F2)."""
    for severed in (frozenset[str](), frozenset({"sm_exclusive"})):
        gpu = VirtualGpu(seed=2, collect=True)
        runner = Runner(VgpuDevice(severed, gpu), backend, hicache_io_backend=io_backend, **graphs)
        first = runner.extend(1, [1, 2, 3, 4, 5, 6])
        runner.store([21, 22], [1, 2], Points.none())  # beside that step, and not its pages
        second = runner.decode(1, len(PROMPT) + 1)
        first.wait()
        third = runner.extend(2, [11, 12, 13, 14, 15, 16])
        second.wait(), third.wait()
        runner.device.synchronize()
        edges = {(race.edge, race.hazard) for race in gpu.races}
        if severed and backend == PERSISTENT and io_backend == "kernel":
            assert edges == {("sm_exclusive", "exclusive")}
            assert {race.memory for race in gpu.races} == {"resource sm"}
        else:
            assert edges == set()


@pytest.mark.parametrize("backend", ["torch", PERSISTENT])
def test_decode_graphs_replay_while_pages_are_loading(backend: str) -> None:
    """F4 as it was once answered, by switching graphs off: no replay waits for a load that it does not read."""
    device = VgpuDevice(gpu=VirtualGpu(policy="laziest"))
    runner = Runner(device, backend, cuda_graph_bs=(1, 2), hicache_io_backend="kernel")
    runner.extend(1, [1, 2, 3, 4, 5, 6]).wait()
    ticket = runner.load([11, 12, 13], [1, 2, 3], Points.none())
    for step in range(1, 3):
        runner.decode(1, len(PROMPT) + step).wait()
        assert runner.hicache.drain_acks() == [], "on this schedule what nobody waits for does not run"
    stats = runner.runner.graph_stats
    assert stats is not None and stats.replays == stats.eligible_steps == 2
    assert stats.fallbacks == {} and stats.repairs == {}
    runner.device.synchronize()
    assert runner.hicache.drain_acks() == [ticket]
