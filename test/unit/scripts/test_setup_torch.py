"""Which torch is chosen: drivers as /proc and nvidia-smi describe them, and what pip is then asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import pick_torch
from pick_torch import Machine, NoTorch

PROC_PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 03:22:07 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
PROC_OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3)  Sun Jul 27
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
SMI = "| NVIDIA-SMI 535.183.01     Driver Version: 535.183.01   CUDA Version: 12.2     |\n"
SMI_NEW = "| NVIDIA-SMI 595.10    KMD Version: 595.10    CUDA UMD Version: 13.2 |\n"


@pytest.mark.parametrize(
    ("text", "branch"), [(PROC_PROPRIETARY, 550), (PROC_OPEN, 580), ("", None), ("NVRM version: unknown", None)]
)
def test_driver_branch(text: str, branch: int | None) -> None:
    assert pick_torch.driver_branch(text) == branch


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [(470, None), (524, None), (525, (12, 6)), (569, (12, 6)), (570, (12, 8)), (579, (12, 8)), (580, (13, 0))]
    + [(610, (13, 0))],
)
def test_cuda_of_driver(driver: int, cuda: tuple[int, int] | None) -> None:
    assert pick_torch.cuda_of_driver(driver) == cuda


@pytest.mark.parametrize(
    ("text", "cuda"),
    [(SMI, (12, 6)), (SMI_NEW, (13, 2)), ("NVIDIA-SMI has failed because it couldn't communicate", None), ("", None)],
)
def test_cuda_of_nvidia_smi(text: str, cuda: tuple[int, int] | None) -> None:
    assert pick_torch.cuda_of_nvidia_smi(text) == cuda


def test_lowest_capability() -> None:
    assert pick_torch.lowest_capability("9.0\n10.0\n8.6\n") == (8, 6)
    assert pick_torch.lowest_capability("No devices were found\n") is None


def test_no_driver_means_the_pinned_cpu_build() -> None:
    choice = pick_torch.choose(Machine("Linux"))
    assert choice.cuda is None
    assert choice.requirements == (
        ("torch==2.13.0+cpu", "https://download.pytorch.org/whl/cpu"),
        ("torch==2.13.0+cpu", None),
    )


def test_a_mac_takes_the_wheel_of_the_default_index() -> None:
    assert pick_torch.choose(Machine("Darwin")).requirements == (("torch==2.13.0", None),)


@pytest.mark.parametrize(
    ("cuda", "capability", "tag", "requirement"),
    [
        ((13, 0), (9, 0), "cu130", "torch>=2.11,<2.15"),
        ((13, 2), None, "cu130", "torch>=2.11,<2.15"),
        ((13, 0), (7, 0), "cu126", "torch>=2.11,<2.15"),  # the 13.0 build has dropped Volta
        ((12, 8), (9, 0), "cu126", "torch>=2.11,<2.15"),
        ((12, 8), (12, 0), "cu128", "torch>=2.11,<2.12"),  # Blackwell is unknown to the 12.6 build
        ((12, 6), (8, 6), "cu126", "torch>=2.11,<2.15"),
    ],
)
def test_driver_and_gpu_choose_the_build(
    cuda: tuple[int, int], capability: tuple[int, int] | None, tag: str, requirement: str
) -> None:
    choice = pick_torch.choose(Machine("Linux", cuda, capability))
    assert choice.requirements[0] == (requirement, f"https://download.pytorch.org/whl/{tag}")
    # Only CUDA 13.0 is what the default index carries.
    assert [index for _, index in choice.requirements[1:]] == ([None] if tag == "cu130" else [])
    assert choice.cuda is not None
    assert choice.cuda <= cuda


@pytest.mark.parametrize(("cuda", "capability"), [((0, 0), None), ((12, 6), (10, 0)), ((13, 0), (3, 7))])
def test_too_old_is_refused_with_the_remedy(cuda: tuple[int, int], capability: tuple[int, int] | None) -> None:
    with pytest.raises(NoTorch, match=r"install driver 580 or newer .* or set FENCELINE_TORCH=cpu"):
        pick_torch.choose(Machine("Linux", cuda, capability))


@pytest.mark.parametrize(
    ("proc", "smi", "machine"),
    [
        (None, None, Machine("Linux")),
        (PROC_OPEN, None, Machine("Linux", (13, 0))),
        (PROC_OPEN, "9.0", Machine("Linux", (13, 0), (9, 0))),
        (None, SMI, Machine("Linux", (12, 6))),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.10  x", None, Machine("Linux", (0, 0))),
        (None, "couldn't communicate with the NVIDIA driver", Machine("Linux")),
    ],
)
def test_looking_at_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proc: str | None, smi: str | None, machine: Machine
) -> None:
    file = tmp_path / "version"
    if proc is not None:
        file.write_text(proc)
    monkeypatch.setattr(pick_torch, "_PROC_VERSION", file)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    if smi is not None:
        tool = bin_dir / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\necho "{smi.strip()}"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_dir))
    assert pick_torch.look("Linux") == machine
