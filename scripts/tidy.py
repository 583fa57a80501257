"""Checks of imports: they point down, raw ordering stays inside memory_order, and no test imports a test.

Usage: tidy.py [SOURCE_DIR [TEST_DIR]], python/ and test/ unless given. Prints one line per violation; exits with 1 if
there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "fenceline"
# Packages beside it, outside the wheel, from the lowest to the highest: each may import the product and those before
# it. The product imports none, not even for types.
BESIDE = ("fenceline_sim", "fenceline_proof")
_OUTSIDE = (*BESIDE, "fenceline_demo")

# Folders from the lowest to the highest. A folder may import from itself and from those before it; folders in one tuple
# may not import from each other.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("memory_order", "constrained"),
    ("distributed",),
    ("mem_cache",),
    ("layers",),
    ("models",),
    ("sampling",),
    ("speculative",),
    ("model_executor",),
    ("scheduler", "frontend"),
    ("entrypoints",),
)
# These may be imported from anywhere and may not import from other folders.
EVERYWHERE = ("config", "images", "ipc", "sampling.sampling_params", "constrained.spec", "version")
# Command lines and tools around the server, which may import everything in the package.
TOOLS = ("", "__main__", "cli", "launch_server", "bench_serving", "benchmarking")
# These are used in processes, or at times, in which torch must not be loaded. Only config may import it, inside a
# function, to find a GPU.
NO_TORCH = (
    "config",
    "constrained.spec",
    "constrained.compile_server",
    "ipc",
    "frontend",
    "images",
    "sampling.sampling_params",
    "mem_cache.tree",
    "mem_cache.storage",
    "mem_cache.transfer",
    "mem_cache.page_hash",
    "mem_cache.image_keys",
)
# The module with whose answers the proof compares the engine's. It imports nothing of ours except for types.
INDEPENDENT = ("fenceline_proof.oracle",)
ORDERING_FOLDERS = ("memory_order", *BESIDE)
# Folders that may use the libraries for collective operations; all others use a Communicator.
RANK_FOLDERS = ("memory_order", "distributed")

_RAW_CLASSES = {"Stream", "Event", "ExternalStream", "CUDAGraph", "graph", "graph_pool_handle"}
_RAW_METHODS = {"record_stream", "wait_stream"}


@dataclass(frozen=True)
class Violation:
    """One broken rule, printed as ``path:line: message``."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Import:
    """One import of ``module`` (full dotted name), at module level or inside a function."""

    module: str
    line: int
    at_top: bool
    for_types: bool


def violations(source: Path) -> list[Violation]:
    """All violations in the packages below ``source``, in the order of files and lines; import cycles come last."""
    found: list[Violation] = []
    paths: dict[str, Path] = {}
    all_imports: dict[str, list[Import]] = {}
    for path in (path for name in (PACKAGE, *BESIDE) for path in sorted((source / name).rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        module = _module_name(path, source)
        imports = list(_imports(tree, _package_of(module, path)))
        paths[module], all_imports[module] = path, imports
        found += [Violation(path, line, text) for line, text in _direction(module, imports)]
        found += [Violation(path, line, text) for line, text in _torch_free(module, imports)]
        found += [Violation(path, line, text) for line, text in _independent(module, imports)]
        if _folder(module) not in ORDERING_FOLDERS:
            found += [Violation(path, line, text) for line, text in _raw_ordering(tree)]
        if _folder(module) not in RANK_FOLDERS:
            found += [Violation(path, line, text) for line, text in _raw_collectives(tree, imports)]
    return found + list(_circles(paths, all_imports))


def _module_name(path: Path, source: Path) -> str:
    """The module's name, within the product such as ``scheduler.scheduler`` (empty for the package itself), and else
    such as ``fenceline_sim.device``."""
    parts = path.relative_to(source).with_suffix("").parts
    parts = parts[1:] if parts[0] == PACKAGE else parts
    return ".".join(parts[:-1] if parts[-1:] == ("__init__",) else parts)


def _full_name(module: str) -> str:
    return module if _folder(module) in BESIDE else f"{PACKAGE}.{module}".rstrip(".")


def _package_of(module: str, path: Path) -> str:
    full = _full_name(module)
    return full if path.name == "__init__.py" else full.rpartition(".")[0]


def _folder(module: str) -> str:
    return module.split(".")[0]


def _within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or (place and module.startswith(place + ".")) for place in places)


def _imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """The imports of a file, with relative ones resolved. ``from a import b`` counts as ``a.b``, which may be a
    module."""

    def visit(node: ast.AST, at_top: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_top, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, at_top, for_types)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, at_top, True)
            for child in node.orelse:
                yield from visit(child, at_top, for_types)
        else:
            inner = at_top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner, for_types)

    yield from visit(tree, True, False)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
    return f"{base}.{node.module}" if node.module else base


def _direction(module: str, imports: list[Import]) -> Iterator[tuple[int, str]]:
    folder = _folder(module)
    below = BESIDE[: BESIDE.index(folder) + 1] if folder in BESIDE else ()
    for item in imports:
        package, _, target = item.module.partition(".")
        if package in _OUTSIDE and package not in below:
            yield item.line, f"imports {item.module}: {folder if below else 'the product'} does not know it"
        elif package == PACKAGE and target and not item.for_types and not _may_import(module, target):
            yield item.line, f"imports {item.module}: imports point down (see docs/internals/architecture.md)"


