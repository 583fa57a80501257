"""``python -m fenceline.launch_server``: flags to configuration to a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fenceline.config import ConfigError, importing
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import exit_with, parse_args

PROG = "python -m fenceline.launch_server"


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Serve until stopped; the process ends with a non-zero status if the engine fails. Wrong flags end it with one
    line on stderr and status 2, Ctrl-C before the server handles signals itself with status 130."""
    try:
        config = resolve(parse_args(argv, prog))
        # Imported late, so that --help and errors in flags are printed at once.
        with importing():
            from fenceline.entrypoints.supervisor import serve_until_stopped

        status = serve_until_stopped(config)
        if status:
            sys.exit(status)
    except ConfigError as error:
        exit_with(error, prog)
    except KeyboardInterrupt:
        print(f"{prog}: stopped while it was starting", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
