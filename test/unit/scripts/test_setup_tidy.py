"""scripts/tidy.py on planted violations: each rule fires where it must and stays silent where it may not. The lint
test runs it on the package and the tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import setup_env
import tidy


def path_of(tmp_path: Path, module: str) -> Path:
    """Of a module of the product, named within it, or of a package beside it."""
    top = tmp_path if module.split(".")[0] in tidy.BESIDE else tmp_path / "fenceline"
    return top / (module.replace(".", "/") + ".py")


def complaints(tmp_path: Path, module: str, code: str) -> list[str]:
    plant(tmp_path, {module: code})
    return [violation.message for violation in tidy.violations(tmp_path)]


def test_the_wheel_holds_the_product_alone() -> None:
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    settings = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    find = settings["packages"]["find"]
    (source,) = find["where"]
    # In a process of its own: setuptools does not load behind another test's distutils.
    code = "import setuptools, sys; print(*setuptools.find_packages(sys.argv[1], include=sys.argv[2:]))"
    command = [sys.executable, "-c", code, str(setup_env.ROOT / source), *find["include"]]
    packages = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[0] for name in packages} == {tidy.PACKAGE} and "fenceline.scheduler" in packages
    assert all((setup_env.ROOT / source / name / "__init__.py").is_file() for name in tidy.BESIDE)


def test_no_test_imports_a_test(tmp_path: Path) -> None:
    for path, code in (
        ("support/fake_clock.py", "import time"),
        ("support/world.py", "from fake_clock import Clock"),
        ("unit/test_a.py", "import json\nfrom world import World"),
        ("sim/test_b.py", "import world\n\n\ndef test_it():\n    from test_a import Case"),
        ("sim/helpers.py", "X = 1"),
        ("support/late.py", "import helpers"),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(code)
    found = [str(violation).removeprefix(str(tmp_path)) for violation in tidy.test_violations(tmp_path)]
    assert found == [
        "/sim/test_b.py:5: imports test_a: what tests share is in test/support",
        "/support/late.py:1: imports helpers: what tests share is in test/support",
    ]


def test_the_folders_that_rules_name_exist() -> None:
    package = setup_env.ROOT / "python" / tidy.PACKAGE
    rules = (*sum(tidy.LEVELS, ()), *tidy.EVERYWHERE, *tidy.TOOLS, *tidy.NO_TORCH)
    beside = (setup_env.ROOT / "python" / name for name in (*tidy.BESIDE, *tidy.INDEPENDENT))
    for name in (*(package / name for name in rules), *beside):
        path = name.parent / name.name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("memory_order.lease", "from fenceline.mem_cache.kv_pool import KVPool"),
        ("mem_cache.tree.radix_cache", "import fenceline.scheduler.scheduler"),
        ("memory_order.device", "from fenceline.distributed import gloo"),
        ("distributed.gloo", "from fenceline.mem_cache.kv_pool import KVPool"),
        ("layers.linear", "from fenceline.models import llama"),
        ("layers.linear", "from ..models import llama"),
        ("layers.attention.cpu_backend", "from ...models.llama import Llama"),
        ("model_executor.runner", "def f():\n    from fenceline.scheduler.scheduler import Scheduler"),
        ("model_executor.runner", "try:\n    import fenceline.entrypoints.engine\nexcept ImportError:\n    pass"),
        ("scheduler.scheduler", "from fenceline.entrypoints.http_server import app"),
        ("scheduler.scheduler", "from fenceline import launch_server"),
        ("scheduler.scheduler", "from fenceline.launch_server import main"),
        ("config.engine_config", "from fenceline.frontend.tokenizer import Tokenizer"),
        ("ipc.io_struct", "from fenceline.frontend.tokenizer import Tokenizer"),
        ("unknown_folder.x", "from fenceline.models import llama"),
    ],
)
def test_imports_that_point_up_are_found(tmp_path: Path, module: str, line: str) -> None:
    (message,) = complaints(tmp_path, module, line)
    assert "imports point down" in message


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("scheduler.scheduler", "from fenceline_sim import device"),
        ("cli", "import fenceline_sim"),
        ("models.x", "from fenceline_demo.corpus import TOOLS"),
        ("config.x", "def f():\n    import fenceline_proof.prove"),
        ("model_executor.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fenceline_sim.device"),
    ],
)
def test_the_product_knows_no_package_beside_it(tmp_path: Path, module: str, line: str) -> None:
    (message,) = complaints(tmp_path, module, line)
    assert "the product does not know it" in message


def test_the_virtual_gpu_does_not_know_the_proof(tmp_path: Path) -> None:
    code = "from fenceline.scheduler import scheduler\nfrom fenceline_sim.gpu import VirtualGpu\n"
    assert complaints(tmp_path, "fenceline_proof.x", code) == [] == complaints(tmp_path, "fenceline_sim.x", code)
    (message,) = complaints(tmp_path, "fenceline_sim.x", "from fenceline_proof.runs import run")
    assert "fenceline_sim does not know it" in message
    files = {"fenceline_sim.x": "import fenceline_sim.y", "fenceline_sim.y": "from fenceline_sim import x"}
    plant(tmp_path, files)
    (message,) = [violation.message for violation in tidy.violations(tmp_path)]
    assert message.endswith("fenceline_sim.x, fenceline_sim.y import each other")


@pytest.mark.parametrize(
    "line",
    [
        "from fenceline.sampling.gumbel import mix_seeds",
        "from fenceline_proof import answers",
        "def f():\n    import fenceline",
    ],
)
def test_the_oracle_shares_nothing_with_the_engine(tmp_path: Path, line: str) -> None:
    (message,) = complaints(tmp_path, "fenceline_proof.oracle", line)
    assert "shares nothing with what it checks" in message
    for_types = f"import numpy\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}"
    if not line.startswith("def"):
        assert not complaints(tmp_path, "fenceline_proof.oracle", for_types)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("config.x", "import torch"),
        ("config.x", "from torch import nn"),
        ("ipc.io_struct", "import torch.cuda"),
        ("ipc.io_struct", "def f():\n    import torch"),
        ("mem_cache.tree.radix_cache", "def f():\n    import torch"),
    ],
)
def test_torch_is_found_where_it_may_not_be(tmp_path: Path, module: str, code: str) -> None:
    (message,) = complaints(tmp_path, module, code)
    assert "imports torch" in message


@pytest.mark.parametrize(
    "code",
    [
        "s = torch.cuda.Stream()",
        "e = torch.cuda.Event(enable_timing=True)",
        "e = torch.Event()",
        "s = torch.Stream(device='cuda')",
        "g = torch.cuda.CUDAGraph()",
        "with torch.cuda.graph(g):\n    pass",
        "from torch.cuda import Event",
        "from torch import cuda\ns = cuda.Stream()",
        "x.record_stream(s)",
        "s.wait_stream(t)",
        "y = x.to('cuda', non_blocking=True)",
        "y.copy_(x, non_blocking=flag)",
    ],
)
def test_raw_ordering_is_found_outside_memory_order_only(tmp_path: Path, code: str) -> None:
    assert "ordering belongs to memory_order" in complaints(tmp_path, "model_executor.x", code)[-1]
    (tmp_path / "fenceline/model_executor/x.py").unlink()
    assert complaints(tmp_path, "memory_order.cuda", code) == []
    assert complaints(tmp_path, "fenceline_sim.device", code) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("entrypoints.http_server", "from fenceline.frontend.tokenizer_manager import TokenizerManager\nimport torch"),
        (
            "scheduler.scheduler",
            "from fenceline.config.engine_config import EngineConfig\nimport fenceline.layers.linear",
        ),
        ("scheduler.scheduler", "from fenceline.ipc.io_struct import Abort"),
        ("memory_order.x", "from fenceline.config import ConfigError"),
        ("layers.attention.x", "from .cpu_backend import Cpu\nfrom ..linear import Linear"),
        ("config.engine_config", "def f():\n    import torch"),
        (
            "models.x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fenceline.scheduler import scheduler",
        ),
        ("launch_server", "from fenceline.entrypoints.supervisor import serve_until_stopped"),
        ("fenceline_proof.prove", "from fenceline.entrypoints.engine import Engine"),
        ("model_executor.x", "y = x.to('cuda', non_blocking=False)\nself.graph = None\nstream.wait(point)"),
        ("model_executor.x", "from fenceline.memory_order.stream import Stream\ns: Stream"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, module: str, code: str) -> None:
    assert complaints(tmp_path, module, code) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "def f(x):\n    import torch.distributed.nn\n",
        "y = torch.distributed.is_initialized()",
    ],
)
def test_torch_distributed_is_named_behind_communicators_only(tmp_path: Path, code: str) -> None:
    for module in ("distributed.x", "memory_order.x"):
        assert complaints(tmp_path, module, code) == []
    for module in ("model_executor.x", "fenceline_sim.x"):
        (message,) = set(complaints(tmp_path, module, code))
        assert "through a Communicator" in message
        path_of(tmp_path, module).unlink()


def plant(tmp_path: Path, files: dict[str, str]) -> None:
    for module, code in files.items():
        path = path_of(tmp_path, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("files", "circles"),
    [
        ({"layers.a": "import fenceline.layers.b", "layers.b": "x = 1"}, []),
        (
            {"layers.a": "import fenceline.layers.b", "layers.b": "from fenceline.layers import a"},
            ["layers.a, layers.b"],
        ),
        # A name of a module leads to the module, for types and in functions too, by whatever spelling.
        (
            {
                "layers.a": FOR_TYPES + "from fenceline.layers.b import B",
                "layers.b": "from .c import C",
                "layers.c": "def f():\n    from fenceline.layers.a import A",
            },
            ["layers.a, layers.b, layers.c"],
        ),
        # Folders whose own imports all point down, but for types.
        (
            {
                "layers.a": FOR_TYPES + "from fenceline.models.m import M",
                "models.m": "from fenceline.layers.a import A",
            },
            ["layers.a, models.m"],
        ),
        # What leads into a circle, or out of it, is not in it; two circles are two.
        (
            {
                "layers.a": "import fenceline.layers.b",
                "layers.b": "import fenceline.layers.c, fenceline.layers.d",
                "layers.c": "import fenceline.layers.b",
                "layers.d": "import fenceline.layers.e",
                "layers.e": "import fenceline.layers.d",
            },
            ["layers.b, layers.c", "layers.d, layers.e"],
        ),
        # A package is a module too: its __init__.
        (
            {"layers.__init__": "from fenceline.layers.a import A", "layers.a": "from fenceline.layers import A"},
            ["layers, layers.a"],
        ),
    ],
)
def test_circles_of_imports_are_found(tmp_path: Path, files: dict[str, str], circles: list[str]) -> None:
    plant(tmp_path, files)
    messages = [violation.message for violation in tidy.violations(tmp_path)]
    assert [text.partition("leads back: ")[2] for text in messages] == [
        f"{circle} import each other" for circle in circles
    ]


def test_command_line_prints_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tidy.main(tmp_path, tmp_path / "no tests") == 0
    complaints(tmp_path, "layers.x", "\nimport fenceline.entrypoints")
    assert tidy.main(tmp_path, tmp_path / "no tests") == 1
    assert "fenceline/layers/x.py:2: imports fenceline.entrypoints: " in capsys.readouterr().out


def test_the_map_of_test_support_names_every_file_once() -> None:
    folder = setup_env.ROOT / "test" / "support"
    rows = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("| ")]
    named = sorted(
        name for row in rows[1:] for name in re.findall(r"`(\w+)`", row.rpartition("|")[0].rpartition("|")[2])
    )
    assert named == sorted(path.stem for path in folder.glob("*.py"))
