"""``python scripts/mutate_kernels.py``: tests the CPU suite with faults in the Triton kernels, one at a time.

A rule drops a mask, a barrier, a wait or the reset of a counter, relaxes a flag, shifts a bound, or takes away a limit
or a rounding up. The tests of the changed file then run on a copy of the tree until one fails; if none does, the mutant
has survived. Tests that only a GPU can run are not part of this.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from fenceline_proof.mutants import Mutant, Rules, SourceFile, mutants_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "fenceline"
KERNELS = PACKAGE / "layers" / "kernels" / "triton"
_LAYERS, _SPECULATION = "test/unit/layers/", "test/unit/speculative/"
# The tests of each file, the fastest first. All kernels also run among garbage.
TESTS: dict[str, tuple[str, ...]] = {
    "activation": ("triton_layer_kernels",),
    "decode_attention": ("triton_attention", "fixed_order"),
    "decode_prologue": ("triton_layer_kernels",),
    "embed_join": ("triton_layer_kernels",),
    "extend_attention": ("triton_attention", "fixed_order"),
    "grouped_gemm": ("experts", "four_bit_experts", "fixed_order"),
    "int4_gemm": ("int4_gemm", "fixed_order"),
    "kv_rows": ("triton_attention", "speculative_kv_rows"),
    "log_sums": ("fixed_order",),
    "page_gather": ("page_gather",),
    "quantized_gemm": ("quantized_kernels", "fixed_order"),
    "rms_norm": ("triton_layer_kernels",),
    "rotate_store": ("triton_layer_kernels", "fixed_order"),
    "routing": ("experts", "fixed_order"),
    "sample": ("triton_layer_kernels",),
    "skinny_gemm": ("skinny_gemm", "fixed_order"),
    "speculative_step": ("speculative_step",),
}
_EVERY = ("kernel_accesses", "triton_overlap")
_EFFECTS = frozenset(("debug_barrier", "gdc_wait", "gdc_launch_dependents"))
_NEXT = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_TIMEOUT_S = 600.0


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
        file.add("limit", node, file.text(node.args[0]))
        file.add("limit", node, file.text(node.args[1]))


RULES: Rules = (_without_effect, _without_mask, _shifted_bound, _rounded_down)


def kernel_mutants() -> list[Mutant]:
    """The mutants of every file with kernels."""
    found: list[Mutant] = []
    for path in sorted(KERNELS.glob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found += mutants_of(name, path.read_text(encoding="utf-8"), RULES, of_kernels=True)
    return found


def files_of(path: str) -> list[str]:
    """The test files that run kernels of ``path``."""
    names = (*TESTS[Path(path).stem], *_EVERY)
    return [f"{_SPECULATION if name.startswith('speculative') else _LAYERS}test_{name}.py" for name in names]


def copy_of_tree(folder: Path) -> None:
    """The sources and tests, as links to the files. Scripts of checks end there with the first that fails."""
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", ".*")
    for name in ("python", "test", "sgl-kernel"):
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink, ignore=ignored)
    (folder / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    script = folder / "test" / "support" / "triton_interpreter.py"
    source, kept = script.read_text(encoding="utf-8"), "outcomes[name] = traceback.format_exc()"
    assert kept in source
    script.unlink()
    script.write_text(source.replace(kept, f"{kept}; break"), encoding="utf-8")


def failure(mutant: Mutant, tree: Path) -> str:
    """The first test that fails; an empty text if none does."""
    file = tree / "python" / "fenceline" / mutant.path
    source = (PACKAGE / mutant.path).read_text(encoding="utf-8")
    file.unlink()
    file.write_text(mutant.apply(source), encoding="utf-8")
    run = [sys.executable, "-m", "pytest", "-q", "-x", "--all", "-n", "0", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(tree / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for test in files_of(mutant.path):
            done = subprocess.run(
                [*run, test], cwd=tree, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            if done.returncode:
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0].partition(" - ")[0] if failed else f"{test}: {done.stdout[-300:]}"
    except subprocess.TimeoutExpired:
        return f"{test}: does not end"
    finally:
        file.unlink()
        file.symlink_to(PACKAGE / mutant.path)
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python scripts/mutate_kernels.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and do nothing")
    parser.add_argument("--id", nargs="+", metavar="ID", help="these mutants")
    parser.add_argument("--file", nargs="+", metavar="NAME", help="mutants of these files, such as decode_attention")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0, help="their order, which is random")
    args = parser.parse_args(argv)
    chosen = [
        one for one in kernel_mutants()
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
            states["killed" if failed else "survived"] += 1
            show(f"{mutant.id} {mutant}: {failed or 'SURVIVED'} ({time.monotonic() - began:.0f} s)")
    show(f"{states['killed']} of {len(chosen)} killed")
    return int(states["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
