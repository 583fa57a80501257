"""Tests of Triton kernels without a GPU: Triton's interpreter, and compilation to machine code.

Triton reads TRITON_INTERPRET when it is imported, so a test file with such checks is also a script. Pytest starts it
once (``run_script``), and it prints what each check raised (``print_outcomes``).
"""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forking import FORKING


def run_script(script: str, mode: str = "interpret") -> Any:
    """Run the file ``script`` with the argument ``mode``, in a process of its own. Returns the JSON value in the last
    line of its output. In mode "interpret" its kernels are interpreted. Skips the test if Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed")
    receiver, sender = FORKING.Pipe(duplex=False)
    env = os.environ | {"TRITON_INTERPRET": str(int(mode == "interpret")), "OMP_NUM_THREADS": "1"}
    process = FORKING.Process(target=_run_here, args=(script, mode, env, sender), daemon=True)
    process.start()
    sender.close()
    try:
        assert receiver.poll(250), f"{script} {mode} takes too long"
        error, output = receiver.recv()  # EOFError if the process was killed
    finally:
        process.kill()
        process.join()
    assert not error, error
    return json.loads(output.splitlines()[-1])


def _run_here(script: str, mode: str, env: dict[str, str], sender: Connection) -> None:
    """Run ``script`` as the main module of this process. Sends the error that ends it, or "", and what it prints."""
    assert "triton" not in sys.modules, "it reads TRITON_INTERPRET when it is imported"
    gc.freeze()  # what lives as long as the script
    os.environ.update(env)
    warnings.simplefilter("ignore", RuntimeWarning)
    sys.argv = [script, mode]
    error = ""
    with redirect_stdout(StringIO()) as output:
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    sender.send((error, output.getvalue()))


def outcomes_of(script: str, mode: str = "interpret") -> Any:
    """A fixture for a test file: what each check of ``script`` raised, an empty text for none; see
    :func:`print_outcomes`."""

    @pytest.fixture(scope="module")
    def outcomes() -> dict[str, str]:
        loaded: dict[str, str] = run_script(script, mode)
        return loaded

    return outcomes


def print_outcomes(checks: dict[str, Callable[[], None]]) -> None:
    """Run every check with the same seed. The last line of the output says what each raised, an empty text for
    none."""
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
    """Prepare a script that runs with TRITON_INTERPRET=1: use one thread, and apply this module's patches of the
    interpreter."""
    torch.set_num_threads(1)
    let_numpy_index()
    patch_once_a_launch()
    make_types_quickly()
    take_operands_as_they_are()
    turn_programs_round()
    convert_by_instruction()


def in_front_of_nan(x: torch.Tensor) -> torch.Tensor:
    """``x`` at the beginning of memory that is NaN otherwise."""
    room = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype, device=x.device)
    return room[: x.numel()].view(x.shape).copy_(x)


def let_numpy_index() -> None:
    """Triton 3.6's interpreter calls int() of an array with one element to make an index, which numpy 2.4 refuses.
    Patch it."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_once_a_launch() -> None:
    """The interpreter patches a module's names of ``triton.language`` at a launch and again at each call of one of its
    functions, which takes a quarter of the time. Let it do so only once for each module and launch."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    modules: set[str] = set()  # modules whose names have been patched since the launch

    def patched(fn):  # type: ignore[no-untyped-def]
        if fn.__module__ in modules:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not modules:  # this is the launch itself; patches of other modules are undone at its end
            restore = scope.restore

            def end() -> None:
                modules.clear()
                restore()

            scope.restore = end
        modules.add(fn.__module__)
        return scope

    interpreter._patch_lang = patched


def make_types_quickly() -> None:
    """The interpreter makes the type of each value anew, with its shape as a tuple of constants that have types of
    their own, and computes integers a second time in 64 bits, for an assertion that it then leaves out. Both take two
    thirds of the time. Make each type once, and leave out the second computation."""
    import math
    from functools import cache

    import triton.language as tl
    from triton.runtime import interpreter

    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    make_block = tl.block_type.__init__

    @cache
    def constants(shape):  # type: ignore[no-untyped-def]
        """A tensor's shape and number of elements."""
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    of_scalars = constants(())

    @cache
    def block(element_type, shape):  # type: ignore[no-untyped-def]
        made = object.__new__(tl.block_type)
        make_block(made, element_type, list(shape))
        return vars(made) | {"constants": constants(shape), "sizes": shape}

    def init_block(self, element_ty, shape):  # type: ignore[no-untyped-def]
        self.__dict__ = block(element_ty, tuple([getattr(size, "value", size) for size in shape]))

    def init_tensor(self, handle, type):  # type: ignore[no-untyped-def]
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.constants if type.is_block() else of_scalars

    def same_shape(self, other):  # type: ignore[no-untyped-def]
        return tl.constexpr(True) if self is other else compare(self, other)

    def same_type(self, other):  # type: ignore[no-untyped-def]
        if isinstance(other, tl.dtype):
            return self is other or self.name == other.name
        return compare_types(self, other)

    compare, tl.tuple.__eq__ = tl.tuple.__eq__, same_shape  # type: ignore[method-assign]
    compare_types, tl.dtype.__eq__ = tl.dtype.__eq__, same_type  # type: ignore[method-assign]
    tl.pointer_type.__hash__ = tl.block_type.__hash__ = tl.dtype.__hash__  # type: ignore[method-assign]
    interpreter._get_np_dtype = cache(interpreter._get_np_dtype)
    tl.block_type.__init__ = init_block  # type: ignore[method-assign]
    tl.tensor.__init__ = init_tensor  # type: ignore[method-assign]


