"""``python scripts/mutate_kernels.py``: tests the CPU suite with faults in our kernels, one at a time: in those of
Triton, and with --cuda in those of CUDA C++.

A rule drops a mask, a barrier, a wait or the reset of a counter, relaxes a flag, shifts a bound, or takes away a limit
or a rounding up. The tests of the changed file then run on a copy of the tree until one fails; if none does, the mutant
has survived. Tests that only a GPU can run are not part of this. Of CUDA C++ these are those of *.cu (launches, and the
loops of fills and page copies) and of skinny_device.cuh, whose instructions are emulated.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from fenceline_proof.mutants import Mutant, Rules, SourceFile, mutants_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "fenceline"
KERNELS = PACKAGE / "layers" / "kernels" / "triton"
_ATTENTION = {"fixed_order": "attention|trees", "fixed_order compile": "decode|verify|tree|prefill|heads"}
_STEP = "begin|place_rows|keep|accept_chain"
# The scripts of checks that run the kernels of a file, and the names of these checks (a pattern), the fastest first.
TESTS: dict[str, dict[str, str]] = {
    "activation": {"triton_layer_kernels": "silu", "kernel_accesses": "silu"},
    "by_head": {"triton_layer_kernels": "by_head", "kernel_accesses": "by_head"},
    "decode_attention": {
        "kernel_accesses": "decode_attention", "triton_attention": "decode|verify|windows|graph", **_ATTENTION,
    },
    "decode_prologue": {"triton_layer_kernels": "prologue", "kernel_accesses": "prologue"},
    "embed_join": {"kernel_accesses": "embed", "speculative_step": "drafts"},
    "extend_attention": {"kernel_accesses": "extend|merge", "triton_attention": "extend|windows", **_ATTENTION},
    "grouped_gemm": {
        "kernel_accesses": "grouped|combine_experts", "experts": "", "four_bit_experts": "", "fixed_order": "layers",
        "fixed_order compile": "experts",
    },
    "int4_gemm": {
        "kernel_accesses": "int4|reorder", "int4_gemm compile": "few", "int4_gemm": "", "fixed_order": "int4",
    },
    "kv_rows": {"kernel_accesses": "move", "speculative_kv_rows": "", "triton_attention compile": "sm_80"},
    "lightning_inputs": {"kernel_accesses": "lightning", "triton_blocks": "whole_model"},
    "log_sums": {"fixed_order": "log_sums"},
    "page_gather": {"page_gather": "", "kernel_accesses": "gather"},
    "quantized_gemm": {"kernel_accesses": "quant|scaled", "quantized_kernels": "", "fixed_order": "fp8|int8"},
    "recurrence": {"triton_recurrence": "", "kernel_accesses": "delta|mamba|gated_norm|convolution|recurrence"},
    "rms_norm": {"triton_layer_kernels": "rms_norm", "kernel_accesses": "rms_norm"},
    "rotate_store": {"triton_layer_kernels": "rotate", "kernel_accesses": "rotate", "fixed_order": "layers"},
    "routing": {"kernel_accesses": "rout|experts|place_pairs", "experts": "logits|routes", "fixed_order": "layers"},
    "sample": {"triton_layer_kernels": "sample|noise", "kernel_accesses": "draw|combine_pieces"},
    "select_blocks": {"kernel_accesses": "means|blocks", "triton_blocks": ""},
    "select_tokens": {"triton_selection": ""},
    "skinny_gemm": {
        "skinny_gemm": "", "kernel_accesses": "skinny|scaled", "fixed_order": "dense|fp8", "fixed_order compile": "row",
    },
    "store_index": {"kernel_accesses": "store_index"},
    "store_latent": {"triton_layer_kernels": "latent", "kernel_accesses": "latent"},
    "speculative_step": {"speculative_step": "", "kernel_accesses": _STEP},
    "token_lookup": {"speculative_step": "look_ups", "kernel_accesses": "look_up|keep_tokens"},
}  # fmt: skip
CUDA = ROOT / "sgl-kernel"
_LAYERS, _PEERS = "layers/test_skinny_gemm_emulated", "distributed/test_all_reduce_kernel"
_COMPILED = "whole_system or without_a_fence or preceding_kernel"
# As TESTS, of CUDA C++: tests and which of them, as pytest's -k says; not those that change the source themselves.
_SKINNY = {_LAYERS: "not needed and not each_other"}
_REDUCE = {_PEERS: f"not rely_on and not ({_COMPILED})", f"{_PEERS} compiled": _COMPILED}
_SHARED = {
    "kernel_package/test_kernel_package": "fill or page or layer or field or list or draft or divi or unit[ or widest"
}
CUDA_TESTS: dict[str, dict[str, str]] = {
    "csrc/all_reduce_device.cuh": {f"{_PEERS} compiled": _COMPILED},
    "csrc/all_reduce_kernel.cuh": _REDUCE, "csrc/all_reduce_thread.cuh": _REDUCE,
    "csrc/skinny_direct.cuh": _SKINNY, "csrc/skinny_kernel.cuh": _SKINNY,
    "include/fenceline/all_reduce.h": _REDUCE, "include/fenceline/skinny_gemm.h": _SKINNY,
    "include/fenceline/arena_fill.h": _SHARED, "include/fenceline/common.h": _SHARED,
    "include/fenceline/page_copy.h": _SHARED, "include/fenceline/page_direct.h": _SHARED,
}  # fmt: skip
_EFFECTS = frozenset(("debug_barrier", "gdc_wait", "gdc_launch_dependents"))
_NEXT = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_TIMEOUT_S = 900.0
NO_PROGRAM = "does not compile"  # so it is no mutant


def _callee(node: ast.AST) -> str:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def _without_effect(file: SourceFile, node: ast.AST) -> None:
    """A barrier, a wait, a start of dependents is left out, or a counter is not reset."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call):
        resets = _callee(call) == "store" and isinstance(call.args[1], ast.Constant)
        if resets or _callee(call) in _EFFECTS:
            file.add("drop", node, "pass")


