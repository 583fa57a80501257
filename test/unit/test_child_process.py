"""What every child process does first."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import multiprocessing
from multiprocessing import resource_tracker
from fenceline.managers.io_struct import PortArgs
from fenceline.managers.process import prepare_child
from tqdm import tqdm

multiprocessing.set_start_method("spawn")  # as in a server's children
ports = PortArgs(tokenizer="ipc://a", scheduler="ipc://b", detokenizer="ipc://c")
prepare_child("test", "error", ports)
for _ in tqdm(range(2)):
    pass
print(resource_tracker._resource_tracker._fd)
"""


def test_a_progress_bar_leaves_nothing_in_the_system() -> None:
    """tqdm's own lock is a named semaphore, which stays behind, with a warning, where a process is killed."""
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout == "None\n"  # nobody had to be told what to clean up
