"""The all-reduce in CUDA C++ without a GPU: its code makes the steps that virtual GPUs have tried, its memory does not
overlap, and the compiled kernels order GPUs by release and acquire."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fenceline_kernel.all_reduce import AllReduceRequest
from fenceline_kernel.cache import Sources, cache_folder, compiled_library
from fenceline_kernel.errors import KernelUnavailable
from fenceline_kernel.toolchain import find_nvcc

from fenceline_sim.all_reduce import REFRESH_EVERY, Act, Launch, Step, count_steps, steps_of

ROOT = Path(__file__).resolve().parents[3] / "sgl-kernel"
_SHAPES = (*itertools.product((2, 3, 4, 8), (1, 2, 7, 16, 64, 65), ((1, 32), (3, 32), (2, 64))),)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel's steps, compiled by the host's compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    library = tmp_path_factory.mktemp("trace") / "trace.so"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}", str(ROOT / "tests" / "all_reduce_trace.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("fenceline_trace_all_reduce", "fenceline_peer_bytes", "fenceline_place"):
        getattr(loaded, name).restype = ctypes.c_uint64
    loaded.fenceline_refreshed.restype = ctypes.c_uint32
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
    """The kernel does not say whose words it pushes."""
    acts = ((step.act.value.replace("push_sum_words", "push_words"), step) for step in steps)
    return [f"{act} {step.peer} {step.vector if step.place < 0 else step.place}" for act, step in acts]


@pytest.mark.parametrize("kind", ["one shot", "two shots", "registered", "rows", "words"])
@pytest.mark.parametrize("size, num_vectors, grid", _SHAPES)
def test_the_kernel_makes_the_steps_that_virtual_gpus_have_tried(
    code: ctypes.CDLL, size: int, num_vectors: int, grid: tuple[int, int], kind: str
) -> None:
    num_blocks, num_threads = grid
    registered, two_shots, words = kind == "registered", kind != "one shot", kind == "words"
    row = 0
    if kind in ("rows", "words"):  # of as many parts as threads; what follows the sums is not a step of the kernel's
        row = num_threads * size
        num_vectors = min(num_vectors, 7) * row
    for rank in {0, 1, size - 1}:
        launch = Launch(rank, size, num_vectors, num_blocks, num_threads, two_shots, registered, row, words)
        made = request(
            rank=rank,
            size=size,
            num_vectors=num_vectors,
            num_blocks=num_blocks,
            num_threads=num_threads,
            kind=4 if words else 3 if row else int(two_shots),
            row_vectors=row,
        )
        made.outputs = 1 if registered else None
        for block in range(num_blocks):
            for thread in {0, 1, 5, num_threads - 1}:
                steps, found = list(steps_of(launch, block, thread)), traced(code, made, block, thread)
                if row:
                    ends = [n for n, step in enumerate(steps) if step.act is Act.BARRIER]
                    steps = steps[: ends[-1] + 1]
                if words:  # several vectors are read before one is pushed
                    steps = [step for step in steps if step.act is not Act.READ]
                    found = [line for line in found if not line.startswith("read")]
                assert found == named(iter(steps))
            assert traced(code, made, block, num_threads) == named(count_steps(launch, block))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_two_things_lie_at_one_place(code: ctypes.CDLL, size: int) -> None:
    made = request(size=size, words_capacity=5, sums_capacity=17)
    slice_capacity = -(-17 // size)
    places = [
        (code.fenceline_place(ctypes.byref(made), part, half, rank, at), 16)
        for part, ranks, most in ((0, size, 5), (1, size, 5), (2, size, slice_capacity), (3, 1, 17))
        for half in range(2)
        for rank in range(ranks)
        for at in range(most)
    ]
    places.sort()
    assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(places))
    flags = 128 * 8 + 2 * 128 * 8 * 8
    assert places[0][0] == flags and places[-1][0] + 16 == code.fenceline_peer_bytes(ctypes.byref(made))
    assert all(start % 16 == 0 for start, _ in places)
    words = [code.fenceline_place(ctypes.byref(made), 0, 1, size - 1, at) for at in range(5)]
    assert all(after - start == 16 for start, after in itertools.pairwise(words)), "a warp writes whole lines"


def test_every_word_is_rewritten_before_its_generation_repeats(code: ctypes.CDLL) -> None:
    capacity, vectors = 7, 3
    for kind in (0, 1, 3, 4):
        made = request(words_capacity=capacity, num_vectors=vectors, kind=kind)
        launch = Launch(0, 2, vectors, 1, 32, bool(kind), words=kind == 4)
        cycle = 2 * REFRESH_EVERY * capacity
        for first in (1, 2**32 - cycle // 2, 2**32 + 1, 2**33 - 5):
            seen = set()
            for generation in range(first, first + cycle):
                found = code.fenceline_refreshed(ctypes.byref(made), ctypes.c_uint64(generation))
                wanted = launch.refreshed(generation, capacity)
                assert found == (capacity if wanted is None else wanted), generation
                seen.add((generation % 2, found))
            num_used = {0: vectors, 4: vectors + 1}.get(kind, 0)  # of two ranks: two slices of two
            left_out = {(half, v) for half in (0, 1) for v in range(num_used)}
            every = set(itertools.product((0, 1), range(capacity)))
            assert seen - {(0, capacity), (1, capacity)} == every - left_out


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
        ({"words_capacity": (1 << 25) - 1}, None),
        ({"words_capacity": 1 << 25}, b"would not be rewritten in time"),
        ({"num_blocks": 129}, b"1 to 128 blocks"),
        ({"num_threads": 33}, b"a multiple of 32"),
        ({"kind": 2, "row_vectors": 3}, b"whole rows"),
        ({"kind": 2, "row_vectors": 4}, b"needs a residual"),
        ({"kind": 3, "row_vectors": 4}, b"needs a residual"),
        ({"kind": 3, "row_vectors": 4, "size": 3}, b"equal parts of a row"),
        ({"kind": 3, "num_vectors": 48, "row_vectors": 48}, b"take whole rows"),
        ({"kind": 3, "num_vectors": 102, "row_vectors": 2}, b"too long for two shots"),
        ({"kind": 4, "num_vectors": 66, "row_vectors": 2}, b"too long for words"),
        ({"kind": 4, "num_vectors": 64, "row_vectors": 2}, b"needs a residual"),
        ({"kind": 5}, b"a gather needs an output"),
        ({"kind": 6}, b"no such kind"),
    ],
)
def test_a_launch_that_cannot_be_made_says_why(code: ctypes.CDLL, fields: dict[str, int], text: bytes | None) -> None:
    made = request(**fields)
    found = code.fenceline_check_all_reduce(ctypes.byref(made))
    assert found is None if text is None else text in found


# --- the kernels on the CPU, every CUDA thread a thread --------------------------------------------------


def emulated(folder: Path, ranks: int, size: int, code: Path = ROOT / "csrc", flags: Sequence[str] = ()) -> Path:
    """The program of tests/all_reduce_emulation.cpp, with the kernels of ``code``."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: install it")
    program = folder / "emulation"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-pthread"]
    command += [f"-DFENCELINE_RANKS={ranks}", f"-DFENCELINE_SIZE={size}", f"-I{ROOT / 'include'}", f"-I{code}"]
    command += flags
    command += [str(ROOT / "tests" / "all_reduce_emulation.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("ranks, size", [(2, 2), pytest.param(3, 0, marks=pytest.mark.long)])
def test_all_kinds_of_launches_pass_generation_2_to_the_32(tmp_path: Path, ranks: int, size: int) -> None:
    """The kernels that learn the number of ranks at run time are also watched for accesses beyond an operand."""
    bounds = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = emulated(tmp_path, ranks, size, flags=() if size else bounds)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[:2000]


_THREAD = "all_reduce_thread.cuh"
_SEVERED = {
    "only the first part of a vector is waited for": (
        (_THREAD, " | (uint32_t(c >> 32) ^ tag) | (uint32_t(d >> 32) ^ tag);", ";"),
    ),
    "all words have one generation": (
        (_THREAD, "const uint64_t tag = generation_ << 32;", "const uint64_t tag = uint64_t{7} << 32;"),
        (_THREAD, "const uint32_t tag = static_cast<uint32_t>(generation_);", "const uint32_t tag = 7;"),
    ),
    "all launches write the same half": ((_THREAD, "static_cast<uint32_t>(generation_ & 1);", "0;"),),
    "blocks that a launch does not have lag behind": (("all_reduce_kernel.cuh", "if (first) m.count_absent();", ""),),
}


@pytest.mark.long
@pytest.mark.parametrize("changes", _SEVERED.values(), ids=list(_SEVERED))
def test_without_what_words_rely_on_the_kernels_are_wrong(
    tmp_path: Path, changes: tuple[tuple[str, str, str], ...]
) -> None:
    """A sum is wrong, or a rank waits for words that have been overwritten; if not in the first run, because threads of
    the system take turns, then in a later one."""
    code = Path(shutil.copytree(ROOT / "csrc", tmp_path / "csrc"))
    for name, old, new in changes:
        text = (code / name).read_text()
        assert text.count(old) == 1, name
        (code / name).write_text(text.replace(old, new))
    program = emulated(tmp_path, 2, 2, code)
    for _ in range(5):
        try:
            done = subprocess.run([program], capture_output=True, text=True, timeout=5)
        except subprocess.TimeoutExpired:
            return
        if done.returncode:
            break
    assert done.returncode == 1 and "is wrong" in done.stdout


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
def machine_code() -> dict[str, list[str]]:
    """The instructions of each kernel for sm_90a."""
    try:
        nvcc = find_nvcc()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump: install the CUDA toolkit's, or Triton")
    library = compiled_library(Sources(ROOT), "all_reduce", nvcc, ["90a"], cache_folder())
    text = subprocess.run([tool, "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[str]] = {}
    for line in text.splitlines():
        function = re.search(r"Function : (\S+)", line)
        if function:
            instructions = kernels.setdefault(function.group(1), [])
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?(\S+)", line):
            op = found.group(2).rstrip(";")
            instructions.append("@PREEXIT" if op == "PREEXIT" and found.group(1) else op)
    return kernels


def accesses(code: list[str]) -> list[str]:
    """The instructions that access global memory, in order."""
    return [op for op in code if op.startswith(("LDG", "STG", "ATOM", "RED", "LD.", "ST."))]


@pytest.mark.long
@pytest.mark.slow
def test_flags_are_released_and_acquired_for_the_whole_system(machine_code: dict[str, list[str]]) -> None:
    """On sm_90 st.release.sys is MEMBAR.ALL.SYS and then the store; ld.acquire.sys the load and then CCTL.IVALL, which
    empties L1. Only two shots have flags."""
    assert len(machine_code) == 2 * 4 * 5 + 5 + 1
    for name, code in machine_code.items():
        releases = [i for i, op in enumerate(code) if op == "STG.E.64.STRONG.SYS"]
        acquires = [i for i, op in enumerate(code) if op == "LDG.E.64.STRONG.SYS"]
        assert bool(releases) == bool(acquires) == ("two_shot" in name), name
        for i in releases:
            assert "MEMBAR.ALL.SYS" in code[max(0, i - 6) : i], (name, code[i - 6 : i + 1])
        for i in acquires:
            assert "CCTL.IVALL" in code[i : i + 12], (name, code[i : i + 12])


@pytest.mark.long
@pytest.mark.slow
def test_words_are_single_strong_accesses_without_a_fence(machine_code: dict[str, list[str]]) -> None:
    """128 bits of a strong access in system scope hold two words, each of which arrives whole. Where words are all that
    ranks exchange, nothing waits for a fence, and no block for another one."""
    for name, code in machine_code.items():
        assert "STG.E.128.STRONG.SYS" in code, name
        if "two_shot" in name:
            assert "LDG.E.128.STRONG.SYS" not in code, name
            continue
        assert "LDG.E.128.STRONG.SYS" in code, name
        assert not any(op.startswith(("MEMBAR", "CCTL", "ATOM", "RED", "ERRBAR")) for op in code), name
        peers = [op for op in accesses(code) if "STRONG.SYS" in op]
        # 32 bits: the words of PeerWatch.
        assert set(peers) <= {"STG.E.128.STRONG.SYS", "LDG.E.128.STRONG.SYS", "LDG.E.STRONG.SYS", "STG.E.STRONG.SYS"}, (
            name
        )


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_accessed_before_the_preceding_kernel_ends(machine_code: dict[str, list[str]]) -> None:
    """griddepcontrol.wait is ACQBULK. PREEXIT lets the next kernel start early; where it would take the place of blocks
    that the launch waits for, because ranks share a GPU, a predicate leaves it out."""
    for name, code in machine_code.items():
        waits = [i for i, op in enumerate(code) if op == "ACQBULK"]
        found = set(accesses(code))
        first = next(i for i, op in enumerate(code) if op in found)
        assert waits and waits[0] < first, name
        branches = [i for i, op in enumerate(code) if op in ("BRA", "EXIT", "BRX", "JMP")]
        assert waits[0] < branches[0], "all threads wait"
        assert "PREEXIT" not in code and code.count("@PREEXIT") == 1 and code.index("@PREEXIT") < waits[0], name