def _without_mask(file: SourceFile, node: ast.AST) -> None:
    """One of the conditions of an access, or what orders it before others, is dropped."""
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        value = keyword.value
        if keyword.arg == "mask" and isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitAnd):
            file.add("mask", value, file.text(value.left))
            file.add("mask", value, file.text(value.right))
        elif keyword.arg == "mask":
            file.add("mask", value, f"({file.text(value)}) | True")
        elif keyword.arg == "sem":
            file.add("relaxed", value, '"relaxed"')


def _shifted_bound(file: SourceFile, node: ast.AST) -> None:
    """A comparison takes one number more or less, and what is one further or before is not. (Not one of a constant,
    which chooses between kernels.)"""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEXT:
        left, right = file.text(node.left), file.text(node.comparators[0])
        if not left.isupper():
            file.add("bound", node, f"{left} {_NEXT[type(node.ops[0])]} {right}")
    is_one = isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value == 1
    if is_one and isinstance(node.op, (ast.Add, ast.Sub)):
        file.add("shift", node, file.text(node.left))


def _rounded_down(file: SourceFile, node: ast.AST) -> None:
    """What is rounded up, or limited, is not."""
    if _callee(node) == "cdiv":
        file.add("round", node, f"(({file.text(node.args[0])}) // ({file.text(node.args[1])}))")
    if _callee(node) in ("minimum", "maximum"):
        file.add("limit", node, f"({file.text(node.args[0])})")
        file.add("limit", node, f"({file.text(node.args[1])})")


_IN = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))"  # what parentheses hold
# Of CUDA C++: what is found in a line, and what takes its place.
_CUDA_RULES = (
    (
        "drop",
        rf"(?<![\w.:])(?:(?:m|thread)\.)?(?:__syncthreads|__syncwarp|named_sync|cluster_barrier|wait_for_previous_kernel"
        rf"|wait_for_oldest|barrier|begin|arrive|count|count_absent|refresh|release|acquire)\({_IN}*\);",
        "{}",
    ),
    ("drop", r"(?<=  )[\w.>-]+(?:\[[^;=]*\])* = (?:0|generation_);", "{}"),  # a counter is not reset, or not kept
    ("relaxed", r"\b(st\.)release|\b(ld\.)acquire", r"\1\2relaxed"),
    ("relaxed", r"(\.)sys(\.global)", r"\1gpu\2"),
    ("relaxed", r"griddepcontrol\.wait;|bar\.sync", ""),
    ("mask", rf"\bif \((?!k[A-Z]\w*\)){_IN}+\)", "if (true)"),
    ("bound", r"( [<>])( (?!k[A-Z]|\d))", r"\1=\2"),  # of what is known when it runs
    ("bound", r"( [<>])=( (?!k[A-Z]|\d))", r"\1\2"),
    ("shift", r" [+-] 1\b(?![.\d])", ""),
    ("limit", rf"\b(?:std::)?(?:min|max)\(({_IN}+?), {_IN}+\)", r"(\1)"),
    ("limit", rf"\b(?:std::)?(?:min|max)\({_IN}+?, ({_IN}+)\)", r"(\1)"),
)
# Lines that are left alone: refusals, of which each has its test, and what holds when they are compiled.
_LEFT_ALONE = re.compile(r"\breturn \"|^\s*(#|template|static_assert|constexpr|static constexpr|using)|if constexpr")

