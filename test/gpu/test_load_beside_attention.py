"""Evidence that loads need no exclusivity: attention's output is bit-identical while an SM kernel loads other pages.

FlashInfer's fa3 prefill is persistent. Beside it backups by an SM kernel have been reported to corrupt its output
(F2), for reasons nobody has found; loads have not. Here every round runs prefill attention over four layers while pages
that it does not read are loaded by the kernel, the two overlapping in time, and each bit of the output is compared with
that of the idle device.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fenceline.config.kv_layout import KVLayout
from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.page_copy import make_page_copier
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Device, Points, open_device

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 300
PAGE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 32, 8, 128
NUM_REQS, PREFIX, NEW = 4, 1024, 512
NUM_MOVED = 1536  # pages, 400 MB: 8 ms on the link, longer than a round's attention takes to submit
FIRST_MOVED = 600


class Attention:
    """A prefill step's attention over random pages, on FORWARD."""

    def __init__(self, device: Device) -> None:
        torch.manual_seed(1)
        self.device = device
        layout = KVLayout.uniform(PAGE, LAYERS, KV_HEADS, HEAD_DIM, "bfloat16")
        self.pool = KVPool(FIRST_MOVED + NUM_MOVED, layout, device.torch_device)
        for layer in range(LAYERS):
            self.pool.row(layer, "k").normal_()
            self.pool.row(layer, "v").normal_()
        self.backend = FlashInferAttentionBackend(self.pool, device, HEADS, prefill="fa3")
        columns = (PREFIX + NEW) // PAGE
        pages = torch.randperm(NUM_REQS * columns) + 1
        assert int(pages.max()) < FIRST_MOVED
        self.table = pages.view(NUM_REQS, columns).int().cuda()
        self.rows = torch.arange(NUM_REQS).cuda()
        self.seq_lens = torch.full((NUM_REQS,), PREFIX + NEW).cuda()
        self.starts = (torch.arange(NUM_REQS + 1) * NEW).int().cuda()
        qkv = torch.randn(NUM_REQS * NEW, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16().cuda()
        self.q, self.k, self.v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        device.synchronize()

    def run(self) -> list[torch.Tensor]:
        """Each layer's output. Submitted, not waited for."""
        inputs = AttentionInputs(
            mode=ForwardMode.EXTEND,
            page_table=self.table,
            rows=self.rows,
            seq_lens=self.seq_lens,
            seq_lens_cpu=np.full(NUM_REQS, PREFIX + NEW, dtype=np.int64),
            query_lens_cpu=np.full(NUM_REQS, NEW, dtype=np.int64),
            query_starts=self.starts,
        )
        plan = self.backend.plan(inputs)
        return [plan.forward(layer, self.q, self.k, self.v, HEAD_DIM**-0.5) for layer in range(LAYERS)]


def rounds_beside(kind: TransferKind) -> tuple[int, int]:
    """(values of attention's output that are wrong, rounds whose transfer was still running when attention ended)."""
    device = open_device("cuda")
    attention = Attention(device)
    assert attention.backend.persistent(ForwardMode.EXTEND)
    host = HostPool(device, NUM_MOVED, attention.pool.layout, "page_first")
    host.buffer.view(torch.bfloat16).normal_()
    copier = make_page_copier(device, attention.pool, host, "kernel")
    assert copier.uses_sm
    controller = HiCacheController(device, attention.pool, host, copier)
    host_pages = np.random.default_rng(1).permutation(NUM_MOVED).astype(np.int32)
    device_pages = np.arange(FIRST_MOVED, FIRST_MOVED + NUM_MOVED, dtype=np.int32)
    move = controller.load if kind is TransferKind.LOAD else controller.store
    with device.forward.active():
        expected = [output.clone() for output in attention.run()]
        num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    device.synchronize()
    num_beside = 0
    for number in range(NUM_ROUNDS):
        ticket = Ticket(number, kind)
        move(ticket, device_pages, host_pages, Points.none())
        with device.forward.active():
            for _ in range(2):
                for output, right in zip(attention.run(), expected, strict=True):
                    num_wrong += (output != right).sum()
        done = device.forward.record()
        while not device.forward.ask(done):
            pass
        num_beside += not any(point.stream.ask(point) for point in ticket.points)
        device.synchronize()
        assert controller.drain_acks() == [ticket]
    for device_page, host_page in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
        for on_device, on_host in zip(attention.pool.parts, host.parts, strict=True):
            assert torch.equal(on_device[device_page].cpu(), on_host[host_page])
    return int(num_wrong), num_beside


def test_attention_beside_kernel_loads_is_bit_identical() -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its fa3 kernels are for Hopper")
    num_wrong, num_beside = rounds_beside(TransferKind.LOAD)
    assert num_wrong == 0
    assert num_beside > NUM_ROUNDS // 2, f"attention ended while its load ran in {num_beside} rounds only"
