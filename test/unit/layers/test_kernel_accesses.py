"""Our Triton kernels read and write what they declare, and before their wait what they declare to read there: in
Triton's interpreter. ``test/gpu/test_kernel_accesses_gpu.py`` runs the same on a GPU.

Run as a script this file is the checks themselves, for the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_surroundings import Launch, check
from triton_interpreter import interpreted_logarithms, outcomes_of, print_outcomes, set_up_interpreter

from fenceline.layers.kernels import accesses, embed_join
from fenceline.memory_order.kernel import Kernel
from fenceline.model_executor.decode_runner import DECODE_PROLOGUE
from fenceline.sampling import draw_kernels as sample
from fenceline.speculative import kv_rows, token_lookup
from fenceline.speculative import step_kernels as step

pytestmark = pytest.mark.long

LAYERS = [value for value in vars(accesses).values() if isinstance(value, Kernel)]
STEP = (step.BEGIN, step.PLACE, step.KEEP, step.PROPOSAL, step.ACCEPT, step.HIDDEN)
LOOK_UPS = (token_lookup.LOOK_UP, token_lookup.KEEP)
OTHERS = (embed_join.KERNEL, DECODE_PROLOGUE, sample.PIECES, sample.COMBINE, kv_rows.KERNEL, *STEP, *LOOK_UPS)
KERNELS = [kernel.name for kernel in (*LAYERS, *OTHERS)]
PROGRAMMATIC = [
    "rms_norm",
    "silu_and_mul",
    "rotate_and_store",
    "store_latent",
    "store_index",
    "by_head",
    "skinny_linear",
    "quantized_linear",
    "scaled_linear",
    "int4_linear",
    "reorder_columns",
    "quantize_rows",
    "decode_attention",
    "merge_pieces",
    "embed_and_join",
    *("router_logits", "route", "choose_experts", "place_pairs", "own_pairs", "grouped_product", "combine_experts"),
]
KINDS = {"among_garbage": KERNELS, "before_the_kernel_in_front_has_ended": PROGRAMMATIC}


results = outcomes_of(__file__)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_touches_what_it_declares(kernel: str, results: dict[str, str]) -> None:
    assert results[f"among_garbage {kernel}"] == ""


@pytest.mark.parametrize("kernel", PROGRAMMATIC)
def test_before_its_wait_a_kernel_reads_what_it_declares(kernel: str, results: dict[str, str]) -> None:
    assert results[f"before_the_kernel_in_front_has_ended {kernel}"] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def main() -> None:
    from kernel_launches import launches

    set_up_interpreter()
    torch.manual_seed(0)
    by_kernel: dict[str, list[Launch]] = {}
    for launch in launches():
        by_kernel.setdefault(launch.kernel.name, []).append(launch)

    def among_garbage(kernel: str) -> None:
        for launch in by_kernel[kernel]:
            check(launch)

    def before_the_kernel_in_front_has_ended(kernel: str) -> None:
        for launch in by_kernel[kernel]:
            check(launch, pdl=True)

    kinds: tuple[Callable[[str], None], ...] = (among_garbage, before_the_kernel_in_front_has_ended)
    with interpreted_logarithms():
        print_outcomes(
            {f"{kind.__name__} {name}": partial(kind, name) for kind in kinds for name in KINDS[kind.__name__]}
        )


if __name__ == "__main__":
    main()
