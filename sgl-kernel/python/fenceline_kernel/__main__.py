"""``python -m fenceline_kernel``: can the kernels be used here? ``... build [ARCH ...]``: compile them ahead."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fenceline_kernel import KernelUnavailable, why_unavailable
from fenceline_kernel.cache import PREBUILT, build_ahead, find_sources
from fenceline_kernel.toolchain import WHEEL_ARCHS, find_nvcc


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns 1 if the kernels cannot be used or built, 2 for wrong arguments.

    ``build`` needs nvcc but no GPU and compiles every kernel for ``arguments`` (80, 90a, 100 unless given) into
    ``_lib`` beside this file, where ``load`` looks first."""
    if not arguments:
        why = why_unavailable()
        print("available" if why is None else f"unavailable: {why}")
        return 0 if why is None else 1
    if arguments[0] != "build":
        print("usage: python -m fenceline_kernel [build [ARCH ...]]", file=sys.stderr)
        return 2
    archs = tuple(arguments[1:]) or WHEEL_ARCHS
    try:
        build_ahead(find_sources(), find_nvcc(), archs, PREBUILT)
    except KernelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{PREBUILT}: {', '.join(find_sources().units())} for {', '.join(archs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
