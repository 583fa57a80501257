"""The all-reduce in CUDA C++ without a GPU: its code makes the steps that virtual GPUs have tried, its memory does not
overlap, and the compiled kernels order GPUs by release and acquire."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fenceline_kernel.all_reduce import AllReduceRequest
from fenceline_kernel.cache import Sources
from fenceline_kernel.errors import KernelUnavailable
from fenceline_kernel.toolchain import find_nvcc

from fenceline.memory_order.all_reduce import Launch, Step, flag_steps, one_shot_steps, two_shot_steps

ROOT = Path(__file__).resolve().parents[2] / "sgl-kernel"
_SHAPES = (*itertools.product((2, 3, 4, 8), (1, 2, 7, 16, 64, 65), ((1, 32), (3, 32), (2, 64))),)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel's steps, compiled by the host's compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    library = tmp_path_factory.mktemp("trace") / "trace.so"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}", str(ROOT / "tests" / "all_reduce_trace.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("fenceline_trace_all_reduce", "fenceline_peer_bytes", "fenceline_place"):
        getattr(loaded, name).restype = ctypes.c_uint64
    loaded.fenceline_check_all_reduce.restype = ctypes.c_char_p
    return loaded


def request(**fields: int) -> AllReduceRequest:
    given = {
        "size": 2,
        "num_vectors": 8,
        "num_blocks": 1,
        "num_threads": 32,
        "words_capacity": 64,
        "sums_capacity": 100,
    }
    return AllReduceRequest(**(given | fields))


def traced(code: ctypes.CDLL, made: AllReduceRequest, block: int, thread: int) -> list[str]:
    room = code.fenceline_trace_all_reduce(ctypes.byref(made), block, thread, None, ctypes.c_uint64(0))
    out = ctypes.create_string_buffer(room)
    code.fenceline_trace_all_reduce(ctypes.byref(made), block, thread, out, ctypes.c_uint64(room))
    return out.raw.decode().splitlines()


def named(steps: Iterator[Step]) -> list[str]:
    return [f"{step.act.value} {step.peer} {step.vector}" for step in steps]


@pytest.mark.parametrize("kind", ["one shot", "two shots", "registered"])
@pytest.mark.parametrize("size, num_vectors, grid", _SHAPES)
def test_the_kernel_makes_the_steps_that_virtual_gpus_have_tried(
    code: ctypes.CDLL, size: int, num_vectors: int, grid: tuple[int, int], kind: str
) -> None:
    num_blocks, num_threads = grid
    registered, two_shots = kind == "registered", kind != "one shot"
    steps: Callable[[Launch, int, int], Iterator[Step]] = two_shot_steps if two_shots else one_shot_steps
    for rank in {0, 1, size - 1}:
        launch = Launch(rank, size, num_vectors, num_blocks, num_threads, two_shots, registered)
        made = request(
            rank=rank,
            size=size,
            num_vectors=num_vectors,
            num_blocks=num_blocks,
            num_threads=num_threads,
            kind=int(two_shots),
        )
        made.outputs = 1 if registered else None
        for block in range(num_blocks):
            for thread in {0, 1, 5, num_threads - 1}:
                assert traced(code, made, block, thread) == named(steps(launch, block, thread))
            assert traced(code, made, block, num_threads) == named(flag_steps(launch, block))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_two_things_lie_at_one_place(code: ctypes.CDLL, size: int) -> None:
    made = request(size=size, words_capacity=5, sums_capacity=17)
    slice_capacity = -(-17 // size)
    places = [
        (code.fenceline_place(ctypes.byref(made), part, half, rank, at), 32 if part == 0 else 16)
        for part, ranks, most in ((0, size, 5), (1, size, slice_capacity), (2, 1, 17))
        for half in range(2)
        for rank in range(ranks)
        for at in range(most)
    ]
    places.sort()
    assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(places))
    flags = 128 + 2 * 128 * 8 * 8
    assert places[0][0] == flags and places[-1][0] + 16 == code.fenceline_peer_bytes(ctypes.byref(made))
    assert all(start % 16 == 0 for start, _ in places)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({}, None),
        ({"size": 9}, b"2 to 8 ranks"),
        ({"rank": 2}, b"2 to 8 ranks"),
        ({"num_vectors": 0}, b"nothing to add up"),
        ({"num_vectors": 65}, b"too long for one shot"),
        ({"num_vectors": 65, "kind": 1}, None),
        ({"num_vectors": 101, "kind": 1}, b"too long for two shots"),
        ({"num_blocks": 129}, b"1 to 128 blocks"),
        ({"num_threads": 33}, b"a multiple of 32"),
        ({"kind": 2, "row_vectors": 3}, b"whole rows"),
        ({"kind": 2, "row_vectors": 4}, b"needs a residual"),
        ({"kind": 3}, b"a gather needs an output"),
        ({"kind": 4}, b"no such kind"),
    ],
)
def test_a_launch_that_cannot_be_made_says_why(
    code: ctypes.CDLL, fields: dict[str, int], text: bytes | None
) -> None:
    made = request(**fields)
    found = code.fenceline_check_all_reduce(ctypes.byref(made))
    assert found is None if text is None else text in found


# --- the compiled kernels -----------------------------------------------------------------------------


def disassembler() -> str | None:
    """cuobjdump: of the CUDA toolkit, or the one that Triton brings."""
    found = shutil.which("cuobjdump")
    if found is None:
        triton = pytest.importorskip("triton")
        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(bundled) if bundled.exists() else None
    return found


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The instructions of each kernel for sm_90a."""
    try:
        nvcc = find_nvcc()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump: install the CUDA toolkit's, or Triton")
    library = tmp_path_factory.mktemp("compiled") / "all_reduce.so"
    sources = Sources(ROOT)
    subprocess.run(
        nvcc.command(["90a"], sources.include, sources.unit_file("all_reduce"), library), check=True
    )
    text = subprocess.run([tool, "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[str]] = {}
    for line in text.splitlines():
        function = re.search(r"Function : (\S+)", line)
        if function:
            instructions = kernels.setdefault(function.group(1), [])
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)", line):
            instructions.append(found.group(1).rstrip(";"))
    return kernels


@pytest.mark.long
@pytest.mark.slow
def test_flags_are_released_and_acquired_for_the_whole_system(machine_code: dict[str, list[str]]) -> None:
    """On sm_90 st.release.sys is MEMBAR.ALL.SYS and then the store; ld.acquire.sys the load and then CCTL.IVALL, which
    empties L1. Words need neither: 64 bits of a strong access in system scope each."""
    assert len(machine_code) == 2 * 4 * 3 + 3 + 1
    for name, code in machine_code.items():
        releases = [i for i, op in enumerate(code) if op == "STG.E.64.STRONG.SYS"]
        acquires = [i for i, op in enumerate(code) if op == "LDG.E.64.STRONG.SYS"]
        assert releases and acquires, name
        for i in releases:
            assert "MEMBAR.ALL.SYS" in code[max(0, i - 6) : i], (name, code[i - 6 : i + 1])
        for i in acquires:
            assert "CCTL.IVALL" in code[i : i + 12], (name, code[i : i + 12])
        words = any(op == "LDG.E.128.STRONG.SYS" for op in code)
        assert words == ("two_shot" not in name), name
        assert any(op.startswith("ATOMG") and "STRONG.GPU" in op for op in code), name