def take_operands_as_they_are() -> None:
    """The interpreter finds the common type of an operation's operands and makes an array of each number, which takes a
    fifth of the time. Leave operands of one type, offsets of pointers, and numbers that fit to numpy, which broadcasts
    them itself; and do not wrap each call twice."""
    from functools import cache

    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    find_types, make_constant = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    broadcast, integers, constants = TritonSemantic.broadcast_impl_value, (tl.int32, tl.int64), {}

    @cache
    def together(left, right):  # type: ignore[no-untyped-def]
        return tuple(map(int, np.broadcast_shapes(left, right))) if len(left) == len(right) else None

    def broadcast_impl_value(self, lhs, rhs):  # type: ignore[no-untyped-def]
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.sizes == rhs.type.sizes
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def expand_dims(self, given, axis):  # type: ignore[no-untyped-def]
        shape = list(given.type.sizes) if given.type.is_block() else []
        shape.insert(axis, 1)
        if not given.type.is_block():
            return self.splat(given, shape=shape)
        return tl.tensor(self.builder.create_expand_dims(given.handle, axis), tl.block_type(given.dtype, shape))

    def scalar_constant(self, value, dtype):  # type: ignore[no-untyped-def]
        if (value, dtype) not in constants:
            constants[value, dtype] = make_constant(self, value, dtype)
        return constants[value, dtype]

    def fits(value, dtype):  # type: ignore[no-untyped-def]
        """Whether a Python number beside a value of this type is of this type."""
        if dtype in integers:
            return type(value) is int and -(2**31) <= value < 2**31
        return dtype == tl.float32 and type(value) in (int, float)

    def operands(  # type: ignore[no-untyped-def]
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        left, right = lhs, rhs
        if isinstance(left, tl.tensor) and fits(right, left.dtype):
            right = self.scalar_constant(right, left.dtype)
        elif isinstance(right, tl.tensor) and fits(left, right.dtype):
            left = self.scalar_constant(left, right.dtype)
        if not div_or_mod and isinstance(left, tl.tensor) and isinstance(right, tl.tensor):
            moves = allow_lhs_ptr and left.dtype.is_ptr() and right.dtype in integers
            if moves or (left.dtype == right.dtype and not left.dtype.is_ptr()):
                if left.shape is right.shape or not right.type.is_block():
                    return left, right
                if not left.type.is_block():
                    return tl.tensor(left.handle, right.type.with_element_ty(left.dtype)), right
                if shape := together(left.type.sizes, right.type.sizes):
                    return [tl.tensor(side.handle, tl.block_type(side.dtype, shape)) for side in (left, right)]
        return find_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def patch_attr(obj, name, member, builder, scope):  # type: ignore[no-untyped-def]
        semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*args, **options):  # type: ignore[no-untyped-def]
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    TritonSemantic.binary_op_type_checking_impl = operands  # type: ignore[method-assign]
    TritonSemantic.scalar_constant = scalar_constant  # type: ignore[method-assign]
    TritonSemantic.broadcast_impl_value = broadcast_impl_value  # type: ignore[method-assign]
    TritonSemantic.expand_dims = expand_dims  # type: ignore[method-assign]
    interpreter._patch_attr = patch_attr


