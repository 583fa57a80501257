"""``python -m fenceline.launch_server``: flags to configuration to a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fenceline.config.server_args import ConfigError, exit_with, parse_args, resolve

PROG = "python -m fenceline.launch_server"


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Serve until stopped. Wrong flags end the process with one line on stderr and status 2."""
    try:
        config = resolve(parse_args(argv, prog))
    except ConfigError as error:
        exit_with(error, prog)
    # Imported late: wrong flags and --help answer at once.
    from fenceline.entrypoints.http_server import launch_server

    launch_server(config)


if __name__ == "__main__":
    main(sys.argv[1:])
