"""Our kernels' declarations on the virtual GPU: what is read before the wait for the preceding kernel is read early."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from fenceline.layers.kernels import accesses
from fenceline.memory_order.kernel import Kernel, KernelAccesses
from fenceline_proof.runs import HAPPENS_BEFORE, Outcome, Trial, run
from fenceline_sim import RaceError, VirtualGpu, device, use

torch.set_num_threads(1)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _kernel(reads_early: bool = False, starts_next: bool = False, programmatic: bool = True) -> Kernel:
    """It copies its first operand to its second."""

    def named(op: KernelAccesses, source: torch.Tensor, target: torch.Tensor) -> None:
        if reads_early:
            op.read(source)
        if starts_next:
            op.start_dependents()
        if programmatic:
            op.wait()
        if not reads_early:
            op.read(source)
        op.write(target)

    return Kernel("copies", named)


PLAIN = _kernel(programmatic=False)
WAITS = _kernel()
EARLY = _kernel(reads_early=True)
OPENS = _kernel(reads_early=True, starts_next=True)


def _chain(gpu: VirtualGpu, kernels: tuple[Kernel, ...], captured: bool) -> torch.Tensor:
    """Each kernel copies what the preceding one has written. Returns the last one's target."""
    device = use(gpu)
    first = torch.ones(4, device=device)
    links = [torch.zeros(4, device=device) for _ in range(len(kernels) + 1)]
    names = [f"link {n}" for n in range(len(links))]
    for link, name in zip(links, names, strict=True):
        gpu.name_memory(link, name)

    def submit() -> None:
        links[0].copy_(first)
        for n, kernel in enumerate(kernels):
            kernel.launch(_copy, links[n], links[n + 1])

    if captured:
        graph = gpu.graph("chain")
        with gpu.capture(graph):
            submit()
        graph.replay()
    else:
        submit()
    return links[-1]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("policy", ["random", "laziest", "eager"])
def test_a_kernel_that_waits_before_it_reads_is_in_order(policy: str, captured: bool) -> None:
    for kernels in ((PLAIN, WAITS, WAITS), (WAITS, PLAIN, PLAIN), (WAITS,)):
        assert _chain(VirtualGpu(policy=policy), kernels, captured).tolist() == [1.0] * 4


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("front", [PLAIN, WAITS], ids=["plain", "programmatic"])
def test_reading_what_the_kernel_in_front_writes_is_a_race(front: Kernel, captured: bool) -> None:
    for policy in ("random", "laziest", "eager", "fifo"):
        gpu = VirtualGpu(policy=policy)
        wanted = (
            r"RAW on link 2(.|\n)*1\. copies writes it on default \((.|\n)*"
            r"2\. copies, before it waits for the kernel in front, reads it on default \((.|\n)*read after the wait"
        )
        with pytest.raises(RaceError, match=wanted):
            _chain(gpu, (PLAIN, front, EARLY), captured).tolist()


def _beyond(gpu: VirtualGpu, between: Kernel) -> None:
    """A kernel writes what the next but one reads before its wait."""
    device = use(gpu)
    source, early, other, target = (torch.zeros(4, device=device) for _ in range(4))
    gpu.name_memory(early, "read early")
    PLAIN.launch(_copy, source, other)
    PLAIN.launch(_copy, source, early)
    between.launch(_copy, source, other)
    EARLY.launch(_copy, early, target)
    gpu.synchronize_all()


def test_a_kernel_between_the_two_orders_them_unless_it_lets_go() -> None:
    for seed in range(6):
        for between in (PLAIN, WAITS, EARLY):
            _beyond(VirtualGpu(seed=seed), between)
        with pytest.raises(RaceError, match="RAW on read early"):
            _beyond(VirtualGpu(seed=seed), OPENS)


def test_without_the_detector_it_gets_what_was_there_before() -> None:
    seen = {tuple(_chain(VirtualGpu(seed=seed, detect=False), (PLAIN, EARLY), False).tolist()) for seed in range(12)}
    assert seen == {(0.0,) * 4, (1.0,) * 4}


def _by_another_stream(gpu: VirtualGpu, waits: bool) -> None:
    """Another stream writes what a kernel reads before its wait; its own stream waits for that."""
    device = use(gpu)
    source, early, target = (torch.zeros(4, device=device) for _ in range(3))
    load = gpu.stream("load")
    gpu.synchronize_all()
    PLAIN.launch(_copy, source, target)
    PLAIN.launch(_copy, source, target)
    with gpu.on(load):
        PLAIN.launch(_copy, source, early)
    if waits:
        gpu.wait(gpu.default_stream, gpu.record(load))
    EARLY.launch(_copy, early, target)
    gpu.synchronize_all()


def test_a_wait_of_the_stream_holds_for_what_is_read_early() -> None:
    for seed in range(6):
        _by_another_stream(VirtualGpu(seed=seed), waits=True)
        with pytest.raises(RaceError):
            _by_another_stream(VirtualGpu(seed=seed), waits=False)