def turn_programs_round() -> None:
    """Let the programs of every other launch run in the reverse order: a GPU promises none. What one of them writes in
    another's place is overwritten in one order only."""
    from triton.runtime.interpreter import InterpreterBuilder

    set_dim, set_index = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    num_launches = 0

    def set_grid_dim(self, *dims):  # type: ignore[no-untyped-def]
        nonlocal num_launches
        num_launches += 1
        set_dim(self, *dims)

    def set_grid_idx(self, *index):  # type: ignore[no-untyped-def]
        if num_launches % 2:
            index = tuple(size - 1 - i for size, i in zip(self.grid_dim, index, strict=True))
        set_index(self, *index)

    InterpreterBuilder.set_grid_dim = set_grid_dim  # type: ignore[method-assign]
    InterpreterBuilder.set_grid_idx = set_grid_idx  # type: ignore[method-assign]


def convert_by_instruction() -> None:
    """Let the interpreter do the instructions that convert E4M3 to float16."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

    def create_inline_asm(self, asm, constraints, values, types, is_pure, pack):  # type: ignore[no-untyped-def]
        assert "cvt.rn.f16x2.e4m3x2" in asm, "no other instruction of FP8"
        numbers = _convert_float(values[0].data, values[0].dtype, tl.float16, None).view(np.float16)
        return SimpleNamespace(get_result=lambda index: TensorHandle(numbers, tl.float16))

    InterpreterBuilder.create_inline_asm = create_inline_asm  # type: ignore[method-assign]


def add_in_order() -> None:
    """Let the interpreter's matrix products add up one input after the other, as a tensor core's chain does: numpy's
    library chooses an order by the shape."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

    def numbers(handle):  # type: ignore[no-untyped-def]
        if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
            return _convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16).astype(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        left, right, total = numbers(a), numbers(b), d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k : k + 1]
        return TensorHandle(total, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot  # type: ignore[method-assign]


@contextmanager
def interpreted_logarithms() -> Iterator[None]:
    """Replace libdevice, which the interpreter does not have, by numpy's float32 logarithms."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    from fenceline.layers.kernels.triton import sample as sample_triton

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
    """The PTX of a kernel for ``arch`` (such as "sm_90"). Checks that it compiles to machine code and fits in a GPU's
    shared memory. ``kv``: the type of keys and values in the pool."""
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
    types |= {"means": "*bf16", "partial": "*fp32", "lists": "*i32", "chosen": "*i32", "scale": "fp32"}
    types |= {"projected": "*bf16"} | dict.fromkeys(("decays", "of_tokens", "q", "k", "v"), "*fp32")
    types |= {"queries": "*bf16", "weights": "*fp32", "scales": "*fp32", "cache_rows": f"*{kv}"}
    types |= dict.fromkeys(("page_table", "keys", "selected"), "*i32") | dict.fromkeys(
        ("rows", "seq_lens", "ancestors"), "*i64"
    )
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


def check_shared_sums(ptx: str) -> int:
    """Where programs share a sum and count their parts, all threads have stored their part before one of them counts
    it, and none reads the parts before the count is known. Returns the number of these counts."""
    counts = list(re.finditer(r"\batom\.(\S+)", ptx))
    for count in counts:
        before, after = ptx[: count.start()], ptx[count.end() :]
        assert "acq_rel" in count[1] and ".gpu" in f".{count[1]}", count[0]
        assert before.rindex("bar.sync") > before.rindex("st.global")
        assert after.index("bar.sync") < after.index("ld.global")
    return len(counts)
