"""Tests of Triton kernels without a GPU: Triton's interpreter, and compilation to machine code.

Triton reads TRITON_INTERPRET when it is imported, so a test file with such checks is a script as well: pytest starts it
once (``run_script``), and it prints what each check raised (``print_outcomes``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def run_script(script: str, mode: str = "interpret") -> Any:
    """The JSON value in the last line of what the file ``script`` prints, run with the argument ``mode``. In mode
    "interpret" its kernels are interpreted. Skips the test where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed")
    env = os.environ | {"TRITON_INTERPRET": str(int(mode == "interpret")), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", script, mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def outcomes_of(script: str, mode: str = "interpret") -> Any:
    """A fixture of a test file: what each check of ``script`` raised, the empty text where nothing; see
    :func:`print_outcomes`."""

    @pytest.fixture(scope="module")
    def outcomes() -> dict[str, str]:
        loaded: dict[str, str] = run_script(script, mode)
        return loaded

    return outcomes


def print_outcomes(checks: dict[str, Callable[[], None]]) -> None:
    """Run every check from the same seed; the last line of the output says what each raised, the empty text where
    nothing."""
    outcomes = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


def set_up_interpreter() -> None:
    """For scripts that run with TRITON_INTERPRET=1: one thread, and what this module changes of the interpreter."""
    torch.set_num_threads(1)
    let_numpy_index()
    patch_once_a_launch()


def let_numpy_index() -> None:
    """Triton 3.6's interpreter makes an index of an array of one element by int(), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_once_a_launch() -> None:
    """The interpreter patches what a module knows of ``triton.language`` at a launch and again at each call of one of
    its functions, which takes a quarter of the time. Let it do so once for each module and launch."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    modules: set[str] = set()  # whose names have been patched since the launch

    def patched(fn):  # type: ignore[no-untyped-def]
        if fn.__module__ in modules:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not modules:  # the launch itself; of the others nothing is taken back before its end
            restore = scope.restore

            def end() -> None:
                modules.clear()
                restore()

            scope.restore = end
        modules.add(fn.__module__)
        return scope

    interpreter._patch_lang = patched


@contextmanager
def interpreted_logarithms() -> Iterator[None]:
    """Numpy's float32 logarithms replace libdevice, which the interpreter does not have."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    from fenceline.sampling.kernels import sample_triton

    def elementwise(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[tl.tensor], tl.tensor]:
        return lambda x: tl.tensor(TensorHandle(function(x.handle.data), tl.float32), x.type)

    class Logarithms:
        log = staticmethod(elementwise(np.log))
        log1p = staticmethod(elementwise(np.log1p))

    original, sample_triton.libdevice = sample_triton.libdevice, Logarithms  # type: ignore[assignment]
    try:
        yield
    finally:
        sample_triton.libdevice = original


def compile_kernel(
    kernel, constants: dict[str, int], arch: str, num_warps: int, num_stages: int, pdl: bool, kv: str = "bf16"
) -> str:  # type: ignore[no-untyped-def]
    """A kernel's PTX for ``arch`` (as "sm_90"). It compiles to machine code and fits a GPU's shared memory. ``kv``: the
    type of keys and values in the pool."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(("q_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("k_ptr", "v_ptr"), f"*{kv}")
    types |= dict.fromkeys(("page_table_ptr", "num_done_ptr", "query_starts_ptr"), "*i32")
    types |= dict.fromkeys(("rows_ptr", "seq_lens_ptr", "ancestors_ptr", "positions", "out_slots"), "*i64")
    types |= dict.fromkeys(("slots", "path", "counts", "addresses", "num_words"), "*i64")
    types |= dict.fromkeys(("qkv", "q_weight", "k_weight", "k_cache", "v_cache"), "*bf16")
    types |= {"table": "*fp32", "eps": "fp32", "k_scale": "fp32", "v_scale": "fp32"}
    types |= dict.fromkeys(("partial_ptr", "stats_ptr", "sinks_ptr"), "*fp32")
    types |= {"scale_log2": "fp32", "cap_log2": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types.get(name, "i32").startswith("*") or name.endswith("_stride")
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl}
    binary = triton.compile(source, target=GPUTarget("cuda", int(arch[3:]), 32), options=options)
    shared_limit = 163 << 10 if arch == "sm_80" else 227 << 10
    assert binary.asm["cubin"] and binary.metadata.shared <= shared_limit
    return str(binary.asm["ptx"])
