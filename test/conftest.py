"""What every test shares: one thread per process, repeatable property tests, GPU tests skipped with a reason."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

# Read when torch (OpenMP) and huggingface_hub are imported, by this process and the servers that tests start: two
# cores run several test processes at once, and no test may reach the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Scripts that tests run find the modules of test/support, as the tests do (pythonpath in pyproject.toml).
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import hypothesis
import psutil
import pytest

from fenceline.ipc.free_memory import trim_memory

# Each client of HTTP would read the machine's certificates, which takes 30 ms of CPU time, and no test meets TLS.
ssl.create_default_context = cache(ssl.create_default_context)

hypothesis.settings.register_profile("fenceline", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fenceline")


_SHOWN_FILES = 12  # of the slowest
_SHOWN_FROM_S = 60.0  # of all tests together: a few tests tell nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long as well")
    parser.addoption("--busy-loops", type=int, default=0, metavar="N", help="processes that take CPU time meanwhile")
    parser.addoption(
        "--kills", type=int, default=2, metavar="N", help="moments at which test_ranks_killed.py kills a rank"
    )


_BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
_busy_loops: list[subprocess.Popen[bytes]] = []


def pytest_make_parametrize_id(val: object) -> str | None:
    """A short name for a long value, as newer versions of pytest give: a test's name is in the environment of the
    processes that it starts, where Linux takes 128 KiB."""
    if isinstance(val, str | bytes) and len(val) > 500:
        start = val[:40] if isinstance(val, str) else val[:40].decode(errors="replace")
        return f"{start}... of {len(val)}"
    return None


def pytest_configure() -> None:
    """A shell has the commands that it starts in the background ignore SIGINT, and so would the servers of tests, until
    they handle it themselves. What is imported and collected stays: looking through it for garbage again and again
    would take a quarter of the time of both."""
    gc.disable()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the processes of --busy-loops: tests that race with a server show it on a machine that has no CPU time to
    spare. They end with this process, however it ends."""
    if not hasattr(session.config, "workerinput"):  # one process of several that share the tests
        command = [sys.executable, "-c", _BUSY_LOOP]
        _busy_loops.extend(subprocess.Popen(command) for _ in range(session.config.getoption("--busy-loops")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_mib"] = _peak_mib()
    for loop in _busy_loops:
        loop.kill()
        loop.wait()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Processes that share the tests collect a folder from different places on: the first one to import a file compiles
    it, assertions and all, which in a fresh clone takes as long as the rest of collecting."""
    report = yield
    if isinstance(collector, pytest.Directory) and hasattr(collector.config, "workerinput"):
        given = collector.config.workerinput
        first = len(report.result) * int(given["workerid"].removeprefix("gw")) // given["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``long`` unless --all is given. Files with tests marked ``long`` or ``slow`` come first,
    also without the long ones, beside which others take time too: several processes share the files out, and nobody is
    left with one at the end. All of them need the same order, whatever they collected first. Skip tests marked ``gpu``
    or ``multi_gpu`` where there are not enough GPUs."""
    slow = {item.path for item in items for mark in ("long", "slow") if item.get_closest_marker(mark)}
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    files = {item: item.nodeid.partition("::")[0] for item in items}
    folders = list(dict.fromkeys(file.split("/")[:2][-1] for file in files.values()))  # in the order asked for

    def place(item: pytest.Item) -> tuple[bool, int, str]:
        return item.path not in slow, folders.index(files[item].split("/")[:2][-1]), files[item]

    items.sort(key=place)
    wanted = {"gpu": 1, "multi_gpu": 2}
    marked = [(item, wanted[mark]) for item in items for mark in wanted if item.get_closest_marker(mark)]
    if not marked:
        return
    num_gpus = _num_gpus()
    for item, needed in marked:
        if num_gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), found {num_gpus}"))


_peaks_mib: list[int] = []  # of other processes that have run tests


def _peak_mib() -> int:
    """The most memory that this process or one that it has started and waited for has held."""
    whom = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    return max(resource.getrusage(who).ru_maxrss * unit for who in whom) >> 20


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended."""
    _peaks_mib.append(getattr(node, "workeroutput", {}).get("peak_mib", 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest files and the memory of the largest process, so that who adds to them sees it."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > _SHOWN_FROM_S:
        terminalreporter.section("slowest files")
        for path, duration in seconds.most_common(_SHOWN_FILES):
            terminalreporter.write_line(f"{duration:7.1f} s  {path}")
        terminalreporter.write_line(f"largest process: {max([_peak_mib(), *_peaks_mib])} MiB (the limit is 1,536)")


def pytest_collection_finish() -> None:
    gc.freeze()  # looking for what little garbage there is would take a second
    gc.enable()
    _set_aside()


@pytest.hookimpl(trylast=True)  # when the file's fixtures have ended too: what is alive is never collected again
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    logging.disable(logging.NOTSET)  # the proof's commands silence their process for the runs
    if nextitem is not None and nextitem.path != item.path:
        _set_aside()
    elif _rss_mib() - _collected_at[0] > _GROWTH_MIB:
        gc.collect()  # engines are cycles, and the collector does not count the bytes of tensors
        trim_memory()
        _collected_at[0] = _rss_mib()


def _set_aside() -> None:
    """Let Python's collector look no more at what is alive now: torch, plugins, every test, what files leave behind.
    Its full rounds would go through all of it while a test runs, which took a fifth of the suite's time. The allocator
    gives back what it has kept, which is hundreds of megabytes after files with threads."""
    gc.collect()
    gc.freeze()
    trim_memory()
    _collected_at[0] = _rss_mib()


_GROWTH_MIB = 100  # since the last collection, after which the next test waits for one
_collected_at = [0]


def _rss_mib() -> int:
    return psutil.Process().memory_info().rss >> 20


def pytest_runtest_setup() -> None:
    # OMP_NUM_THREADS does not reach a torch that a plugin imported first.
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
