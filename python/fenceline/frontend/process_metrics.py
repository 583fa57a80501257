"""Memory, CPU time and descriptors of the server's processes under prometheus_client's names, and what is running."""

from __future__ import annotations

import multiprocessing
import platform
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fenceline.version import __version__

_LABELS = ("process", "pid")


def build_labels() -> Mapping[str, str]:
    """The versions of what answers."""
    try:
        torch = version("torch")  # without importing it
    except PackageNotFoundError:
        torch = ""
    return {"version": __version__, "python_version": platform.python_version(), "torch_version": torch}


def process_metrics() -> Iterator[Metric]:
    """The metrics of this process and its children, read now; processes that end meanwhile are left out."""
    memory = GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", labels=_LABELS)
    virtual = GaugeMetricFamily("process_virtual_memory_bytes", "Virtual memory.", labels=_LABELS)
    cpu = CounterMetricFamily("process_cpu_seconds", "CPU time of user and system.", labels=_LABELS)
    started = GaugeMetricFamily("process_start_time_seconds", "Unix time of the start in seconds.", labels=_LABELS)
    files = GaugeMetricFamily("process_open_fds", "Open file descriptors.", labels=_LABELS)
    most_files = GaugeMetricFamily("process_max_fds", "Most file descriptors that may be open.", labels=_LABELS)
    names = {child.pid: child.name for child in multiprocessing.active_children()}
    for pid, name in {psutil.Process().pid: "main", **names}.items():
        labels = (name, str(pid))
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                used, times = process.memory_info(), process.cpu_times()
                num_files, created = process.num_fds(), process.create_time()
            memory.add_metric(labels, used.rss)
            virtual.add_metric(labels, used.vms)
            cpu.add_metric(labels, times.user + times.system)
            started.add_metric(labels, created)
            files.add_metric(labels, num_files)
    # The children inherit the limit.
    most_files.add_metric(("main", str(psutil.Process().pid)), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from (memory, virtual, cpu, started, files, most_files)