_FUNCTION = re.compile(r"^ *(?:[\w:<>*&]+ )+(\w+)\([^;]*$")  # that begins in a line

RULES: Rules = (_without_effect, _without_mask, _shifted_bound, _rounded_down)


def kernel_mutants() -> list[Mutant]:
    """The mutants of every file with kernels."""
    found: list[Mutant] = []
    for path in sorted(KERNELS.glob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found += mutants_of(name, path.read_text(encoding="utf-8"), RULES, of_kernels=True)
    return [one for one in found if "prefetch" not in one.function]  # what is prefetched changes no number


def _conditions(line: str) -> Iterator[tuple[int, int]]:
    """Where each operand of && stands in ``line``, with its &&."""
    for found in re.finditer(" && ", line):
        start, end = found.span()
        before = re.search(rf"(?:(?!&& |\|\| |[=?:;{{}}] |\($)(?:[^()]|\({_IN}*\)))*$", line[:start])
        behind = re.match(rf"(?:(?! &&| \|\|| [?:]|[;)])(?:[^()]|\({_IN}*\)))*", line[end:])
        assert before and behind
        yield before.start() + len(before[0]) - len(before[0].lstrip()), end
        yield start, end + behind.end()


def cuda_mutants_of(path: str, source: str) -> list[Mutant]:
    """The mutants of one file of CUDA C++, in the order of its lines."""
    file, start = SourceFile(path, source, statements=[(0, len(source), 1)]), 0
    for number, whole in enumerate(source.splitlines(keepends=True), 1):
        line = whole.partition("//")[0]
        if named := _FUNCTION.search(line):
            file.names = [named[1]]
        if not _LEFT_ALONE.search(line):
            for rule, pattern, text in _CUDA_RULES:
                for one in re.finditer(pattern, line):
                    file.add_span(rule, number, start + one.start(), start + one.end(), one.expand(text))
            for begin, end in _conditions(line):
                file.add_span("mask", number, start + begin, start + end, "")
        start += len(whole)
    return file.found


def cuda_mutants() -> list[Mutant]:
    """The mutants of CUDA_TESTS' files."""
    files = {path: (CUDA / path).read_text(encoding="utf-8") for path in CUDA_TESTS}
    found = [one for path, source in files.items() for one in cuda_mutants_of(path, source)]
    return [one for one in found if "prefetch" not in one.function]


def checks_of(path: str) -> list[tuple[str, str, str]]:
    """The scripts whose checks run kernels of ``path``, with their mode and the names of these checks."""
    found = []
    if path in CUDA_TESTS:
        return [(f"test/unit/{test.split()[0]}.py", "pytest", names) for test, names in CUDA_TESTS[path].items()]
    for test, names in TESTS[Path(path).stem].items():
        name, _, mode = test.partition(" ")
        folder = "speculative" if name.startswith("speculative") else "layers"
        found.append((f"test/unit/{folder}/test_{name}.py", mode or "interpret", names))
    return found


def copy_of_tree(folder: Path) -> None:
    """The sources, as links to the files, and tests. Scripts of checks make only those that $CHECKS matches there, and
    end with the first that fails. The compiler of C++ does not warn there: of what a fault leaves unused."""
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", ".*")
    for name in ("python", "test", "sgl-kernel"):
        link = os.symlink if name == "python" else shutil.copy2  # tests look for sources from where they stand
        shutil.copytree(ROOT / name, folder / name, copy_function=link, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    compiler = folder / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -w\n', encoding="utf-8")
    compiler.chmod(0o755)
    script = folder / "test" / "support" / "triton_interpreter.py"
    source = script.read_text(encoding="utf-8")
    loop, fails = "    for name, check in checks.items():\n", "outcomes[name] = traceback.format_exc()"
    assert loop in source and fails in source
    chosen = (
        '    checks = {name: checks[name] for name in checks if __import__("re").search(os.environ["CHECKS"], name)}\n'
    )
    script.unlink()
    script.write_text(source.replace(loop, chosen + loop).replace(fails, f"{fails}; break"), encoding="utf-8")


def failure(mutant: Mutant, tree: Path) -> str:
    """The first check that fails; an empty text if none does."""
    home = CUDA if mutant.path in CUDA_TESTS else PACKAGE
    original, file = home / mutant.path, tree / home.relative_to(ROOT) / mutant.path
    source = original.read_text(encoding="utf-8")
    file.unlink()
    file.write_text(mutant.apply(source), encoding="utf-8")
    try:
        for script, mode, names in checks_of(mutant.path):
            if failed := _failed(tree, script, mode, names):
                return failed
    finally:
        file.unlink()
        file.symlink_to(original)
    return ""


def _failed(tree: Path, script: str, mode: str, names: str) -> str:
    if mode == "pytest":
        return _failed_test(tree, script, names)
    paths = os.pathsep.join(str(tree / each) for each in ("python", "test/support"))
    env = os.environ | {
        "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "CHECKS": names, "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": str(int(mode == "interpret")),
    }  # fmt: skip
    run = [sys.executable, "-W", "ignore", str(tree / script), mode]
    try:
        done = subprocess.run(run, cwd=tree, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{script} does not end"
    if done.returncode:
        return f"{script}: exit status {done.returncode}: {done.stderr[-200:]}"
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert outcomes, f"{script} has no check {names!r}"
    return next((f"{script} {mode} {name}" for name, text in outcomes.items() if text), "")


def _failed_test(tree: Path, file: str, names: str) -> str:
    """The first test of ``file`` that fails, by the compilers of the tree."""
    path, paths = (f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}", f"{tree / 'python'}")
    env = os.environ | {"PATH": path, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tree / "cache")}
    run = ["timeout", "240"]  # ends the programs of tests too
    run += [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--all", "-p", "no:cacheprovider", "-k", names, file]
    run += ["--timeout", "200" if names == _COMPILED else "45"]  # of a test; nvcc takes a minute
    done = subprocess.run(run, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 124:
        return f"{file} does not end"
    if "returned non-zero exit status" in done.stdout and "error:" in done.stderr + done.stdout:
        return NO_PROGRAM
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    assert failed or done.returncode <= 0 or "crash" in done.stdout, done.stdout[-2000:]
    return failed[1] if failed else f"{file}: exit status {done.returncode}" if done.returncode else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python scripts/mutate_kernels.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and do nothing")
    parser.add_argument("--cuda", action="store_true", help="of CUDA C++")
    parser.add_argument("--id", nargs="+", metavar="ID", help="these mutants")
    parser.add_argument("--file", nargs="+", metavar="NAME", help="mutants of these files, such as decode_attention")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0, help="their order, which is random")
    args = parser.parse_args(argv)
    chosen = [
        one for one in (cuda_mutants() if args.cuda else kernel_mutants())
        if (args.id is None or one.id in args.id) and (args.file is None or Path(one.path).stem in args.file)
    ]  # fmt: skip
    chosen = Random(args.seed).sample(chosen, len(chosen))[: args.sample]
    if args.list:
        print(*(f"{one.id} {one}" for one in chosen), sep="\n")
        return 0
    states: Counter[str] = Counter()
    show = partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_of_tree(Path(folder))
        for mutant in chosen:
            began = time.monotonic()
            failed = failure(mutant, Path(folder))
            states["none" if failed == NO_PROGRAM else "killed" if failed else "survived"] += 1
            show(f"{mutant.id} {mutant}: {failed or 'SURVIVED'} ({time.monotonic() - began:.0f} s)")
    show(f"{states['killed']} of {len(chosen) - states['none']} killed")
    return int(states["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
