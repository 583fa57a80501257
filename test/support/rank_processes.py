"""Runs the ranks of a case of multi_gpu_cases.py, each as a process: starts them, waits, and kills them if
necessary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fenceline.distributed import SHARED_GPU_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "test" / "support" / "multi_gpu_cases.py"
OTHERS_S = 10.0  # for the other ranks when one has failed: they may wait for it for ever


class Ended:
    """How the ranks of a case have ended: their statuses (None for those that had to be killed) and their outputs."""

    def __init__(self, case: str, size: int, folder: Path, limit_s: float = 120.0, shared: bool = False) -> None:
        """``shared``: all ranks share one GPU."""
        paths = [str(ROOT / "python"), str(ROOT / "sgl-kernel" / "python"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_MODULE_LOADING": "EAGER"}
        if shared:
            env[SHARED_GPU_VARIABLE] = "1"
        logs = [folder / f"{rank}.log" for rank in range(size)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                command = [sys.executable, str(CASES), case, str(rank), str(size), str(folder)]
                ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + limit_s
        self.statuses: list[int | None] = [None] * size
        try:
            while None in self.statuses and time.monotonic() < deadline:
                time.sleep(0.05)
                before, self.statuses = self.statuses, [process.poll() for process in ranks]
                if not any(before) and any(self.statuses):  # the first that has failed
                    deadline = min(deadline, time.monotonic() + OTHERS_S)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        self.text = "\n".join(log.read_text()[-4000:] for log in logs)
        found = [folder / f"{rank}.json" for rank in range(size)]
        self.found = [json.loads(path.read_text()) if path.exists() else None for path in found]

    @property
    def well(self) -> bool:
        return all(status == 0 for status in self.statuses)
