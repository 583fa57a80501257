"""Builds the wheel, with the CUDA sources and, if nvcc is installed, the compiled libraries.

With nvcc the wheel is for one platform and any Python 3; without, it is pure and compiles on first use. An editable
installation compiles on first use too, from the checkout's sources.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.install import install

ROOT = Path(__file__).resolve().parent
# An isolated build has no torch, which fenceline_kernel/__init__.py imports, so its compiler modules are imported
# alone.
_package = types.ModuleType("fenceline_kernel")
_package.__path__ = [str(ROOT / "python" / "fenceline_kernel")]
sys.modules["fenceline_kernel"] = _package
cache = importlib.import_module("fenceline_kernel.cache")
toolchain = importlib.import_module("fenceline_kernel.toolchain")
errors = importlib.import_module("fenceline_kernel.errors")


def nvcc_or_none():
    """The compiler, None where there is none."""
    try:
        return toolchain.find_nvcc()
    except errors.KernelUnavailable:
        return None


class BuildKernels(build_py):
    """Adds ``_src`` and, with nvcc, ``_lib`` to the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "fenceline_kernel"
        for folder in ("_src", "_lib"):  # left by an earlier build
            shutil.rmtree(package / folder, ignore_errors=True)
        for folder in ("include", "csrc"):
            shutil.copytree(ROOT / folder, package / "_src" / folder)
        nvcc = nvcc_or_none()
        if nvcc is not None:
            cache.build_ahead(cache.Sources(ROOT), nvcc, toolchain.WHEEL_ARCHS, package / "_lib")


class AnyPythonWheel(bdist_wheel):
    """The wheel is for any Python 3, because the library is loaded through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])

    def finalize_options(self) -> None:
        super().finalize_options()
        if nvcc_or_none() is not None:
            self.root_is_pure = False


class Install(install):
    """Installs into the platform's packages, because of the compiled library."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if nvcc_or_none() is not None:
            self.install_lib = self.install_platlib


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": AnyPythonWheel, "install": Install})
