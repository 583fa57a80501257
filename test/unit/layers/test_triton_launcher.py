"""Launches that bypass Triton's own: the same function with the same arguments as through Triton, by a driver that
records instead of launching, so that kernels are compiled for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton_recorder import IS_KNOWN, STREAM, Recorder

from fenceline.config.families import BlocksConfig
from fenceline.layers.cuda_layers import TRITON, _programmatic
from fenceline.layers.forward_batch import BlockQueries
from fenceline.layers.kernels.base import HeadLayout, LayerKernels, QKNorm
from fenceline.layers.kernels.speculative_operands import AcceptOutputs, BeginOutputs, NextRow, Pieces
from fenceline.layers.kernels.triton import (
    activation,
    extend_attention,
    page_gather,
    rms_norm,
    rotate_store,
    select_blocks,
    skinny_gemm,
)
from fenceline.layers.kernels.triton import decode_prologue as decode_prologue_triton
from fenceline.layers.kernels.triton import sample as sample_triton
from fenceline.layers.kernels.triton import speculative_step as step_triton
from fenceline.layers.kernels.triton.decode_attention import PagedRequests
from fenceline.mem_cache import page_tag_kernels
from fenceline.mem_cache.page_tag_operands import BegunTags, MovedPages, Visit
from fenceline.memory_order import triton_launcher as launcher
from fenceline.memory_order.guards import first_of_best

# With another version Triton launches, which needs no test of ours, and the recorder cannot stand for its driver.
needs_known_triton = pytest.mark.skipif(
    not IS_KNOWN, reason=f"launches of Triton {launcher._KNOWN_VERSION}*, here is {triton.__version__}"
)
BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    """For tests with the mark ``needs_known_triton``."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    recorder = Recorder()
    kernels = (
        rms_norm._rms_norm_kernel,
        activation._silu_and_mul_kernel,
        extend_attention._extend_kernel,
        select_blocks._coarse_kernel,
        select_blocks._score_kernel,
        skinny_gemm._rows_kernel,
        page_gather._gather_kernel,
        rotate_store._rotate_and_store_kernel,
        decode_prologue_triton._decode_prologue_kernel,
        sample_triton._piece_kernel,
        sample_triton._combine_kernel,
        step_triton._begin_kernel,
        step_triton._keep_kernel,
        step_triton._accept_kernel,
        step_triton._hidden_kernel,
        page_tag_kernels._begin_kernel,
        page_tag_kernels._visit_kernel,
        page_tag_kernels._seal_kernel,
        page_tag_kernels._arrive_kernel,
    )
    makers = (
        rms_norm._variant,
        activation._variant,
        extend_attention._variants,
        select_blocks._coarse_variant,
        select_blocks._score_variant,
        rotate_store._variant,
        decode_prologue_triton._variant,
        sample_triton._variants,
        step_triton._paged_variant,
        step_triton._pieces_variant,
        step_triton._accept_variant,
        step_triton._hidden_variant,
        page_tag_kernels._begin_variant,
        page_tag_kernels._visit_variant,
        page_tag_kernels._moved_variant,
    )
    monkeypatch.setattr(driver, "_active", recorder)
    yield recorder
    for kernel in kernels:
        kernel.device_caches.clear()
    for maker in makers:
        maker.cache_clear()


def addresses_for_tensors(launch: tuple[Any, ...], num_args: int) -> tuple[Any, ...]:
    """A launch as it is when bound: addresses for tensors, nothing for hooks and for constants, which the kernel has
    built in."""
    begin = len(launcher._KNOWN_FORMAT)
    plain = [arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 if arg is None else arg for arg in launch[begin:]]
    return (*launch[: begin - 3], None, None, None, *plain[:num_args], *[None] * (len(plain) - num_args))


@needs_known_triton
def test_a_bound_launch_is_tritons(gpu: Recorder) -> None:
    x, weight = torch.zeros(5, 2048, dtype=BF16), torch.ones(2048, dtype=BF16)
    rms_norm.rms_norm(x, weight, 1e-6, pdl=True)
    out = rms_norm.rms_norm(x, weight, 1e-6, pdl=True)
    first, second = gpu.launches
    assert gpu.through_triton == 1
    at = len(launcher._KNOWN_FORMAT) + 2  # the output is each call's own
    first = addresses_for_tensors(first, 5)
    assert second == (*first[:at], out.data_ptr(), *first[at + 1 :])
    assert second[:4] == (5, 1, 1, STREAM)
    assert second[6] is True, "dependent launch"