def _may_import(module: str, target: str) -> bool:
    folder, other = _folder(module), _folder(target)
    if _within(module, EVERYWHERE):
        return _within(target, EVERYWHERE)
    if folder in (*TOOLS, *BESIDE) or folder == other or _within(target, EVERYWHERE):
        return True
    levels = {name: level for level, names in enumerate(LEVELS) for name in names}
    if folder not in levels:
        return False
    # Any other target is a name of the package itself (fenceline.__version__) or a command line; folders may not import
    # these.
    return other in levels and levels[other] < levels[folder]


def _torch_free(module: str, imports: list[Import]) -> Iterator[tuple[int, str]]:
    if not _within(module, NO_TORCH):
        return
    for item in imports:
        if item.module.split(".")[0] != "torch" or item.for_types:
            continue
        if item.at_top or _folder(module) != "config":
            yield item.line, f"imports torch: {module} runs without it"


def _independent(module: str, imports: list[Import]) -> Iterator[tuple[int, str]]:
    for item in imports if module in INDEPENDENT else ():
        if not item.for_types and item.module.split(".")[0] in (PACKAGE, *BESIDE):
            yield item.line, f"imports {item.module}: {module} shares nothing with what it checks"


def _circles(paths: Mapping[str, Path], imports: Mapping[str, list[Import]]) -> Iterator[Violation]:
    """Modules that import each other, in any folders. Imports in functions and for types count too."""
    graph = {module: _imported_modules(module, imports) for module in imports}
    for circle in _strongly_connected(graph):
        first = circle[0]
        line, target = min((line, name) for name, line in graph[first].items() if name in circle)
        text = f"imports {_full_name(target)}, which leads back: {', '.join(circle)} import each other"
        yield Violation(paths[first], line, text)


def _imported_modules(module: str, imports: Mapping[str, list[Import]]) -> dict[str, int]:
    """The other modules of ours that ``module`` imports, and the first line that does."""
    found: dict[str, int] = {}
    for item in imports[module]:
        package, _, rest = item.module.partition(".")
        if package not in (PACKAGE, *BESIDE):
            continue
        target = rest if package == PACKAGE else item.module
        while target and target not in imports:  # it may be a name in a module; then the module is meant
            target = target.rpartition(".")[0]
        if target in imports and target != module:
            found.setdefault(target, item.line)
    return found


def _strongly_connected(graph: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """The sets of two or more nodes that can all be reached from each other, each in order of names."""

    def reachable(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for node in edges[todo.pop()]:
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        return seen

    backwards: dict[str, list[str]] = {node: [] for node in graph}
    for node, targets in graph.items():
        for target in targets:
            backwards[target].append(node)
    circles = {tuple(sorted(reachable(node, graph) & reachable(node, backwards) | {node})) for node in graph}
    return sorted(circle for circle in circles if len(circle) > 1)


def _raw_ordering(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        name = _raw_name(node)
        if name is not None:
            yield getattr(node, "lineno", 0), f"{name}: ordering belongs to memory_order"


def _raw_collectives(tree: ast.Module, imports: list[Import]) -> Iterator[tuple[int, str]]:
    lines = [item.line for item in imports if _within(item.module, ("torch.distributed",))]
    lines += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    for line in lines:
        yield line, "torch.distributed: ranks meet in distributed, through a Communicator"


def _raw_name(node: ast.AST) -> str | None:
    """The name of the raw ordering primitive that ``node`` is; None if it is none."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if node.attr in _RAW_CLASSES and owner in ("torch.cuda", "torch", "cuda", "torch.cuda.graphs"):
            return f"{owner}.{node.attr}"
        if node.attr in _RAW_METHODS:
            return node.attr
    if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.cuda", "torch.cuda.graphs"):
        raw = [alias.name for alias in node.names if alias.name in _RAW_CLASSES]
        return f"{node.module}.{raw[0]}" if raw else None
    if isinstance(node, ast.keyword) and node.arg == "non_blocking":
        harmless = isinstance(node.value, ast.Constant) and node.value.value is False
        return None if harmless else "non_blocking"
    return None


def test_violations(tests: Path) -> list[Violation]:
    """Every import of a test module: code that several tests use belongs in ``tests``/support, one flat folder."""
    paths = sorted(tests.rglob("*.py"))
    shared = {path.stem for path in paths if path.parent == tests / "support"}
    modules = {path.stem for path in paths} - shared
    found: list[Violation] = []
    for path in paths:
        for item in _imports(ast.parse(path.read_text(encoding="utf-8"), str(path)), ""):
            name = item.module.split(".")[0]
            if name in modules:
                found.append(Violation(path, item.line, f"imports {name}: what tests share is in test/support"))
    return found


def main(source: Path, tests: Path) -> int:
    """Print the violations below ``source`` and ``tests``; 1 if there are any."""
    found = violations(source) + test_violations(tests)
    for violation in found:
        print(violation)
    return 1 if found else 0


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    given = [Path(argument) for argument in sys.argv[1:]]
    sys.exit(main(*[*given, *(root / "python", root / "test")[len(given) :]]))
