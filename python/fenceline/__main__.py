"""``python -m fenceline``: the same as the console script."""

from __future__ import annotations

from fenceline.cli import main

if __name__ == "__main__":
    main()