@needs_known_triton
def test_numbers_and_types(gpu: Recorder) -> None:
    """Neither sizes nor factors make a variant, types do."""
    weight = torch.ones(64, dtype=BF16)
    for num_rows in (3, 1, 16, 17, 4096):
        rms_norm.rms_norm(torch.zeros(num_rows, 64, dtype=BF16), weight, 1e-5 * num_rows)
    assert gpu.through_triton == 1
    assert [launch[0] for launch in gpu.launches] == [-(-rows // 16) for rows in (3, 1, 16, 17, 4096)]
    assert gpu.launches[-1][len(launcher._KNOWN_FORMAT) + 3 :][:2] == (4096, 1e-5 * 4096)
    rms_norm.rms_norm(torch.zeros(3, 64), weight.float(), 1e-5)
    rms_norm.rms_norm(torch.zeros(3, 64), weight, 1e-5)
    assert gpu.through_triton == 3
    functions = [launch[4] for launch in gpu.launches]
    assert len(set(functions[:5])) == 1 and len(set(functions)) == 3


@needs_known_triton
def test_an_address_that_is_not_aligned(gpu: Recorder) -> None:
    """What was compiled for aligned addresses is not launched with others, and the other way about."""
    weight = torch.ones(65, dtype=BF16)
    x = torch.zeros(3, 64, dtype=BF16)
    assert weight[1:].data_ptr() % 16 == 2
    for last in (weight[1:], weight[:64], weight[1:], weight[:64], weight[1:]):
        rms_norm.rms_norm(x, last, 1e-5)
    functions = [launch[4] for launch in gpu.launches]
    assert functions == [functions[0], functions[1]] * 2 + [functions[0]] and functions[0] != functions[1]
    assert gpu.through_triton == 4, "the aligned one is bound"


@needs_known_triton
def test_every_kernel_is_bound(gpu: Recorder) -> None:
    heads = HeadLayout(4, 2, 32)
    table, cache = torch.zeros(64, 48), torch.zeros(32, 2, 32, dtype=BF16)
    norm = torch.ones(32, dtype=BF16)

    def ids(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def launch_all(size: int) -> None:
        activation.silu_and_mul(torch.zeros(size, 128, dtype=BF16))
        for norms in (None, QKNorm(norm, norm, 1e-6)):
            qkv = torch.zeros(size, 8 * 32, dtype=BF16)
            rotate_store.rotate_and_store(qkv, heads, norms, table, ids(size), cache, cache, ids(size))
        state = torch.zeros(4, 8, dtype=torch.int32), ids(4)
        outputs = ids(size), ids(size), ids(size), ids(size)
        decode_prologue_triton.launch((ids(size), ids(size), ids(size)), state, 16, outputs)
        inputs = sample_triton.DrawInputs(None, None, None, ids(size), None, None)
        sample_triton.launch(torch.zeros(size, 300), inputs, None, None, ids(size), None)
        draws = torch.ones(size), torch.ones(size), ids(size), ids(size)
        inputs = sample_triton.DrawInputs(*draws, None, None)
        sample_triton.launch(torch.zeros(size, 300), inputs, ids(size), ids(4), ids(size), ids(size))
        launch_step(size)
        launch_tags(size)

    def launch_tags(size: int) -> None:
        table, tags = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(64, 3, dtype=torch.int32)
        arrived, counts = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        retired = ids(4 - size % 3 * 2).view(2, -1)
        page_tag_kernels.launch_begin(BegunTags(table, tags, ids(size), ids(size), ids(size), retired))
        for starts in (None, counts[: size + 1]):
            rows = ids(size), ids(size), ids(size), ids(size), starts
            pages = table, table, tags, arrived, counts, torch.zeros(9, 11, dtype=torch.int32)
            page_tag_kernels.launch_visit(Visit(*rows, *pages, size % 2, 16, 1 + size % 3, size % 2))
        lists = ids(5 * (size + size % 2)).view(5, -1)[:, :size]
        moved = MovedPages(lists[0], lists[1], lists[2], lists[3], lists[4], ids(16).view(8, 2), tags, arrived)
        page_tag_kernels.launch_seal(moved, ids(12).view(4, 3), False)
        page_tag_kernels.launch_arrive(moved, ids(12).view(4, 3), -size, size % 2, False)

    def launch_step(size: int) -> None:
        positions, slots = (ids(size * 4).view(size, 4) for _ in range(2))
        flags = torch.zeros(size, dtype=torch.bool)
        begun = BeginOutputs(ids(size), ids(size), None, positions, slots, positions, flags)
        table = torch.zeros(4, 8, dtype=torch.int32)
        step_triton.launch_begin(ids(size), ids(4), table, ids(4), 16, 3, begun)
        pieces = Pieces(torch.zeros(size, 3), torch.zeros(size, 3, dtype=torch.int32), torch.zeros(size, 3))
        following = NextRow(size % 3, ids(size), positions, slots, ids(size), ids(size), ids(size), ids(size))
        step_triton.launch_keep(pieces, flags, positions, 1 + size % 3, 300, following)
        kept = AcceptOutputs(ids(size), ids(size), ids(4), ids(4), None, None)
        step_triton.launch_accept(positions, slots, flags, flags, ids(size), ids(size), 3.0, kept)
        hidden, state = torch.zeros(size * 4, 64, dtype=BF16), torch.zeros(4, 2, 64, dtype=BF16)
        step_triton.launch_hidden(hidden, ids(size), ids(size), state[:, 1])

    launch_all(3)
    each = len(gpu.launches)
    assert each == gpu.through_triton == 17
    for size in (1, 16, 20):
        launch_all(size)
    assert len(gpu.launches) == 4 * each
    assert gpu.through_triton == each


@needs_known_triton
def test_all_numbers_of_queries_share_the_kernels_that_score_blocks(gpu: Recorder) -> None:
    """Each number has as many programs as keep a GPU busy. A kernel for each would be two for each decode graph, which
    take seconds to compile."""
    blocks = BlocksConfig(size=16, top_k=4, first=1, local=1, width=8, stride=4)
    means = torch.zeros(64, 2, 4, dtype=BF16)
    programs = []
    for num in (1, 4, 16, 24, 48, 256):
        lens = torch.full((num,), 64)
        requests = PagedRequests(torch.zeros(1, 16, dtype=torch.int32), torch.zeros_like(lens), lens, 16)
        wanted = BlockQueries(torch.zeros(num, 4, 16, dtype=BF16), 0.3, blocks, first_of_best)
        select_blocks.score_blocks(wanted, means, requests, 2048, 132, fixed=False)
        programs.append(gpu.launches[-1][2])
    assert programs == [64, 64, 33, 22, 11, 2]
    assert gpu.through_triton == 2


@needs_known_triton
def test_prompts_of_all_lengths_share_the_kernel_of_their_attention(gpu: Recorder) -> None:
    """Their keys are not in the pool, but in a list, whose row is as long as the longest prompt."""
    config = extend_attention.ExtendConfig(32, 32, 4, 2)
    for length in (20, 30, 1024, 1025):
        q, lens = torch.zeros(length, 2, 16, dtype=BF16), torch.tensor([length])
        requests = PagedRequests(torch.arange(length, dtype=torch.int32)[None], torch.zeros_like(lens), lens, 1)
        starts, grid = torch.tensor([0, length], dtype=torch.int32), extend_attention.ExtendGrid(-(-length // 32), 1)
        extend_attention.extend_attention(q, q, q, requests, starts, grid, 0.3, config)
    assert gpu.through_triton == 1


@needs_known_triton
def test_what_is_compiled_ahead_is_launched_without_compiling(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever way a kernel is launched; once for all sizes that share it, and only the first start finds it new."""
    weight, w = torch.ones(64, dtype=BF16), torch.ones(32, 64, dtype=BF16)
    config = skinny_gemm.TritonConfig(16, 32, 4)

    def run() -> None:
        for num_rows in (3, 17, 3):
            x = rms_norm.rms_norm(torch.ones(num_rows, 64, dtype=BF16), weight, 1e-5)
            skinny_gemm.skinny_linear(x, w, config)

    assert launcher.compile_ahead(run, 2) == 3 and gpu.launches == []
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **which: compiled.append(which))
    run()
    assert len(gpu.launches) == 6 and compiled == []
    for kernel in (rms_norm._rms_norm_kernel, skinny_gemm._rows_kernel):
        kernel.device_caches.clear()
    assert launcher.compile_ahead(run, 2) == 0


@needs_known_triton
def test_what_is_not_written_ahead_is_zeros(gpu: Recorder) -> None:
    """So that operations which index by a kernel's result stay in bounds; bound kernels are not launched either."""
    x, weight, found = torch.ones(3, 64, dtype=BF16), torch.ones(64, dtype=BF16), []
    rms_norm.rms_norm(x, weight, 1e-5)

    def run() -> None:
        normalised = rms_norm.rms_norm(x, weight, 1e-5)
        found.extend([normalised, x.new_empty(9), torch.empty(5, 1 << 10), torch.empty_like(x)])

    with torch.inference_mode():
        launcher.compile_ahead(run, 1)
    assert len(found) == 4 and not any(tensor.any() for tensor in found) and len(gpu.launches) == 1
    rms_norm.rms_norm(x, weight, 1e-5)
    assert len(gpu.launches) == 2


@needs_known_triton
def test_where_an_attention_library_reads_is_written_ahead_too(gpu: Recorder) -> None:
    """FlashInfer's kernels, which are called ahead, would read anywhere or never end."""
    ids, results = torch.ones(2, dtype=torch.int64), [torch.zeros(size, dtype=torch.int32) for size in (3, 8, 2)]

    def run() -> None:
        page_gather.gather_page_indices(torch.zeros(2, 4, dtype=torch.int32), ids, ids, 16, 4, *results)

    assert launcher.compile_ahead(run, 1) == 1
    assert len(gpu.launches) == 1
    run()
    assert len(gpu.launches) == 2


@needs_known_triton
def test_a_kernel_that_cannot_be_compiled_fails_at_its_launch(gpu: Recorder) -> None:
    variant = launcher.KernelVariant(broken, {}, num_warps=1)

    def run() -> None:
        variant.launch((1,), (torch.zeros(16),))

    assert launcher.compile_ahead(run, 1) == 0
    with pytest.raises(triton.compiler.errors.CompilationError):
        run()
    with pytest.raises(ZeroDivisionError):
        launcher.compile_ahead(lambda: print(1 // 0), 1)
    rms_norm.rms_norm(torch.ones(3, 64), torch.ones(64), 1e-5)
    assert len(gpu.launches) == 1, "as before"


@triton.jit
def broken(x):  # type: ignore[no-untyped-def]
    triton.language.store(x, undefined)  # type: ignore[name-defined]  # noqa: F821


@needs_known_triton
def test_numbers_that_choose_a_variant_are_refused(gpu: Recorder) -> None:
    variant = launcher.KernelVariant(specialised, {}, num_warps=1)
    with pytest.raises(AssertionError, match="size chooses a variant"):
        variant.launch((1,), (torch.zeros(16),), (3,))


@triton.jit
def specialised(x, size):  # type: ignore[no-untyped-def]
    triton.language.store(x, size)


@needs_known_triton
@pytest.mark.parametrize("change", ["version", "format"])
def test_an_unknown_triton_launches_by_itself(gpu: Recorder, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "version":
        monkeypatch.setattr(triton, "__version__", "3.9.1")
    else:
        monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKO")
    for _ in range(3):
        activation.silu_and_mul(torch.zeros(5, 128, dtype=BF16))
    assert len(gpu.launches) == gpu.through_triton == 3


def compiled_kernel() -> SimpleNamespace:
    run = SimpleNamespace(
        launch=print, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0
    )
    return SimpleNamespace(run=run, packed_metadata=(1, 1, 0), function=5)


def test_the_installed_triton_is_bypassed_only_if_it_is_known() -> None:
    assert (launcher._bind(compiled_kernel(), 1) is not None) is IS_KNOWN


@needs_known_triton
def test_scratch_memory_is_left_to_triton() -> None:
    compiled = compiled_kernel()
    run = compiled.run
    run.global_scratch_size = 64
    assert launcher._bind(compiled, 1) is None
    del run.global_scratch_size
    assert launcher._bind(compiled, 1) is None


def test_a_method_that_is_one_kernel_has_its_parameters() -> None:
    """Callers know the methods of ``LayerKernels``; on a GPU they call the kernels' functions."""
    for name, kernel in TRITON.items():
        wanted = list(signature(getattr(LayerKernels, name)).parameters)
        given = [parameter for parameter in signature(kernel).parameters if parameter != "fixed"]  # set at start
        assert given == [*wanted[1:], "pdl"], name
        assert signature(_programmatic(kernel)).parameters["pdl"].default is True
        assert signature(kernel).parameters["pdl"].default is False, "another GPU's are as they were"
