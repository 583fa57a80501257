"""Mutants of the engine: every place in the source where a rule can make a fault of order, one edit each.

A rule looks at the syntax tree of each file of the folders that the proof is about, and says how the text at a node is
replaced. A mutant's id does not depend on line numbers, so it stays the same while other lines move.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

import fenceline

PACKAGE = Path(fenceline.__file__).parent
FOLDERS = ("memory_order", "mem_cache", "scheduler", "model_executor", "sampling", "layers")

# Files that the workloads cannot reach, or that handle no memory, by patterns of the path below the package.
LEFT_OUT = (
    ("memory_order/cuda*", "CUDA's own calls: test_cuda_device.py runs them against a fake torch.cuda"),
    ("*kernels/*", "kernels: the interpreter and GPU runs hold them against torch's operators"),
    ("layers/attention/f*", "FlashInfer and FA3 need a GPU"),
    ("layers/attention/triton*", "needs a GPU or the interpreter"),
    ("layers/attention/backends*", "which backend a GPU gets"),
    ("layers/context.py", "what layers are made with; one rank: nothing is summed"),
    ("*stats*", "figures for people"),
    ("sampling/sampling_params.py", "checks of a request's fields: unit tests"),
    ("*flight_*", "a record for people"),
    ("scheduler/process.py", "the process around the scheduler: test/server runs it"),
    ("model_executor/warm_up*", "start-up"),
)

_ORDERING = frozenset(
    """
    wait wait_for_pages synchronize synchronize_from_worker record join retire release release_hold lock unlock
    hold hold_host lease fill fill_rows begin_fill begin_replay before_replay replay upload download move
    protect_from_graphs register allow_replay note_passed host_access
    """.split()  # noqa: SIM905
)
_MOVING = re.compile(r"copy|copy_|gather|scatter|load|store|backup|write|index_(copy|put|select|fill)_?")
_NO_POINTS = "__import__('fenceline.memory_order', fromlist=['Points']).Points.none()"
_CONTEXTS = re.compile(r"active|lock|fill|plan|replay|capture|hold|lease|stream")
_SILENT = re.compile(r"^(logger|log|warnings)\.|^super\(\)|__init__|^object\.__setattr__")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit: in ``path`` (below the package) the characters ``[start, end)`` become ``text``.

    ``statement`` and ``last_line``: the lines in which its statement begins and ends.
    """

    path: str
    line: int
    statement: int
    last_line: int
    rule: str
    start: int
    end: int
    old: str
    text: str
    occurrence: int
    function: str = ""  # that it is in, with its class

    @property
    def id(self) -> str:
        """Stays what it is while the lines around it move."""
        parts = (self.path, self.rule, self.old, self.text, str(self.occurrence))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """The file's text with the edit; the lines after it keep their numbers."""
        line, newline, behind = source[self.end :].partition("\n")
        lost = "\n" * (self.old.count("\n") - self.text.count("\n"))
        return source[: self.start] + self.text + line + lost + newline + behind

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.text))
        return f"{self.path}:{self.line} {self.function} [{self.rule}] {old}  ->  {new}"