# --- in the engine -----------------------------------------------------------------------------------------


def _queries_read_before_the_wait(patch: pytest.MonkeyPatch) -> None:
    right = accesses.rotate_and_store

    def wrong(op: KernelAccesses, qkv: torch.Tensor, *operands: torch.Tensor) -> None:
        op.read(qkv)
        right.accesses(op, qkv, *operands)

    patch.setattr(accesses, "rotate_and_store", Kernel(right.name, wrong))


def _input_read_before_the_wait(patch: pytest.MonkeyPatch) -> None:
    right = accesses.skinny_linear

    def wrong(op: KernelAccesses, x: torch.Tensor, *operands: torch.Tensor) -> None:
        op.read(x)
        right.accesses(op, x, *operands)

    patch.setattr(accesses, "skinny_linear", Kernel(right.name, wrong))


@pytest.mark.parametrize(
    ("plant", "kernel"),
    [(_queries_read_before_the_wait, "rotate_and_store"), (_input_read_before_the_wait, "skinny_linear")],
)
@pytest.mark.parametrize("workload", ["graphs", "mixed"])
def test_a_kernel_that_reads_before_its_wait_is_named(
    plant: Callable[[pytest.MonkeyPatch], None], kernel: str, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found: Outcome = run(Trial(workload, seed=0))
    assert found.checker == HAPPENS_BEFORE, found
    assert f"{kernel}, before it waits for the kernel in front, reads it on forward" in found.report


@pytest.mark.parametrize(
    ("name", "workload", "writer"),
    [
        ("fill_rows", "graphs", r"(clone|copy) writes it on forward"),
        ("copy_words", "conversations", "copy writes it on forward"),
    ],
)
def test_a_kernel_that_moves_inputs_before_their_writer_is_named(
    name: str, workload: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Kernel = getattr(device, name)

    def wrong(op: KernelAccesses, *operands: Any) -> None:
        sources = operands[operands[0] + 1 :] if name == "fill_rows" else operands[:1]
        for source in sources:
            op.read(source)
        op.wait()
        right.accesses(op, *operands)

    monkeypatch.setattr(device, name, Kernel(right.name, wrong))
    # Small results often come from a graph's replay, of which the kernel behind begins nothing early.
    found = next(found for seed in range(8) if not (found := run(Trial(workload, seed))).clean)
    assert found.checker == HAPPENS_BEFORE, found
    wanted = rf"1\. .*{writer}(.|\n)*2\. {name}, before it waits for the kernel in front, reads it on forward"
    assert re.search(wanted, found.report), found.report


# --- attention ---------------------------------------------------------------------------------------------


def test_the_engine_is_clean_with_attention_by_our_kernels() -> None:
    models = set()
    for seed in range(6):
        trial = Trial("launched", seed)
        models.add(trial.scenarios.make(Random(seed)).flags.get("model"))
        found = run(trial)
        assert found.clean, found.report
    assert "latents" in models and len(models) > 1, models


def test_fetching_the_token_of_the_kernel_in_front_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    right = accesses.decode_attention

    def wrong(op: KernelAccesses, q: torch.Tensor, k_cache: torch.Tensor, *operands: Any) -> None:
        _, _, page_table, rows, seq_lens, _, _, _, page_size, *_ = operands
        op.read_tokens(k_cache, page_table, rows, seq_lens, page_size)
        right.accesses(op, q, k_cache, *operands)

    monkeypatch.setattr(accesses, "decode_attention", Kernel(right.name, wrong))
    wanted = (
        r"RAW on kv_pool\.layer0\.(k|latent) row(.|\n)*1\. (rotate_and_store|store_latent) writes it on forward(.|\n)*"
        r"2\. decode_attention, before it waits for the kernel in front, reads it on forward"
    )
    for seed in range(3):
        found = run(Trial("launched", seed))
        assert found.checker == HAPPENS_BEFORE and re.search(wanted, found.report), found


def test_reading_lists_before_they_are_selected_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """So attention to lists of slots waits for what has written them before it begins."""
    right = accesses.list_attention

    def wrong(op: KernelAccesses, *operands: Any) -> None:
        op.start_dependents()
        op.read(operands[6])  # the lists' lengths
        op.wait()
        right.accesses(op, *operands)

    monkeypatch.setattr(accesses, "list_attention", Kernel(right.name, wrong))
    wanted = r"1\. select_best writes it on forward(.|\n)*2\. list_attention, before it waits for the kernel in front"
    found = [run(Trial("sparse", seed)) for seed in range(4)]
    caught = [one for one in found if not one.clean]
    assert caught, "some of these runs attend by our own kernels"
    for one in caught:
        assert one.checker == HAPPENS_BEFORE and re.search(wanted, one.report), one.report
