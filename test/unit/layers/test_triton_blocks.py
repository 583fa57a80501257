"""Attention to selected blocks of the triton backend, and what lightning attention reads, on the CPU: their kernels in
Triton's interpreter, and compiled for a GPU that is not there.

Run as a script this file is the checks themselves, for the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from block_cases import BlockSteps
from model_parity import PagedModel
from sala_reference import save_sala
from triton_interpreter import add_in_order, compile_kernel, outcomes_of, print_outcomes, set_up_interpreter

from fenceline.config.families import BlocksConfig
from fenceline.layers.forward_batch import ForwardMode
from fenceline.layers.kernels.base import LayerKernels

INTERPRETED = ("decode_and_prompts", "other_sizes", "many_programs", "in_a_fixed_order", "whole_model")
BLOCKS = BlocksConfig(size=16, top_k=4, first=1, local=1, width=8, stride=4)

interpreted = outcomes_of(__file__)
compiled = outcomes_of(__file__, "compile")


@pytest.mark.long
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@pytest.mark.long
@pytest.mark.parametrize("name", ["sm_90", "first_start"])
def test_compiles_without_a_gpu(name: str, compiled: dict[str, str]) -> None:
    assert compiled[name] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def steps_of(seed: int, lengths: tuple[int, ...], blocks: BlocksConfig = BLOCKS, *sizes: object) -> BlockSteps:
    from fenceline.layers.kernels.triton.select_blocks import store_means

    return BlockSteps(seed, lengths, blocks, *sizes, store_means=store_means)  # type: ignore[arg-type]


def backend_of(steps: BlockSteps, longest: int | None = None):  # type: ignore[no-untyped-def]
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend

    return TritonAttentionBackend(steps.pool, 0, steps.rules, steps.kv_heads * steps.group, longest)


def check_decode_and_prompts() -> None:
    """Requests of fewer blocks than are selected, as many, and more; the first alone have no scores."""
    for lengths in ((1, 20, 64), (63, 65, 200)):
        steps = steps_of(3, lengths)
        steps.check(backend_of(steps))
        steps.check(backend_of(steps), [min(length, 9) for length in lengths])


def check_other_sizes() -> None:
    for number, (width, stride, size, page_size) in enumerate(((4, 4, 16, 16), (12, 4, 8, 64), (4, 2, 8, 32))):
        blocks = BlocksConfig(size=size, top_k=5, first=0, local=2, width=width, stride=stride)
        steps = steps_of(number, (150, 90), blocks, page_size, (1, 17, 20))
        steps.check(backend_of(steps))


def check_many_programs() -> None:
    """They share out the means and the blocks of a query, also where some have none; and more blocks than are counted
    or listed at once."""
    from fenceline.layers.kernels.triton import select_blocks

    steps = steps_of(5, (230, 70))
    backend = backend_of(steps)
    backend.num_sms = 8
    steps.check(backend)
    select_blocks._choose_variant.cache_clear()
    with mock.patch.multiple(select_blocks, _COUNTED_TILE=8, _CHOSEN_TILE=2):
        steps.check(backend)
    select_blocks._choose_variant.cache_clear()


def check_in_a_fixed_order() -> None:
    """A query's result is the same bits in a step of decode or of a prompt, beside longer requests, with which it is
    computed from lists, and beside shorter ones."""
    add_in_order()
    for lengths in ((230, 50), (90, 50), (50, 20)):
        steps = steps_of(6, lengths)
        backend, queries = backend_of(steps, 256), torch.randn(len(lengths), 6, 8)
        found = [
            steps.results(backend, own, new, rows)
            for own, new, rows in (
                (queries, None, [0, 1]),
                (queries[:1], None, [0]),
                (queries[1:], None, [1]),
                (queries.repeat_interleave(3, 0), [3, 3], [0, 1]),
            )
        ]
        steps.check(backend)
        assert torch.equal(found[0], torch.cat(found[1:3]))
        assert torch.equal(found[0], found[3][2::3])


def check_whole_model() -> None:
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.kernels.triton.lightning_inputs import lightning_inputs
    from fenceline.layers.kernels.triton.select_blocks import store_means

    with TemporaryDirectory() as directory:
        save_sala(Path(directory))
        expected, ours = (PagedModel(Path(directory), 16, "cpu") for _ in range(2))
    ours.backend = TritonAttentionBackend(ours.pool, 0, ours.model.attention_rules, ours.config.num_heads)
    one, two = torch.randint(0, 100, (2, 110))
    steps = (
        ([(0, one, 0, 90), (1, two, 0, 10)], ForwardMode.EXTEND),
        ([(0, one, 90, 109), (1, two, 10, 15)], ForwardMode.EXTEND),
        ([(0, one, 109, 110), (1, two, 15, 16)], ForwardMode.DECODE),
    )
    for work, mode in steps:
        wanted = expected.step(work, mode)
        kernels = {"store_means": staticmethod(store_means), "lightning_inputs": staticmethod(lightning_inputs)}
        with mock.patch.multiple(LayerKernels, **kernels):
            found = ours.step(work, mode)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def compile_for_hopper() -> None:
    """The kernels of MiniCPM-SALA, down to machine code."""
    from fenceline.layers.kernels.triton import lightning_inputs as lightning
    from fenceline.layers.kernels.triton import select_blocks as module

    blocks = BlocksConfig(size=64, top_k=96, first=1, local=32, width=32, stride=16)
    sizes = (16, 2, 128, 64, 64)
    for variant, kernel in (
        (module._means_variant(16, 256), module._means_kernel),
        (module._coarse_variant(blocks, *sizes), module._coarse_kernel),
        (module._score_variant(blocks, 64, *sizes), module._score_kernel),
        (module._choose_variant(blocks, 2, 64), module._choose_kernel),
        (lightning._variant(32, 64)[1], lightning._lightning_inputs_kernel),
    ):
        compile_kernel(kernel, variant.constants, "sm_90", 4, 3, False, "bf16")


def check_first_start() -> None:
    """A first start of a small MiniCPM-SALA: all that its steps launch is compiled ahead, with none of them launched,
    and more requests need no more kernels."""
    import triton
    from triton.runtime import driver
    from triton_recorder import IS_KNOWN, STREAM, Recorder

    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.cuda_layers import TRITON
    from fenceline.layers.kernels.triton.lightning_inputs import lightning_inputs
    from fenceline.layers.kernels.triton.select_blocks import store_means
    from fenceline.memory_order.triton_launcher import compile_ahead

    if not IS_KNOWN:
        return
    recorder = Recorder()
    driver._active = recorder
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    with TemporaryDirectory() as directory:
        save_sala(Path(directory))
        model = PagedModel(Path(directory), 16, "cpu")
    model.backend = TritonAttentionBackend(model.pool, 0, model.model.attention_rules, model.config.num_heads)
    prompts = torch.randint(0, 100, (8, 110))

    def decode(size: int) -> None:
        model.step([(row, prompts[row], 109, 110) for row in range(size)], ForwardMode.DECODE)

    def run() -> None:
        model.step([(0, prompts[0], 0, 90), (1, prompts[1], 0, 10)], ForwardMode.EXTEND)
        model.step([(0, prompts[0], 90, 109), (1, prompts[1], 10, 15)], ForwardMode.EXTEND)
        decode(8)

    kernels = TRITON | {"store_means": store_means, "lightning_inputs": lightning_inputs}
    with mock.patch.multiple(LayerKernels, **{name: staticmethod(kernel) for name, kernel in kernels.items()}):
        with TemporaryDirectory() as empty, mock.patch.dict(os.environ, TRITON_CACHE_DIR=empty):
            number = compile_ahead(run, 2)
        assert 0 < number <= 14 and recorder.launches == [], number
        compiled: list[object] = []
        triton.knobs.compilation.listener = lambda **which: compiled.append(which["src"].name)
        run()
        for size in (2, 3, 5, 7):
            decode(size)
    assert compiled == [] and len(recorder.launches) > 100, compiled


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print_outcomes({"sm_90": compile_for_hopper, "first_start": check_first_start})
    else:
        set_up_interpreter()
        print_outcomes({name: globals()[f"check_{name}"] for name in INTERPRETED})