@dataclass(slots=True)
class SourceFile:
    """One file being read. Offsets are in characters; the tree's columns are in bytes of UTF-8."""

    path: str
    source: str
    line_starts: list[int] = field(default_factory=list)
    statements: list[tuple[int, int, int]] = field(default_factory=list)  # each one's start, end and line
    found: list[Mutant] = field(default_factory=list)
    seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)  # of the classes and functions around the node that is read

    def __post_init__(self) -> None:
        self.line_starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        begin = self.line_starts[line - 1]
        text = self.source[begin : self.line_starts[line]]
        return begin + len(text.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self.offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def add(self, rule: str, node: ast.AST, text: str) -> None:
        start, end = self.span(node)
        self.add_span(rule, node.lineno, start, end, text)  # type: ignore[attr-defined]

    def add_span(self, rule: str, line: int, start: int, end: int, text: str) -> None:
        old = self.source[start:end]
        if old == text:
            return
        _, behind, statement = max(one for one in self.statements if one[0] <= start < one[1])  # the innermost
        number, last = self.seen[rule, old, text], self.source.count("\n", 0, behind) + 1
        self.seen[rule, old, text] += 1
        name = ".".join(self.names)
        self.found.append(Mutant(self.path, line, statement, last, rule, start, end, old, text, number, name))


# --- rules. Each looks at one node.


def _dropped_call(file: SourceFile, node: ast.AST) -> None:
    """A call that is made only for its effect is not made."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and _callee(call) in _ORDERING and not _SILENT.search(ast.unparse(call.func)):
        file.add("drop", node, "pass")


def _shifted_call(file: SourceFile, node: ast.AST) -> None:
    """A wait, record, lease or the like changes places with the statement after it."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        if not isinstance(statements, list):
            continue
        for first, second in zip(statements, statements[1:], strict=False):
            pair = (first, second)
            if not any(_is_ordering(one) for one in pair) or not all(map(_is_simple, pair)):
                continue
            if _assigned(first) & _names(second) or _assigned(second) & _names(first):
                continue  # it would not even run
            (start, first_end), (second_start, end) = file.span(first), file.span(second)
            between = file.source[first_end:second_start]
            file.add_span("shift", first.lineno, start, end, file.text(second) + between + file.text(first))


def _lost_points(file: SourceFile, node: ast.AST) -> None:
    """Points to wait for are dropped: one side of a join, the second argument of retire, ``after=``."""
    if not isinstance(node, ast.Call):
        return
    callee, arguments = _callee(node), node.args
    if callee == "join" and isinstance(node.func, ast.Attribute) and len(arguments) == 1:
        if isinstance(node.func.value, ast.Constant):
            return  # text
        file.add("join", node, file.text(node.func.value))
        file.add("join", node, file.text(arguments[0]))
    if callee == "retire" and len(arguments) == 2:
        file.add("points", arguments[1], _NO_POINTS)
    for keyword in node.keywords:
        if keyword.arg == "after":
            file.add("points", keyword.value, _NO_POINTS)


def _plain_block(file: SourceFile, node: ast.AST) -> None:
    """What is done inside a context (a stream, a lock, a fill) is done outside it."""
    if not isinstance(node, ast.With) or any(item.optional_vars is not None for item in node.items):
        return
    if _CONTEXTS.search(ast.unparse(node.items[0].context_expr)):
        start = file.offset(node.lineno, node.col_offset)
        colon = file.source.index(":", file.span(node.items[-1].context_expr)[1])
        file.add_span("context", node.lineno, start, colon, "if True")


def _turned_condition(file: SourceFile, node: ast.AST) -> None:
    """The condition of a statement that orders or moves memory is negated."""
    if not isinstance(node, (ast.If, ast.IfExp)) or "TYPE_CHECKING" in ast.unparse(node.test):
        return
    body = node.body if isinstance(node.body, list) else [node.body]
    calls = [one for statement in body for one in ast.walk(statement) if isinstance(one, ast.Call)]
    if any(_callee(call) in _ORDERING or _MOVING.fullmatch(_callee(call)) for call in calls):
        file.add("condition", node.test, f"not ({file.text(node.test)})")


Rules = Sequence[Callable[[SourceFile, ast.AST], None]]
RULES: Rules = (_dropped_call, _shifted_call, _lost_points, _plain_block, _turned_condition)


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_ordering(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _callee(statement.value) in _ORDERING
    )


def _is_simple(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)) and not (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _assigned(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def mutants_of(path: str, source: str, rules: Rules = RULES, of_kernels: bool = False) -> list[Mutant]:
    """All mutants of one file, in the order of its text: of the bodies of functions (``of_kernels``: Triton kernels
    alone, otherwise all others), except errors, assertions and texts."""
    file, tree = SourceFile(path, source), ast.parse(source, path)
    file.statements = [(*file.span(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.stmt)]

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_kernel = any("jit" in ast.unparse(one) for one in node.decorator_list)
            if node.name in ("__repr__", "__str__") or is_kernel is not of_kernels:
                return
            inside = True
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else []
        file.names += names
        if inside:
            for rule in rules:
                rule(file, node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, inside)
        del file.names[len(file.names) - len(names) :]

    visit(tree, False)
    return sorted(file.found, key=lambda mutant: (mutant.start, mutant.rule, mutant.text))


def all_mutants() -> list[Mutant]:
    """The mutants of every file of the folders that is not left out."""
    found: list[Mutant] = []
    for file in sorted(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if not any(fnmatch(path, pattern) for pattern, _ in LEFT_OUT):
            found += mutants_of(path, file.read_text(encoding="utf-8"))
    return found
